// Linear layers with adapters of weights as a quantised file has them, with rows in eight bits.

#include "linear_fours.h"
#include "linear_lora.h"

namespace xla_engine {

XLA_ENGINE_LORA(Fours, Fours)

}  // namespace xla_engine
