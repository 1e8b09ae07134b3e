// Frozen: runs at commit 49612931.
// What do tiles cost on AMX, alone and beside vectors, and what do the instructions that unpack weights cost?
//
//   g++ -std=c++17 -O2 -march=native -mamx-tile -mamx-int8 spikes/107_tile_costs.cc -o costs && ./costs
//
// Prints ns of one thread by its processor time, the best of many rounds, with all data in the first cache. A step: sums of 16 rows by
// 16 features over 32 numbers of K in eight bits, stored, read as vectors, converted, multiplied by two scales and added.

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <ctime>

namespace {

double Seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

alignas(64) int8_t rows[8][16 * 64], weights[8][16 * 64];
alignas(64) int32_t sums[16][16 * 16], others[8][16 * 16];
alignas(64) float scales[64][16], out[16][16];

constexpr int kSteps = 20000;
enum { kLoad = 1, kMultiply = 2, kStore = 4, kAdd = 8, kAddOthers = 16 };

template <int what, int kRows>
__attribute__((noinline)) void Run() {
  __m512 total[16] = {};
  for (int step = 0; step < kSteps; ++step) {
    asm volatile("" ::: "memory");
    if (what & kMultiply) _tile_zero(0);
    if (what & kLoad) {
      _tile_loadd(1, rows[step & 7], 32);
      _tile_loadd(2, weights[step & 7], 64);
    }
    if (what & kMultiply) _tile_dpbssd(0, 1, 2);
    if (what & kStore) _tile_stored(0, sums[step & 15], 64);
    asm volatile("" ::: "memory");
    if (what & (kAdd | kAddOthers)) {
      const int32_t* from = what & kAdd ? sums[(step - 2) & 15] : others[step & 7];
      const __m512 scale = _mm512_load_ps(scales[step & 63]);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(from + 16 * r));
        total[r] = _mm512_fmadd_ps(_mm512_mul_ps(sum, _mm512_set1_ps(scales[step & 63][r])), scale, total[r]);
      }
    }
  }
  for (int r = 0; r < 16; ++r) _mm512_storeu_ps(out[r], total[r]);
}

template <int what, int kRows = 16>
void Step(const char* name) {
  Shapes shapes;
  shapes.rows[0] = shapes.rows[1] = kRows, shapes.rows[2] = 8;
  shapes.bytes[0] = shapes.bytes[2] = 64, shapes.bytes[1] = 32;
  _tile_loadconfig(&shapes);
  double best = 1e9;
  for (int round = 0; round < 20; ++round) {
    const double began = Seconds();
    Run<what, kRows>();
    best = std::min(best, Seconds() - began);
  }
  std::printf("%-34s %2d rows %6.2f\n", name, kRows, best / kSteps * 1e9);
}

#define ON(name, operands, to) name " " operands ",%%zmm" #to "\n\t"
#define TIME(name, operands)                                                                                     \
  {                                                                                                              \
    double best = 1e9;                                                                                           \
    for (int round = 0; round < 20; ++round) {                                                                   \
      const double began = Seconds();                                                                            \
      for (int step = 0; step < kSteps; ++step)                                                                  \
        asm volatile(ON(name, operands, 0) ON(name, operands, 1) ON(name, operands, 2) ON(name, operands, 3)     \
                         ON(name, operands, 4) ON(name, operands, 5) ON(name, operands, 6) ON(name, operands, 7) \
                     ::: "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7");                        \
      best = std::min(best, Seconds() - began);                                                                  \
    }                                                                                                            \
    std::printf("%-42s %6.2f\n", name, best / kSteps / 8 * 1e9);                                                 \
  }

}  // namespace

int main() {
  syscall(SYS_arch_prctl, 0x1023, 18);
  TIME("vmulps", "%%zmm16,%%zmm16")
  TIME("vpandd", "%%zmm16,%%zmm16")
  TIME("vpslld", "$16,%%zmm16")
  TIME("vpermw", "%%zmm16,%%zmm16")
  TIME("vpdpbusd", "%%zmm16,%%zmm16")
  TIME("vcvtne2ps2bf16", "%%zmm16,%%zmm16")
  TIME("vdpbf16ps", "%%zmm16,%%zmm16")
  Step<kLoad>("load both tiles");
  Step<kLoad | kMultiply>("load, multiply");
  Step<kLoad | kMultiply, 8>("load, multiply");
  Step<kStore>("store");
  Step<kStore, 8>("store");
  Step<kLoad | kMultiply | kStore>("load, multiply, store");
  Step<kLoad | kMultiply | kStore, 8>("load, multiply, store");
  Step<kAdd>("vectors alone");
  Step<kLoad | kAddOthers>("load, vectors of other sums");
  Step<kStore | kAddOthers>("store, vectors of other sums");
  Step<kLoad | kMultiply | kStore | kAddOthers>("all, vectors of other sums");
  Step<kLoad | kMultiply | kStore | kAdd>("all");
  Step<kLoad | kMultiply | kStore | kAdd, 8>("all");
}
