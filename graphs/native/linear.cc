// Linear layers of a bf16 decoder on matrix tiles, for XLA:CPU: each call is one product with what stands before and
// behind it. The head's weights are rows as in the checkpoint (tiles.h), because the embedding may be the same array, and
// its result is feature-major; those of the layers are packed (packed.h).

#include "packed.h"
#include "tiles.h"

namespace xla_engine {
namespace {

#ifdef XLA_ENGINE_AMX

using Floats = ffi::Buffer<ffi::F32>;
using Halves = ffi::Buffer<ffi::BF16>;

const BFloat16* Data(const Halves& buffer) { return reinterpret_cast<const BFloat16*>(buffer.untyped_data()); }

void Round(Vec values, BFloat16* to) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
  std::memcpy(to, &rounded, sizeof rounded);
}

struct Shape {
  int64_t count, width, features;
};

ffi::Error Check(const Shape& shape) {
  return shape.width % 32 || shape.features % 32 ? ffi::Error::InvalidArgument("features must come in multiples of 32")
                                                 : ffi::Error::Success();
}

// The left side of a product: x [N, K] in bf16, or in float32 with the weight [K] of a norm before it, or none.
struct Operand {
  const BFloat16* halves;  // or null
  const float *floats, *norm;
  float eps;
  int64_t count, width;

  Operand(const ffi::AnyBuffer& x, const Floats& weight, float epsilon)
      : halves(x.element_type() == ffi::BF16 ? static_cast<const BFloat16*>(x.untyped_data()) : nullptr),
        floats(halves ? nullptr : static_cast<const float*>(x.untyped_data())),
        norm(weight.element_count() ? weight.typed_data() : nullptr),
        eps(epsilon),
        count(x.dimensions()[0]),
        width(x.dimensions()[1]) {}

  // What a row is multiplied by (Zhang and Sennrich 2019).
  float Scale(const float* x) const {
    if (!norm) return 1.0f;
    Vec squares = {};
    for (int64_t k = 0; k < width; k += kVector) squares += Load(x + k) * Load(x + k);
    const float mean = Reduce(squares, [](Vec a, Vec b) { return a + b; }) / static_cast<float>(width);
    return 1.0f / std::sqrt(mean + eps);
  }

  // Row n in bf16, 32 values at a time, each to where `place(k)` says.
  template <typename Place>
  void Write(int64_t n, const Place& place) const {
    if (halves) {
      for (int64_t k = 0; k < width; k += 32) std::memcpy(place(k), halves + n * width + k, 64);
      return;
    }
    const float* x = floats + n * width;
    const float scale = Scale(x);
    for (int64_t k = 0; k < width; k += kVector) {
      const Vec scaled = norm ? Load(x + k) * scale * Load(norm + k) : Load(x + k);
      Round(scaled, place(k / 32 * 32) + k % 32);
    }
  }

