// The left operand of a product: rows of the residual stream, normalised if a norm is given.
//
// Products see live rows only: "row n" is the n-th live row. Its result is written to row `places[n]` of the output; rows that
// are not live get zeros, or the residual.

#pragma once

#include "buffers.h"
#include "common.h"
#include "parallel.h"

namespace xla_engine {

inline void Round(Vec values, BFloat16* to) {
#ifdef __AVX512BF16__
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
  std::memcpy(to, &rounded, sizeof rounded);
#else
  Storage<BFloat16>::Round(values, to);
#endif
}

// x [N, K] in bf16 or in float32, with the weight [K] of a norm before it, weight and bias [2, K], or none; live [N], or [0]: all are.
struct Source {
  const BFloat16* halves;  // or null
  const float *floats, *norm;
  float eps;
  int64_t total, width, count = 0;  // N, K, live rows
  std::vector<uint16_t> masks;      // of live rows among sixteen
  std::vector<int32_t> places;      // of live rows
  const float* bias;                // of the norm, or null

  Source(const ffi::AnyBuffer& x, const Floats& weight, const Flags& live, float epsilon)
      : halves(x.element_type() == ffi::BF16 ? static_cast<const BFloat16*>(x.untyped_data()) : nullptr),
        floats(halves ? nullptr : static_cast<const float*>(x.untyped_data())),
        norm(weight.element_count() ? weight.typed_data() : nullptr),
        eps(epsilon),
        total(x.dimensions()[0]),
        width(x.dimensions()[1]),
        masks((total + 15) / 16),
        places(total),
        bias(weight.element_count() > static_cast<size_t>(width) ? norm + width : nullptr) {
    const bool* flags = live.element_count() ? live.typed_data() : nullptr;
    for (int64_t row = 0; row < total; ++row) {
      const bool is_live = !flags || flags[row];
      masks[row / 16] |= is_live << row % 16;
      places[count] = static_cast<int32_t>(row);
      count += is_live;
    }
  }

  // The number of blocks of sixteen rows for which `Clear` must be called.
  int64_t Gaps() const { return count < total ? static_cast<int64_t>(masks.size()) : 0; }

  // Zeroes those of the sixteen rows from 16 * block on that are not live; a row of `to` has `bytes` bytes.
  void Clear(int64_t block, void* to, int64_t bytes) const {
    for (int64_t row = block * 16; row < std::min(total, block * 16 + 16); ++row)
      if (~masks[block] >> row % 16 & 1) std::memset(static_cast<char*>(to) + row * bytes, 0, bytes);
  }

  // The factor of a row in root-mean-square normalisation (Zhang and Sennrich 2019).
  float Scale(const float* x) const {
    if (!norm) return 1.0f;
    Vec squares = {};
    for (int64_t k = 0; k < width; k += kVector) squares = Fused(Load(x + k), Load(x + k), squares);
    const float mean = Total(squares) / static_cast<float>(width);
    return 1.0f / std::sqrt(mean + eps);
  }

  // Calls take(k, values k .. k + 16) for all of row n.
  template <typename Take>
  void Each(int64_t n, const Take& take) const {
    if (halves) {
      for (int64_t k = 0; k < width; k += kVector)
        take(k, Cast<Vec>(Convert<Bits>(LoadAs<Shorts>(halves + places[n] * width + k)) << 16));
      return;
    }
    const float* x = floats + places[n] * width;
    const float scale = Scale(x);
    for (int64_t k = 0; k < width; k += kVector) {
      Vec values = norm ? Load(x + k) * scale * Load(norm + k) : Load(x + k);
      if (bias) values = values + Load(bias + k);
      take(k, values);
    }
  }

  // Writes row n in bf16, 64 bytes at a time, to the addresses that `place(k)` returns.
  template <typename Place>
  void Write(int64_t n, const Place& place) const {
    if (halves) {
      for (int64_t k = 0; k < width; k += 32)
        std::memcpy(place(k), halves + places[n] * width + k, std::min<int64_t>(width - k, 32) * sizeof(BFloat16));
      return;
    }
    Each(n, [&](int64_t k, Vec values) { Round(values, place(k / 32 * 32) + k % 32); });
  }
};

}  // namespace xla_engine
