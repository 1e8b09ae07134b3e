// Products on matrix tiles (Intel AMX) with weights that were packed when they were loaded.
//
// Packed weights stand in the order in which tiles want a right operand (Intel SDM, TDPBF16PS and TDPBSSD): sixteen
// features by sixteen words of K after the other, [F / 16][K words][16], so that a task reads one stream. Activations
// are the left operand, in blocks of sixteen rows by 64 bytes. Sums run over K in order, 64 bytes at a time, whatever
// the number of rows: a row's bits depend on the row alone. Elements are bf16, summed in float32, or int8, summed in
// int32.

#pragma once

#include "common.h"

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

// `steps` times 64 bytes of K of up to 32 rows by two blocks of sixteen features.
template <typename T>
void MultiplyPacked(const char* rows, const char* one, const char* other, int64_t steps, bool second) {
  const char* behind = rows + steps * 1024;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step) {
    _tile_loadd(6, one + step * 1024, 64);
    _tile_loadd(4, rows + step * 1024, 64);
    _tile_loadd(7, other + step * 1024, 64);
    if constexpr (std::is_same_v<T, int8_t>) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (!second) continue;
    _tile_loadd(5, behind + step * 1024, 64);
    if constexpr (std::is_same_v<T, int8_t>) {
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
    } else {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// The sums of sixteen rows by two blocks of sixteen features.
template <typename Sum>
struct Sums {
  alignas(64) Sum one[16 * 16], other[16 * 16];
};

// Products of N prepared rows with packed weights, `width` elements of K. `prepare(n, rows, block)` fills the block of
// rows n .. n + rows; `pick(task)` names two blocks of features; `finish(task, n, rows, sums)` takes sums away.
template <typename T, typename Prepare, typename Pick, typename Finish>
void PackedProduct(ffi::ThreadPool& pool, int64_t count, int64_t width, int64_t tasks, const Prepare& prepare,
                   const Pick& pick, const Finish& finish) {
  using Sum = std::conditional_t<std::is_same_v<T, int8_t>, int32_t, float>;
  thread_local std::vector<char> buffer;
  const int64_t groups = (count + 15) / 16, steps = width * sizeof(T) / 64, bytes = steps * 1024;
  if (static_cast<int64_t>(buffer.size()) < groups * bytes + 64) buffer.resize(groups * bytes + 64);
  char* blocks = buffer.data() + (64 - reinterpret_cast<uintptr_t>(buffer.data()) % 64) % 64;
  std::atomic<int64_t> prepared{0};
  ParallelFor(pool, groups + tasks, [&](int64_t index) {
    if (index < groups) {
      prepare(index * 16, std::min<int64_t>(16, count - index * 16), blocks + index * bytes);
      prepared.fetch_add(1);
      return;
    }
    const int64_t task = index - groups;
    const auto [one, other] = pick(task);
    while (prepared.load() < groups) _mm_pause();
    Sums<Sum> sums;
    int64_t shaped = 0;  // rows that the tiles are configured for
    for (int64_t n = 0; n < count; n += 32) {
      const int64_t rows = std::min<int64_t>(32, count - n);
      const int64_t first = std::min<int64_t>(16, rows), second = rows - first;
      if (rows != shaped) ConfigurePacked(first, second);
      shaped = rows;
      MultiplyPacked<T>(blocks + n / 16 * bytes, static_cast<const char*>(one), static_cast<const char*>(other), steps,
                        second > 0);
      _tile_stored(0, sums.one, 64);
      _tile_stored(1, sums.other, 64);
      Written();
      finish(task, n, first, sums);
      if (second) {
        _tile_stored(2, sums.one, 64);
        _tile_stored(3, sums.other, 64);
        Written();
        finish(task, n + 16, second, sums);
      }
    }
    _tile_release();
  });
}

}  // namespace xla_engine

#endif
