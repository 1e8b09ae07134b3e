// The rule of recurrent layers: a memory for each head that takes in one position after the other. The gated delta rule (Yang,
// Kautz and Hatamizadeh 2024), and that of Mamba-2 (Dao and Gu 2024), which is the same without the correction of what the
// memory recalls. A head has one decay, or one for each channel of its keys (Kimi Delta Attention, Kimi Team 2025).
//
// A head's memory S [Dk, Dv] is cut into columns that no operation mixes. The columns of a task stay in the first-level
// cache while it walks through the positions of a lane, so that the memory itself is read and written once per call. One
// sweep over them changes them by a position and asks them for the next: four operations, one load and one store a vector.
// Prefill, decode and verify steps run the same code for a position: their bits agree by construction.

#pragma once

#include "common.h"

namespace xla_engine {

constexpr int64_t kParts = kRegister == 16 ? 4 : 1;  // vectors of columns in a task, so that their sums stay in registers

// The inputs of one position to one head: key and query [Dk], value [Dv] from the task's first column on.
// With decays [Dk] by channel, which stand within the products with S, the decay behind them is 1.
struct Position {
  const float *key, *query, *value;
  float decay, rate;
  float* out;
  const float* decays;
};

// What the memory recalls for a position's key, and what the query reads, of `parts` vectors of columns.
template <int parts>
struct Found {
  Vec recalled[parts], read[parts];
};

// Writes the output of a position, and returns the change of the memory.
template <bool corrects, int parts>
inline void Change(const Position& at, int64_t dims, const Found<parts>& found, Vec* change) {
  Vec products = {};
  for (int64_t k = 0; k < dims; k += kVector) products = Fused(Load(at.key + k), Load(at.query + k), products);
  const float overlap = Total(products);
  for (int p = 0; p < parts; ++p) {
    const Vec value = Load(at.value + p * kVector);
    change[p] = (corrects ? Fused(-found.recalled[p], at.decay, value) : value) * at.rate;
    Store(at.out + p * kVector, Fused(change[p], overlap, found.read[p] * at.decay));
  }
}

// One sweep over `parts` vectors of columns of S [dims, stride]: changes them by `change` of the position `at`, if there is
// one, and asks them for `next`, if there is one.
template <bool corrects, bool by_channel, bool changes, bool asks, int parts>
__attribute__((always_inline)) inline void Sweep(float* memory, int64_t dims, int64_t stride, const Position& at,
                                                 const Vec* change, const Position& next, Found<parts>& found) {
  found = {};
  for (int64_t k = 0; k < dims; ++k) {
    const float decay = by_channel ? at.decays[k] : at.decay;
    [[maybe_unused]] const float key = by_channel ? next.key[k] * next.decays[k] : next.key[k];
    const float query = by_channel ? next.query[k] * next.decays[k] : next.query[k];
    for (int p = 0; p < parts; ++p) {
      float* held = memory + k * stride + p * kVector;
      Vec now = Load(held);
      if constexpr (changes) {
        now = Fused(change[p], at.key[k], now * decay);
        Store(held, now);
      }
      if constexpr (asks && corrects) found.recalled[p] = Fused(now, key, found.recalled[p]);
      if constexpr (asks) found.read[p] = Fused(now, query, found.read[p]);
    }
  }
}

// For `count` positions in turn, S becomes a S + k b (v - a S^T k)^T, or without correction a S + k b v^T, and the output
// is S^T q. One piece of machine code for all callers.
template <bool corrects, bool by_channel, int parts, typename Positions>
__attribute__((noinline)) void Advance(float* memory, int64_t dims, int64_t stride, int64_t count, const Positions& positions) {
  Position at = positions(0);
  Found<parts> found;
  Vec change[parts];
  Sweep<corrects, by_channel, false, true, parts>(memory, dims, stride, at, change, at, found);
  for (int64_t t = 1; t < count; ++t) {
    Change<corrects, parts>(at, dims, found, change);
    const Position next = positions(t);
    Sweep<corrects, by_channel, true, true, parts>(memory, dims, stride, at, change, next, found);
    at = next;
  }
  Change<corrects, parts>(at, dims, found, change);
  Sweep<corrects, by_channel, true, false, parts>(memory, dims, stride, at, change, at, found);
}

// A memory before the first position of a lane, null for zeros, and after the last, null if nobody reads it.
struct Memory {
  const float* before;
  float* after;
};

// `vectors` of columns of a head's memory [dims, width], through `count` positions. They are swept where they are, or with
// more positions side by side: a power of two apart, they would take each other's places in the cache.
template <bool corrects, bool by_channel, typename Positions>
void Follow(const Memory& held, int64_t dims, int64_t width, int64_t vectors, int64_t count, const Positions& positions) {
  constexpr int64_t kInPlace = 2;  // positions
  const int64_t columns = vectors * kVector;
  thread_local std::vector<float> scratch;
  float* memory = held.after;
  int64_t stride = width;
  if (held.before != held.after || count > kInPlace) {
    scratch.resize(dims * columns);
    memory = scratch.data();
    stride = columns;
    if (!held.before) std::memset(memory, 0, dims * columns * sizeof(float));
    for (int64_t k = 0; k < dims && held.before; ++k)
      std::memcpy(memory + k * columns, held.before + k * width, columns * sizeof(float));
  }
  if (vectors == kParts) {
    Advance<corrects, by_channel, kParts>(memory, dims, stride, count, positions);
  } else {
    for (int64_t column = 0; column < columns; column += kVector)
      Advance<corrects, by_channel, 1>(memory + column, dims, stride, count, [&](int64_t t) {
        Position at = positions(t);
        at.value += column, at.out += column;
        return at;
      });
  }
  if (held.after && memory != held.after)
    for (int64_t k = 0; k < dims; ++k)
      std::memcpy(held.after + k * width, memory + k * columns, columns * sizeof(float));
}

}  // namespace xla_engine
