// Weights in quantised block formats (ggml's, AWQ's) stay quantised in memory; a product unpacks them to bf16 as it needs them.
//
// The unpacked values have the order of packed bf16 weights (product.h), and each is ggml's dequantised value, rounded to bf16. So a
// product has the bits that it has if the weights are converted to bf16 when they are loaded. A scale is a float16 and a code has at
// most eight bits: `scale * code` and `scale * zero point` are exact in float32. Only the addition of a minimum rounds, and then the
// conversion to bf16.
//
// An array has a header and blocks. A block is sixteen features by all K: the codes, then the scales, each in whole lines of 64 bytes.
//
//   header   64 bytes, int32: K, the number of features, the number of runs, the order of the codes (0: "pairs", 1: "fours"). Then
//            for each run of blocks of one kind: the kind (`CodedKind::number`), and the number of the block behind the run
//   codes    in the order "pairs", below, or in the order "fours" (coded_dots.h)
//   scales   for each 32 K, a number for each of the 16 features: float16 d, then float16 m (minimum or zero point), if the kind has
//            one; or one byte e for the scale 2^(e - 127). Nested kinds have for each 256 K: for each 32 K 16 bytes of scales and
//            16 of minima, or, without minima, 16 signed bytes for each 32 K (Q6_K: for each 16 K); then float16 d and m for
//            each feature, by which these bytes are multiplied
//
// The order "pairs" serves bf16 dot products, which take two neighbours of K at once. The lower four bits of the codes of 8 K are
// a line of 16 lanes by 4 bytes. In each byte, the lower half belongs to one of the features 0 to 7 and the upper half to the feature
// eight further:
//
//            byte 0               byte 1               byte 2               byte 3
//   lane 0   features 0, 8: K 0   features 0, 8: K 2   features 0, 8: K 4   features 0, 8: K 6
//   lane 1   features 0, 8: K 1   features 0, 8: K 3   features 0, 8: K 5   features 0, 8: K 7
//   lane 2   features 1, 9: K 0   ...
//
// So byte b of all lanes is the word of K 2 b, 2 b + 1 of the sixteen features. Codes of eight bits take two such lines, of features
// 0 to 7 and 8 to 15. The fifth and sixth bits of codes follow the lower bits of the whole block, in bytes that stand in the same
// order: a byte has those of several times 8 K, the first in its lowest bits.

#pragma once

#include "coded_kinds.h"
#include "packed_dots.h"
#include "packed_tiles.h"

namespace xla_engine {

constexpr int64_t kAhead = 32768;  // bytes: how far ahead of a product its weights are fetched

// A value for each of sixteen features, laid out as the 32 numbers of a line are: each value twice, since a line has two neighbours of K
// for each feature. `first` serves features 0 to 7, `second` 8 to 15.
struct Both {
  Vec first, second;
};

inline Pair<FloatRegister> Twice(FloatRegister v) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  return {(FloatRegister)_mm512_permutexvar_ps(low, (__m512)v), (FloatRegister)_mm512_permutexvar_ps(high, (__m512)v)};
#elif defined(__AVX2__)
  return {__builtin_shufflevector(v, v, 0, 0, 1, 1, 2, 2, 3, 3), __builtin_shufflevector(v, v, 4, 4, 5, 5, 6, 6, 7, 7)};
#else
  return {__builtin_shufflevector(v, v, 0, 0, 1, 1), __builtin_shufflevector(v, v, 2, 2, 3, 3)};
#endif
}

template <typename V>
Both Doubled(V v) {
  if constexpr (kRegister == 16) {
    const auto all = Twice(v);
    return {all.low, all.high};
  } else if constexpr (kRegister == 8) {
    return {Twice(v.low), Twice(v.high)};
  } else {
    return {{Twice(v.low.low), Twice(v.low.high)}, {Twice(v.high.low), Twice(v.high.high)}};
  }
}

// Sixteen finite float16 as float32. Subnormal float16 keep their values even if the processor treats subnormal float32 as zeros.
inline Vec FromFloat16(const char* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  const Bits bits = Convert<Bits>(LoadAs<Shorts>(from)), exponent = bits & 0x7C00u;
  const Vec normal = Cast<Vec>(((bits & 0x7FFFu) << 13) + (112u << 23));
  const Vec least = Convert<Vec>(Cast<Words>(bits & 0x3FFu)) * 5.9604644775390625e-8f;  // 2 ** -24
  return Cast<Vec>(Cast<Bits>(Select(Cast<Words>(exponent) > Words{}, normal, least)) | (bits & 0x8000u) << 16);
#endif
}

