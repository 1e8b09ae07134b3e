// Routed experts in eight bits.

#include "experts_layer.h"

namespace xla_engine {

XLA_ENGINE_EXPERTS(Int8, int8_t)

}  // namespace xla_engine
