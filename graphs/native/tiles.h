// Products of routed experts on matrix tiles (Intel AMX), whose weights stay as in the checkpoint, [F, K]: they are the left operand, and
// stream through the caches once.
//
// Activations are interleaved to the order of the right operand (Intel SDM, TDPBF16PS). Sums of bf16 in float32 run over K in order,
// 64 bytes at a time, whatever the number of rows: a row's bits depend on the row alone. All other products are packed (packed_tiles.h).

#pragma once

#include "product.h"

#ifdef XLA_ENGINE_AMX

namespace xla_engine {

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

inline void Configure(Columns columns) {
  TileShapes shapes;
  const int64_t second = std::max<int64_t>(columns.second, 1);
  for (int tile : {0, 1, 6}) shapes.Set(tile, 16, 4 * columns.first);
  for (int tile : {2, 3, 7}) shapes.Set(tile, 16, 4 * second);
  for (int tile : {4, 5}) shapes.Set(tile, 16, 64);
  Configure(shapes);
}

// The weights of a task: sixteen rows in each half. Those of the next task are `step` elements further.
struct Rows {
  const BFloat16 *upper, *lower;
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
      for (int64_t line = 0; line < 16; ++line) __builtin_prefetch(lower + rows.step + k * 16 + line * kStep, 0, 2);
    }
    const int64_t at = k / kStep * 256;
    _tile_loadd(4, upper + k, pitch);
    _tile_loadd(6, tiles + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, lower + k, pitch);
    _tile_dpbf16ps(1, 5, 6);
    if (!second) continue;
    _tile_loadd(7, behind + at, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
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
