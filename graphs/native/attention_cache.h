// The layout of keys and values, and which of them a query reads. Kernels do not know slots or pages: they get a list of tiles in
// order of position.
//
// Layout of a store, with W = elements in 32 bits (4 for int8, 2 for bf16, 1 for f32) and D = head dimension padded to whole tiles:
//   keys   [layers, pages, KV, S / 16, D / W, 16, W]   sixteen keys side by side: one vector holds one word of each
//   values [layers, pages, KV, S / 16 W, D / 16, 16, 16, W]   tiles of 16 W positions by sixteen dimensions
// This is the operand order of AMX tiles (Intel SDM, TDPBF16PS); plain vectors read it without shuffles as well. In int8,
// sixteen keys are followed by two vectors more, the float32 scales of these keys and of the values of the same positions:
// keys are [layers, pages, KV, S / 16, D / 4 + 2, 16, 4], and all of a cell is a function of its own row.
//
// If the keys are the values (latent attention), a store has no values: their part is of width 0 (attention_latent.h).
//
// A sequence's page j is table[j % pages of the table]. A contiguous slot is one page as long as the sequence may get;
// a ring is one shorter page, which repeats; block tables name a page for every S positions.

#pragma once

#include "common.h"

namespace xla_engine {

constexpr int64_t kMaxWidth = 640;  // of a padded head

// One key/value head of one sequence.
template <typename T>
struct Head {
  T* keys;  // of page 0
  T* values;  // null: keys are the values
  const int32_t* table;
  int64_t pages;   // in the table
  int64_t page;    // positions of one, whole value tiles
  int64_t stride;  // positions from a page to the next
  int64_t width;   // padded head dimension

  static constexpr int64_t kPack = Storage<T>::kPack;
  static constexpr int64_t kTile = kVector * kPack;  // positions of a value tile

  static constexpr int64_t kScales = std::is_same_v<T, int8_t> ? 2 * sizeof(float) : 0;  // bytes beside a key

  // Positions from the start of page 0 to a position, which starts a tile.
  int64_t Place(int64_t position) const {
    if (position < page) return table[0] * stride + position;  // every position of a slot: no division
    return table[position / page % pages] * stride + position % page;
  }
  int64_t KeyWidth() const { return width + kScales; }
  T* KeyBlock(int64_t position) const { return keys + Place(position / kVector * kVector) * KeyWidth(); }

  // `own`: no other task writes the other half of the value's word, because the next position is written after this one or not
  // in this call. That half is zeroed then, because products read whole words and must not meet a stale NaN.
  void Write(int64_t position, const T* key, const T* value, bool own) const {
    Word* to = reinterpret_cast<Word*>(KeyBlock(position)) + position % kVector;
    const Word* words = reinterpret_cast<const Word*>(key);
    for (int64_t word = 0; word < width / kPack; ++word) to[word * kVector] = words[word];
    if (!value) return;  // the key is the value
    T* row = values + Place(position / kTile * kTile) * width + position % kTile / kPack * kVector * kPack;
    for (int64_t d = 0; d < width; d += kVector, row += kVector * kVector * kPack) {
      if constexpr (kPack == 1) {
        Store(row, Load(value + d));
      } else if (kPack == 4 || !own) {
        for (int64_t each = 0; each < kVector; ++each) row[each * kPack + position % kPack] = value[d + each];
      } else if constexpr (kPack == 2) {
        const Bits fresh = Convert<Bits>(LoadAs<Shorts>(value + d));
        StoreAs(row, position % kPack ? (LoadAs<Bits>(row) & 0xFFFFu) | fresh << 16 : fresh);
      }
    }
  }
};

// The keys and values of a range of positions that starts with a value tile.
template <typename T>
struct Context {
  std::vector<const T*> keys;    // blocks of sixteen positions
  std::vector<const T*> values;  // tiles of sixteen words
  int64_t count = 0;             // positions
  int64_t width = 0;

  void List(const Head<T>& head, int64_t first, int64_t last) {
    count = last - first;
    width = head.width;
    keys.resize((count + kVector - 1) / kVector);
    values.resize(head.values ? (count + Head<T>::kTile - 1) / Head<T>::kTile : 0);
    auto *key = keys.data(), *value = values.data();
    for (int64_t at = first, end = head.page; at < last; at = end, end += head.page) {
      if (at >= end) end = (at / head.page + 1) * head.page;
      const int64_t place = head.Place(at), size = std::min(last, end) - at;
      for (int64_t p = 0; p < size; p += kVector) *key++ = head.keys + (place + p) * head.KeyWidth();
      for (int64_t p = 0; head.values && p < size; p += Head<T>::kTile) *value++ = head.values + (place + p) * width;
    }
  }
};

}  // namespace xla_engine
