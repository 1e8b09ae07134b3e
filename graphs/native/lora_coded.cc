// Linear layers with adapters of weights as a quantised file has them.

#include "linear_coded.h"
#include "linear_lora.h"

namespace xla_engine {

XLA_ENGINE_LORA(Coded, Coded)
XLA_ENGINE_WIDENING(LoraCoded, CodedWeights)

}  // namespace xla_engine