// Sixteen signed bytes as 32-bit words. Written with intrinsics, because compilers split a conversion of this width into single values.
inline Words SignedWords(const char* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
  const auto half = [](const char* at) { return (WordRegister)_mm256_cvtepi8_epi32(_mm_loadu_si64(at)); };
  return {half(from), half(from + 8)};
#else
  return Convert<Words>(LoadAs<Bytes>(from));
#endif
}
inline Vec UnsignedBytes(const char* from) { return Convert<Vec>(SignedWords(from) & 0xFF); }
inline Vec SignedBytes(const char* from) { return Convert<Vec>(SignedWords(from)); }

template <int table>
WordRegister FromLevels(WordRegister codes) {
#if defined(__AVX512F__)
  const __m512i all = _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(kLevels[table])));
  return (WordRegister)_mm512_permutexvar_epi32((__m512i)codes, all);
#elif defined(__AVX2__)
  const __m256i all = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kLevels[table])));
  return (WordRegister)_mm256_shuffle_epi8(all, (__m256i)codes) << 24 >> 24;
#else
  WordRegister found;
  for (int lane = 0; lane < kRegister; ++lane) found[lane] = kLevels[table][codes[lane]];
  return found;
#endif
}

// (a & mask) | b.
inline WordRegister Merged(WordRegister a, int32_t mask, WordRegister b) {
#if defined(__AVX512F__)
  return (WordRegister)_mm512_ternarylogic_epi32((__m512i)a, _mm512_set1_epi32(mask), (__m512i)b, 0xEA);
#else
  return (a & mask) | b;
#endif
}

// Shifts `plane` so that its bits from `at` on begin at `to`. The caller masks the bits around them.
template <int at, int to>
Words Moved(Words plane) {
  if constexpr (at >= to) {
    return plane >> (at - to);
  } else {
    return plane << (to - at);
  }
}

// The numbers that sixteen codes stand for, before they are scaled. A code's lower bits begin at bit `at` of its word in `codes`; its
// fifth and sixth bit, if it has them, at bit `higher` of its word in `above`.
template <int index, int at, int higher>
Vec Level(Words codes, Words above) {
  constexpr CodedKind kind = kCodedKinds[index];
  if constexpr (kind.levels) {
    const Words found = codes >> at & 15;
    return Convert<Vec>(ByRegister(found, found, [](auto, auto each) { return FromLevels<kind.levels>(each); }));
  } else {  // the code becomes the last bits of the float 2^23, from which 2^23 + bias is subtracted: exact
    constexpr int lowest = (1 << kind.low) - 1;
    const Words taken = codes >> at;
    Words found = ByRegister(taken, taken, [](auto, auto each) { return Merged(each, lowest, WordRegister{} + 0x4B000000); });
    if constexpr (kind.high > 0) {
      constexpr int mask = ((1 << kind.high) - 1) << 4;
      found = ByRegister(found, Moved<higher, 4>(above), [](auto lower, auto each) { return Merged(each, mask, lower); });
    }
    return Cast<Vec>(found) - static_cast<float>(8388608 + kind.bias);
  }
}

#if defined(__AVX512BW__)

// A table from codes of up to six bits to their numbers in bf16, which represents them exactly.
template <int index>
struct NumbersOfCodes {
  alignas(64) uint16_t at[64] = {};
  constexpr NumbersOfCodes() {
    constexpr CodedKind kind = kCodedKinds[index];
    for (int place = 0; place < 64; ++place) {
      const int code = place % (1 << (kind.low + kind.high)), number = kind.levels ? kLevels[kind.levels][code] : code - kind.bias;
      const int size = number < 0 ? -number : number;
      int exponent = 0;
      while (size >> exponent > 1) ++exponent;
      if (number) at[place] = static_cast<uint16_t>((number < 0) << 15 | (127 + exponent) << 7 | ((size << 7 >> exponent) & 127));
    }
  }
};
template <int index>
constexpr NumbersOfCodes<index> kNumbersOfCodes;

