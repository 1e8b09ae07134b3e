// Linear layers of a decoder, for XLA:CPU. Each call is one product together with the operations before it (a norm) and after it (a gate,
// or the addition of the residual). It computes the live rows; the other rows of the result are zeros, or the residual.
//
// Weights are packed (product.h), but the last features, if they are fewer than the 32 of a task, stay rows as in the checkpoint.
//
// Each kind of weights (bf16, int8, quantised blocks) is a library of its own, `linear_*.cc`, and with adapters another, `lora_*.cc`: a
// model compiles only what it needs. A kind is a struct with the weights, the number of features and the kernel; its `Complaint` says what
// is wrong with a call, or nothing.

#pragma once

#include "buffers.h"
#include "gates.h"
#include "products.h"

namespace xla_engine {

inline std::string Unfit(int64_t step) { return "rows must come in multiples of " + std::to_string(step) + ", features of 32"; }

// Packed weights of type T [F, K]; int8 has scales [F, K / 64].
template <typename T, typename K>
struct PackedKind {
  using Element = T;
  using Kernel = K;
  static constexpr bool kWholeTasks = false;

  PackedWeights<T> weights;
  int64_t features, scale_count;

  PackedKind(const ffi::AnyBuffer& weight, const Halves& scale)
      : weights{static_cast<const T*>(weight.untyped_data()), nullptr, weight.dimensions()[1]},
        features(weight.dimensions()[0]),
        scale_count(static_cast<int64_t>(scale.element_count())) {
    if (std::is_same_v<T, int8_t>) weights.scales = reinterpret_cast<const BFloat16*>(scale.untyped_data());
  }

