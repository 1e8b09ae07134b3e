// Linear layers of a bf16 decoder on matrix tiles, for XLA:CPU: each call is one product with what stands before and
// behind it. See tiles.h.

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

  // x / rms(x) * weight (Zhang and Sennrich 2019) of a row, rounded.
  void Normalise(const float* x, BFloat16* to) const {
    Vec squares = {};
    for (int64_t k = 0; k < width; k += kVector) squares += Load(x + k) * Load(x + k);
    const float mean = Reduce(squares, [](Vec a, Vec b) { return a + b; }) / static_cast<float>(width);
    const float scale = 1.0f / std::sqrt(mean + eps);
    for (int64_t k = 0; k < width; k += kVector) Round(Load(x + k) * scale * Load(norm + k), to + k);
  }

  // Fills the tiles of rows n .. n + rows.
  void operator()(int64_t n, int64_t rows, uint32_t* tiles) const {
    if (halves) return Interleave(halves + n * width, rows, width / 2, tiles);
    thread_local std::vector<BFloat16> rounded;
    rounded.resize(16 * width);
    for (int64_t r = 0; r < rows; ++r) {
      const float* x = floats + (n + r) * width;
      BFloat16* to = rounded.data() + r * width;
      if (norm) {
        Normalise(x, to);
      } else {
        for (int64_t k = 0; k < width; k += kVector) Round(Load(x + k), to + k);
      }
    }
    Interleave(rounded.data(), rows, width / 2, tiles);
  }
};

ffi::Error Check(int64_t width) {
  return width % 32 ? ffi::Error::InvalidArgument("features must come in multiples of 32") : ffi::Error::Success();
}

// x [N, K], norm [K] or [0], weight [F, K] -> weight times norm(x), feature-major [F, N].
ffi::Error Linear(ffi::ThreadPool pool, ffi::AnyBuffer x, Floats norm, Halves weight, ffi::ResultBuffer<ffi::F32> out,
                  float eps) {
  const Operand operand(x, norm, eps);
  const int64_t count = operand.count, width = operand.width, features = weight.dimensions()[0];
  if (auto error = Check(width); error.failure()) return error;
  const BFloat16* from = Data(weight);
  float* to = out->typed_data();
  Product<BFloat16>(
      pool, count, width, (features + kFeatures - 1) / kFeatures, operand,
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

// residual [N, F] + weight [F, K] times norm(x), x [N, K], norm [K] or [0] -> [N, F].
ffi::Error LinearAdd(ffi::ThreadPool pool, ffi::AnyBuffer x, Floats norm, Halves weight, Floats residual,
                     ffi::ResultBuffer<ffi::F32> out, float eps) {
  const Operand operand(x, norm, eps);
  const int64_t count = operand.count, width = operand.width, features = weight.dimensions()[0];
  if (auto error = Check(width); error.failure()) return error;
  if (auto error = Check(features); error.failure()) return error;
  const BFloat16* from = Data(weight);
  Product<BFloat16>(
      pool, count, width, features / kFeatures, operand,
      [&](int64_t task) {
        const BFloat16* upper = from + task * kFeatures * width;
        return Rows<BFloat16>{upper, upper + 16 * width, kFeatures, kFeatures * width};
      },
      [&](int64_t task, int64_t n, Columns columns) {
        Turned turned;
        for (int tile = 0; tile < (columns.second ? 4 : 2); ++tile) {
          Take(tile, turned.sums, 64);
          const int64_t row = n + tile / 2 * 16, rows = tile < 2 ? columns.first : columns.second;
          for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = (row + r) * features + task * kFeatures + tile % 2 * 16;
            Store(out->typed_data() + at, Load(residual.typed_data() + at) + turned.Row(r));
          }
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

// x [N, K], norm [K] or [0], weight [2 F, K], gates first -> act(gate) * up of norm(x), [N, F].
ffi::Error GatedLinear(ffi::ThreadPool pool, ffi::AnyBuffer x, Floats norm, Halves weight, ffi::ResultBuffer<ffi::BF16> out,
                       float eps, bool gelu) {
  const Operand operand(x, norm, eps);
  const int64_t count = operand.count, width = operand.width, features = weight.dimensions()[0] / 2;
  if (auto error = Check(width); error.failure()) return error;
  if (auto error = Check(features); error.failure()) return error;
  const BFloat16 *gates = Data(weight), *ups = gates + features * width;
  auto* to = reinterpret_cast<BFloat16*>(out->untyped_data());
  Product<BFloat16>(
      pool, count, width, features / 16, operand,
      [&](int64_t task) {
        const int64_t first = task * 16 * width;
        return Rows<BFloat16>{gates + first, ups + first, kFeatures, 16 * width};
      },
      [&](int64_t task, int64_t n, Columns columns) {
        Turned gate, up;
        for (int half = 0; half < (columns.second ? 2 : 1); ++half) {
          Take(2 * half, gate.sums, 64);
          Take(2 * half + 1, up.sums, 64);
          const int64_t rows = half ? columns.second : columns.first;
          for (int64_t r = 0; r < rows; ++r)
            Round(Gated(gate.Row(r), up.Row(r), gelu), to + (n + half * 16 + r) * features + task * 16);
        }
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineLinear, Linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<Floats>()
                                  .Arg<Halves>()
                                  .Ret<Floats>()
                                  .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineLinearAdd, LinearAdd,
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
