// Linear layers of a decoder in bf16 or int8, for XLA:CPU: each call is one product with what stands before and behind it,
// for the rows that are live; all others are zero, or the residual. Weights are packed (product.h), but for features that fill no
// task, and for the head's on tiles: these are rows as in the checkpoint. The head's result is feature-major.

#include "buffers.h"
#include "gates.h"
#include "products.h"
#include "tiles.h"

namespace xla_engine {
namespace {

ffi::Error Unfit(int64_t step) {
  return ffi::Error::InvalidArgument("rows must come in multiples of " + std::to_string(step) + ", features of 32");
}

// Calls run(weight, its scales or null) with the weight in its own type.
template <typename Run>
ffi::Error ByType(const ffi::AnyBuffer& weight, const Floats& scale, const Run& run) {
  if (weight.element_type() == ffi::S8) return run(static_cast<const int8_t*>(weight.untyped_data()), scale.typed_data());
  return run(static_cast<const BFloat16*>(weight.untyped_data()), static_cast<const float*>(nullptr));
}

#ifdef XLA_ENGINE_AMX

// Tile `tile` of a feature-major product, features from `feature` on by sixteen rows from n on.
void Put(int tile, const Operand<BFloat16>&, int64_t, int64_t, int64_t, float* to, int64_t stride) {
  Take(tile, to, stride * sizeof(float));
}

void Put(int tile, const Operand<int8_t>& operand, int64_t feature, int64_t features, int64_t n, float* to, int64_t stride) {
  alignas(64) int32_t sums[16 * 16];
  Take(tile, sums, 64);
  Written();
  const Vec scales = Load(operand.scales.data() + n);
  for (int64_t f = 0; f < features; ++f) {
    const Vec values = Convert<Vec>(LoadAs<Words>(sums + f * 16));
    Store(to + f * stride, values * operand.features[feature + f] * scales);
  }
}

// As in products.h, with tiles whose left operand are the weights.
template <typename T, typename Finish>
void RowsProduct(ffi::ThreadPool& pool, Operand<T>& operand, const T* weights, int64_t features, int64_t stride,
                 const Finish& finish) {
  const int64_t width = operand.width;
  const auto sums = [&] {  // of a task, [features][live rows]
    thread_local Lines kept;
    return reinterpret_cast<float*>(kept.Bytes((kFeatures * stride + 16) * sizeof(float)));
  };
  Product<T>(
      pool, operand.count, width, (features + kFeatures - 1) / kFeatures,
      [&](int64_t n, int64_t rows, uint32_t* tiles) {
        thread_local std::vector<T> rounded;
        rounded.resize(16 * width);
        for (int64_t r = 0; r < rows; ++r) operand.Write(n + r, [&](int64_t k) { return rounded.data() + r * width + k; });
        Interleave(rounded.data(), rows, width * sizeof(T) / 4, tiles);
      },
      [&](int64_t task) {
        const T* upper = weights + task * kFeatures * width;
        const int64_t left = std::min(kFeatures, features - task * kFeatures);
        return Rows<T>{upper, left > 16 ? upper + 16 * width : nullptr, left, kFeatures * width};
      },
      [&](int64_t task, int64_t n, Columns columns) {
        const auto put = [&](int tile, int64_t half, int64_t first, int64_t rows) {
          const int64_t feature = task * kFeatures + half, left = std::min<int64_t>(16, features - feature);
          if (left > 0 && rows > 0) Put(tile, operand, feature, left, first, sums() + half * stride + first, stride);
        };
        put(0, 0, n, columns.first);
        put(1, 16, n, columns.first);
        put(2, 0, n + 16, columns.second);
        put(3, 16, n + 16, columns.second);
      },
      [&](int64_t task) {
        Written();
        finish(task, sums());
      });
}

#endif

// weight [F, K] with scales [F] or [0], times norm(x), feature-major [F, N].
ffi::Error Head(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Floats scale,
                ffi::ResultBuffer<ffi::F32> out, float eps) {
  return ByType(weight, scale, [&](auto* from, const float* scales) {
    using T = std::decay_t<decltype(*from)>;
    Operand<T> operand(Source(x, norm, live, eps), scales);
    const int64_t total = operand.total, features = weight.dimensions()[0], stride = (operand.count + 15) / 16 * 16;
    if (operand.width % Kernel<T>::kStep) return Unfit(Kernel<T>::kStep);
    if (operand.count == 0) std::memset(out->untyped_data(), 0, out->size_bytes());
    RowsProduct(pool, operand, from, features, stride, [&](int64_t task, const float* sums) {  // to the places of the rows
      for (int64_t f = 0; f < std::min(kFeatures, features - task * kFeatures); ++f) {
        const float* packed = sums + f * stride;
        float* to = out->typed_data() + (task * kFeatures + f) * total;
        for (int64_t n = 0; n < total; n += 16) {
          Expand(packed, operand.masks[n / 16], to + n, std::min<int64_t>(16, total - n));
          packed += __builtin_popcount(operand.masks[n / 16]);
        }
      }
    });
    return ffi::Error::Success();
  });
}

// Two blocks of sixteen features of packed weights.
template <typename T>
Stream Blocks(const T* one, const T* other) {
  return {reinterpret_cast<const char*>(one), reinterpret_cast<const char*>(other)};
}

// residual [N, F], where the result goes, or [0] + packed weight [F, K] with scales [F] or [0], times norm(x), x [N, K], norm [K] or [0] -> [N, F].
ffi::Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Floats scale,
                  Floats residual, ffi::ResultBuffer<ffi::F32> out, float eps) {
  return ByType(weight, scale, [&](auto* from, const float* scales) {
    using T = std::decay_t<decltype(*from)>;
    Operand<T> operand(Source(x, norm, live, eps), scales);
    const int64_t width = operand.width, features = weight.dimensions()[0];
    if (width % Kernel<T>::kStep || features % 32) return Unfit(Kernel<T>::kStep);
    const float* before = residual.element_count() ? residual.typed_data() : nullptr;
    if (before && before != out->typed_data()) return ffi::Error::Internal("the result has to take the residual's place");
    const auto clear = [&](int64_t block) { operand.Clear(block, out->untyped_data(), features * sizeof(float)); };
    PackedProduct<T>(
        pool, operand, features / 32, Phase{before ? 0 : operand.Gaps(), clear},
        [&](int64_t task) {
          const T* one = from + task * 32 * width;
          return Blocks(one, one + 16 * width);
        },
        [&](int64_t task, int64_t n, int64_t rows, const auto& sums) {
          for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = operand.places[n + r] * features + task * 32;
            float* to = out->typed_data() + at;
            const Vec one = operand.Value(sums.one + r * 16, n + r, task * 32);
            const Vec other = operand.Value(sums.other + r * 16, n + r, task * 32 + 16);
            Store(to, before ? Load(before + at) + one : one);
            Store(to + 16, before ? Load(before + at + 16) + other : other);
          }
        });
    return ffi::Error::Success();
  });
}

