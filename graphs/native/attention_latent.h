// Values that are the keys (latent attention): the cache has keys only, and a task turns a segment of them at a time into the layout of
// values (attention_cache.h). So products and bits are those of values that are stored apart.

#pragma once

#include "attention_cache.h"
#include "turn.h"

namespace xla_engine {

constexpr int64_t kSegment = 256;                // positions that are turned at a time: they stay in the second-level cache
constexpr int64_t kLatentWeights = 4 << 20;      // bytes that the weights of a task's queries may have, if it has several
constexpr int64_t kLatentRows = 256;             // queries of a task at most, unless a token has more

typedef uint32_t FourWords __attribute__((vector_size(16)));
typedef uint16_t EightHalves __attribute__((vector_size(16)));

// Writes four positions of four words each, `rows`, into a tile of values. position: of the first in the tile. dim: of the first word.
template <typename T>
void WriteTurned(const FourWords* rows, int64_t position, int64_t dim, T* tile) {
  constexpr int64_t kPack = Storage<T>::kPack;
  const auto place = [&](int64_t at, int64_t d) {  // of the word with position `at` of dimension d, in a value tile
    return tile + ((d / kVector * kVector + at / kPack) * kVector + d % kVector) * kPack;
  };
  if constexpr (kPack == 1) {
    for (int64_t p = 0; p < 4; ++p) StoreAs(place(position + p, dim), rows[p]);
  } else if constexpr (kPack == 2) {
    for (int64_t p = 0; p < 4; p += 2) {
      const auto one = reinterpret_cast<EightHalves>(rows[p]), other = reinterpret_cast<EightHalves>(rows[p + 1]);
      StoreAs(place(position + p, dim), __builtin_shufflevector(one, other, 0, 8, 1, 9, 2, 10, 3, 11));
      StoreAs(place(position + p, dim + 4), __builtin_shufflevector(one, other, 4, 12, 5, 13, 6, 14, 7, 15));
    }
  } else {
    alignas(16) uint8_t from[4][16];
    alignas(16) uint8_t to[16][4];
    std::memcpy(from, rows, sizeof from);
    for (int64_t d = 0; d < 16; ++d)
      for (int64_t p = 0; p < 4; ++p) to[d][p] = from[p][d];
    std::memcpy(static_cast<void*>(place(position, dim)), to, sizeof to);
  }
}

// The values [first, last) of a context, `first` at the start of a value tile, as tiles one behind the other. Values behind the last one
// that share a word with it are zero, whatever the cache has there.
template <typename T>
void TurnKeys(const Context<T>& context, int64_t first, int64_t last, T* to) {
  constexpr int64_t kPack = Storage<T>::kPack, kTile = Head<T>::kTile;
  for (int64_t at = first; at < last; at += 4) {
    const T* block = context.keys[at / kVector] + at % kVector * kPack;
    T* tile = to + (at - first) / kTile * kTile * context.width;
    for (int64_t dim = 0; dim < context.width; dim += 4 * kPack) {
      FourWords rows[4];
      TurnFour(reinterpret_cast<const Word*>(block + dim * kVector), kVector, reinterpret_cast<Word*>(rows), 4);
      for (int64_t p = last - at; p < 4; ++p) rows[p] = FourWords{};
      WriteTurned(rows, (at - first) % kTile, dim, tile);
    }
  }
}

}  // namespace xla_engine
