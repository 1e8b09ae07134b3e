// Packs rows of a quantised file in the order "fours".

#include "pack.h"

namespace xla_engine {

XLA_ENGINE_PACK(XlaEnginePackFours, true)

}  // namespace xla_engine