// x [N, K], norm [K] or [0], packed weight [2 F, K] with scales [2 F] or [0], gates first -> act(gate) * up of norm(x), [N, F]:
// bf16, or float32 where the next product quantises.
ffi::Error GatedLinear(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Floats scale,
                       ffi::Result<ffi::AnyBuffer> out, float eps, bool gelu) {
  return ByType(weight, scale, [&](auto* gates, const float* scales) {
    using T = std::decay_t<decltype(*gates)>;
    Operand<T> operand(Source(x, norm, live, eps), scales);
    const int64_t width = operand.width, features = weight.dimensions()[0] / 2;
    if (width % Kernel<T>::kStep || features % 32) return Unfit(Kernel<T>::kStep);
    const int64_t bytes = features * (std::is_same_v<T, int8_t> ? sizeof(float) : sizeof(BFloat16));
    const auto clear = [&](int64_t block) { operand.Clear(block, out->untyped_data(), bytes); };
    PackedProduct<T>(
        pool, operand, features / 16, Phase{operand.Gaps(), clear},
        [&](int64_t task) {
          const T* gate = gates + task * 16 * width;
          return Blocks(gate, gate + features * width);
        },
        [&](int64_t task, int64_t n, int64_t rows, const auto& sums) {
          for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = operand.places[n + r] * features + task * 16;
            const Vec values = Gated(operand.Value(sums.one + r * 16, n + r, task * 16),
                                     operand.Value(sums.other + r * 16, n + r, features + task * 16), gelu);
            if constexpr (std::is_same_v<T, int8_t>) {
              Store(static_cast<float*>(out->untyped_data()) + at, values);
            } else {
              Round(values, static_cast<BFloat16*>(out->untyped_data()) + at);
            }
          }
        });
    return ffi::Error::Success();
  });
}

}  // namespace

// Whether this machine lets this process have what the library was built for.
extern "C" bool XlaEngineReady() {
#ifdef XLA_ENGINE_AMX
  return RequestTiles();
#else
  return true;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineHead, Head, Attributes({"eps"}));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineLinear, Linear, Attributes({"eps"}));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineGatedLinear, GatedLinear, Attributes({"eps", "gelu"}));

}  // namespace xla_engine