  std::string Complaint(const Source& source, bool whole) const {
    const int64_t step = Kernel::kStep;
    if (source.width != weights.width || weights.width % step || (whole && features % kFeatures)) return Unfit(step);
    if (std::is_same_v<T, int8_t> && scale_count != features * weights.width / kScaleGroup)
      return "weights in eight bits need a scale for each row and 64 columns";
    return "";
  }
};

// weight [F, K] with scales [F, K / 64] or [0, 0], times norm(x), [N, F].
template <typename Kind>
ffi::Error Head(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Halves scale,
                ffi::ResultBuffer<ffi::F32> out, float eps) {
  const Source source(x, norm, live, eps);
  const Kind kind(weight, scale);
  if (const std::string complaint = kind.Complaint(source, false); !complaint.empty()) return ffi::Error::InvalidArgument(complaint);
  const auto clear = [&](int64_t block) { source.Clear(block, out->typed_data(), kind.features * sizeof(float)); };
  RowsProduct(pool, source, kind, Phase{source.Gaps(), clear}, out->typed_data());
  return ffi::Error::Success();
}

inline constexpr int32_t kInOrder[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

template <typename Kind, typename Added>
ffi::Error Linear(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const Flags& live, const Floats& norm, const ffi::AnyBuffer& weight,
                  const Halves& scale, const Floats& residual, float* out, float eps, Added* adapters) {
  Source source(x, norm, live, eps);
  const Kind kind(weight, scale);
  if (const std::string complaint = kind.Complaint(source, true); !complaint.empty()) return ffi::Error::InvalidArgument(complaint);
  const int64_t features = kind.features, tasks = features / kFeatures;
  if constexpr (kAdds<Added>)
    if (adapters) adapters->Order(source.places, source.count);
  const float* before = OrNull(residual);
  if (before && before != out) return ffi::Error::Internal("the result has to take the residual's place");
  const auto clear = [&](int64_t block) { source.Clear(block, out, features * sizeof(float)); };
  PackedProduct<typename Kind::Kernel>(
      pool, source, tasks, tasks, Phase{before ? 0 : source.Gaps(), clear},
      [&](int64_t task) { return kind.weights.At(task * 32, task * 32 + 16); },
      [&](int64_t task, int64_t n, int64_t rows, const auto& sums) {
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t at = source.places[n + r] * features + task * 32;
          float* to = out + at;
          const Vec one = Load(sums.one + r * 16);
          const Vec other = Load(sums.other + r * 16);
          Store(to, before ? Load(before + at) + one : one);
          Store(to + 16, before ? Load(before + at + 16) + other : other);
        }
        if constexpr (kAdds<Added>) {
          if (!adapters) return;
          const int32_t* places = source.places.data() + n;
          for (int64_t f = task * 32; f < task * 32 + 32; f += 16) adapters->Add(n, rows, f, f + 32, out + f, places, features);
        }
      },
      adapters);
  return ffi::Error::Success();
}

template <typename Kind, typename Added>
ffi::Error GatedLinear(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const Flags& live, const Floats& norm,
                       const ffi::AnyBuffer& weight, const Halves& scale, void* out, float eps, bool gelu, Added* adapters) {
  Source source(x, norm, live, eps);
  const Kind kind(weight, scale);
  if (const std::string complaint = kind.Complaint(source, true); !complaint.empty()) return ffi::Error::InvalidArgument(complaint);
  using T = typename Kind::Element;
  const int64_t features = kind.features / 2, tasks = features / 16;
  if constexpr (kAdds<Added>)
    if (adapters) adapters->Order(source.places, source.count);
  const int64_t bytes = features * (std::is_same_v<T, int8_t> ? sizeof(float) : sizeof(BFloat16));
  const auto clear = [&](int64_t block) { source.Clear(block, out, bytes); };
  const auto put = [&](int64_t n, int64_t feature, Vec gate, Vec up) {
    const int64_t at = source.places[n] * features + feature;
    const Vec values = Gated(gate, up, gelu);
    if constexpr (std::is_same_v<T, int8_t>) {
      Store(static_cast<float*>(out) + at, values);
    } else {
      Round(values, static_cast<BFloat16*>(out) + at);
    }
  };
  PackedProduct<typename Kind::Kernel>(
      pool, source, tasks, tasks, Phase{source.Gaps(), clear},
      [&](int64_t task) { return kind.weights.At(task * 16, features + task * 16); },
      [&](int64_t task, int64_t n, int64_t rows, const auto& sums) {
        const int64_t feature = task * 16;
        const auto gate = [&](int64_t r) { return Load(sums.one + r * 16); };
        const auto up = [&](int64_t r) { return Load(sums.other + r * 16); };
        if constexpr (kAdds<Added>) {
          if (adapters) {
            alignas(64) float both[16 * 32];  // gates and ups of each row
            for (int64_t r = 0; r < rows; ++r) Store(both + r * 32, gate(r)), Store(both + r * 32 + 16, up(r));
            adapters->Add(n, rows, feature, feature + 16, both, kInOrder, 32);
            adapters->Add(n, rows, features + feature, features + feature + 16, both + 16, kInOrder, 32);
            for (int64_t r = 0; r < rows; ++r) put(n + r, feature, Load(both + r * 32), Load(both + r * 32 + 16));
            return;
          }
        }
        for (int64_t r = 0; r < rows; ++r) put(n + r, feature, gate(r), up(r));
      },
      adapters);
  return ffi::Error::Success();
}

// residual [N, F], where the result goes, or [0] + packed weight [F, K] with scales [F, K / 64] or [0, 0], times norm(x), x [N, K], norm [K] or [0] -> [N, F].
template <typename Kind>
ffi::Error LinearOf(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Halves scale,
                    Floats residual, ffi::ResultBuffer<ffi::F32> out, float eps) {
  return Linear<Kind, NoAdapters>(pool, x, live, norm, weight, scale, residual, out->typed_data(), eps, nullptr);
}

// x [N, K], norm [K] or [0], packed weight [2 F, K] with scales [2 F, K / 64] or [0, 0], gates first -> act(gate) * up of norm(x), [N, F]:
// bf16, or float32 where the next product quantises.
template <typename Kind>
ffi::Error GatedLinearOf(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Halves scale,
                         ffi::Result<ffi::AnyBuffer> out, float eps, bool gelu) {
  return GatedLinear<Kind, NoAdapters>(pool, x, live, norm, weight, scale, out->untyped_data(), eps, gelu, nullptr);
}

// The handlers of a library of weights of one kind.
#define XLA_ENGINE_LINEAR(Name, Kind)                              \
  XLA_ENGINE_HANDLER(XlaEngineHead##Name, Head<Kind>, "eps")       \
  XLA_ENGINE_HANDLER(XlaEngineLinear##Name, LinearOf<Kind>, "eps") \
  XLA_ENGINE_HANDLER(XlaEngineGatedLinear##Name, GatedLinearOf<Kind>, "eps", "gelu")

}  // namespace xla_engine
