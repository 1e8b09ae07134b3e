// Attention over keys and values in eight bits.

#include "attention_bytes.h"
#include "attention.h"

namespace xla_engine {

XLA_ENGINE_ATTENTION(Int8, int8_t)

}  // namespace xla_engine
