// Sums of products of 32-bit words: what kernels need from each instruction set without matrix tiles.
//
// A word holds two bf16 or four int8 neighbours of K. `Dots<T>` names the registers of a sum of sixteen features, takes a word
// of each feature apart in `kParts` steps (`Part`), and adds one of them times one word of a row (`Add`); `Spread` writes a
// word of a row, or of several neighbouring rows, as `Add` wants them. Sums run over K in order, one word and one part after the other.
//
//   bf16   AVX512-BF16 and ARM BF16: pairs at once (vdpbf16ps, bfdot); elsewhere widened, one fused multiply-add for each, the
//          second of a pair first: that is what vdpbf16ps does (Intel SDM), so that bits are those of AVX512-BF16
//   int8   VNNI, AVX-VNNI and ARM: fours at once (vpdpbusd, sdot); elsewhere pairs of widened 16-bit numbers (vpmaddwd)
//
// vpdpbusd multiplies unsigned by signed: weights are taken with 128 added, and sums start at -kOffset times the total of what
// the row has of the group (grouped_dots.h). All integer sums are exact.

#pragma once

#include "common.h"

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
#define XLA_ENGINE_VNNI 1
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define XLA_ENGINE_BFDOT 1
#endif
#if defined(__AVX512BF16__) || defined(XLA_ENGINE_BFDOT)
#define XLA_ENGINE_PAIRS 1  // of bf16 in one instruction
#endif

namespace xla_engine {

// The number of rows whose sums stay in registers: sixteen features of a row take 64 bytes.
#if defined(__AVX512F__)
constexpr int64_t kBlockRows = 12;  // by two blocks of features: 24 of 32 registers
#elif defined(__AVX2__)
constexpr int64_t kBlockRows = 6;  // by one block: 12 of 16
#else
constexpr int64_t kBlockRows = 6;  // by one block: 24 of 32
#endif
constexpr int64_t kJointRows = kRegister == 16 ? 12 : 2;  // up to this many rows, both blocks are multiplied together

// The distance between one word of a row and its next in a group of `rows` rows. It grows with the group: the words of one row that
// stood as far apart as those of twelve filled the first cache (findings/archive/095_rates_of_files.md).
constexpr int64_t Apart(int64_t rows) {
  int64_t apart = 1;
  while (apart < rows) apart *= 2;
  return apart < kBlockRows ? apart : kBlockRows;
}

// The arithmetic on one register.

#if defined(__AVX512BF16__)
inline FloatRegister AddPairs(FloatRegister sum, WordRegister weights, int32_t word) {
  return (FloatRegister)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(word));
}
#elif defined(XLA_ENGINE_BFDOT)
inline FloatRegister AddPairs(FloatRegister sum, WordRegister weights, int32_t word) {
  return (FloatRegister)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_s32((int32x4_t)weights),
                                    vreinterpretq_bf16_s32(vdupq_n_s32(word)));
}
#endif

#if defined(__AVX512VNNI__) && defined(__AVX512F__)
inline WordRegister AddFours(WordRegister sum, WordRegister weights, int32_t word) {
  return (WordRegister)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(word));
}
#elif defined(__AVXVNNI__)
inline WordRegister AddFours(WordRegister sum, WordRegister weights, int32_t word) {
  return (WordRegister)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, _mm256_set1_epi32(word));
}
#elif defined(__ARM_FEATURE_DOTPROD)
inline WordRegister AddFours(WordRegister sum, WordRegister weights, int32_t word) {
  return (WordRegister)vdotq_s32((int32x4_t)sum, vreinterpretq_s8_s32((int32x4_t)weights),
                                 vreinterpretq_s8_s32(vdupq_n_s32(word)));
}
#elif !defined(__AVX2__)
inline WordRegister AddFours(WordRegister sum, WordRegister weights, int32_t word) {
  for (int place = 24; place >= 0; place -= 8) sum += (weights << place >> 24) * (word << place >> 24);
  return sum;
}
#endif

// Two products of 16-bit numbers in each word. Compilers that added products to each other first would run out of registers.
inline WordRegister AddTwos(WordRegister sum, WordRegister weights, int32_t word) {
#if defined(__AVX512BW__)
  sum += (WordRegister)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(word));
  asm("" : "+v"(sum));
#elif defined(__AVX2__)
  sum += (WordRegister)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(word));
  asm("" : "+x"(sum));
#else  // 16-bit halves, widened
  sum += (weights << 16 >> 16) * (word << 16 >> 16) + (weights >> 16) * (word >> 16);
#endif
  return sum;
}

