// Attention on matrix tiles (Intel AMX), for keys and values in bf16.

#pragma once

#include "attention_cache.h"
#include "attention_scores.h"

#ifdef XLA_ENGINE_AMX

namespace xla_engine {

constexpr int64_t kTileKeys = 32;  // keys summed by one tile product

// Scores [rows, keys] of queries [rows, width]. Tiles 0-3 add up, 4 and 5 are the operands.
inline void ScoreTiles(const Context<BFloat16>& context, const BFloat16* queries, float* scores, int64_t stride) {
  const int64_t blocks = context.keys.size();
  const int64_t pitch = context.width * sizeof(BFloat16);
  int64_t block = 0;
  for (; block + 4 <= blocks; block += 4) {
    const BFloat16* const* keys = context.keys.data() + block;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t dim = 0; dim < context.width; dim += 32) {
      _tile_loadd(4, queries + dim, pitch);
      _tile_loadd(5, keys[0] + dim * kVector, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, keys[1] + dim * kVector, 64);
      _tile_dpbf16ps(1, 4, 5);
      _tile_loadd(5, keys[2] + dim * kVector, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, keys[3] + dim * kVector, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    float* to = scores + block * kVector;
    _tile_stored(0, to, stride * sizeof(float));
    _tile_stored(1, to + kVector, stride * sizeof(float));
    _tile_stored(2, to + 2 * kVector, stride * sizeof(float));
    _tile_stored(3, to + 3 * kVector, stride * sizeof(float));
  }
  for (; block < blocks; ++block) {
    _tile_zero(0);
    for (int64_t dim = 0; dim < context.width; dim += 32) {
      _tile_loadd(4, queries + dim, pitch);
      _tile_loadd(5, context.keys[block] + dim * kVector, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, scores + block * kVector, stride * sizeof(float));
  }
}

// Weighted values [rows, width]. Tiles 0-3 add up, 4 and 5 are the operands, 6 and 7 those of the last, partial key
// tile: values behind the last key are never read, so stale NaN in a slot is harmless.
// fresh: `out` has no sums of earlier keys, to which these are added.
inline void WeighTiles(const Context<BFloat16>& context, const BFloat16* weights, int64_t stride, float* out, bool fresh) {
  const int64_t whole = context.count / kTileKeys;
  const bool rest = context.count % kTileKeys != 0;
  const int64_t weight_pitch = stride * sizeof(BFloat16), pitch = context.width * sizeof(float);
  constexpr int64_t kTile = 16 * 32;  // elements
  for (int64_t dim = 0; dim < context.width; dim += 64) {
    const bool wide = dim + 32 < context.width;  // the width is a multiple of 32
    if (fresh) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, out + dim, pitch);
      _tile_loadd(1, out + dim + kVector, pitch);
      if (wide) {
        _tile_loadd(2, out + dim + 2 * kVector, pitch);
        _tile_loadd(3, out + dim + 3 * kVector, pitch);
      }
    }
    for (int64_t key = 0; key < whole; ++key) {
      const BFloat16* tile = context.values[key] + dim * kTileKeys;
      _tile_loadd(4, weights + key * kTileKeys, weight_pitch);
      _tile_loadd(5, tile, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, tile + kTile, 64);
      _tile_dpbf16ps(1, 4, 5);
      if (!wide) continue;
      _tile_loadd(5, tile + 2 * kTile, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, tile + 3 * kTile, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    if (rest) {
      const BFloat16* tile = context.values[whole] + dim * kTileKeys;
      _tile_loadd(6, weights + whole * kTileKeys, weight_pitch);
      _tile_loadd(7, tile, 64);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(7, tile + kTile, 64);
      _tile_dpbf16ps(1, 6, 7);
      if (wide) {
        _tile_loadd(7, tile + 2 * kTile, 64);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(7, tile + 3 * kTile, 64);
        _tile_dpbf16ps(3, 6, 7);
      }
    }
    _tile_stored(0, out + dim, pitch);
    _tile_stored(1, out + dim + kVector, pitch);
    if (wide) {
      _tile_stored(2, out + dim + 2 * kVector, pitch);
      _tile_stored(3, out + dim + 3 * kVector, pitch);
    }
  }
}

// Configures the tiles for `rows` queries and `count` keys.
inline void ShapeTiles(int64_t rows, int64_t count) {
  const int64_t rest = std::max<int64_t>((count % kTileKeys + 1) / 2, 1);  // words of the partial tile
  TileShapes shapes;
  for (int tile = 0; tile < 5; ++tile) shapes.Set(tile, rows, 64);
  shapes.Set(5, 16, 64);
  shapes.Set(6, rows, 4 * rest);
  shapes.Set(7, rest, 64);
  Configure(shapes);
}

// As WeightsByVectors, with the weights in bf16 apart, `weight_stride` elements a row.
inline void WeightsByTiles(const Context<BFloat16>& context, const BFloat16* queries, const Seen& seen, ScoreForm form, float* scores,
                           int64_t stride, BFloat16* weights, int64_t weight_stride, float* sums) {
  ScoreTiles(context, queries, scores, stride);
  const int64_t end = (context.count + kTileKeys - 1) / kTileKeys * kTileKeys;
  for (int64_t row = 0; row < seen.rows; ++row) {
    float* at = scores + row * stride;
    sums[row] = Softmax(at, seen, row, end, form);
    for (int64_t key = 0; key < end; key += 32) {
      const __m512bh packed = _mm512_cvtne2ps_pbh((__m512)Load(at + key + 16), (__m512)Load(at + key));
      std::memcpy(weights + row * weight_stride + key, &packed, sizeof packed);
    }
  }
  Written();
}

// As AttendVectors; `weights` is scratch as well, `weight_stride` elements a row.
inline void AttendTiles(const Context<BFloat16>& context, const BFloat16* queries, const Seen& seen, ScoreForm form,
                        float* scores, int64_t stride, BFloat16* weights, int64_t weight_stride, float* out,
                        float* sums) {
  ShapeTiles(seen.rows, context.count);
  WeightsByTiles(context, queries, seen, form, scores, stride, weights, weight_stride, sums);
  WeighTiles(context, weights, weight_stride, out, true);
  _tile_release();
}

}  // namespace xla_engine

#endif
