// Products in eight bits by sums of products (`dots.h`): every group of kScaleGroup numbers of K has scales of its own.
//
// Within a group a sum is an exact integer, whatever the instructions. Groups are scaled and added in float32, K ascending:
// sum = Fused(float(integer) * scale of the row, scale of the feature, sum). So bits are the same on every instruction set.
//
// Rows, and weights when they are loaded, are rotated: every group by a Hadamard matrix, which spreads what is far from the rest
// and changes no product (Ashkboos et al., "QuaRot", 2024).
//
// Integers start at kMagic, whose bits as a float are 1.5 * 2^23: those of a sum are then the float kMagic + sum, and one fused
// multiply-add takes kMagic away and scales what is left. Nothing is rounded but the product, as scales of rows have 16 bits.

#pragma once

#include "hadamard.h"
#include "packed_dots.h"

namespace xla_engine {

constexpr int32_t kMagic = 0x4B400000;
constexpr int64_t kGroupWords = kScaleGroup / 4;
constexpr int64_t kJointGroups = kRegister == 16 ? 6 : 2;  // up to so many rows meet both blocks of features at once: a sum is two registers

// The bfloat16 scales of sixteen features.
inline Vec Scales(const BFloat16* from) { return Cast<Vec>(Convert<Bits>(LoadAs<Shorts>(from)) << 16); }

// Packs the scales [count][groups] of up to sixteen features as [groups][16].
inline void PackScales(const BFloat16* rows, int64_t groups, int64_t count, BFloat16* to) {
  for (int64_t group = 0; group < groups; ++group)
    for (int64_t feature = 0; feature < 16; ++feature)
      to[group * 16 + feature] = feature < count ? rows[feature * groups + group] : BFloat16{};
}

// Numbers of a row that share a scale, in eight bits.
template <int64_t kNumbers, bool kRotated>
struct EightBits {
  static constexpr int64_t kParts = kNumbers / kVector;
  Words values[kParts];
  float scale;

  explicit EightBits(const Vec* from) {
    Vec numbers[kParts];
    std::copy_n(from, kParts, numbers);
    for (int64_t distance = kRotated ? kParts / 2 : 0; distance; distance /= 2)
      for (int64_t part = 0; part < kParts; ++part)
        if (!(part & distance)) {
          const Vec one = numbers[part], other = numbers[part + distance];
          numbers[part] = one + other, numbers[part + distance] = one - other;
        }
    Words size = Cast<Words>(All(1e-30f));
    for (int64_t part = 0; part < kParts; ++part) {
      if constexpr (kRotated) numbers[part] = Transformed(numbers[part]) * 0.125f;
      const Words bits = Cast<Words>(numbers[part]) & 0x7FFFFFFF;  // as integers, NaN is larger than all numbers
      size = Select(bits > size, bits, size);
    }
    const int32_t most = Largest(size);
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    largest *= 1.0f / 127.0f;
    uint32_t bits;
    std::memcpy(&bits, &largest, sizeof bits);
    bits &= 0xFFFFFF00;  // sixteen bits: kMagic times the scale is exact
    std::memcpy(&scale, &bits, sizeof scale);
    const float inverse = 1.0f / scale;
    for (int64_t part = 0; part < kParts; ++part) values[part] = Nearest(numbers[part] * inverse);
  }

  int32_t Total() const {
    Words sum = values[0];
    for (int64_t part = 1; part < kParts; ++part) sum = sum + values[part];
    return Reduce(sum, [](auto a, auto b) { return a + b; });
  }
};

using QuantizedGroup = EightBits<kScaleGroup, true>;

struct GroupTiles;  // scaled_tiles.h

struct GroupKernel {
  using D = Dots<int8_t>;
#ifdef XLA_ENGINE_AMX
  using Many = GroupTiles;  // from so many rows on
  static constexpr int64_t kMany = 9;
#endif
  static constexpr int64_t kStep = kScaleGroup;  // K comes in multiples of it
  // Words of a row of a group of K: its own, then where its sums start, its scale, and -kMagic times the scale.
  static constexpr int64_t kOwn = kGroupWords * D::kParts, kAll = kOwn + 3;

  static int64_t GroupRows(int64_t count) { return DotKernel<>::GroupRows(count); }
  static int64_t GroupBytes(int64_t width) { return width / kScaleGroup * kAll * kBlockRows * static_cast<int64_t>(sizeof(Word)); }

  // Writes a group of row r, of as many vectors as it takes, to `bytes`, and what belongs to it where the group of a block begins.
  // apart: `Apart` of the block's rows.
  static void Quantize(const Vec* from, int64_t r, int64_t apart, int8_t* bytes, Word* group) {
    const QuantizedGroup quantized(from);
    for (int64_t part = 0; part < QuantizedGroup::kParts; ++part)
      StoreAs(bytes + part * kVector, Convert<Bytes>(quantized.values[part]));
    const int32_t start = kMagic - (D::kOffset ? D::kOffset * quantized.Total() : 0);
    const float undone = -12582912.0f * quantized.scale;
    std::memcpy(group + kOwn * apart + r, &start, sizeof start);
    std::memcpy(group + (kOwn + 1) * apart + r, &quantized.scale, sizeof quantized.scale);
    std::memcpy(group + (kOwn + 2) * apart + r, &undone, sizeof undone);
  }

