// Routed experts in bf16.

#include "experts_layer.h"

namespace xla_engine {

XLA_ENGINE_EXPERTS(Bf16, BFloat16)
XLA_ENGINE_WIDENING(ExpertsBf16, BFloat16)

}  // namespace xla_engine
