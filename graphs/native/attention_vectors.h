// Attention on plain vectors: any storage type, any CPU.

#pragma once

#include "attention_cache.h"
#include "attention_scores.h"

namespace xla_engine {

template <typename T, int kRows, int kBlocks>
void ScoreBlocks(const Context<T>& context, const float* queries, int64_t first_block, float* scores, int64_t stride) {
  constexpr int kPack = Storage<T>::kPack;
  Vec sum[kRows][kBlocks] = {};
  const T* const* keys = context.keys.data() + first_block;
  for (int64_t word = 0; word < context.width / kPack; ++word) {
    for (int b = 0; b < kBlocks; ++b) {
      const T* words = keys[b] + word * kVector * kPack;
      const Vec first = Storage<T>::template Part<0>(words);
      for (int r = 0; r < kRows; ++r) sum[r][b] = Fused(first, queries[r * context.width + word * kPack], sum[r][b]);
      if constexpr (kPack == 2) {
        const Vec second = Storage<T>::template Part<1>(words);
        for (int r = 0; r < kRows; ++r) sum[r][b] = Fused(second, queries[r * context.width + word * 2 + 1], sum[r][b]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) Store(scores + r * stride + (first_block + b) * kVector, sum[r][b]);
}

template <typename T, int kRows>
void ScoreRows(const Context<T>& context, const float* queries, float* scores, int64_t stride) {
  constexpr int kBlocks = kRows >= 4 ? 2 : 4;
  const int64_t blocks = context.keys.size();
  int64_t block = 0;
  for (; block + kBlocks <= blocks; block += kBlocks)
    ScoreBlocks<T, kRows, kBlocks>(context, queries, block, scores, stride);
  for (; block < blocks; ++block) ScoreBlocks<T, kRows, 1>(context, queries, block, scores, stride);
}

template <typename T, int kRows, int kParts>
void WeighParts(const Context<T>& context, const float* weights, int64_t stride, int64_t dim, float* out) {
  constexpr int kPack = Storage<T>::kPack;
  Vec sum[kRows][kParts] = {};
  const int64_t words = (context.count + kPack - 1) / kPack;
  for (int64_t tile = 0; tile * kVector < words; ++tile) {
    const T* rows = context.values[tile] + dim * kVector * kPack;
    const int64_t end = std::min((tile + 1) * kVector, words);
    for (int64_t word = tile * kVector; word < end; ++word, rows += kVector * kPack) {
      for (int p = 0; p < kParts; ++p) {
        const T* part = rows + p * kVector * kVector * kPack;
        const Vec first = Storage<T>::template Part<0>(part);
        for (int r = 0; r < kRows; ++r) sum[r][p] = Fused(first, weights[r * stride + word * kPack], sum[r][p]);
        if constexpr (kPack == 2) {
          const Vec second = Storage<T>::template Part<1>(part);
          for (int r = 0; r < kRows; ++r) sum[r][p] = Fused(second, weights[r * stride + word * 2 + 1], sum[r][p]);
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kParts; ++p) Store(out + r * context.width + dim + p * kVector, sum[r][p]);
}

template <typename T, int kRows>
void WeighRows(const Context<T>& context, const float* weights, int64_t stride, float* out) {
  constexpr int64_t kParts = kRows >= 4 ? 2 : 4;
  int64_t dim = 0;
  for (; dim + kParts * kVector <= context.width; dim += kParts * kVector)
    WeighParts<T, kRows, kParts>(context, weights, stride, dim, out);
  for (; dim < context.width; dim += kVector) WeighParts<T, kRows, 1>(context, weights, stride, dim, out);
}

// Calls step(rows at a time as a constant, first row) until `rows` are done; a row's bits do not depend on the cut.
template <typename Step>
void ByRows(int64_t rows, Step step) {
  int64_t row = 0;
  for (; row + 6 <= rows; row += 6) step(std::integral_constant<int, 6>(), row);
  for (; row + 3 <= rows; row += 3) step(std::integral_constant<int, 3>(), row);
  for (; row < rows; ++row) step(std::integral_constant<int, 1>(), row);
}

// Attends with queries [rows, width] to the keys each of them sees: weighted values [rows, width] and, apart, the sum of
// weights of each row. `scores` is scratch, `stride` floats a row.
template <typename T>
void AttendVectors(const Context<T>& context, const T* queries, const Seen& seen, ScoreForm form, float* scores,
                   int64_t stride, float* out, float* sums) {
  float wide[kQueries * kMaxWidth];
  for (int64_t i = 0; i < seen.rows * context.width; ++i) wide[i] = Storage<T>::Widen(queries[i]);
  ByRows(seen.rows, [&](auto count, int64_t row) {
    ScoreRows<T, count>(context, wide + row * context.width, scores + row * stride, stride);
  });
  const int64_t end = (context.count + kVector - 1) / kVector * kVector;
  for (int64_t row = 0; row < seen.rows; ++row) sums[row] = Softmax(scores + row * stride, seen, row, end, form);
  ByRows(seen.rows, [&](auto count, int64_t row) {
    WeighRows<T, count>(context, scores + row * stride, stride, out + row * context.width);
  });
}

}  // namespace xla_engine
