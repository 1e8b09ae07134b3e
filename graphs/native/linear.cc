// Linear layers of a decoder in bf16 or int8, for XLA:CPU: each call is one product with what stands before and behind it,
// for the rows that are live; all others are zero, or the residual. Weights are packed (product.h), but for features that fill no
// task, and for the head's on tiles: these are rows as in the checkpoint. Those of a quantised file may stay as they are
// (coded_weights.h).

#include "buffers.h"
#include "gates.h"
#include "products.h"
#include "tiles.h"

#include <numeric>

namespace xla_engine {
namespace {

ffi::Error Unfit(int64_t step) {
  return ffi::Error::InvalidArgument("rows must come in multiples of " + std::to_string(step) + ", features of 32");
}

// Calls run(weights, F) with the weights [F, K] in their own type, if these and the rows of `source` fit together.
template <typename Run>
ffi::Error ByType(const Source& source, const ffi::AnyBuffer& weight, const Halves& scale, bool whole, const Run& run) {
  const auto with = [&](auto* values) {
    using T = std::decay_t<decltype(*values)>;
    const int64_t features = weight.dimensions()[0], width = weight.dimensions()[1], step = Kernel<T>::kStep;
    if (source.width != width || width % step || (whole && features % kFeatures)) return Unfit(step);
    const auto* scales = reinterpret_cast<const BFloat16*>(scale.untyped_data());
    if (std::is_same_v<T, int8_t> && static_cast<int64_t>(scale.element_count()) != features * width / kScaleGroup)
      return ffi::Error::InvalidArgument("weights in eight bits need a scale for each row and 64 columns");
    return run(PackedWeights<T>{values, std::is_same_v<T, int8_t> ? scales : nullptr, width}, features);
  };
  if (weight.element_type() == ffi::U8) {
    const CodedWeights coded(weight.untyped_data(), weight.element_count());
    const int64_t step = Kernel<BFloat16>::kStep;
    if (!coded.Fit() || coded.Width() != source.width) return ffi::Error::InvalidArgument("coded weights of another form");
    return whole && coded.Features() % kFeatures ? Unfit(step) : run(coded, coded.Features());
  }
  if (weight.element_type() == ffi::S8) return with(static_cast<const int8_t*>(weight.untyped_data()));
  return with(static_cast<const BFloat16*>(weight.untyped_data()));
}

#ifdef XLA_ENGINE_AMX

// As in products.h, with tiles whose left operand are the weights.
template <typename Clear>
void RowsProduct(ffi::ThreadPool& pool, const Source& source, const PackedWeights<BFloat16>& weights, int64_t features,
                 const Phase<Clear>& clear, float* out) {
  const int64_t width = source.width, stride = (source.count + 15) / 16 * 16;
  const auto sums = [&] {  // of a task, [features][live rows]
    thread_local Lines kept;
    return reinterpret_cast<float*>(kept.Bytes((kFeatures * stride + 16) * sizeof(float)));
  };
  InPhases(pool, clear);
  Product(
      pool, source.count, width, (features + kFeatures - 1) / kFeatures,
      [&](int64_t n, int64_t rows, uint32_t* tiles) {
        thread_local std::vector<BFloat16> rounded;
        rounded.resize(16 * width);
        for (int64_t r = 0; r < rows; ++r) source.Write(n + r, [&](int64_t k) { return rounded.data() + r * width + k; });
        Interleave(rounded.data(), rows, width / 2, tiles);
      },
      [&](int64_t task) {
        const BFloat16* upper = weights.values + task * kFeatures * width;
        const int64_t left = std::min(kFeatures, features - task * kFeatures);
        return Rows{upper, left > 16 ? upper + 16 * width : nullptr, left, kFeatures * width};
      },
      [&](int64_t task, int64_t n, Columns columns) {
        const auto put = [&](int tile, int64_t half, int64_t first, int64_t rows) {
          const int64_t feature = task * kFeatures + half, left = std::min<int64_t>(16, features - feature);
          if (left > 0 && rows > 0) Take(tile, sums() + half * stride + first, stride * sizeof(float));
        };
        put(0, 0, n, columns.first);
        put(1, 16, n, columns.first);
        put(2, 0, n + 16, columns.second);
        put(3, 16, n + 16, columns.second);
      },
      [&](int64_t task) {
        Written();
        alignas(64) float turned[4 * kFeatures];
        const int64_t first = task * kFeatures, left = std::min(kFeatures, features - first);
        for (int64_t n = 0; n < source.count; n += 4) {
          ReadColumns(sums(), left, stride, n, 4, turned, kFeatures);
          for (int64_t r = 0; r < std::min<int64_t>(4, source.count - n); ++r)
            std::copy_n(turned + r * kFeatures, left, out + source.places[n + r] * features + first);
        }
      });
}

#endif

// weight [F, K] with scales [F, K / 64] or [0, 0], times norm(x), [N, F].
ffi::Error Head(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Halves scale,
                ffi::ResultBuffer<ffi::F32> out, float eps) {
  const Source source(x, norm, live, eps);
  return ByType(source, weight, scale, false, [&](const auto& weights, int64_t features) {
    const auto clear = [&](int64_t block) { source.Clear(block, out->typed_data(), features * sizeof(float)); };
    RowsProduct(pool, source, weights, features, Phase{source.Gaps(), clear}, out->typed_data());
    return ffi::Error::Success();
  });
}

// Rows of coded weights, those of tokens [N]: [N, K].
ffi::Error RowsOf(ffi::ThreadPool pool, ffi::AnyBuffer weight, Integers tokens, ffi::ResultBuffer<ffi::F32> out) {
  const CodedWeights coded(weight.untyped_data(), weight.element_count());
  const int64_t width = out->dimensions()[1];
  if (!coded.Fit() || coded.Width() != width) return ffi::Error::InvalidArgument("coded weights of another form");
  ParallelFor(pool, tokens.element_count(), [&](int64_t n) {
    thread_local Lines kept;
    char* block = kept.Bytes(width * 32);
    const int64_t row = std::clamp<int64_t>(tokens.typed_data()[n], 0, coded.Features() - 1);
    coded.Unpack(row / 16, block);
    for (int64_t k = 0; k < width; ++k) {
      BFloat16 value;
      std::memcpy(&value, block + k / 2 * 64 + row % 16 * 4 + k % 2 * 2, sizeof value);
      out->typed_data()[n * width + k] = Storage<BFloat16>::Widen(value);
    }
  });
  return ffi::Error::Success();
}

constexpr int32_t kInOrder[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

ffi::Error Linear(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const Flags& live, const Floats& norm, const ffi::AnyBuffer& weight,
                  const Halves& scale, const Floats& residual, float* out, float eps, Adapters* adapters) {
  Source source(x, norm, live, eps);
  return ByType(source, weight, scale, true, [&](const auto& weights, int64_t features) {
    using T = typename std::decay_t<decltype(weights)>::Element;
    const int64_t tasks = features / kFeatures;
    if (adapters) adapters->Order(source.places, source.count);
    const float* before = OrNull(residual);
    if (before && before != out) return ffi::Error::Internal("the result has to take the residual's place");
    const auto clear = [&](int64_t block) { source.Clear(block, out, features * sizeof(float)); };
    PackedProduct<T>(
        pool, source, tasks, tasks, Phase{before ? 0 : source.Gaps(), clear},
        [&](int64_t task) { return weights.At(task * 32, task * 32 + 16); },
        [&](int64_t task, int64_t n, int64_t rows, const auto& sums) {
          for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = source.places[n + r] * features + task * 32;
            float* to = out + at;
            const Vec one = Load(sums.one + r * 16);
            const Vec other = Load(sums.other + r * 16);
            Store(to, before ? Load(before + at) + one : one);
            Store(to + 16, before ? Load(before + at + 16) + other : other);
          }
          if (!adapters) return;
          const int32_t* places = source.places.data() + n;
          for (int64_t f = task * 32; f < task * 32 + 32; f += 16) adapters->Add(n, rows, f, f + 32, out + f, places, features);
        },
        adapters);
    return ffi::Error::Success();
  });
}

ffi::Error GatedLinear(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const Flags& live, const Floats& norm,
                       const ffi::AnyBuffer& weight, const Halves& scale, void* out, float eps, bool gelu, Adapters* adapters) {
  Source source(x, norm, live, eps);
  return ByType(source, weight, scale, true, [&](const auto& weights, int64_t gates_and_ups) {
    using T = typename std::decay_t<decltype(weights)>::Element;
    const int64_t features = gates_and_ups / 2, tasks = features / 16;
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
    PackedProduct<T>(
        pool, source, tasks, tasks, Phase{source.Gaps(), clear},
        [&](int64_t task) { return weights.At(task * 16, features + task * 16); },
        [&](int64_t task, int64_t n, int64_t rows, const auto& sums) {
          const int64_t feature = task * 16;
          const auto gate = [&](int64_t r) { return Load(sums.one + r * 16); };
          const auto up = [&](int64_t r) { return Load(sums.other + r * 16); };
          if (!adapters) {
            for (int64_t r = 0; r < rows; ++r) put(n + r, feature, gate(r), up(r));
            return;
          }
          alignas(64) float both[16 * 32];  // gates and ups of each row
          for (int64_t r = 0; r < rows; ++r) Store(both + r * 32, gate(r)), Store(both + r * 32 + 16, up(r));
          adapters->Add(n, rows, feature, feature + 16, both, kInOrder, 32);
          adapters->Add(n, rows, features + feature, features + feature + 16, both + 16, kInOrder, 32);
          for (int64_t r = 0; r < rows; ++r) put(n + r, feature, Load(both + r * 32), Load(both + r * 32 + 16));
        },
        adapters);
    return ffi::Error::Success();
  });
}

// Adapters that some row has, or null.
Adapters* Used(Adapters& adapters) { return adapters.Rows() ? &adapters : nullptr; }

ffi::Error UnfitAdapters() { return ffi::Error::InvalidArgument("widths must come in multiples of 16, ranks of 4"); }

// residual [N, F], where the result goes, or [0] + packed weight [F, K] with scales [F, K / 64] or [0, 0], times norm(x), x [N, K], norm [K] or [0] -> [N, F].
ffi::Error LinearOf(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Halves scale,
                    Floats residual, ffi::ResultBuffer<ffi::F32> out, float eps) {
  return Linear(pool, x, live, norm, weight, scale, residual, out->typed_data(), eps, nullptr);
}

// The same, plus what adapters make of norm(x), as `Adapters` takes them.
ffi::Error LinearLora(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Halves scale,
                      Floats residual, Flags adapted, Integers adapter, Halves a, Halves b, Integers ranks,
                      ffi::ResultBuffer<ffi::F32> out, float eps, Adapters::Ends ends) {
  Adapters adapters(x, adapted, norm, adapter, a, b, ranks, eps, ends);
  if (!adapters.Fit()) return UnfitAdapters();
  return Linear(pool, x, live, norm, weight, scale, residual, out->typed_data(), eps, Used(adapters));
}

// x [N, K], norm [K] or [0], packed weight [2 F, K] with scales [2 F, K / 64] or [0, 0], gates first -> act(gate) * up of norm(x), [N, F]:
// bf16, or float32 where the next product quantises.
ffi::Error GatedLinearOf(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Halves scale,
                         ffi::Result<ffi::AnyBuffer> out, float eps, bool gelu) {
  return GatedLinear(pool, x, live, norm, weight, scale, out->untyped_data(), eps, gelu, nullptr);
}

// The same of gates and ups to which adapters have added theirs.
ffi::Error GatedLora(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, Halves scale,
                     Flags adapted, Integers adapter, Halves a, Halves b, Integers ranks, ffi::Result<ffi::AnyBuffer> out,
                     float eps, Adapters::Ends ends, bool gelu) {
  Adapters adapters(x, adapted, norm, adapter, a, b, ranks, eps, ends);
  if (!adapters.Fit()) return UnfitAdapters();
  return GatedLinear(pool, x, live, norm, weight, scale, out->untyped_data(), eps, gelu, Used(adapters));
}

// y [N, F], whose features fill no tasks, plus what adapters add; written in place.
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

}  // namespace

// Whether this machine lets this process have what the library was built for.
extern "C" bool XlaEngineReady() {
#ifdef XLA_ENGINE_AMX
  return RequestTiles();
#else
  return true;
#endif
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineRows, RowsOf, Attributes());
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineHead, Head, Attributes({"eps"}));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineLinear, LinearOf, Attributes({"eps"}));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineGatedLinear, GatedLinearOf, Attributes({"eps", "gelu"}));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineLora, Lora, Attributes({"eps", "ends"}));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineLinearLora, LinearLora, Attributes({"eps", "ends"}));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineGatedLora, GatedLora, Attributes({"eps", "ends", "gelu"}));

}  // namespace xla_engine
