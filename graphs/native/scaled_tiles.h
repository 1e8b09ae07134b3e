// Products in eight bits on matrix tiles (Intel AMX), for many rows: the sums of `coded_dots.h` and `grouped_dots.h`, bit for bit.
//
// Over a run of K in which no scale changes, those kernels add word by word; here one instruction (TDPBSSD) adds for sixteen rows and
// features at once. Sums of integers are exact in any order. What follows is the same: multiply by the scale of the row, round, multiply
// by the scale of the feature and add, in the order of K. Sums go from tiles to registers through memory, one step later.
//
// Rows are in groups of up to sixteen. For each step of K a group has [16 rows][K] bytes, then the scales of the rows, then the totals of
// the rows times these scales.

#pragma once

#include "grouped_dots.h"

#ifdef XLA_ENGINE_AMX

namespace xla_engine {

// kK: numbers of K in a step, for which a row has one scale. kRun: of these, how many have one scale of a feature.
template <int64_t kK>
struct ScaledRows {
  int8_t values[16][kK];
  float scales[16], totals[16];
};

struct ScaledTiles {
  // Rows in groups of about the same size.
  static int64_t GroupRows(int64_t count) {
    const int64_t groups = (count + 15) / 16;
    return groups ? (count + groups - 1) / groups : 1;
  }

  // Writes `rows` rows from n on, which `source.Each` hands out, as a group.
  template <int64_t kK, bool kRotated, typename Source>
  static void Fill(const Source& source, int64_t n, int64_t rows, char* block) {
    using Quantized = EightBits<kK, kRotated>;
    for (int64_t r = 0; r < rows; ++r) {
      Vec numbers[Quantized::kParts];
      source.Each(n + r, [&](int64_t k, Vec values) {
        const int64_t part = k % kK / kVector;
        numbers[part] = values;
        if (part + 1 < Quantized::kParts) return;
        const Quantized quantized(numbers);
        auto& to = reinterpret_cast<ScaledRows<kK>*>(block)[k / kK];
        for (int64_t at = 0; at < Quantized::kParts; ++at)
          StoreAs(to.values[r] + at * kVector, Convert<Bytes>(quantized.values[at]));
        to.scales[r] = quantized.scale;
        if constexpr (!kRotated) to.totals[r] = static_cast<float>(quantized.Total()) * quantized.scale;
      });
    }
  }

  // Tile 0 has sums, 1 rows and 2 weights.
  static void Configure(int64_t rows, int64_t run) {
    TileShapes shapes;
    shapes.Set(0, rows, 64);
    shapes.Set(1, rows, run);
    shapes.Set(2, run / 4, 64);
    xla_engine::Configure(shapes);
  }

  // The sums of up to `kRows` rows by sixteen features. `lines(step)` says where the words of a step's weights are, [K / 4][16] of four
  // bytes; `prepare(step)` is called three steps before; `scale(step, run)` returns their `Steps`.
  template <int kRows, int64_t kK, int64_t kRun, typename Prepare, typename Where, typename Scale>
  static __attribute__((always_inline)) inline void Sum(const char* rows, int64_t steps, bool minimum, const Prepare& prepare,
                                                        const Where& lines, const Scale& scale, float* to) {
    constexpr int64_t kRuns = kK / kRun;
    const auto* of_rows = reinterpret_cast<const ScaledRows<kK>*>(rows);
    alignas(64) int32_t sums[2][kRuns][16 * 16];
    Vec total[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) total[r] = Vec{};
    const auto start = [&](int64_t step) __attribute__((always_inline)) {
      Written();
#pragma GCC unroll 2
      for (int64_t run = 0; run < kRuns; ++run) {
        _tile_zero(0);
        _tile_loadd(1, of_rows[step].values[0] + run * kRun, kK);
        _tile_loadd(2, lines(step) + run * kRun * 16, 64);
        _tile_dpbssd(0, 1, 2);
        _tile_stored(0, sums[step & 1][run], 64);
      }
      Written();
    };
    const auto add = [&](int64_t step) __attribute__((always_inline)) {
      const ScaledRows<kK>& now = of_rows[step];
#pragma GCC unroll 2
      for (int run = 0; run < kRuns; ++run) {
        const auto by = scale(step, run);
        const int32_t* from = sums[step & 1][run];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r)
          total[r] = Fused(Convert<Vec>(LoadAs<Words>(from + r * 16)) * now.scales[r], by.scale, total[r]);
        if (minimum) {
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) total[r] = Fused(by.minimum, now.totals[r], total[r]);
        }
      }
    };
    for (int64_t step = 0; step < std::min<int64_t>(3, steps); ++step) prepare(step);
    start(0);
    for (int64_t step = 1; step < steps; ++step) {
      start(step);
      if (step + 2 < steps) prepare(step + 2);
      add(step - 1);
    }
    add(steps - 1);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) Store(to + r * kVector, total[r]);
  }
};

// Of packed weights in eight bits.
struct GroupTiles {
  static constexpr int64_t kK = kScaleGroup, kStep = kK;

  static int64_t GroupRows(int64_t count) { return ScaledTiles::GroupRows(count); }
  static int64_t GroupBytes(int64_t width) { return width / kK * static_cast<int64_t>(sizeof(ScaledRows<kK>)); }
  template <typename Source>
  static void Fill(const Source& source, int64_t n, int64_t rows, char* block) {
    ScaledTiles::Fill<kK, true>(source, n, rows, block);
  }

  struct Steps {
    Vec scale, minimum;
  };

  template <int kRows>
  static __attribute__((noinline)) void SumBlock(const char* rows, int64_t steps, const char* weights, const BFloat16* scales,
                                                 const char* next, float* to) {
    const auto fetch = [&](int64_t step) __attribute__((always_inline)) {
      if (!next) return;
      for (int64_t line = 0; line < kK * 16; line += 64) __builtin_prefetch(next + step * kK * 16 + line, 0, 2);
    };
    ScaledTiles::Sum<kRows, kK, kK>(
        rows, steps, false, fetch, [&](int64_t step) { return weights + step * kK * 16; },
        [&](int64_t step, int) { return Steps{Scales(scales + step * kVector), {}}; }, to);
  }

  template <typename Take>
  static void Multiply(const char* blocks, int64_t count, int64_t width, const Stream& weights, const Stream& next, const Take& take) {
    const int64_t group = GroupRows(count), bytes = GroupBytes(width), steps = width / kK;
    Sums<float> sums;
    for (int64_t n = 0, configured = 0; n < count; n += group, blocks += bytes) {
      const int64_t rows = std::min(group, count - n);
      if (rows != configured) ScaledTiles::Configure(configured = rows, kK);
      const auto sum = rows > 8 ? SumBlock<16> : SumBlock<8>;
      sum(blocks, steps, weights.one, weights.one_scales, n ? nullptr : next.one, sums.one);
      sum(blocks, steps, weights.other, weights.other_scales, n ? nullptr : next.other, sums.other);
      take(n, rows, sums);
    }
    _tile_release();
  }
};

}  // namespace xla_engine

#endif
