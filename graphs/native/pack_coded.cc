// Packs rows of a quantised file in the order "pairs".

#include "pack.h"

namespace xla_engine {

XLA_ENGINE_PACK(XlaEnginePackCoded, false)

}  // namespace xla_engine
