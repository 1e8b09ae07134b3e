// What stands between the products of an encoder: sums with LayerNorm behind them, and the activation of its MLP.
//
// A row is computed alone and in one order, sixteen columns at a time: its bits depend on nothing else. Rows that are not live
// become zeros.

#include "buffers.h"
#include "common.h"
#include "parallel.h"

namespace xla_engine {
namespace {

constexpr int64_t kRows = 16;  // of a task

// Calls body(row) for all live rows, and clear(row) for the others.
template <typename Body, typename Clear>
void ForRows(ffi::ThreadPool& pool, int64_t rows, const bool* live, const Body& body, const Clear& clear) {
  ParallelFor(pool, (rows + kRows - 1) / kRows, [&](int64_t task) {
    for (int64_t row = task * kRows; row < std::min(rows, (task + 1) * kRows); ++row) live[row] ? body(row) : clear(row);
  });
}

// x [N, D], bias [D], residual [N, D], weight [D], shift [D], live [N] -> LayerNorm (Ba et al. 2016) of residual + x + bias, [N, D].
ffi::Error AddedNorm(ffi::ThreadPool pool, Floats x, Floats bias, Floats residual, Floats weight, Floats shift, Flags live,
                     ffi::ResultBuffer<ffi::F32> out, float eps) {
  const int64_t rows = x.dimensions()[0], width = x.dimensions()[1];
  if (width % kVector) return ffi::Error::InvalidArgument("columns must come in multiples of 16");
  const float *added = bias.typed_data(), *scale = weight.typed_data(), *shifted = shift.typed_data();
  const auto norm = [&](int64_t row) {
    const float *from = x.typed_data() + row * width, *before = residual.typed_data() + row * width;
    float* to = out->typed_data() + row * width;
    Vec sums = {}, squares = {};
    for (int64_t k = 0; k < width; k += kVector) {
      const Vec value = Load(before + k) + (Load(from + k) + Load(added + k));
      Store(to + k, value);
      sums += value;
    }
    const float mean = Total(sums) / static_cast<float>(width);
    for (int64_t k = 0; k < width; k += kVector) {
      const Vec value = Load(to + k) - mean;
      squares = Fused(value, value, squares);
    }
    const float factor = 1.0f / std::sqrt(Total(squares) / static_cast<float>(width) + eps);
    for (int64_t k = 0; k < width; k += kVector)
      Store(to + k, Fused((Load(to + k) - mean) * factor, Load(scale + k), Load(shifted + k)));
  };
  ForRows(pool, rows, live.typed_data(), norm,
          [&](int64_t row) { std::memset(out->typed_data() + row * width, 0, width * sizeof(float)); });
  return ffi::Error::Success();
}

// Half of 1 + erf(x / sqrt(2)) (Abramowitz and Stegun 1964, 7.1.26); the absolute error is below 2e-7.
inline Vec Normal(Vec x) {
  const Vec zero = {};
  const Vec size = Select(x < zero, -x, x) * 0.70710678118654752f;
  const Vec t = 1.0f / Fused(size, 0.3275911f, zero + 1.0f);
  Vec p = Fused(t, 1.061405429f, zero - 1.453152027f);
  p = Fused(p, t, 1.421413741f);
  p = Fused(p, t, -0.284496736f);
  p = Fused(p, t, 0.254829592f);
  const Vec beyond = p * t * Exp(-(size * size)) * 0.5f;  // the smaller of the two sides
  return Select(x < zero, beyond, 1.0f - beyond);
}

// x [N, F], bias [F], live [N] -> the activation of x + bias, [N, F] in float32 or bf16. kind: 0 GELU by the error function, 1 GELU by
// tanh (Hendrycks and Gimpel 2016), 2 ReLU, 3 SiLU. x and bias with 2 F columns: the second half is multiplied by the activation of
// the first (Shazeer 2020).
ffi::Error Activated(ffi::ThreadPool pool, Floats x, Floats bias, Flags live, ffi::Result<ffi::AnyBuffer> out, int64_t kind) {
  const int64_t rows = x.dimensions()[0], pitch = x.dimensions()[1], width = out->dimensions()[1];
  if (width % kVector) return ffi::Error::InvalidArgument("columns must come in multiples of 16");
  if (pitch != width && pitch != 2 * width) return ffi::Error::InvalidArgument("a gate must be as wide as what it multiplies");
  const bool halves = out->element_type() == ffi::BF16, gated = pitch != width;
  const auto activate = [&](Vec value) {
    const Vec zero = {};
    if (kind == 2) return Select(value > zero, value, zero);
    if (kind == 0) return value * Normal(value);
    const Vec z = kind == 3 ? value : 1.5957691216057308f * Fused(value * value * value, 0.044715f, value);
    const Vec small = Exp(Select(z > zero, -z, z));  // exp(-|z|)
    return value * (Select(z > zero, zero + 1.0f, small) / (1.0f + small));
  };
  const auto row_of = [&](int64_t row) {
    const float *from = x.typed_data() + row * pitch, *added = bias.typed_data();
    for (int64_t k = 0; k < width; k += kVector) {
      Vec value = activate(Load(from + k) + Load(added + k));
      if (gated) value = value * (Load(from + width + k) + Load(added + width + k));
      if (halves)
        Storage<BFloat16>::Round(value, static_cast<BFloat16*>(out->untyped_data()) + row * width + k);
      else
        Store(static_cast<float*>(out->untyped_data()) + row * width + k, value);
    }
  };
  const int64_t bytes = width * static_cast<int64_t>(halves ? sizeof(BFloat16) : sizeof(float));
  ForRows(pool, rows, live.typed_data(), row_of,
          [&](int64_t row) { std::memset(static_cast<char*>(out->untyped_data()) + row * bytes, 0, bytes); });
  return ffi::Error::Success();
}

}  // namespace

XLA_ENGINE_HANDLER(XlaEngineAddedNorm, AddedNorm, "eps")
XLA_ENGINE_HANDLER(XlaEngineActivated, Activated, "kind")

}  // namespace xla_engine
