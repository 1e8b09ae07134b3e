// Attention over keys and values in float32.

#include "attention.h"

namespace xla_engine {

XLA_ENGINE_ATTENTION(F32, float)

}  // namespace xla_engine
