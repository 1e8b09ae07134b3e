// Products of weights in quantised block formats with rows in int8: faster than products that unpack weights to bf16 (coded_weights.h),
// with other bits.
//
// Rows are quantised: each 32 numbers share a scale. Over a run of K in which the scales of the features do not change either (32 K, in
// Q6_K 16), a sum of products is an exact integer on every instruction set. These integers are scaled and added in float32, in the
// order of K:
//
//   sum = Fused(float(integer) * scale of the row, scale of the feature, sum)
//   sum = Fused(minimum of the feature, float(total of the row) * scale of the row, sum)      after each 32 K of kinds with minima
//
// So bits are the same on every instruction set.
//
// The order "fours" serves int8 dot products, which take four neighbours of K at once. Header and scales are those of coded_weights.h. A
// line of 64 bytes has four bytes for each of the sixteen features f, k = 0 .. 3:
//
//   8 bits    32 K are 8 lines: byte 4 f + k of line i is the code of K 4 i + k
//   4 bits    32 K are 4 lines: byte 4 f + k of line i has K 8 i + k in its lower half and K 8 i + 4 + k in its upper half
//   5, 6      the lower four bits as above. 1 or 2 lines follow with the other bits: byte 4 f + k has those of K k, 4 + k, 8 + k, ..,
//             from its lowest bit on
//
// How an instruction set multiplies them:
//
//   VNNI                vpdpbusd takes unsigned codes. The start value of a sum subtracts what the bias of the codes adds to it
//   AVX2, AVX-512       vpmaddubsw adds in 16 bits, so codes are multiplied four bits at a time: sixteen products of up to 15 * 127 fit
//   ARM, others         sdot takes signed codes

#pragma once

#include "coded_weights.h"
#include "grouped_dots.h"

namespace xla_engine {

#if defined(__AVX2__) && !defined(XLA_ENGINE_VNNI)
constexpr bool kByNibbles = true;
#else
constexpr bool kByNibbles = false;
#endif
#ifdef __AVX2__
constexpr bool kSignedCodes = false;
#else
constexpr bool kSignedCodes = true;
#endif

// The tables of kLevels as bytes. Where products take four bits at a time, `at[table][0]` has the lower halves of the bytes and
// `at[table][1]` the upper ones.
struct LevelBytes {
  static constexpr int kTables = sizeof kLevels / sizeof *kLevels;
  alignas(16) uint8_t at[kTables][2][16] = {};
  constexpr LevelBytes() {
    for (int table = 0; table < kTables; ++table)
      for (int plane = 0; plane < 2; ++plane)
        for (int code = 0; code < 16; ++code) {
          const int level = kLevels[table][code], byte = kSignedCodes ? level & 255 : level + 128;
          at[table][plane][code] = static_cast<uint8_t>(kByNibbles ? byte >> 4 * plane & 15 : byte);
        }
  }
};
constexpr LevelBytes kLevelBytes;

// Kinds whose codes are stored alike share one compiled product. Its argument `Variant` says how they differ: in scales, levels, biases
// and minima.
constexpr bool Alike(const CodedKind& a, const CodedKind& b) {
  return a.low == b.low && a.high == b.high && !a.levels == !b.levels && a.Run() == b.Run();
}
constexpr int FirstAlike(int index) {
  int first = 0;
  while (!Alike(kCodedKinds[first], kCodedKinds[index])) ++first;
  return first;
}

// The biases that kinds have. `FoursKernel::Quantize` computes for each the start value of a sum, which cancels the bias: minus the bias
// times the total of the row. For the last bias, that of Q6_K, it computes one for each 16 K, because Q6_K has a scale for each 16 K.
constexpr int kStarts[] = {0, 8, 16, 128, 32}, kStartCount = sizeof kStarts / sizeof *kStarts;

// What distinguishes kinds that share a compiled product. start: an index of `kStarts`.
struct Variant {
  int form = 0, levels = 0, start = 0;
  bool minimum = false;
  int64_t step_bytes = 0;
};
struct VariantOfKinds {
  Variant of[kCodedKindCount];
  constexpr VariantOfKinds() {
    for (int index = 0; index < kCodedKindCount; ++index) {
      const CodedKind& kind = kCodedKinds[index];
      int start = 0;
      while (kStarts[start] != (kSignedCodes && kind.FoursBias() == 128 ? 0 : kind.FoursBias())) ++start;
      of[index] = {kind.Form(), kind.levels, start, kind.minimum, kind.StepBytes()};
    }
  }
};
constexpr VariantOfKinds kVariants;

// The smallest form of scales, from `form` on, among the kinds that share a product with kind `index`; kForms if there is none.
constexpr int NextForm(int index, int form) {
  for (; form < kForms; ++form)
    for (const CodedKind& kind : kCodedKinds)
      if (kind.Form() == form && Alike(kind, kCodedKinds[index])) return form;
  return form;
}
// The first kind with a form of scales.
constexpr int FirstOfForm(int form) {
  int first = 0;
  while (kCodedKinds[first].Form() != form) ++first;
  return first;
}

// As `StepsOf`, for the kinds that share a product with kind `index`; `form` says which of their forms the scales have.
template <int index, int least = 0>
inline __attribute__((always_inline)) Steps StepsAmong(int form, const char* scales, int64_t k, int half) {
  constexpr int first = NextForm(index, least);
  if constexpr (NextForm(index, first + 1) < kForms) {
    if (form != first) return StepsAmong<index, first + 1>(form, scales, k, half);
  }
  return StepsOf<FirstOfForm(first)>(scales, k, half);
}

// table[code] for each byte of `codes`.
inline WordRegister Chosen(const uint8_t* table, WordRegister codes) {
#if defined(__AVX512BW__)
  const __m512i all = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return (WordRegister)_mm512_shuffle_epi8(all, (__m512i)codes);
#elif defined(__AVX2__)
  const __m256i all = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table)));
  return (WordRegister)_mm256_shuffle_epi8(all, (__m256i)codes);
