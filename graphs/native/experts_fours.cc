// Routed experts of weights as a quantised file has them, with rows in eight bits.

#include "experts_layer.h"
#include "linear_fours.h"

namespace xla_engine {

XLA_ENGINE_EXPERTS(Fours, Fours)

}  // namespace xla_engine
