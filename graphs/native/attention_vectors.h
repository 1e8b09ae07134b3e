// Attention on plain vectors: any storage type, any CPU.

#pragma once

#include "attention_cache.h"
#include "attention_scores.h"
#include "dots.h"

namespace xla_engine {

// The factors of keys (queries) and of values (softmax weights), rounded to the type of the store. Where one instruction multiplies a pair of
// bf16, a factor is a word of the row. Elsewhere it is one widened part of that word, and the second part is added first, as that
// instruction does (dots.h): the bits are the same. `Place` returns where a row has the factor for a part of a word.
template <typename T>
struct Factors {
  using Type = float;
  static constexpr int kParts = Storage<T>::kPack;
  template <int part>
  static Vec Part(const T* words) {
    return Storage<T>::template Part<kParts - 1 - part>(words);
  }
  static int64_t Place(int64_t word, int part) { return word * kParts + kParts - 1 - part; }
  static Vec Add(Vec sum, Vec words, float factor) { return Fused(words, factor, sum); }
  // `pitch` factors apart.
  static void FromQuery(const T* from, int64_t width, float* to, int64_t pitch) {
    for (int64_t i = 0; i < width; ++i) to[i * pitch] = Storage<T>::Widen(from[i]);
  }
  // In place.
  static const float* FromWeights(float* row, int64_t end) {
    if constexpr (kParts == 2)
      for (int64_t at = 0; at < end; at += kVector) StoreAs(row + at, Storage<T>::Rounded(Load(row + at)) & 0xFFFF0000u);
    return row;
  }
};

#ifdef XLA_ENGINE_PAIRS
template <>
struct Factors<BFloat16> {
  using Type = Word;
  static constexpr int kParts = 1;
  template <int part>
  static Words Part(const BFloat16* words) {
    return LoadAs<Words>(words);
  }
  static int64_t Place(int64_t word, int) { return word; }
  static Vec Add(Vec sum, Words words, Word factor) { return Dots<BFloat16>::Add(sum, words, factor); }
  static void FromQuery(const BFloat16* from, int64_t width, Word* to, int64_t pitch) {
    for (int64_t word = 0; word < width / 2; ++word) to[word * pitch] = reinterpret_cast<const Word*>(from)[word];
  }
  // In place: words are half as long, so that none is written before it is read.
  static const Word* FromWeights(float* row, int64_t end) {
    BFloat16* to = reinterpret_cast<BFloat16*>(row);
    for (int64_t at = 0; at < end; at += kVector) {
#if defined(__AVX512BF16__)  // takes denormals for zeros, but weights are none
      StoreAs(to + at, _mm512_cvtneps_pbh((__m512)Load(row + at)));
#else
      Storage<BFloat16>::Round(Load(row + at), to + at);
#endif
    }
    return reinterpret_cast<const Word*>(row);
  }
};
#endif

// How many rows and vectors are computed together: with few rows more vectors, so that enough sums are in flight.
constexpr int kMostRows = kRegister == 16 ? 8 : 6;
constexpr int Beside(int rows) {
  if (kRegister == 16) return rows <= 4 ? 4 : 2;
  return rows <= 3 ? 4 : 1;
}

// Whether both parts of a key's word are multiplied before those of the next block: where registers do not hold all sums, this moves
// them to memory and back half as often. A lone row's sums would wait for each other.
template <typename F, int kRows>
constexpr bool kByBlock = F::kParts == 2 && kRegister == 8 && kRows > 1;

// Queries [factor][kQueries]: with a constant distance from one row to the next, and every loop over sums unrolled, compilers
// keep all sums in registers.
template <typename T, int kRows, int kBlocks>
void ScoreBlocks(const Context<T>& context, const typename Factors<T>::Type* queries, int64_t first_block, float* scores,
                 int64_t stride) {
  using F = Factors<T>;
  constexpr int kPack = Storage<T>::kPack;
  const int64_t words = context.width / kPack;
  const T* keys[kBlocks];
  std::copy_n(context.keys.data() + first_block, kBlocks, keys);
  Vec sum[kRows][kBlocks];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) sum[r][b] = Vec{};
  }
  for (int64_t word = 0; word < words; ++word) {
    const auto add = [&](auto part, int b) __attribute__((always_inline)) {
      const typename F::Type* factors = queries + F::Place(word, part) * kQueries;
      const auto key = F::template Part<part>(keys[b] + word * kVector * kPack);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sum[r][b] = F::Add(sum[r][b], key, factors[r]);
    };
    constexpr std::integral_constant<int, 0> kFirst;
    constexpr std::integral_constant<int, F::kParts - 1> kSecond;
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) {
      add(kFirst, b);
      if constexpr (kByBlock<F, kRows>) add(kSecond, b);
    }
    if constexpr (F::kParts == 2 && !kByBlock<F, kRows>) {
#pragma GCC unroll 4
      for (int b = 0; b < kBlocks; ++b) add(kSecond, b);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int b = 0; b < kBlocks; ++b) Store(scores + r * stride + (first_block + b) * kVector, sum[r][b]);
  }
}

template <typename T, int kRows>
void ScoreRows(const Context<T>& context, const typename Factors<T>::Type* queries, float* scores, int64_t stride) {
  constexpr int kBlocks = Beside(kRows);
  const int64_t blocks = context.keys.size();
  int64_t block = 0;
  for (; block + kBlocks <= blocks; block += kBlocks)
    ScoreBlocks<T, kRows, kBlocks>(context, queries, block, scores, stride);
  for (; block < blocks; ++block) ScoreBlocks<T, kRows, 1>(context, queries, block, scores, stride);
}

