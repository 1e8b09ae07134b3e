// Products with packed weights by dot products (dots.h). The sums of a few rows by sixteen features stay in registers during the loop
// over K; a word of a row is broadcast to all features.

#pragma once

#include "dots.h"
#include "product.h"
#include "turn.h"
#include "widening.h"

namespace xla_engine {

// Multiplies `kRows` rows by the blocks of features at `weights`, over `words` words of K. next: as many words of weights to prefetch
// meanwhile, or null. The words of a row are `Apart(kRows)` apart. Every loop over sums is unrolled: sums that are indexed by a variable
// would be kept in memory.
template <typename D, int kRows, int kBlocks>
void MultiplyRows(const Word* rows, const char* const* weights, const char* const* next, int64_t words,
                  typename D::Sum* const* to) {
  typename D::Sum sum[kRows][kBlocks];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) sum[r][b] = typename D::Sum{};
  }
  const char *from[kBlocks], *ahead[kBlocks];
  std::copy_n(weights, kBlocks, from);
  std::copy_n(next ? next : weights, kBlocks, ahead);
  const auto add = [&](auto part, int64_t word) __attribute__((always_inline)) {
    const Word* row = rows + (word * D::kParts + part) * Apart(kRows);
    decltype(D::template Part<part>(from[0])) words_of[kBlocks];
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) words_of[b] = D::template Part<part>(from[b] + word * 64);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; ++b) sum[r][b] = D::Add(sum[r][b], words_of[b], row[r]);
    }
  };
  for (int64_t word = 0; word < words; ++word) {
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b)
      if (next) __builtin_prefetch(ahead[b] + word * 64, 0, 2);
    add(std::integral_constant<int, 0>(), word);
    if constexpr (D::kParts == 2) {
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; ++b) asm("" : "+r"(from[b]));  // words are loaded again: no room to keep them
      add(std::integral_constant<int, 1>(), word);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) StoreAs(to[b] + r, sum[r][b]);
  }
}

// The same for a number of rows that is not a constant, 1 to kBlockRows, and both blocks of features.
template <typename D, int kRows = 1>
void MultiplyRows(int64_t count, const Word* rows, Stream weights, const Stream* next, int64_t words,
                  Sums<float>& sums) {
  using Sum = typename D::Sum;
  if constexpr (kRows < kBlockRows) {
    if (count > kRows) return MultiplyRows<D, kRows + 1>(count, rows, weights, next, words, sums);
  }
  const char* const from[] = {weights.one, weights.other};
  const char* const ahead[] = {next ? next->one : nullptr, next ? next->other : nullptr};
  const char* const* fetched = next ? ahead : nullptr;
  Sum* const to[] = {reinterpret_cast<Sum*>(sums.one), reinterpret_cast<Sum*>(sums.other)};
  if constexpr (kRows <= kJointRows) {
    MultiplyRows<D, kRows, 2>(rows, from, fetched, words, to);
  } else {
    MultiplyRows<D, kRows, 1>(rows, from, fetched, words, to);
    MultiplyRows<D, kRows, 1>(rows, from + 1, fetched ? fetched + 1 : nullptr, words, to + 1);
  }
}

// Writes the first `rows` rows of a group, of `count` words each that stand `pitch` apart.
template <typename D>
void SpreadRows(const Word* words, int64_t pitch, int64_t count, int64_t rows, Word* to) {
  const int64_t apart = Apart(rows), step = D::kParts * apart;
  int64_t done = 0;
  if (D::kParts == 1 && rows == 1) return void(std::memcpy(to, words, count * sizeof(Word)));
  if constexpr (!std::is_same_v<D, ByteDots> || D::kParts == 1) {
    typedef uint32_t Four __attribute__((vector_size(16)));
    for (; count % 4 == 0 && done + 4 <= rows; done += 4) {
      for (int64_t word = 0; word < count; word += 4) {
        Word turned[16];
        TurnFour(words + done * pitch + word, pitch, turned, 4);
#pragma GCC unroll 4
        for (int64_t at = 0; at < 4; ++at) D::Spread(LoadAs<Four>(turned + 4 * at), to + (word + at) * step + done, apart);
      }
    }
  }
  for (; done < rows; ++done)
    for (int64_t word = 0; word < count; ++word) D::Spread(words[done * pitch + word], to + word * step + done, apart);
}

// Rows in bf16 by weights in bf16. Weights: the kind that they are unpacked from (widening.h).
template <typename Weights = BFloat16>
struct DotKernel {
  static constexpr int64_t kStep = kVector;  // K comes in multiples of it
#ifdef XLA_ENGINE_WIDENS
  static constexpr int64_t kParts = WidenedDots::kParts;
#else
  static constexpr int64_t kParts = HalvesDots::kParts;
#endif

  // Rows in groups, each as large as possible.
  static int64_t GroupRows(int64_t count) {
    const int64_t groups = (count + kBlockRows - 1) / kBlockRows;
    return groups ? (count + groups - 1) / groups : 1;
  }
  static int64_t GroupBytes(int64_t width) {
    return width * static_cast<int64_t>(sizeof(BFloat16)) * kParts * kBlockRows;
  }

  // Writes row `r` of a group of `rows` from its words.
  static void Spread(const Word* words, int64_t count, int64_t r, int64_t rows, char* block) {
    WithDots<Weights>(rows, [&](auto dots) {
      using D = decltype(dots);
      const int64_t apart = Apart(rows);
      Word* to = reinterpret_cast<Word*>(block) + r;
      for (int64_t word = 0; word < count; ++word, to += D::kParts * apart) D::Spread(words[word], to, apart);
    });
  }

