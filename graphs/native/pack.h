// Packs rows of a quantised file into blocks of coded weights (coded_weights.h, coded_dots.h), without loss.
//
// The formats of the file are ggml's (ggml-common.h): a row is a sequence of groups of 32 or 256 K. A4 and A8 are made from other
// files: float16 scale and zero point, then codes as in Q4_0 or Q8_0. Sixteen rows make a block. They are read group by group into
// one byte for each code, and their bits are then gathered into the lines of a block. Words are little endian.

#pragma once

#include <cstring>
#include <utility>

#include "coded_kinds.h"

namespace xla_engine {
namespace {

constexpr int kFeatures = 16;

template <typename Word>
Word LoadWord(const uint8_t* from) {
  Word word;
  std::memcpy(&word, from, sizeof word);
  return word;
}
template <typename Word>
void StoreWord(uint8_t* to, Word word) {
  std::memcpy(to, &word, sizeof word);
}

// The same byte at each place of a word.
template <typename Word>
constexpr Word Each(int byte) {
  return static_cast<Word>(~Word{} / 255 * byte);
}

// Bytes 0 1 2 3 4 5 6 7 in the order 0 2 4 6 1 3 5 7.
inline uint64_t EvenFirst(uint64_t v) {
  const uint64_t inner = (v ^ v >> 8) & 0x0000FF000000FF00u;
  v ^= inner ^ inner << 8;
  const uint64_t middle = (v ^ v >> 16) & 0x00000000FFFF0000u;
  return v ^ middle ^ middle << 16;
}

// A kind of block, how its groups lie in the file, and how they are packed.
template <int index, bool fours>
struct Packing {
  static constexpr CodedKind kKind = kCodedKinds[index];
  static constexpr int kNumber = kKind.number, kGroup = kKind.nested ? 256 : 32;  // K
  static constexpr bool kIsQ6 = kNumber == 14, kIsIq4 = kNumber == 23;
  static constexpr int kHalves = kKind.power ? 0 : 1 + kKind.minimum;  // float16 numbers
  static constexpr int kSmall = !kKind.nested ? kKind.power : kIsQ6 ? 16 : kIsIq4 ? 6 : 12;  // bytes of other scales
  static constexpr int kCodes = kGroup * (kKind.low + kKind.high) / 8, kBytes = 2 * kHalves + kSmall + kCodes;
  // The places in a group. Scales come first, but last in Q6_K; bits above four come before the others, but behind in Q6_K.
  static constexpr int kHalvesAt = kIsQ6 ? kBytes - 2 : 0, kSmallAt = kIsQ6 ? 192 : 2 * kHalves;
  static constexpr int kHighAt = kIsQ6 ? 128 : 2 * kHalves + kSmall;
  static constexpr int kLowAt = kIsQ6 ? 0 : kBytes - kGroup * kKind.low / 8;
  static constexpr int kRun = kIsQ6 ? 64 : kKind.nested && !kIsIq4 ? 32 : 16;  // bytes that hold as many codes, then as many more

  static constexpr int64_t RowBytes(int64_t width) { return width / kGroup * kBytes; }

  // The codes of a group, a byte each.
  static void Unpack(const uint8_t* group, uint8_t* codes) {
    const uint8_t* low = group + kLowAt;
    const uint8_t* high = group + kHighAt;
    if constexpr (kKind.low == 8) {
      std::memcpy(codes, low, kGroup);
    } else {
      for (int at = 0; at < kGroup / 2; at += 8) {  // in words, whose stores the planes' loads wait for least
        const uint64_t word = LoadWord<uint64_t>(low + at);
        uint8_t* to = codes + at + at / kRun * kRun;
        StoreWord(to, word & Each<uint64_t>(15));
        StoreWord(to + kRun, word >> 4 & Each<uint64_t>(15));
      }
    }
    if constexpr (kIsQ6) {
      for (int part = 0; part < 8; ++part)
        for (int i = 0; i < 32; ++i) codes[32 * part + i] |= (high[32 * (part / 4) + i] >> 2 * (part % 4) & 3) << 4;
    } else if constexpr (kKind.high && kKind.nested) {
      for (int part = 0; part < 8; ++part)
        for (int i = 0; i < 32; ++i) codes[32 * part + i] |= (high[i] >> part & 1) << 4;
    } else if constexpr (kKind.high > 0) {
      for (int at = 0; at < kGroup; at += 8) {  // bit i of a byte to byte i of a word, then to its bit 4
        const uint64_t bits = high[at / 8] * Each<uint64_t>(1) & 0x8040201008040201u;
        StoreWord(codes + at, LoadWord<uint64_t>(codes + at) | ((bits + Each<uint64_t>(127)) >> 3 & Each<uint64_t>(16)));
      }
    }
  }

