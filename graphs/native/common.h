// What the native operations share: storage types, the treatment of denormals, the exponential and matrix tiles.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define XLA_ENGINE_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "vectors.h"

namespace xla_engine {

struct BFloat16 {
  uint16_t bits;
};

// Denormals are zeros while an object of this lives, as numbers that kernels read and as results; rounding is to nearest.
// vdpbf16ps has no denormals, whatever the processor is told: only so has the same sum its bits on every instruction set.
class WithoutDenormals {
 public:
  WithoutDenormals() : before_(Read()) { Write(kState); }
  ~WithoutDenormals() { Write(before_); }
  WithoutDenormals(const WithoutDenormals&) = delete;
  WithoutDenormals& operator=(const WithoutDenormals&) = delete;

 private:
#ifdef __x86_64__
  static constexpr uint32_t kState = 0x9FC0;  // MXCSR: no exceptions (0x1F80), results (0x8000) and operands (0x40) flushed
  static uint32_t Read() { return __builtin_ia32_stmxcsr(); }
  static void Write(uint32_t state) { __builtin_ia32_ldmxcsr(state); }
  uint32_t before_;
#else
  static constexpr uint64_t kState = 1 << 24;  // FPCR.FZ: both flushed
  static uint64_t Read() {
    uint64_t state;
    asm volatile("mrs %0, fpcr" : "=r"(state));
    return state;
  }
  static void Write(uint64_t state) { asm volatile("msr fpcr, %0" : : "r"(state) : "memory"); }
  uint64_t before_;
#endif
};

// Storage types: words are 32 bits wide, `Part<w>` is element w of each word.
template <typename T>
struct Storage;

template <>
struct Storage<float> {
  static constexpr int64_t kPack = 1, kPad = 16;
  static float Round(float value) { return value; }
  static void Round(Vec values, float* to) { Store(to, values); }
  static float Widen(float value) { return value; }
  template <int w>
  static Vec Part(const float* words) {
    return Load(words);
  }
};

template <>
struct Storage<BFloat16> {
  static constexpr int64_t kPack = 2, kPad = 32;
  static BFloat16 Round(float value) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)};
  }
  static void Round(Vec values, BFloat16* to) { StoreAs(to, Convert<Shorts>(Rounded(values) >> 16)); }
  static Bits Rounded(Vec values) {  // in the upper halves
    const Bits bits = Cast<Bits>(values), rounded = bits + 0x7FFFu + (bits >> 16 & 1u), nan = bits | 0x400000u;
    return Select(values != values, nan, rounded);
  }
  static float Widen(BFloat16 value) {
    uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
  }
  template <int w>
  static Vec Part(const BFloat16* words) {
    const Words bits = LoadAs<Words>(words);
    if constexpr (w == 0) return Cast<Vec>(bits << 16);
    return Cast<Vec>(bits & static_cast<int32_t>(0xFFFF0000));
  }
};

template <>
struct Storage<int8_t> {
  static constexpr int64_t kPack = 4;
};

// exp of values <= 0 (NaN stays NaN) by reduction to [-ln2/2, ln2/2] and a polynomial (coefficients of Cephes' expf); 0 below -87.
inline Vec Exp(Vec x) {
  const Vec zero = {};
  const Vec low = zero - 87.0f;
  const Vec clamped = Select(x < low, low, x);
  const Vec magic = zero + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = Fused(clamped, 1.44269504088896341f, magic);
  const Vec n = shifted - magic;
  const Vec r = Fused(n, 2.12194440e-4f, Fused(n, -0.693359375f, clamped));
  Vec p = Fused(r, 1.9875691500e-4f, 1.3981999507e-3f);
  p = Fused(p, r, 8.3334519073e-3f);
  p = Fused(p, r, 4.1665795894e-2f);
  p = Fused(p, r, 1.6666665459e-1f);
  p = Fused(p, r, 5.0000001201e-1f);
  p = Fused(p, r * r, r) + 1.0f;
  const Words scale = (Cast<Words>(shifted) - Cast<Words>(magic) + 127) << 23;
  return Select(x < low, zero, p * Cast<Vec>(scale));
}

#ifdef XLA_ENGINE_AMX

inline bool RequestTiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row
  uint8_t rows[16] = {};
  void Set(int tile, int64_t row_count, int64_t row_bytes) {
    rows[tile] = static_cast<uint8_t>(row_count);
    bytes[tile] = static_cast<uint16_t>(row_bytes);
  }
};

// Compilers do not know that tile loads read memory: everything written before this line is there after it.
inline void Written() { asm volatile("" ::: "memory"); }

inline void Configure(const TileShapes& shapes) {
  Written();
  _tile_loadconfig(&shapes);
}

#endif

}  // namespace xla_engine