// As `Level`, by table, for two codes in each word: one in either half of 16 bits. Their lower four bits begin at bit `4 * part` of the
// half, the others at bit `higher` of the same half of `above`.
template <int index, int part, int higher>
inline __attribute__((always_inline)) Words Numbers(Words codes, Words above) {
  constexpr CodedKind kind = kCodedKinds[index];
  const auto* from = kNumbersOfCodes<index>.at;
  auto found = (__m512i)(codes >> 4 * part);
  if constexpr (kind.high > 0) {  // the lowest four bits of `found`, the others of `upper`
    const Words upper = Moved<higher, 4>(above);  // a variable, because the next call is a macro on some compilers: no commas
    found = _mm512_ternarylogic_epi32(_mm512_set1_epi16(15), found, (__m512i)upper, 0xCA);
  }
  if constexpr (kind.high > 1)
    return (Words)_mm512_permutex2var_epi16(_mm512_load_si512(from), found, _mm512_load_si512(from + 32));
  return (Words)_mm512_permutexvar_epi16(found, _mm512_load_si512(from));
}

#endif

template <int... values, typename Run>
inline __attribute__((always_inline)) void Unrolled(std::integer_sequence<int, values...>, const Run& run) {
  (run(std::integral_constant<int, values>()), ...);
}

// Prefetches the codes and scales that follow `kAhead` bytes after those of the 32 K from k on. Hardware prefetchers stop at the end of
// a page. The target is the second-level cache, because the first level can wait for only a few lines at a time
// (findings/archive/095_rates_of_files.md).
template <int index>
inline __attribute__((always_inline)) void FetchAhead(const char* block, int64_t k) {
  constexpr CodedKind kind = kCodedKinds[index];
  constexpr int64_t size = kind.CodeBytes(32) + kind.StepBytes();
  for (int64_t line = 0; line < size; line += 64) __builtin_prefetch(block + k / 32 * size + line + kAhead, 0, 2);
}

// The scales of sixteen features, and what is added to their scaled codes.
struct Steps {
  Vec scale, minimum = {};
};

// The scales of the 32 K from k on. Q6_K has a scale for each 16 K: `half` chooses the first or the second 16.
template <int index>
inline __attribute__((always_inline)) Steps StepsOf(const char* scales, int64_t k, int half) {
  constexpr CodedKind kind = kCodedKinds[index];
  if constexpr (kind.power) {
    return {Cast<Vec>((SignedWords(scales + k / 32 * kind.StepBytes()) & 0xFF) << 23)};
  } else if constexpr (!kind.nested) {
    const char* from = scales + k / 32 * kind.StepBytes();
    const Vec scale = FromFloat16(from);
    if constexpr (kind.zero) return {scale, -(scale * FromFloat16(from + 32))};  // exact
    if constexpr (kind.minimum) return {scale, FromFloat16(from + 32)};
    return {scale};
  } else {
    const char* from = scales + k / 256 * 8 * kind.StepBytes();
    const char* bytes = from + k % 256 / 32 * (kind.SmallBytes() / 8);
    const Vec scale = FromFloat16(from + kind.SmallBytes());
    if constexpr (kind.minimum) {
      const Vec minimum = FromFloat16(from + kind.SmallBytes() + 32);
      return {scale * UnsignedBytes(bytes), -(minimum * UnsignedBytes(bytes + 16))};
    }
    return {scale * SignedBytes(bytes + (kind.Run() == 16 ? half * 16 : 0))};
  }
}

#ifdef XLA_ENGINE_AMX