#elif defined(__ARM_NEON)
  return (WordRegister)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
  uint8_t bytes[sizeof codes];
  std::memcpy(bytes, &codes, sizeof codes);
  for (uint8_t& byte : bytes) byte = table[byte];
  std::memcpy(&codes, bytes, sizeof codes);
  return codes;
#endif
}

// Adds two products of bytes to each sum of 16 bits. The empty `asm` keeps the compiler from doing all multiplications first, for which
// there are not enough registers.
inline WordRegister AddNibbles(WordRegister sum, WordRegister codes, int32_t word) {
#if defined(__AVX512BW__)
  sum = (WordRegister)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(word)));
  asm("" : "+v"(sum));
#elif defined(__AVX2__)
  sum = (WordRegister)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(word)));
  asm("" : "+x"(sum));
#endif
  return sum;
}

// Pairs of neighbouring 16-bit sums, times `factor`, as sums of 32 bits.
inline WordRegister Widened(WordRegister sums, int16_t factor) {
#if defined(__AVX512BW__)
  return (WordRegister)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(factor));
#elif defined(__AVX2__)
  return (WordRegister)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(factor));
#else
  return sums;
#endif
}

// Two blocks of weights in the order "fours", or an array of them.
struct FoursTask {
  const CodedWeights* weights;
  int64_t one, other;
};
struct FoursWeights {
  CodedWeights coded;
  FoursTask At(int64_t one, int64_t other) const { return {&coded, one / 16, other / 16}; }
};

struct FoursTiles;  // coded_tiles.h

struct FoursKernel {
#ifdef XLA_ENGINE_AMX
  using Many = FoursTiles;  // from so many rows on
  static constexpr int64_t kMany = 13;
#endif
  static constexpr int64_t kStep = 32;  // K comes in multiples of it
  static constexpr int64_t kWords = kStep / 4;
  // A row takes kAll words for each 32 K: kWords of its numbers, then these.
  static constexpr int64_t kStart = kWords;  // the start values of a sum, one for each of `kStarts`; the last one is for the first 16 K
  static constexpr int64_t kSecond = kStart + kStartCount;  // the start value for the second 16 K
  static constexpr int64_t kScale = kSecond + 1;   // float
  static constexpr int64_t kUndone = kScale + 1;   // float: -kMagic as a float times the scale
  static constexpr int64_t kTotal = kUndone + 1;   // float: the sum of the row times the scale
  static constexpr int64_t kAll = kTotal + 1;