  // Scale number i of a group that are not float16, below SmallBytes / 16. Minima follow their scales.
  static uint8_t Small(const uint8_t* group, int i) {
    const uint8_t* small = group + kSmallAt;
    if constexpr (kKind.power) {
      return (*small ? *small : 1) - 1;  // numbers are doubled
    } else if constexpr (kIsQ6) {
      return small[i];
    } else if constexpr (kIsIq4) {
      return ((small[2 + i / 2] >> 4 * (i % 2) & 15) | (small[i / 4] >> 2 * (i % 4) & 3) << 4) - 32;
    } else {
      const int own = i / 2 % 4 + i % 2 * 4;
      if (i < 8) return small[own] & 63;
      return (small[8 + i / 2 % 4] >> i % 2 * 4 & 15) | (small[own] >> 2 & 48);
    }
  }

  // Whether the scales of a group mean finite numbers, and those of MXFP4 zero or normal ones, as small as weights may be.
  static bool IsUsable(const uint8_t* group, const uint8_t* codes) {
    if constexpr (kKind.power) {
      const int power = group[kSmallAt];
      if (power > 1) return power < 221;
      for (int i = 0; i < kGroup; ++i)
        if (codes[i] & 7) return false;
      return true;
    }
    for (int half = 0; half < kHalves; ++half)
      if ((LoadWord<uint16_t>(group + kHalvesAt + 2 * half) & 0x7C00) == 0x7C00) return false;
    return true;
  }

  // A word of `bits` of codes, from bit `at` of each on.
  template <int bits, int at, typename Word>
  static Word Bits(const uint8_t* codes) {
    const Word word = LoadWord<Word>(codes);
    if constexpr (bits == 8) return word ^ Each<Word>(128);
    return word >> at & Each<Word>((1 << bits) - 1);
  }

  // A plane of `bits` bits from bit `at` of the codes of 32 K on: 64 bytes for each bit.
  template <int bits, int at>
  static void Plane(const uint8_t (*codes)[kGroup], int first, uint8_t* to) {
    if constexpr (fours) {
      constexpr int kParts = 8 / bits;  // of a byte
      for (int line = 0; line < bits; ++line)
        for (int feature = 0; feature < kFeatures; ++feature) {
          uint32_t word = 0;
          for (int part = 0; part < kParts; ++part)
            word |= Bits<bits, at, uint32_t>(codes[feature] + first + 4 * (line * kParts + part)) << part * bits;
          StoreWord(to + 64 * line + 4 * feature, word);
        }
    } else if constexpr (bits == 8) {
      for (int eight = 0; eight < 4; ++eight)
        for (int feature = 0; feature < kFeatures; ++feature)
          StoreWord(to + 128 * eight + 8 * feature, EvenFirst(Bits<bits, at, uint64_t>(codes[feature] + first + 8 * eight)));
    } else {
      constexpr int kParts = 4 / bits;  // of half a byte
      for (int line = 0; line < bits; ++line)
        for (int feature = 0; feature < kFeatures / 2; ++feature) {
          uint64_t word = 0;
          for (int part = 0; part < kParts; ++part)
            for (int half = 0; half < 2; ++half)
              word |= Bits<bits, at, uint64_t>(codes[8 * half + feature] + first + 8 * (line * kParts + part))
                      << bits * (2 * part + half);
          StoreWord(to + 64 * line + 8 * feature, EvenFirst(word));
        }
    }
  }