template <typename T, int kRows, int kParts>
void WeighParts(const Context<T>& context, const typename Factors<T>::Type* weights, int64_t stride, int64_t dim, float* out, bool fresh) {
  constexpr int kPack = Storage<T>::kPack;
  Vec sum[kRows][kParts] = {};
  for (int r = 0; !fresh && r < kRows; ++r)
    for (int p = 0; p < kParts; ++p) sum[r][p] = Load(out + r * context.width + dim + p * kVector);
  const int64_t words = (context.count + kPack - 1) / kPack;
  for (int64_t tile = 0; tile * kVector < words; ++tile) {
    const T* rows = context.values[tile] + dim * kVector * kPack;
    const int64_t end = std::min((tile + 1) * kVector, words);
    for (int64_t word = tile * kVector; word < end; ++word, rows += kVector * kPack) {
      for (int p = 0; p < kParts; ++p) {
        auto add = [&](auto part) {
          const auto value = Factors<T>::template Part<part>(rows + p * kVector * kVector * kPack);
          for (int r = 0; r < kRows; ++r) sum[r][p] = Factors<T>::Add(sum[r][p], value, weights[r * stride + Factors<T>::Place(word, part)]);
        };
        add(std::integral_constant<int, 0>());
        if constexpr (Factors<T>::kParts == 2) add(std::integral_constant<int, 1>());
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kParts; ++p) Store(out + r * context.width + dim + p * kVector, sum[r][p]);
}

template <typename T, int kRows>
void WeighRows(const Context<T>& context, const typename Factors<T>::Type* weights, int64_t stride, float* out, bool fresh) {
  constexpr int64_t kParts = Beside(kRows);
  int64_t dim = 0;
  for (; dim + kParts * kVector <= context.width; dim += kParts * kVector)
    WeighParts<T, kRows, kParts>(context, weights, stride, dim, out, fresh);
  for (; dim < context.width; dim += kVector) WeighParts<T, kRows, 1>(context, weights, stride, dim, out, fresh);
}

// Calls step(rows at a time as a constant, first row) until `rows` are done; a row's bits do not depend on the cut.
template <typename Step>
void ByRows(int64_t rows, Step step) {
  int64_t row = 0;
  for (; row + kMostRows <= rows; row += kMostRows) step(std::integral_constant<int, kMostRows>(), row);
  for (; row + 4 <= rows; row += 4) step(std::integral_constant<int, 4>(), row);
  if (row + 3 == rows) return step(std::integral_constant<int, 3>(), row);
  if (row + 2 == rows) return step(std::integral_constant<int, 2>(), row);
  if (row + 1 == rows) step(std::integral_constant<int, 1>(), row);
}

// The weights of the keys that each of the queries [rows, width] sees, and their sum for each row. Weights are rounded to the type of the
// values, as factors, their sum is not. They take the place of `scores`, scratch of `stride` floats a row.
template <typename T>
void WeightsByVectors(const Context<T>& context, const T* queries, const Seen& seen, ScoreForm form, float* scores, int64_t stride,
                      float* sums) {
  alignas(64) typename Factors<T>::Type factors[kQueries * kMaxWidth];
  for (int64_t row = 0; row < seen.rows; ++row)
    Factors<T>::FromQuery(queries + row * context.width, context.width, factors + row, kQueries);
  ByRows(seen.rows, [&](auto count, int64_t row) {
    ScoreRows<T, count>(context, factors + row, scores + row * stride, stride);
  });
  const int64_t end = (context.count + 2 * kVector - 1) / (2 * kVector) * (2 * kVector);
  for (int64_t row = 0; row < seen.rows; ++row) {
    sums[row] = Softmax(scores + row * stride, seen, row, end, form);
    Factors<T>::FromWeights(scores + row * stride, end);
  }
}

// The values [rows, width] of a context, weighted by those weights from key `first` on. fresh: `out` has no sums of earlier keys.
template <typename T>
void WeighByVectors(const Context<T>& context, const float* weights, int64_t stride, int64_t first, int64_t rows, float* out,
                    bool fresh) {
  using F = Factors<T>;
  const int64_t before = first / Storage<T>::kPack * F::kParts;  // factors
  ByRows(rows, [&](auto count, int64_t row) {
    const auto* own = reinterpret_cast<const typename F::Type*>(weights + row * stride) + before;
    WeighRows<T, count>(context, own, stride, out + row * context.width, fresh);
  });
}

// What becomes of weighted values [rows, width].
template <typename T>
void Finish(const Context<T>&, int64_t, float*) {}

// Attends with queries [rows, width] to the keys each of them sees: weighted values [rows, width] and, apart, the sum of
// weights of each row.
template <typename T, typename Taken>
void AttendVectors(const Context<T>& context, Taken* queries, const Seen& seen, ScoreForm form, float* scores, int64_t stride, float* out,
                   float* sums) {
  WeightsByVectors(context, queries, seen, form, scores, stride, sums);
  WeighByVectors(context, scores, stride, 0, seen.rows, out, true);
  Finish(context, seen.rows, out);
}

}  // namespace xla_engine
