// Products on matrix tiles (Intel AMX) with weights that were packed when they were loaded.
//
// Packed weights (product.h) have the order of the right operand of tiles (Intel SDM, TDPBF16PS): sixteen words of K by sixteen features
// are a tile. Activations are the left operand, in blocks of sixteen rows by 64 bytes. Sums run over K in order, 64 bytes at a time,
// whatever the number of rows: a row's bits depend on the row alone. Elements are bf16, summed in float32.

#pragma once

#include "product.h"

#ifdef XLA_ENGINE_AMX

namespace xla_engine {

// Tiles 0-3 add up [row half][feature half], 4 and 5 hold activations, 6 and 7 weights.
inline void ConfigurePacked(int64_t first, int64_t second) {
  TileShapes shapes;
  const int64_t lower = std::max<int64_t>(second, 1);
  for (int tile : {0, 1, 4}) shapes.Set(tile, first, 64);
  for (int tile : {2, 3, 5}) shapes.Set(tile, lower, 64);
  for (int tile : {6, 7}) shapes.Set(tile, 16, 64);
  Configure(shapes);
}

// Multiplies up to 32 rows by two blocks of sixteen features and adds the products to tiles 0 to 3, over `steps` times 64 bytes of K.
// pitch: bytes from the first sixteen rows to the next. In each step, `lines` cache lines of the weights that come next are prefetched.
inline void MultiplyPacked(const char* rows, int64_t pitch, Stream weights, int64_t steps, bool second, Stream next, int64_t lines) {
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, weights.one + step * 1024, 64);
    _tile_loadd(4, rows + step * 1024, 64);
    _tile_loadd(7, weights.other + step * 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    for (int64_t line = step * lines; line < (step + 1) * lines; ++line) {
      __builtin_prefetch(next.one + line * 64, 0, 2);
      __builtin_prefetch(next.other + line * 64, 0, 2);
    }
    if (!second) continue;
    _tile_loadd(5, rows + pitch + step * 1024, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Zeroes tiles 0-3, or loads the sums of an earlier part of K.
inline void Begin(const Sums<float>* sums, bool second, bool fresh) {
  if (fresh) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, sums[0].one, 64);
  _tile_loadd(1, sums[0].other, 64);
  if (!second) return;
  _tile_loadd(2, sums[1].one, 64);
  _tile_loadd(3, sums[1].other, 64);
}

inline void Leave(Sums<float>* sums, bool second) {
  _tile_stored(0, sums[0].one, 64);
  _tile_stored(1, sums[0].other, 64);
  if (second) {
    _tile_stored(2, sums[1].one, 64);
    _tile_stored(3, sums[1].other, 64);
  }
  Written();
}

// Many rows are multiplied by one part of K after the other, because a part's weights fit into the first-level cache. The sums are kept in
// memory meanwhile; the order of a sum is the same. The first group of rows prefetches the next task's weights.
struct TileKernel {
  static constexpr int64_t kMany = 64, kPart = 9;  // rows; steps of K, 2 KB of weights each

  static constexpr int64_t kStep = 32;  // elements of K in a tile

  static int64_t GroupRows(int64_t) { return 16; }
  static int64_t GroupBytes(int64_t width) { return 16 * width * sizeof(BFloat16); }

  // Writes `rows` rows from n on as blocks of sixteen by 64 bytes.
  template <typename Operand>
  static void Fill(const Operand& operand, int64_t n, int64_t rows, char* block) {
    auto* to = reinterpret_cast<BFloat16*>(block);
    for (int64_t r = 0; r < rows; ++r) operand.Write(n + r, [&](int64_t k) { return to + k * 16 + r * kStep; });
  }

  template <typename Take>
  static void Multiply(const char* blocks, int64_t count, int64_t width, Stream weights, Stream next, const Take& take) {
    thread_local Lines kept;
    const int64_t groups = (count + 15) / 16, steps = width * sizeof(BFloat16) / 64, bytes = steps * 1024;
    const int64_t parts = count > kMany ? (steps + kPart - 1) / kPart : 1, part = (steps + parts - 1) / parts;
    const int64_t blocks_of_rows = std::max<int64_t>(1, (count + 31) / 32);
    const int64_t lines = (16 + blocks_of_rows - 1) / blocks_of_rows;  // of the next 16 a step
    auto* sums = reinterpret_cast<Sums<float>*>(kept.Bytes(groups * sizeof(Sums<float>)));
    int64_t shaped = 0, fetched = 0;  // rows that the tiles are configured for; bytes of each block of the next weights
    for (int64_t step = 0; step < steps; step += part) {
      const int64_t now = std::min(part, steps - step), from = step * 1024;
      for (int64_t n = 0; n < count; n += 32) {
        const int64_t rows = std::min<int64_t>(32, count - n), first = std::min<int64_t>(16, rows), second = rows - first;
        Sums<float>* of_rows = sums + n / 16;
        if (rows != shaped) ConfigurePacked(first, second);
        shaped = rows;
        Begin(of_rows, second > 0, step == 0);
        const int64_t ahead = fetched < bytes ? lines : 0;
        MultiplyPacked(blocks + n / 16 * bytes + from, bytes, {weights.one + from, weights.other + from}, now, second > 0,
                          {next.one + fetched, next.other + fetched}, ahead);
        fetched += ahead * now * 64;
        Leave(of_rows, second > 0);
        if (step + now < steps) continue;
        take(n, first, of_rows[0]);
        if (second) take(n + 16, second, of_rows[1]);
      }
    }
    _tile_release();
  }
};

}  // namespace xla_engine

#endif