// A shorter `UnpackGroup` for linear kinds: a weight is scale * (code - bias), plus a minimum if the kind has one.
//
// A code's bits replace bits of the fraction of 1.0: the float is then 1 + code / 2^15 (codes in bits 8 to 11 or 8 to 15 of a word) or
// 1 + code / 2^11 (bits 12 to 15). One fused multiply-add turns it into scale * (code - bias), exactly:
//
//   (1 + code / 2^15) * (scale * 2^15) - scale * (2^15 + bias) = scale * (code - bias)
//
// Each byte in turn must be the second byte of its word, so lines are loaded from other addresses rather than shifted: only one execution
// unit can shift registers, and the conversion to bf16 needs it.
template <int bits, bool kMinimum, typename Take>
inline __attribute__((always_inline)) void UnpackLinear(const char* from, int bias, Both scale, Both minimum, const Take& take) {
  constexpr float kPlace = 32768, kOther = bits == 8 ? kPlace : 2048;
  const auto offset = static_cast<float>(bias);
  const Both times = {scale.first * kPlace, scale.second * kOther};
  const Both added = {scale.first * -(kPlace + offset), scale.second * -(kOther + offset)};
#pragma GCC unroll 1
  for (int64_t eight = 0; eight < 4; ++eight, from += 16 * bits) {
    Unrolled(std::make_integer_sequence<int, 4>(), [&](auto byte) __attribute__((always_inline)) {
      constexpr int32_t kOne = 0x3F800000, kMask = bits == 8 ? 0xFF00 : 0x0F00, kOtherMask = bits == 8 ? 0xFF00 : 0xF000;
      const Words one = LoadAs<Words>(from + byte - 1), other = bits == 8 ? LoadAs<Words>(from + 63 + byte) : one;
      Vec first = Fused(Cast<Vec>(Merged(one, kMask, WordRegister{} + kOne)), times.first, added.first);
      Vec second = Fused(Cast<Vec>(Merged(other, kOtherMask, WordRegister{} + kOne)), times.second, added.second);
      if constexpr (kMinimum) first = first + minimum.first, second = second + minimum.second;
      take(eight * 4 + byte, first, second);
    });
  }
}

#endif

// Unpacks the 32 K from k on of a block. Calls take(w, first, second) for each word of K (K 2 w and 2 w + 1), in any order: `first` has
// the two values of each of the features 0 to 7, `second` those of 8 to 15. kLinear: use `UnpackLinear` for the kinds that it serves. It
// loses the sign of zeros, which changes no sum.
template <int index, bool kLinear = false, typename Take>
inline __attribute__((always_inline)) void UnpackGroup(const char* block, int64_t width, int64_t k, const Take& take) {
  constexpr CodedKind kind = kCodedKinds[index];
  const char* low = block + k * 2 * kind.low;
  const char* high = block + width * 2 * kind.low + k * 2 * kind.high;
  const char* scales = block + kind.CodeBytes(width);
  FetchAhead<index>(block, k);
  Both scale, minimum = {};
  const auto put = [&](int64_t word, Vec first, Vec second) __attribute__((always_inline)) {
    if constexpr (kind.minimum) {
      take(k / 2 + word, Fused(first, scale.first, minimum.first), Fused(second, scale.second, minimum.second));
    } else {
      take(k / 2 + word, first * scale.first, second * scale.second);
    }
  };
  const auto ready = [&](int half) __attribute__((always_inline)) {
    const Steps steps = StepsOf<index>(scales, k, half);
    scale = Doubled(steps.scale);
    if constexpr (kind.minimum) minimum = Doubled(steps.minimum);
  };
  // Unpacks 8 of the 32 K. `place` is `eight` as a constant for kinds with higher bits, whose position it decides; else 0.
  const auto unpack = [&](int64_t eight, auto place) __attribute__((always_inline)) {
    constexpr int bits = kind.high == 2 ? place % 2 * 4 : place * 2;  // the first bit of these 8 K in a byte of higher bits
    const Words above = kind.high ? LoadAs<Words>(high + (kind.high == 2 ? place / 2 * 64 : 0)) : Words{};
    const char* from = low + eight * 16 * kind.low;
    const Words codes = LoadAs<Words>(from), others = kind.low == 8 ? LoadAs<Words>(from + 64) : codes;
#if defined(__AVX512BW__)
    if constexpr (kind.low == 4) {
      Unrolled(std::make_integer_sequence<int, 2>(), [&](auto byte) __attribute__((always_inline)) {  // bytes `byte` and `byte + 2`
        constexpr int higher = byte * 8 + bits;
        const Words first = Numbers<index, 2 * byte, higher>(codes, above);
        const Words second = Numbers<index, 2 * byte + 1, higher + kind.high>(codes, above);
        put(eight * 4 + byte, Cast<Vec>(first << 16), Cast<Vec>(second << 16));
        put(eight * 4 + byte + 2, Cast<Vec>(first & -65536), Cast<Vec>(second & -65536));
      });
    } else
#endif
    Unrolled(std::make_integer_sequence<int, 4>(), [&](auto byte) __attribute__((always_inline)) {
      constexpr int at = byte * 8, higher = at + bits;
      const Vec first = Level<index, at, higher>(codes, above);
      put(eight * 4 + byte, first, Level<index, kind.low == 8 ? at : at + 4, higher + kind.high>(others, above));
    });
  };
  ready(0);
#ifdef XLA_ENGINE_AMX
  if constexpr (kLinear && kind.IsLinear()) {
    UnpackLinear<kind.low, kind.minimum>(low, kind.bias, scale, minimum, [&](int64_t word, Vec first, Vec second) __attribute__((always_inline)) {
      take(k / 2 + word, first, second);
    });
    return;
  }
#endif
  if constexpr (kind.high) {
    Unrolled(std::make_integer_sequence<int, 4>(), [&](auto eight) __attribute__((always_inline)) {
      if constexpr (eight == 2 && kind.Run() == 16) ready(1);
      unpack(eight, eight);
    });
  } else {
#pragma GCC unroll 1  // as fast as unrolled, and compiled in a third of the time
    for (int64_t eight = 0; eight < 4; ++eight) unpack(eight, std::integral_constant<int, 0>());
  }
}