inline WordRegister Evens(WordRegister bytes) {  // bytes 0 and 2 of each word as 16-bit numbers
#if defined(__AVX512BW__)
  return (WordRegister)_mm512_srai_epi16(_mm512_slli_epi16((__m512i)bytes, 8), 8);
#elif defined(__AVX2__)
  return (WordRegister)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)bytes, 8), 8);
#else
  return (bytes << 24 >> 24 & 0xFFFF) | (bytes << 8 >> 24 << 16);
#endif
}

inline WordRegister Odds(WordRegister bytes) {  // bytes 1 and 3
#if defined(__AVX512BW__)
  return (WordRegister)_mm512_srai_epi16((__m512i)bytes, 8);
#elif defined(__AVX2__)
  return (WordRegister)_mm256_srai_epi16((__m256i)bytes, 8);
#else
  return (bytes << 16 >> 24 & 0xFFFF) | (bytes >> 24 << 16);
#endif
}

// The same for sixteen features.

template <typename Sum, typename Weights, typename Step>
Sum ByRegister(Sum sum, Weights weights, const Step& step) {
  if constexpr (kIsPair<Sum>) {
    return {ByRegister(sum.low, weights.low, step), ByRegister(sum.high, weights.high, step)};
  } else {
    return step(sum, weights);
  }
}

// bf16, a pair at once.
#ifdef XLA_ENGINE_PAIRS
struct PairedDots {
  using Sum = Vec;
  static constexpr int64_t kParts = 1;
  template <int part>
  static Words Part(const char* words) {
    return LoadAs<Words>(words);
  }
  static Sum Add(Sum sum, Words weights, Word word) {
    return ByRegister(sum, weights, [=](auto s, auto w) { return AddPairs(s, w, static_cast<int32_t>(word)); });
  }
  template <typename V>
  static void Spread(V words, Word* to, int64_t) {
    StoreAs(to, words);
  }
};
#endif

// bf16, widened: on x86-64 the bits of `PairedDots`.
struct WidenedDots {
  using Sum = Vec;
  static constexpr int64_t kParts = 2;
  template <int part>
  static Vec Part(const char* words) {
    return Storage<BFloat16>::Part<1 - part>(reinterpret_cast<const BFloat16*>(words));
  }
  static Sum Add(Sum sum, Vec weights, Word word) {
    float factor;
    std::memcpy(&factor, &word, sizeof factor);
    return Fused(weights, factor, sum);
  }
  template <typename V>
  static void Spread(V words, Word* to, int64_t stride) {
    StoreAs(to, words & 0xFFFF0000u), StoreAs(to + stride, words << 16);
  }
};

struct ByteDots {
  using Sum = Words;
  static int32_t Byte(Word word, int place) { return static_cast<int8_t>(word >> 8 * place); }

#if defined(XLA_ENGINE_VNNI) || defined(__ARM_FEATURE_DOTPROD)
  static constexpr int64_t kParts = 1;
#ifdef XLA_ENGINE_VNNI
  static constexpr int32_t kOffset = 128;
#else
  static constexpr int32_t kOffset = 0;
#endif
  template <int part>
  static Words Part(const char* words) {
    return kOffset ? LoadAs<Words>(words) ^ static_cast<int32_t>(0x80808080) : LoadAs<Words>(words);
  }
  static Sum Add(Sum sum, Words weights, Word word) {
    return ByRegister(sum, weights, [=](auto s, auto w) { return AddFours(s, w, static_cast<int32_t>(word)); });
  }
  template <typename V>
  static void Spread(V words, Word* to, int64_t) {
    StoreAs(to, words);
  }
#else
  static constexpr int64_t kParts = 2;
  static constexpr int32_t kOffset = 0;
  template <int part>
  static Words Part(const char* words) {
    const Words bytes = LoadAs<Words>(words);
    return ByRegister(bytes, bytes, [](auto, auto w) { return part ? Odds(w) : Evens(w); });
  }
  static Sum Add(Sum sum, Words weights, Word word) {
    return ByRegister(sum, weights, [=](auto s, auto w) { return AddTwos(s, w, static_cast<int32_t>(word)); });
  }
  static void Spread(Word word, Word* to, int64_t stride) {
    to[0] = (Byte(word, 0) & 0xFFFF) | static_cast<Word>(Byte(word, 2)) << 16;
    to[stride] = (Byte(word, 1) & 0xFFFF) | static_cast<Word>(Byte(word, 3)) << 16;
  }
#endif
};

#ifdef XLA_ENGINE_PAIRS
using HalvesDots = PairedDots;
#else
using HalvesDots = WidenedDots;
#endif
template <typename T>
using Dots = std::conditional_t<std::is_same_v<T, int8_t>, ByteDots, HalvesDots>;

}  // namespace xla_engine