  static int64_t GroupRows(int64_t count) { return DotKernel<>::GroupRows(count); }
  static int64_t GroupBytes(int64_t width) { return width / kStep * kAll * kBlockRows * static_cast<int64_t>(sizeof(Word)); }

  // Quantises rows n to n + rows of `source` into a block.
  template <typename Source>
  static void Fill(const Source& source, int64_t n, int64_t rows, char* block) {
    const int64_t apart = Apart(rows);
    for (int64_t r = 0; r < rows; ++r) {
      Vec first = {};
      source.Each(n + r, [&](int64_t k, Vec values) {
        if (k % kStep == 0) {
          first = values;
          return;
        }
        const Vec both[] = {first, values};
        Quantize(both, apart, At(block, k, apart) + r);
      });
    }
  }

  // The address in a block of the 32 K that contain k.
  static Word* At(char* block, int64_t k, int64_t apart) { return reinterpret_cast<Word*>(block) + k / kStep * kAll * apart; }

  // Quantises 32 numbers of a row to `to`. apart: the distance between words of one row, `Apart` of the block's rows.
  static void Quantize(const Vec* from, int64_t apart, Word* to) {
    const EightBits<kStep, false> quantized(from);
    alignas(64) int8_t bytes[kStep];
    // Sums of sixteen bytes take twelve bits, so one pass finds both.
    const int32_t both = Reduce(quantized.values[0] + (quantized.values[1] << 16), [](auto a, auto b) { return a + b; });
    const int32_t first = static_cast<int16_t>(both), all = first + ((both - first) >> 16);
    for (int half = 0; half < 2; ++half) StoreAs(bytes + half * kVector, Convert<Bytes>(quantized.values[half]));
    for (int64_t word = 0; word < kWords; ++word) std::memcpy(to + word * apart, bytes + word * 4, 4);
    const auto start = [&](int64_t place, int32_t bias, int32_t sum) { to[place * apart] = static_cast<Word>(kMagic - bias * sum); };
    constexpr int64_t kLast = kStartCount - 1;
    for (int64_t place = 0; place < kLast; ++place) start(kStart + place, kStarts[place], all);
    start(kStart + kLast, kStarts[kLast], first), start(kSecond, kStarts[kLast], all - first);
    const float scales[] = {quantized.scale, -12582912.0f * quantized.scale, static_cast<float>(all) * quantized.scale};
    for (int64_t place = 0; place < 3; ++place) std::memcpy(to + (kScale + place) * apart, scales + place, 4);
  }

  // The codes of sixteen features for four neighbours of K. Where products take four bits at a time, plane 0 has the lower four bits of
  // the codes and plane 1 the others.
  template <int index, int plane>
  static __attribute__((always_inline)) inline Words CodesAt(int levels, const char* from, int64_t word) {
    constexpr CodedKind kind = kCodedKinds[index];
    constexpr int32_t kLower = 0x0F0F0F0F;
    if constexpr (kind.low == 8) {
      const Words bytes = LoadAs<Words>(from + word * 64);
      if constexpr (kByNibbles) return (plane ? bytes >> 4 : bytes) & kLower;
      return kSignedCodes ? bytes ^ static_cast<int32_t>(0x80808080) : bytes;
    } else if constexpr (kByNibbles && kind.high && plane) {
      return HigherBits<kind.high, 0>(from, word) & ((1 << kind.high) - 1) * 0x01010101;
    } else {
      const Words bytes = LoadAs<Words>(from + word / 2 * 64), codes = word % 2 ? bytes >> 4 : bytes;
      if constexpr (kind.levels) {
        return ByRegister(codes, codes, [=](auto, auto each) { return Chosen(kLevelBytes.at[levels][plane], each & kLower); });
      } else if constexpr (kByNibbles || !kind.high) {
        return codes & kLower;
      } else {
        const Words above = HigherBits<kind.high, 4>(from, word) & ((1 << kind.high) - 1) * 0x10101010;
        return ByRegister(codes, above, [](auto lower, auto higher) { return Merged(lower, kLower, higher); });
      }
    }
  }