  // Sixteen rows. Returns whether all scales are usable.
  static bool Block(const uint8_t* rows, int64_t width, uint8_t* to) {
    const int64_t row_bytes = RowBytes(width), low_step = 64 * kKind.low, high_step = 64 * kKind.high;
    const int64_t step = fours ? low_step + high_step : low_step;  // from one 32 K to the next
    uint8_t* high = to + (fours ? low_step : width / 32 * low_step);
    uint8_t* scales = to + kKind.CodeBytes(width);
    uint8_t codes[kFeatures][kGroup];
    bool usable = true;
    for (int64_t k = 0; k < width; k += kGroup, rows += kBytes) {
      for (int feature = 0; feature < kFeatures; ++feature) {
        const uint8_t* group = rows + feature * row_bytes;
        Unpack(group, codes[feature]);
        usable = usable && IsUsable(group, codes[feature]);
      }
      constexpr int kSmallScales = kKind.power ? 1 : static_cast<int>(kKind.SmallBytes() / kFeatures);
      for (int i = 0; i < kSmallScales; ++i)
        for (int feature = 0; feature < kFeatures; ++feature) *scales++ = Small(rows + feature * row_bytes, i);
      for (int half = 0; half < kHalves; ++half)
        for (int feature = 0; feature < kFeatures; ++feature, scales += 2)
          std::memcpy(scales, rows + feature * row_bytes + kHalvesAt + 2 * half, 2);
      for (int first = 0; first < kGroup; first += 32) {
        const int64_t place = (k + first) / 32;
        Plane<kKind.low, 0>(codes, first, to + place * step);
        if constexpr (kKind.high > 0) Plane<kKind.high, 4>(codes, first, high + place * (fours ? step : high_step));
      }
    }
    std::memset(scales, 0, to + kKind.Bytes(width) - scales);
    return usable;
  }

  // Returns the first block with scales that are not usable, or -1.
  static int64_t Blocks(const uint8_t* rows, int64_t width, int64_t blocks, uint8_t* to) {
    int64_t bad = -1;
    for (int64_t block = 0; block < blocks; ++block) {
      const bool usable = Block(rows + block * kFeatures * RowBytes(width), width, to + block * kKind.Bytes(width));
      if (!usable && bad < 0) bad = block;
    }
    return bad;
  }
};

using Pack = int64_t (*)(const uint8_t*, int64_t, int64_t, uint8_t*);

template <bool fours, int... index>
Pack PackOf(int32_t kind, int64_t bytes, int64_t width, std::integer_sequence<int, index...>) {
  Pack found = nullptr;
  ((kCodedKinds[index].number == kind && Packing<index, fours>::RowBytes(width) == bytes
        ? void(found = &Packing<index, fours>::Blocks)
        : void()),
   ...);
  return found;
}

// kind: ggml's number, or above 100. rows: the file's, [16 * blocks, bytes] of `width` K. Returns the first block with scales that
// are not usable, or -1 if there is none; -2 for an unknown kind and for rows that have another width.
template <bool fours>
int64_t PackBlocks(int32_t kind, int64_t width, int64_t blocks, int64_t bytes, const uint8_t* rows, uint8_t* to) {
  const Pack pack = PackOf<fours>(kind, bytes, width, std::make_integer_sequence<int, kCodedKindCount>());
  return pack ? pack(rows, width, blocks, to) : -2;
}

// A plain C function of this name.
#define XLA_ENGINE_PACK(name, fours)                                                                                      \
  extern "C" int64_t name(int32_t kind, int64_t width, int64_t blocks, int64_t bytes, const uint8_t* rows, uint8_t* to) { \
    return PackBlocks<fours>(kind, width, blocks, bytes, rows, to);                                                       \
  }

}  // namespace
}  // namespace xla_engine
