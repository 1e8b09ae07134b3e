// The left side of a product: rows as they are in the network, normalised if asked for, in the type of the weights.

#pragma once

#include "common.h"

#ifdef XLA_ENGINE_AMX

namespace xla_engine {

using Floats = ffi::Buffer<ffi::F32>;

inline void Round(Vec values, BFloat16* to) {
  const __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
  std::memcpy(to, &rounded, sizeof rounded);
}

// x [N, K] in bf16 or in float32, with the weight [K] of a norm before it, or none.
struct Source {
  const BFloat16* halves;  // or null
  const float *floats, *norm;
  float eps;
  int64_t count, width;

  Source(const ffi::AnyBuffer& x, const Floats& weight, float epsilon)
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

  // Calls take(k, values k .. k + 16) for all of row n.
  template <typename Take>
  void Each(int64_t n, const Take& take) const {
    if (halves) {
      for (int64_t k = 0; k < width; k += kVector) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves + n * width + k));
        take(k, (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
      }
      return;
    }
    const float* x = floats + n * width;
    const float scale = Scale(x);
    for (int64_t k = 0; k < width; k += kVector) take(k, norm ? Load(x + k) * scale * Load(norm + k) : Load(x + k));
  }
};

// Rows in the type T of the weights, and what their sums stand for.
template <typename T>
struct Operand;

template <>
struct Operand<BFloat16> : Source {
  Operand(const Source& rows, const float*) : Source(rows) {}

  // Row n, 64 bytes at a time, each to where `place(k)` says.
  template <typename Place>
  void Write(int64_t n, const Place& place) const {
    if (halves) {
      for (int64_t k = 0; k < width; k += 32) std::memcpy(place(k), halves + n * width + k, 64);
      return;
    }
    Each(n, [&](int64_t k, Vec values) { Round(values, place(k / 32 * 32) + k % 32); });
  }

  // Of sixteen features from `feature` on, row n.
  Vec Value(const float* sums, int64_t n, int64_t feature) const { return Load(sums); }
};

// Rows are quantised by their own largest value, and their scales kept until the sums are there (`graphs.quantized`).
template <>
struct Operand<int8_t> : Source {
  const float* features;  // scales of the weight's features
  std::vector<float> scales;  // of rows

  Operand(const Source& rows, const float* weight) : Source(rows), features(weight), scales((rows.count + 15) / 16 * 16) {}

  template <typename Place>
  void Write(int64_t n, const Place& place) {
    thread_local std::vector<float> row;
    row.resize(width);
    __m512i bits = _mm512_castps_si512(_mm512_set1_ps(1e-30f));
    Each(n, [&](int64_t k, Vec values) {
      Store(row.data() + k, values);
      // As integers, NaN is larger than all numbers.
      bits = _mm512_max_epi32(bits, _mm512_and_si512((__m512i)values, _mm512_set1_epi32(0x7FFFFFFF)));
    });
    const int32_t most = _mm512_reduce_max_epi32(bits);
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    scales[n] = largest * (1.0f / 127.0f);
    const float inverse = 127.0f / largest;
    for (int64_t k = 0; k < width; k += kVector) {
      const __m128i values = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32((__m512)(Load(row.data() + k) * inverse)));
      std::memcpy(place(k / 64 * 64) + k % 64, &values, sizeof values);
    }
  }

  Vec Value(const int32_t* sums, int64_t n, int64_t feature) const {
    return (Vec)_mm512_cvtepi32_ps(_mm512_loadu_si512(sums)) * Load(features + feature) * scales[n];
  }
};

}  // namespace xla_engine

#endif
