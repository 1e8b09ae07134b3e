// Products of coded weights with rows in eight bits on matrix tiles (Intel AMX): `coded_dots.h` for many rows.

#pragma once

#include "coded_dots.h"
#include "scaled_tiles.h"

#ifdef XLA_ENGINE_AMX

namespace xla_engine {

// Weights in quantised blocks, in the order "fours".
struct FoursTiles {
  static constexpr int64_t kK = FoursKernel::kStep, kStep = kK;

  static int64_t GroupRows(int64_t count) { return ScaledTiles::GroupRows(count); }
  static int64_t GroupBytes(int64_t width) { return width / kK * static_cast<int64_t>(sizeof(ScaledRows<kK>)); }
  template <typename Source>
  static void Fill(const Source& source, int64_t n, int64_t rows, char* block) {
    ScaledTiles::Fill<kK, false>(source, n, rows, block);
  }

  // Codes are unpacked to `strip`, unless an earlier group of rows has done so. Without a strip, four buffers are used in turns.
  template <int index, int kRows>
  static __attribute__((noinline)) void SumBlock(Variant variant, const char* rows, const char* codes, int64_t width, char* strip,
                                                 bool unpacked, float* to) {
    constexpr CodedKind kind = kCodedKinds[index];
    constexpr int64_t kBytesOfStep = kind.CodeBytes(kK), kBytes = kK * 16;
    const char* scales = codes + kind.CodeBytes(width);
    alignas(64) char turns[4 * kBytes];
    char* const lines = strip ? strip : turns;
    const int64_t mask = strip ? -1 : 3;
    const int32_t bias = kStarts[variant.start] * 0x01010101;
    const auto unpack = [&](int64_t step) __attribute__((always_inline)) {
      if (unpacked) return;
      const char* from = codes + step * kBytesOfStep;
      char* at = lines + (step & mask) * kBytes;
      __builtin_prefetch(scales + step * variant.step_bytes + kAhead, 0, 2);
#pragma GCC unroll 8
      for (int64_t line = 0; line < kBytesOfStep; line += 64) __builtin_prefetch(from + line + kAhead, 0, 2);
#pragma GCC unroll 8
      for (int64_t word = 0; word < kK / 4; ++word) {
        const auto found = (__m512i)FoursKernel::CodesAt<index, 0>(variant.levels, from, word);
        StoreAs(at + word * 64, (WordRegister)_mm512_sub_epi8(found, _mm512_set1_epi32(bias)));
      }
    };
    ScaledTiles::Sum<kRows, kK, kind.Run()>(
        rows, width / kK, variant.minimum, unpack, [&](int64_t step) { return lines + (step & mask) * kBytes; },
        [&](int64_t step, int run) __attribute__((always_inline)) { return StepsAmong<index>(variant.form, scales, step * kK, run); }, to);
  }

  template <typename Take>
  static void Multiply(const char* blocks, int64_t count, int64_t width, const FoursTask& task, const Take& take) {
    thread_local Lines kept;
    const int64_t group = GroupRows(count), bytes = GroupBytes(width), places[] = {task.one, task.other};
    char* strip = count > group ? kept.Bytes(width * 32) : nullptr;
    Sums<float> sums;
    for (int64_t n = 0, configured = 0; n < count; n += group, blocks += bytes) {
      const int64_t rows = std::min(group, count - n);
      for (int64_t place : {0, 1}) {
        task.weights->OfBlock(places[place], [&](auto index, const char* at) {
          constexpr int alike = FirstAlike(index);
          constexpr int64_t run = kCodedKinds[index].Run();
          if (rows * kK + run != configured) ScaledTiles::Configure(rows, run);
          configured = rows * kK + run;
          const auto sum = rows > 8 ? SumBlock<alike, 16> : SumBlock<alike, 8>;
          sum(kVariants.of[index], blocks, at, width, strip ? strip + place * width * 16 : nullptr, n > 0,
              place ? sums.other : sums.one);
        });
      }
      take(n, rows, sums);
    }
    _tile_release();
  }
};

}  // namespace xla_engine

#endif
