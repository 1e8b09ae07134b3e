// Attention over keys and values in bf16.

#include "attention.h"

namespace xla_engine {

XLA_ENGINE_ATTENTION(Bf16, BFloat16)

}  // namespace xla_engine