  // The fifth and sixth bits of codes, from bit `to` of each byte on; the caller masks the bits around them. from: the codes of 32 K.
  template <int bits, int to>
  static __attribute__((always_inline)) inline Words HigherBits(const char* from, int64_t word) {
    const Words line = LoadAs<Words>(from + 256 + word * bits / 8 * 64);
    const int at = static_cast<int>(word * bits % 8);
    return at < to ? line << (to - at) : line >> (at - to);
  }

  // Multiplies `kRows` rows by a block of sixteen features. ahead: how many bytes further the weights to prefetch are.
  template <int index, int kRows>
  static __attribute__((noinline)) void MultiplyBlock(Variant variant, const Word* rows, const char* codes, int64_t width,
                                                      int64_t ahead, float* to) {
    constexpr CodedKind kind = kCodedKinds[index];
    constexpr int kRun = kind.Run(), kPlanes = kByNibbles && (kind.low + kind.high > 4 || kind.levels) ? 2 : 1;
    constexpr int64_t kApart = Apart(kRows), kBytesOfGroup = kind.CodeBytes(kStep);
    const char* scales = codes + kind.CodeBytes(width);
    Vec total[kRows];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) total[r] = Vec{};
    for (int64_t k = 0; k < width; k += kStep, rows += kAll * kApart, codes += kBytesOfGroup) {
      const auto* floats = reinterpret_cast<const float*>(rows);
      __builtin_prefetch(scales + k / kStep * variant.step_bytes + ahead, 0, 2);
#pragma GCC unroll 8
      for (int64_t line = 0; line < kBytesOfGroup; line += 64) __builtin_prefetch(codes + line + ahead, 0, 2);
      Unrolled(std::make_integer_sequence<int, kStep / kRun>(), [&](auto run) __attribute__((always_inline)) {
        if constexpr (run > 0) asm("" : "+r"(floats));  // scales are loaded again: no room to keep them
        const Word* starts = rows + (kRun == kStep ? kStart + variant.start : run + kSecond - 1) * kApart;
        Words sum[kRows];
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) sum[r] = Words{} + static_cast<int32_t>(starts[r]);
        Unrolled(std::make_integer_sequence<int, kPlanes>(), [&](auto plane) __attribute__((always_inline)) {
          if constexpr (plane > 0) asm("" : "+r"(rows), "+r"(codes));  // words are loaded again: no room to keep them
          Words part[kRows];
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r) part[r] = kByNibbles ? Words{} : sum[r];
          const auto add = [&](int64_t word) __attribute__((always_inline)) {
            const Words of_features = CodesAt<index, plane>(variant.levels, codes, word);
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
              const auto of_row = static_cast<int32_t>(rows[word * kApart + r]);
              part[r] = ByRegister(part[r], of_features, [=](auto s, auto c) { return AddCodes(s, c, of_row); });
            }
          };
          constexpr int64_t kWord = run * (kRun / 4), kEnd = kWord + kRun / 4;
          if constexpr (kRegister == 4) {  // a word is many instructions
#pragma GCC unroll 1
            for (int64_t word = kWord; word < kEnd; word += 2) add(word), add(word + 1);
          } else {
#pragma GCC unroll 8
            for (int64_t word = kWord; word < kEnd; ++word) add(word);
          }
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r) {
            const auto widened = [=](auto, auto each) { return Widened(each, plane ? 16 : 1); };
            sum[r] = kByNibbles ? sum[r] + ByRegister(part[r], part[r], widened) : part[r];
          }
        });
        const Steps steps = StepsAmong<index>(variant.form, scales, k, run);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r)
          total[r] = Fused(Fused(Cast<Vec>(sum[r]), floats[kScale * kApart + r], floats[kUndone * kApart + r]), steps.scale, total[r]);
        if (variant.minimum) {
#pragma GCC unroll 12
          for (int r = 0; r < kRows; ++r) total[r] = Fused(steps.minimum, floats[kTotal * kApart + r], total[r]);
        }
      });
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) Store(to + r * kVector, total[r]);
  }

  static __attribute__((always_inline)) inline WordRegister AddCodes(WordRegister sum, WordRegister codes, int32_t word) {
#if defined(__AVX2__) && !defined(XLA_ENGINE_VNNI)
    return AddNibbles(sum, codes, word);
#else
    return AddFours(sum, codes, word);
#endif
  }

  // The same for a number of rows that is not a constant, 1 to kBlockRows.
  template <int index, int kRows = 1, typename... Arguments>
  static void MultiplyRows(int64_t count, Arguments... arguments) {
    if constexpr (kRows < kBlockRows) {
      if (count > kRows) return MultiplyRows<index, kRows + 1>(count, arguments...);
    }
    MultiplyBlock<index, kRows>(arguments...);
  }

  // The sums of a group of rows by a task.
  static void MultiplyTask(int64_t rows, const char* group, const FoursTask& task, int64_t width, int64_t ahead, Sums<float>& sums) {
    const int64_t places[] = {task.one, task.other};
    for (int64_t place : {0, 1}) {
      task.weights->OfBlock(places[place], [&](auto index, const char* at) {
        float* to = place ? sums.other : sums.one;
        MultiplyRows<FirstAlike(index)>(rows, kVariants.of[index], reinterpret_cast<const Word*>(group), at, width, ahead, to);
      });
    }
  }

  template <typename Take>
  static void Multiply(const char* blocks, int64_t count, int64_t width, const FoursTask& task, const Take& take) {
    const int64_t group = GroupRows(count), bytes = GroupBytes(width);
    Sums<float> sums;
    for (int64_t n = 0; n < count; n += group, blocks += bytes) {
      const int64_t rows = std::min(group, count - n);
      MultiplyTask(rows, blocks, task, width, n ? 0 : kAhead, sums);
      take(n, rows, sums);
    }
  }

  // One row of the weights, each value rounded to bf16 as `CodedWeights::Unpack` does.
  static void Row(const CodedWeights& weights, int64_t row, float* to) {
    const int64_t width = weights.Width(), feature = row % 16;
    weights.OfBlock(row / 16, [&](auto index, const char* at) {
      constexpr CodedKind kind = kCodedKinds[index];
      alignas(64) float scales[kVector], minima[kVector];
      for (int64_t k = 0; k < width; ++k) {
        if (k % 16 == 0) {
          const Steps steps = StepsOf<index>(at + kind.CodeBytes(width), k / 32 * 32, k / 16 % 2);
          Store(scales, steps.scale), Store(minima, steps.minimum);
        }
        const char* bytes = at + kind.CodeBytes(k / 32 * 32) + feature * 4 + k % 4;
        const int64_t word = k / 4 % 8;
        int code = static_cast<uint8_t>(bytes[word * kind.low / 8 * 64]);
        if (kind.low == 4) code = code >> word % 2 * 4 & 15;
        if (kind.high) {
          const int above = static_cast<uint8_t>(bytes[256 + word * kind.high / 8 * 64]) >> word * kind.high % 8;
          code |= (above & ((1 << kind.high) - 1)) << 4;
        }
        const auto level = static_cast<float>(kind.levels ? kLevels[kind.levels][code] : code - kind.bias);
        const float value = kind.minimum ? Fused(level, scales[feature], minima[feature]) : level * scales[feature];
        to[k] = Storage<BFloat16>::Widen(Storage<BFloat16>::Round(value));
      }
    });
  }
};

// Rows times a task, as with other weights.
template <typename Kernel, typename Take>
void MultiplyTask(const char* blocks, int64_t count, int64_t width, FoursTask task, FoursTask, const Take& take) {
  Kernel::Multiply(blocks, count, width, task, take);
}

}  // namespace xla_engine