// A task's two blocks of coded weights, by number. `Stream` is the same for packed weights.
class CodedWeights;
struct CodedTask {
  const CodedWeights* weights;
  int64_t one, other;
};

class CodedWeights {
 public:
  using Element = BFloat16;

  CodedWeights(const void* array, int64_t bytes) : header_(static_cast<const int32_t*>(array)), size_(bytes) {}

  int64_t Width() const { return header_[0]; }
  int64_t Features() const { return header_[1]; }
  bool IsFours() const { return header_[3] == 1; }

  // Whether the array is as long as its header says.
  bool Fit() const {
    if (size_ < 64 || header_[0] < 32 || header_[0] % 32 || header_[2] < 1 || header_[2] > kRuns || header_[3] >> 1) return false;
    int64_t bytes = 64, block = 0;
    for (int64_t run = 0; run < header_[2]; ++run) {
      if (Kind(run) < 0 || End(run) < block) return false;
      bytes += (End(run) - block) * kCodedKinds[Kind(run)].Bytes(Width());
      block = End(run);
    }
    return bytes == size_ && header_[1] >= 0 && header_[1] <= block * 16;
  }

  // As `PackedWeights::At`; `one` and `other` are multiples of 16.
  CodedTask At(int64_t one, int64_t other) const { return {this, one / 16, other / 16}; }

  // Calls run(kind, address) for a block.
  template <typename Run>
  void OfBlock(int64_t block, const Run& run) const {
    const Place place = Find(block);
    Switch<0>(place.kind, [&](auto index) { run(index, place.at); });
  }

  // Calls run(kind, addresses, count, first) for the blocks of a task: once for both if they have the same kind, otherwise once for each.
  // first: 0 or 1, the place in the task of the first block in this call.
  template <typename Run>
  void OfTask(CodedTask task, const Run& run) const {
    const Place first = Find(task.one), second = Find(task.other);
    const char* const at[] = {first.at, second.at};
    const bool alike = first.kind == second.kind;
    Switch<0>(first.kind, [&](auto index) { run(index, at, 1 + alike, 0); });
    if (!alike) Switch<0>(second.kind, [&](auto index) { run(index, at + 1, 1, 1); });
  }

  // Unpacks a block as [K words][16 features].
  void Unpack(int64_t block, char* to) const { UnpackRun(block, 0, Width(), to); }

