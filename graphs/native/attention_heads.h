// Heads out of the fused projection, ready for the cache or for a product: normed, rotated, rounded, padded.

#pragma once

#include "attention_cache.h"

namespace xla_engine {

// Rows of qkv, query heads first, then keys, then values; see `Arguments` for what may be missing.
struct Projection {
  const float* qkv;   // [N, F]
  const float* rope;  // [N, 2, Dh / 2]
  int64_t width;      // F
  int64_t head_dim, padded;
  float eps;  // of the norms
  bool value_norm;
  bool norm_last;  // norms of queries and keys come behind the rotation

  // Head `head` of row `row` as it is, or normed without a weight.
  template <typename T>
  void Value(int64_t row, int64_t head, T* to) const {
    const float* from = At(row, head);
    alignas(64) float normed[kMaxWidth];
    if (value_norm) {
      Norm(from, nullptr, normed);
      from = normed;
    }
    int64_t d = 0;
    for (; d + kVector <= head_dim; d += kVector) Storage<T>::Round(Load(from + d), to + d);
    for (; d < head_dim; ++d) to[d] = Storage<T>::Round(from[d]);
    for (int64_t d = head_dim; d < padded; ++d) to[d] = T{};
  }

  // The same normed by the weight `norm`, if there is one, and rotated, or in the other order.
  template <typename T>
  void Rotated(int64_t row, int64_t head, const float* norm, T* to) const {
    const float* from = At(row, head);
    if (norm == nullptr) return Rotate(row, from, to);
    alignas(64) float normed[kMaxWidth], turned[kMaxWidth];
    if (norm_last) {
      Rotate(row, from, turned);
      Norm(turned, norm, normed);
      for (int64_t d = 0; d < padded; d += kVector) Storage<T>::Round(Load(normed + d), to + d);
      return;
    }
    Norm(from, norm, normed);
    Rotate(row, normed, to);
  }

 private:
  const float* At(int64_t row, int64_t head) const { return qkv + row * width + head * head_dim; }

  // Half-split pairs, as in Hugging Face.
  template <typename T>
  void Rotate(int64_t row, const float* from, T* to) const {
    const int64_t half = head_dim / 2;
    const float *cosine = rope + row * head_dim, *sine = cosine + half;
    int64_t d = 0;
    for (; d + kVector <= half; d += kVector) {
      const Vec low = Load(from + d), high = Load(from + d + half), c = Load(cosine + d), s = Load(sine + d);
      Storage<T>::Round(Fused(-high, s, low * c), to + d);
      Storage<T>::Round(Fused(low, s, high * c), to + d + half);
    }
    for (; d < half; ++d) {
      const float low = from[d], high = from[d + half];
      to[d] = Storage<T>::Round(Fused(-high, sine[d], low * cosine[d]));
      to[d + half] = Storage<T>::Round(Fused(low, sine[d], high * cosine[d]));
    }
    for (int64_t d = head_dim; d < padded; ++d) to[d] = T{};
  }

  // Root-mean-square normalisation (Zhang and Sennrich 2019).
  void Norm(const float* from, const float* weight, float* to) const {
    for (int64_t d = 0; d < head_dim; ++d) to[d] = from[d];
    for (int64_t d = head_dim; d < padded; ++d) to[d] = 0;
    Vec squares = {};
    for (int64_t d = 0; d < padded; d += kVector) squares = Fused(Load(to + d), Load(to + d), squares);
    const float square = Total(squares);
    const float scale = 1.0f / std::sqrt(square / static_cast<float>(head_dim) + eps);
    for (int64_t d = 0; d < head_dim; ++d) to[d] *= weight ? scale * weight[d] : scale;
  }
};

}  // namespace xla_engine
