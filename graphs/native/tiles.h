// Products on matrix tiles (Intel AMX): prepared rows of activations times streamed rows of weights.
//
// Weights stay as in the checkpoint, [F, K] row-major, and stream through the caches once: 32 features at a time,
// the next 32 prefetched. Activations are interleaved to the tiles' order once per call (Intel SDM, TDPBF16PS). Sums of bf16
// in float32 run over K in order, 64 bytes at a time, whatever the number of rows: a row's bits depend on the row alone.

#pragma once

#include "parallel.h"
#include "product.h"

#ifdef XLA_ENGINE_AMX

namespace xla_engine {

constexpr int64_t kPrefetched = 64 << 10;  // bytes: what stays in the second-level cache until it is wanted

// Words (32 bits) of up to sixteen rows side by side: word w of row n at [w][n]. Rows behind `rows` are zero.
inline void Interleave(const void* x, int64_t rows, int64_t words, uint32_t* tiles) {
  const __m512i step = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                          _mm512_set1_epi32(static_cast<int>(words)));
  const auto mask = static_cast<__mmask16>(rows >= 16 ? 0xFFFF : (1 << rows) - 1);
  for (int64_t word = 0; word < words; ++word) {
    const auto* from = static_cast<const uint32_t*>(x) + word;
    _mm512_storeu_si512(tiles + word * 16, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, step, from, 4));
  }
}

// Tiles 0-3 add up [feature half][row half], 4 and 5 hold weights, 6 and 7 activations. `first` and `second` rows
// stand in the two halves, 1 to 16; the last call of a row count may be partial.
struct Columns {
  int64_t first, second;  // second may be 0
};

inline void Configure(int64_t features, Columns columns) {
  TileShapes shapes;
  const int64_t upper = std::min<int64_t>(features, 16), lower = std::max<int64_t>(features - 16, 1);
  const int64_t second = std::max<int64_t>(columns.second, 1);
  shapes.Set(0, upper, 4 * columns.first);
  shapes.Set(1, lower, 4 * columns.first);
  shapes.Set(2, upper, 4 * second);
  shapes.Set(3, lower, 4 * second);
  shapes.Set(4, upper, 64);
  shapes.Set(5, lower, 64);
  shapes.Set(6, 16, 4 * columns.first);
  shapes.Set(7, 16, 4 * second);
  Configure(shapes);
}

// The weights of a task: up to sixteen rows in each half. Those of the next task are `step` elements further.
struct Rows {
  const BFloat16 *upper, *lower;  // lower is null if there is no second half
  int64_t features;               // in both halves
  int64_t step;
};

// Computes the sums of a task's features by up to 32 rows of activations; prefetches the next task's weights if told to.
inline void Multiply(const Rows& rows, const uint32_t* tiles, int64_t width, bool second, bool ahead) {
  constexpr int64_t kStep = 32;  // elements of a weight row in a tile
  const BFloat16 *upper = rows.upper, *lower = rows.lower;
  const int64_t pitch = width * sizeof(BFloat16);
  const uint32_t* behind = tiles + 16 * pitch / 4;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < width; k += kStep) {
    if (ahead) {  // sixteen rows stand together: so many of their columns are as many bytes as these sixteen lines
      for (int64_t line = 0; line < 16; ++line) __builtin_prefetch(upper + rows.step + k * 16 + line * kStep, 0, 2);
      if (lower)
        for (int64_t line = 0; line < 16; ++line) __builtin_prefetch(lower + rows.step + k * 16 + line * kStep, 0, 2);
    }
    const int64_t at = k / kStep * 256;
    _tile_loadd(4, upper + k, pitch);
    _tile_loadd(6, tiles + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (lower) {
      _tile_loadd(5, lower + k, pitch);
      _tile_dpbf16ps(1, 5, 6);
    }
    if (second) {
      _tile_loadd(7, behind + at, 64);
      _tile_dpbf16ps(2, 4, 7);
      if (lower) _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Multiplies weights by `count` prepared rows. `prepare(n, rows, tiles)` fills the tiles of rows n .. n + rows; `pick(task)`
// returns a task's weights; `take(task, n, columns)` stores tiles 0-3; `finish(task)` is called after all rows of a task.
template <typename Prepare, typename Pick, typename TakeAway, typename Finish>
void Product(ffi::ThreadPool& pool, int64_t count, int64_t width, int64_t tasks, const Prepare& prepare, const Pick& pick,
             const TakeAway& take, const Finish& finish) {
  thread_local std::vector<uint32_t> buffer;
  const int64_t groups = (count + 15) / 16, words = width / 2;
  if (static_cast<int64_t>(buffer.size()) < groups * 16 * words + 16) buffer.resize(groups * 16 * words + 16);
  uint32_t* tiles = buffer.data() + (64 - reinterpret_cast<uintptr_t>(buffer.data()) % 64) % 64 / 4;
  const bool ahead = kFeatures * width * static_cast<int64_t>(sizeof(BFloat16)) <= kPrefetched;
  const auto fill = [&](int64_t group) {
    prepare(group * 16, std::min<int64_t>(16, count - group * 16), tiles + group * 16 * words);
  };
  const auto multiply = [&](int64_t task) {
    const Rows rows = pick(task);
    Columns configured = {0, 0};
    for (int64_t n = 0; n < count; n += 32) {
      const Columns columns = {std::min<int64_t>(16, count - n), std::min<int64_t>(16, std::max<int64_t>(count - n - 16, 0))};
      if (columns.first != configured.first || columns.second != configured.second) Configure(rows.features, columns);
      configured = columns;
      Multiply(rows, tiles + n * words, width, columns.second > 0, ahead && n == 0);
      take(task, n, columns);
    }
    _tile_release();
    finish(task);
  };
  InPhases(pool, Phase{groups, fill}, Phase{tasks, multiply});
}

// One tile of sums, [16 features][16 rows], turned: row n's sixteen features.
struct Turned {
  alignas(64) float sums[16 * 16];
  Vec Row(int64_t n) const {
    const __m512i step = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    return (Vec)_mm512_i32gather_ps(step, sums + n, 4);
  }
};

// Sums of a tile, four bytes each, into rows that stand `stride` bytes apart.
inline void Take(int tile, void* to, int64_t stride) {
  switch (tile) {
    case 0: _tile_stored(0, to, stride); break;
    case 1: _tile_stored(1, to, stride); break;
    case 2: _tile_stored(2, to, stride); break;
    default: _tile_stored(3, to, stride);
  }
}

}  // namespace xla_engine

#endif