  // Fills the block of rows n .. n + rows of a packed product.
  void operator()(int64_t n, int64_t rows, char* block) const {
    auto* to = reinterpret_cast<BFloat16*>(block);
    for (int64_t r = 0; r < rows; ++r) Write(n + r, [&](int64_t k) { return to + k * 16 + r * 32; });
  }
};

// weight [F, K] times norm(x), feature-major [F, N].
ffi::Error Head(ffi::ThreadPool pool, ffi::AnyBuffer x, Floats norm, Halves weight, ffi::ResultBuffer<ffi::F32> out,
                float eps) {
  const Operand operand(x, norm, eps);
  const int64_t count = operand.count, width = operand.width, features = weight.dimensions()[0];
  if (auto error = Check({count, width, 32}); error.failure()) return error;
  const BFloat16* from = Data(weight);
  float* to = out->typed_data();
  Product<BFloat16>(
      pool, count, width, (features + kFeatures - 1) / kFeatures,
      [&](int64_t n, int64_t rows, uint32_t* tiles) {
        thread_local std::vector<BFloat16> rounded;
        rounded.resize(16 * width);
        for (int64_t r = 0; r < rows; ++r) operand.Write(n + r, [&](int64_t k) { return rounded.data() + r * width + k; });
        Interleave(rounded.data(), rows, width / 2, tiles);
      },
      [&](int64_t task) {
        const BFloat16* upper = from + task * kFeatures * width;
        const int64_t left = std::min(kFeatures, features - task * kFeatures);
        return Rows<BFloat16>{upper, left > 16 ? upper + 16 * width : nullptr, left, kFeatures * width};
      },
      [&](int64_t task, int64_t n, Columns columns) {
        float* at = to + task * kFeatures * count + n;
        const bool lower = features - task * kFeatures > 16;
        const int64_t stride = count * sizeof(float);
        Take(0, at, stride);
        if (lower) Take(1, at + 16 * count, stride);
        if (columns.second) Take(2, at + 16, stride);
        if (columns.second && lower) Take(3, at + 16 * count + 16, stride);
      });
  return ffi::Error::Success();
}

// Two blocks of sixteen features of packed weights.
struct Blocks {
  const void *one, *other;
};

// residual [N, F] or [0] + packed weight [F, K] times norm(x), x [N, K], norm [K] or [0] -> [N, F].
ffi::Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, Floats norm, Halves weight, Floats residual,
                  ffi::ResultBuffer<ffi::F32> out, float eps) {
  const Operand operand(x, norm, eps);
  const Shape shape = {operand.count, operand.width, weight.dimensions()[0]};
  if (auto error = Check(shape); error.failure()) return error;
  const BFloat16* from = Data(weight);
  const float* before = residual.element_count() ? residual.typed_data() : nullptr;
  PackedProduct<BFloat16>(
      pool, shape.count, shape.width, shape.features / 32, operand,
      [&](int64_t task) {
        const BFloat16* one = from + task * 32 * shape.width;
        return Blocks{one, one + 16 * shape.width};
      },
      [&](int64_t task, int64_t n, int64_t rows, const Sums<float>& sums) {
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t at = (n + r) * shape.features + task * 32;
          float* to = out->typed_data() + at;
          const Vec one = Load(sums.one + r * 16), other = Load(sums.other + r * 16);
          Store(to, before ? Load(before + at) + one : one);
          Store(to + 16, before ? Load(before + at + 16) + other : other);
        }
      });
  return ffi::Error::Success();
}

// 1 / (1 + exp(-z)), without overflow.
Vec Logistic(Vec z) {
  const Vec zero = {};
  const Vec small = Exp(z > zero ? -z : z);  // exp(-|z|)
  return z > zero ? 1.0f / (1.0f + small) : small / (1.0f + small);
}

// act(gate) * up (Shazeer 2020): SiLU, or GELU by tanh (Hendrycks and Gimpel 2016), where (1 + tanh z) / 2 is the
// logistic function of 2 z.
Vec Gated(Vec gate, Vec up, bool gelu) {
  const Vec z = gelu ? 1.5957691216057308f * (gate + 0.044715f * (gate * gate * gate)) : gate;
  return gate * up * Logistic(z);
}

// x [N, K], norm [K] or [0], packed weight [2 F, K], gates first -> act(gate) * up of norm(x), [N, F].
ffi::Error GatedLinear(ffi::ThreadPool pool, ffi::AnyBuffer x, Floats norm, Halves weight, ffi::ResultBuffer<ffi::BF16> out,
                       float eps, bool gelu) {
  const Operand operand(x, norm, eps);
  const Shape shape = {operand.count, operand.width, weight.dimensions()[0] / 2};
  if (auto error = Check(shape); error.failure()) return error;
  const BFloat16 *gates = Data(weight), *ups = gates + shape.features * shape.width;
  auto* to = reinterpret_cast<BFloat16*>(out->untyped_data());
  PackedProduct<BFloat16>(
      pool, shape.count, shape.width, shape.features / 16, operand,
      [&](int64_t task) {
        const int64_t first = task * 16 * shape.width;
        return Blocks{gates + first, ups + first};
      },
      [&](int64_t task, int64_t n, int64_t rows, const Sums<float>& sums) {
        for (int64_t r = 0; r < rows; ++r)
          Round(Gated(Load(sums.one + r * 16), Load(sums.other + r * 16), gelu),
                to + (n + r) * shape.features + task * 16);
      });
  return ffi::Error::Success();
}

#endif

}  // namespace

// Whether this build and this machine have matrix tiles.
extern "C" bool XlaEngineTiles() {
#ifdef XLA_ENGINE_AMX
  return RequestTiles();
#else
  return false;
#endif
}

#ifdef XLA_ENGINE_AMX
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineHead, Head,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats>()
                                  .Arg<Halves>()
                                  .Ret<Floats>()
                                  .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineLinear, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats>()
                                  .Arg<Halves>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineGatedLinear, GatedLinear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats>()
                                  .Arg<Halves>()
                                  .Ret<Halves>()
                                  .Attr<float>("eps")
                                  .Attr<bool>("gelu"));
#endif

}  // namespace xla_engine