  // Writes `rows` rows from n on, which `source.Each` hands out, as a block.
  template <typename Source>
  static void Fill(const Source& source, int64_t n, int64_t rows, char* block) {
    thread_local Lines kept;
    const int64_t width = source.width, apart = Apart(rows);
    auto* bytes = reinterpret_cast<int8_t*>(kept.Bytes(rows * width));
    for (int64_t r = 0; r < rows; ++r) {
      Vec group[QuantizedGroup::kParts];
      source.Each(n + r, [&](int64_t k, Vec values) {
        const int64_t part = k % kScaleGroup / kVector, first = k / kScaleGroup * kScaleGroup;
        group[part] = values;
        if (part + 1 == QuantizedGroup::kParts) Quantize(group, r, apart, bytes + r * width + first, At(block, first, apart));
      });
    }
    for (int64_t k = 0; k < width; k += kScaleGroup)
      SpreadRows<ByteDots>(reinterpret_cast<const Word*>(bytes + k), width / 4, kGroupWords, rows, At(block, k, apart));
  }

  // Where the group of K that begins at k begins in a block.
  static Word* At(char* block, int64_t k, int64_t apart) { return reinterpret_cast<Word*>(block) + k / kScaleGroup * kAll * apart; }

  // The sums of `kRows` rows by `kBlocks` blocks of sixteen features; as many words at `next`, if it is not null, are fetched
  // meanwhile. As in `MultiplyRows`.
  template <int kRows, int kBlocks>
  static void MultiplyBlock(const Word* rows, const char* const* weights, const BFloat16* const* scales, const char* const* next,
                            int64_t groups, float* const* to) {
    constexpr int64_t kApart = Apart(kRows);
    Vec total[kRows][kBlocks];
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; ++b) total[r][b] = Vec{};
    }
    const char *from[kBlocks], *ahead[kBlocks];
    std::copy_n(weights, kBlocks, from);
    std::copy_n(next ? next : weights, kBlocks, ahead);
    for (int64_t group = 0; group < groups; ++group, rows += kAll * kApart) {
      const Word* of_rows = rows + kOwn * kApart;
      Words sum[kRows][kBlocks];
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int b = 0; b < kBlocks; ++b) sum[r][b] = Words{} + static_cast<int32_t>(of_rows[r]);
      }
      const auto add = [&](auto part, int64_t word) __attribute__((always_inline)) {
        const Word* row = rows + (word * D::kParts + part) * kApart;
        Words words_of[kBlocks];
#pragma GCC unroll 2
        for (int b = 0; b < kBlocks; ++b) words_of[b] = D::template Part<part>(from[b] + word * 64);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int b = 0; b < kBlocks; ++b) sum[r][b] = D::Add(sum[r][b], words_of[b], row[r]);
        }
      };
#pragma GCC unroll 8
      for (int64_t word = 0; word < kGroupWords; ++word) {
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
      Vec scale[kBlocks];
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; ++b) {
        scale[b] = Scales(scales[b] + group * kVector);
        from[b] += kGroupWords * 64, ahead[b] += kGroupWords * 64;
      }
      const auto* floats = reinterpret_cast<const float*>(of_rows);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int b = 0; b < kBlocks; ++b) {
          const Vec scaled = Fused(Cast<Vec>(sum[r][b]), floats[kApart + r], floats[2 * kApart + r]);
          total[r][b] = Fused(scaled, scale[b], total[r][b]);
        }
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int b = 0; b < kBlocks; ++b) Store(to[b] + r * kVector, total[r][b]);
    }
  }

  // The same for a number of rows that is not a constant, 1 to kBlockRows, and both blocks of features.
  template <int kRows = 1>
  static void MultiplyRows(int64_t count, const Word* rows, const Stream& weights, const Stream* next, int64_t groups,
                           Sums<float>& sums) {
    if constexpr (kRows < kBlockRows) {
      if (count > kRows) return MultiplyRows<kRows + 1>(count, rows, weights, next, groups, sums);
    }
    const char* const from[] = {weights.one, weights.other};
    const BFloat16* const scales[] = {weights.one_scales, weights.other_scales};
    const char* const ahead[] = {next ? next->one : nullptr, next ? next->other : nullptr};
    const char* const* fetched = next ? ahead : nullptr;
    float* const to[] = {sums.one, sums.other};
    if constexpr (kRows <= kJointGroups) {
      MultiplyBlock<kRows, 2>(rows, from, scales, fetched, groups, to);
    } else {
      MultiplyBlock<kRows, 1>(rows, from, scales, fetched, groups, to);
      MultiplyBlock<kRows, 1>(rows, from + 1, scales + 1, fetched ? fetched + 1 : nullptr, groups, to + 1);
    }
  }

  template <typename Take>
  static void Multiply(const char* blocks, int64_t count, int64_t width, const Stream& weights, const Stream& next,
                       const Take& take) {
    const int64_t group = GroupRows(count), bytes = GroupBytes(width);
    Sums<float> sums;
    for (int64_t n = 0; n < count; n += group, blocks += bytes) {
      const int64_t rows = std::min(group, count - n);
      MultiplyRows(rows, reinterpret_cast<const Word*>(blocks), weights, n ? nullptr : &next, width / kScaleGroup, sums);
      take(n, rows, sums);
    }
  }
};

}  // namespace xla_engine