  // The same for K `from` to `end`.
  void UnpackRun(int64_t block, int64_t from, int64_t end, char* to) const {
    OfBlock(block, [&](auto index, const char* at) {
      for (int64_t k = from; k < end; k += 32) {
        UnpackGroup<index>(at, Width(), k, [&](int64_t word, Vec first, Vec second) __attribute__((always_inline)) {
          char* line = to + (word - from / 2) * 64;
#ifdef __AVX512BF16__
          StoreAs(line, (WordRegister)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
          Storage<BFloat16>::Round(first, reinterpret_cast<BFloat16*>(line));
          Storage<BFloat16>::Round(second, reinterpret_cast<BFloat16*>(line + 32));
#endif
        });
      }
    });
  }

 private:
  static constexpr int64_t kRuns = 6;
  struct Place {
    int kind;
    const char* at;
  };

  // The index in kCodedKinds of a run's kind, or -1.
  int Kind(int64_t run) const {
    for (int kind = 0; kind < kCodedKindCount; ++kind)
      if (kCodedKinds[kind].number == header_[4 + 2 * run]) return kind;
    return -1;
  }
  int64_t End(int64_t run) const { return header_[5 + 2 * run]; }

  Place Find(int64_t block) const {
    const char* at = reinterpret_cast<const char*>(header_) + 64;
    int64_t first = 0, run = 0;
    for (; block >= End(run); first = End(run++)) at += (End(run) - first) * kCodedKinds[Kind(run)].Bytes(Width());
    return {Kind(run), at + (block - first) * kCodedKinds[Kind(run)].Bytes(Width())};
  }

  template <int index, typename Run>
  static void Switch(int kind, const Run& run) {
    if constexpr (index + 1 < kCodedKindCount) {
      if (kind != index) return Switch<index + 1>(kind, run);
    }
    run(std::integral_constant<int, index>());
  }

  const int32_t* header_;
  int64_t size_;
};

#if defined(__AVX512BF16__) && !defined(XLA_ENGINE_AMX)

// Unpacks the first 32 K of a block.
template <int index>
__attribute__((noinline)) void UnpackFirst(const char* block, int64_t width, char* to) {
  UnpackGroup<index>(block, width, 0, [&](int64_t word, Vec first, Vec second) __attribute__((always_inline)) {
    StoreAs(to + word * 64, (WordRegister)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
  });
}

// Multiplies a group of rows by one or two blocks, one after the other, and writes the sums to `to`. While 32 K are multiplied, the next
// 32 are unpacked: the two use different execution units (findings/archive/089_coded_rows.md). strip: room for whole unpacked blocks, which
// the caller then reads; null: two buffers of 32 K are used alternately.
template <int index, int kRows>
__attribute__((noinline)) void SumBlocks(const Word* rows, int64_t width, const char* const* blocks, int64_t count, char* strip,
                                         float* const* to) {
  alignas(64) char turns[2][1024];
  char* const lines = strip ? strip : turns[0];
  const int64_t mask = strip ? -1 : 1;
  const auto unpack = [&](const char* block, int64_t k, int64_t step, const auto& meanwhile) __attribute__((always_inline)) {
    char* at = lines + (step & mask) * 1024;
    int64_t taken = 0;
    UnpackGroup<index>(block, width, k, [&](int64_t word, Vec first, Vec second) __attribute__((always_inline)) {
      StoreAs(at + (word - k / 2) * 64, (WordRegister)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
      meanwhile(taken++);
    });
  };
  UnpackFirst<index>(blocks[0], width, lines);
  int64_t step = 0;
  for (int64_t block = 0; block < count; ++block) {
    Vec sum[kRows];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) sum[r] = Vec{};
    for (int64_t k = 0; k < width; k += 32, ++step) {
      const char* now = lines + (step & mask) * 1024;
      const auto add = [&](int64_t word) __attribute__((always_inline)) {
        const Words line = LoadAs<Words>(now + word * 64);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r)
          sum[r] = AddPairs(sum[r], line, static_cast<int32_t>(rows[(k / 2 + word) * Apart(kRows) + r]));
      };
      const bool more = k + 32 < width;
      if (more || block + 1 < count) {
        unpack(blocks[more ? block : block + 1], more ? k + 32 : 0, step + 1, add);
      } else {
        for (int64_t word = 0; word < 16; ++word) add(word);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) Store(to[block] + r * kVector, sum[r]);
  }
}

// The same for a task and `count` rows, 1 to kBlockRows. It computes the next larger number of rows that is compiled; nobody reads the
// sums of the additional rows.
template <int kRows = 1>
void SumGroup(int64_t count, const Word* rows, int64_t width, CodedTask task, char* strip, Sums<float>& sums) {
  if constexpr (kRows < kBlockRows) {
    if (count > kRows) return SumGroup<std::min<int>(2 * kRows, kBlockRows)>(count, rows, width, task, strip, sums);
  }
  float* const to[] = {sums.one, sums.other};
  task.weights->OfTask(task, [&](auto index, const char* const* at, int64_t blocks, int64_t first) {
    SumBlocks<index, kRows>(rows, width, at, blocks, strip ? strip + first * width * 32 : nullptr, to + first);
  });
}

#endif

#ifdef XLA_ENGINE_AMX

// Multiplies up to 32 rows by a task whose blocks have the same kind; the sums are left in tiles 0 to 3. While 32 K are multiplied, the
// next 32 are unpacked. strip: as in `SumBlocks`.
template <int index, bool kLinear>
__attribute__((noinline)) void SumTiles(const char* rows, int64_t pitch, int64_t width, const char* const* blocks, bool second, char* strip) {
  alignas(64) char turns[2 * 2 * 1024];
  char* const lines = strip ? strip : turns;
  const int64_t mask = strip ? -1 : 1, other = strip ? width * 32 : 2 * 1024, steps = width / 32;
  const auto unpack = [&](int64_t step) __attribute__((always_inline)) {
#pragma GCC unroll 1
    for (int64_t block = 0; block < 2; ++block) {
      char* at = lines + (step & mask) * 1024 + block * other;
      UnpackGroup<index, kLinear>(blocks[block], width, step * 32, [&](int64_t word, Vec first, Vec second) __attribute__((always_inline)) {
        StoreAs(at + (word - step * 16) * 64, (WordRegister)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
      });
    }
  };
  unpack(0);
  for (int64_t step = 0; step < steps; ++step) {
    const char* now = lines + (step & mask) * 1024;
    Written();
    MultiplyPacked(rows + step * 1024, pitch, {now, now + other}, 1, second, {}, 0);
    if (step + 1 < steps) unpack(step + 1);
  }
}

#endif

// Multiplies rows by a task. The first group of rows is multiplied while the task is unpacked, the others afterwards; on instruction sets
// without such a loop, all are multiplied afterwards.
template <typename Kernel, typename Take>
void MultiplyTask(const char* blocks, int64_t count, int64_t width, CodedTask task, CodedTask, const Take& take) {
  thread_local Lines kept;
#if defined(__AVX512BF16__) && !defined(XLA_ENGINE_AMX)
  const int64_t group = Kernel::GroupRows(count), bytes = Kernel::GroupBytes(width);
  Sums<float> sums;
  if (Widening<CodedWeights>::rows >> group & 1) {  // these are multiplied afterwards, too
    char* one = kept.Bytes(width * 64);
    task.weights->Unpack(task.one, one);
    task.weights->Unpack(task.other, one + width * 32);
    return DotKernel<CodedWeights>::MultiplyGroups(blocks, 0, group, count, width, {one, one + width * 32}, nullptr, take);
  }
  char* one = count > group ? kept.Bytes(width * 64) : nullptr;
  SumGroup(group, reinterpret_cast<const Word*>(blocks), width, task, one, sums);
  take(0, group, sums);
  if (one) DotKernel<CodedWeights>::MultiplyGroups(blocks + bytes, group, group, count, width, {one, one + width * 32}, nullptr, take);
#else
#ifdef XLA_ENGINE_AMX
  const int64_t first = std::min<int64_t>(16, count), second = std::min<int64_t>(32, count) - first;
  char* strip = count > 32 ? kept.Bytes(width * 64) : nullptr;
  int64_t done = 0;
  task.weights->OfTask(task, [&](auto index, const char* const* at, int64_t alike, int64_t) {
    if (alike < 2) return;
    Sums<float> sums[2];
    ConfigurePacked(first, second);
    Begin(sums, second > 0, true);
    constexpr bool linear = kCodedKinds[index].IsLinear(), always = !linear || !kCodedKinds[index].minimum;
    const auto sum = always || !second ? SumTiles<index, linear> : SumTiles<index, linear && always>;  // with minima, of up to 16 rows
    sum(blocks, Kernel::GroupBytes(width), width, at, second > 0, strip);
    Leave(sums, second > 0);
    _tile_release();
    take(0, first, sums[0]);
    if (second) take(16, second, sums[1]);
    done = first + second;
  });
  if (done == count) return;
  if (done) {
    const auto later = [&](int64_t n, int64_t rows, const auto& sums) { take(done + n, rows, sums); };
    const Stream weights = {strip, strip + width * 32};
    return Kernel::Multiply(blocks + 2 * Kernel::GroupBytes(width), count - done, width, weights, weights, later);
  }
#endif
  char* one = kept.Bytes(width * 64);
  char* other = one + width * 32;
  task.weights->Unpack(task.one, one);
  task.weights->Unpack(task.other, other);
  Kernel::Multiply(blocks, count, width, {one, other}, {one, other}, take);
#endif
}

}  // namespace xla_engine
