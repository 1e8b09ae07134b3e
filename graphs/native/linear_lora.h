// Linear layers with adapters: the calls of linear.h, plus what adapters add.

#pragma once

#include <numeric>

#include "linear.h"
#include "lora.h"

namespace xla_engine {

// The adapters if any row has one, else null.
inline Adapters* Used(Adapters& adapters) { return adapters.Rows() ? &adapters : nullptr; }

inline ffi::Error UnfitAdapters() { return ffi::Error::InvalidArgument("widths must come in multiples of 16, ranks of 4"); }

// `LinearOf` plus the adapters' product with norm(x); for their arguments see `Adapters`.
template <typename Kind>
ffi::Error LinearLora(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Halves scale,
                      Floats residual, Flags adapted, Integers adapter, Halves a, Halves b, Integers ranks,
                      ffi::ResultBuffer<ffi::F32> out, float eps, Adapters::Ends ends) {
  Adapters adapters(x, adapted, norm, adapter, a, b, ranks, eps, ends);
  if (!adapters.Fit()) return UnfitAdapters();
  return Linear<Kind, Adapters>(pool, x, live, norm, weight, scale, residual, out->typed_data(), eps, Used(adapters));
}

// `GatedLinearOf`, with the adapters' part added to gates and ups before they meet.
template <typename Kind>
ffi::Error GatedLora(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Halves scale,
                     Flags adapted, Integers adapter, Halves a, Halves b, Integers ranks, ffi::Result<ffi::AnyBuffer> out,
                     float eps, Adapters::Ends ends, bool gelu) {
  Adapters adapters(x, adapted, norm, adapter, a, b, ranks, eps, ends);
  if (!adapters.Fit()) return UnfitAdapters();
  return GatedLinear<Kind, Adapters>(pool, x, live, norm, weight, scale, out->untyped_data(), eps, gelu, Used(adapters));
}

// Adds the adapters' part to y [N, F] in place, for products whose features do not fill a task. The same for all kinds of weights.
template <typename Kind>
ffi::Error Lora(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags adapted, Floats norm, Integers adapter, Halves a, Halves b,
                Integers ranks, Floats y, ffi::ResultBuffer<ffi::F32> out, float eps, Adapters::Ends ends) {
  if (y.typed_data() != out->typed_data()) return ffi::Error::Internal("the result has to take the product's place");
  Adapters adapters(x, adapted, norm, adapter, a, b, ranks, eps, ends);
  if (!adapters.Fit()) return UnfitAdapters();
  const int64_t rows = y.dimensions()[0], features = y.dimensions()[1];
  std::vector<int32_t> places(rows);
  std::iota(places.begin(), places.end(), 0);
  adapters.Order(places, rows);
  const auto read = [&](int64_t n) { adapters.Read(n); };
  const auto shrink = [&](int64_t task) { adapters.Shrink(task); };
  const auto add = [&](int64_t task) {
    adapters.Add(0, rows, task * 16, task * 16 + 16, out->typed_data() + task * 16, places.data(), features);
  };
  if (adapters.Rows()) InPhases(pool, Phase{adapters.Rows(), read}, Phase{adapters.Shrinks(), shrink}, Phase{features / 16, add});
  return ffi::Error::Success();
}


// The handlers of a library of weights of one kind.
#define XLA_ENGINE_LORA(Name, Kind)                                              \
  XLA_ENGINE_HANDLER(XlaEngineLora##Name, Lora<Kind>, "eps", "ends")             \
  XLA_ENGINE_HANDLER(XlaEngineLinearLora##Name, LinearLora<Kind>, "eps", "ends") \
  XLA_ENGINE_HANDLER(XlaEngineGatedLora##Name, GatedLora<Kind>, "eps", "ends", "gelu")

}  // namespace xla_engine