  // Writes `rows` rows from n on as a group.
  template <typename Operand>
  static void Fill(const Operand& operand, int64_t n, int64_t rows, char* block) {
    thread_local Lines kept;
    auto* written = reinterpret_cast<BFloat16*>(kept.Bytes(rows * operand.width * sizeof(BFloat16)));
    for (int64_t r = 0; r < rows; ++r)
      operand.Write(n + r, [&](int64_t k) { return written + r * operand.width + k; });
    const int64_t words = operand.width / 2;
    WithDots<Weights>(rows, [&](auto dots) {
      SpreadRows<decltype(dots)>(reinterpret_cast<const Word*>(written), words, words, rows, reinterpret_cast<Word*>(block));
    });
  }

  // Multiplies a group of rows by two blocks of features. next: blocks to prefetch meanwhile, or null.
  static void MultiplyGroup(const char* block, int64_t rows, int64_t width, Stream weights, const Stream* next, Sums<float>& sums) {
    WithDots<Weights>(rows, [&](auto dots) {
      MultiplyRows<decltype(dots)>(rows, reinterpret_cast<const Word*>(block), weights, next, width / 2, sums);
    });
  }

  template <typename Take>
  static void Multiply(const char* blocks, int64_t count, int64_t width, Stream weights, Stream next, const Take& take) {
    MultiplyGroups(blocks, 0, GroupRows(count), count, width, weights, &next, take);
  }

  // Multiplies the rows from `first` on, in groups of `group`, of which all but the last are full. blocks: those of these rows.
  template <typename Take>
  static void MultiplyGroups(const char* blocks, int64_t first, int64_t group, int64_t count, int64_t width, Stream weights,
                             const Stream* next, const Take& take) {
    const int64_t bytes = GroupBytes(width);
    Sums<float> sums;
    for (int64_t n = first; n < count; n += group, blocks += bytes, next = nullptr) {
      const int64_t rows = std::min(group, count - n);
      MultiplyGroup(blocks, rows, width, weights, next, sums);
      take(n, rows, sums);
    }
  }
};

// Four words of each of the features `feature`, `feature` + 4, .., as many features as a register has room for.
inline BitRegister Lanes(const Word* from, int64_t pitch) {
#if defined(__AVX512F__)
  typedef uint32_t Four __attribute__((vector_size(16)));
  const auto four = [&](int64_t lane) { return (__m128i)LoadAs<Four>(from + 4 * lane * pitch); };
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(four(0)), four(1), 1);
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(four(2)), four(3), 1);
  return (BitRegister)_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#elif defined(__AVX2__)
  const auto* one = reinterpret_cast<const __m128i*>(from);
  const auto* other = reinterpret_cast<const __m128i*>(from + 4 * pitch);
  return (BitRegister)_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128(one)), _mm_loadu_si128(other), 1);
#else
  return LoadAs<BitRegister>(from);
#endif
}

// Interleaves, in each 128-bit lane, the first two words of a and b, or the last two.
template <bool kLast>
BitRegister Unpack(BitRegister a, BitRegister b) {
#if defined(__AVX512F__)
  return (BitRegister)(kLast ? _mm512_unpackhi_epi32((__m512i)a, (__m512i)b) : _mm512_unpacklo_epi32((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
  return (BitRegister)(kLast ? _mm256_unpackhi_epi32((__m256i)a, (__m256i)b) : _mm256_unpacklo_epi32((__m256i)a, (__m256i)b));
#else
  return kLast ? __builtin_shufflevector(a, b, 2, 6, 3, 7) : __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

// The same for pairs of words.
template <bool kLast>
BitRegister UnpackPairs(BitRegister a, BitRegister b) {
#if defined(__AVX512F__)
  return (BitRegister)(kLast ? _mm512_unpackhi_epi64((__m512i)a, (__m512i)b) : _mm512_unpacklo_epi64((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
  return (BitRegister)(kLast ? _mm256_unpackhi_epi64((__m256i)a, (__m256i)b) : _mm256_unpacklo_epi64((__m256i)a, (__m256i)b));
#else
  return kLast ? __builtin_shufflevector(a, b, 2, 3, 6, 7) : __builtin_shufflevector(a, b, 0, 1, 4, 5);
#endif
}

// Packs sixteen features of `words` words each, `pitch` words apart, as [word][feature]; features behind `count` are zero.
inline void Pack(const Word* rows, int64_t pitch, int64_t count, int64_t words, char* to) {
  int64_t word = 0;
  for (; count == 16 && word + 4 <= words; word += 4) {
    for (int64_t first = 0; first < 16; first += kRegister) {
      const Word* from = rows + first * pitch + word;
      const BitRegister a = Lanes(from, pitch), b = Lanes(from + pitch, pitch), c = Lanes(from + 2 * pitch, pitch);
      const BitRegister d = Lanes(from + 3 * pitch, pitch);
      const BitRegister ab = Unpack<false>(a, b), cd = Unpack<false>(c, d), more_ab = Unpack<true>(a, b);
      const BitRegister more_cd = Unpack<true>(c, d);
      char* at = to + word * 64 + first * 4;
      StoreAs(at, UnpackPairs<false>(ab, cd));
      StoreAs(at + 64, UnpackPairs<true>(ab, cd));
      StoreAs(at + 128, UnpackPairs<false>(more_ab, more_cd));
      StoreAs(at + 192, UnpackPairs<true>(more_ab, more_cd));
    }
  }
  for (; word < words; ++word)
    for (int64_t feature = 0; feature < 16; ++feature)
      reinterpret_cast<Word*>(to)[word * 16 + feature] = feature < count ? rows[feature * pitch + word] : 0;
}

}  // namespace xla_engine
