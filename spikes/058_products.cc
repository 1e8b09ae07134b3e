// Frozen: runs at commit 84bfb74.
// What do AVX512-BF16 products of many rows reach on one core, beside the multiply-adds alone?
//
//     g++ -std=c++17 -O3 -mtune=native -march=x86-64-v4 -mavx512bf16 -mavx512vnni -ffp-contract=off -Igraphs/native \
//       spikes/058_products.cc -o products && ./products 128
//
// The layers' products of SmolLM2-135M's shape with as many rows, weights from memory (30 layers) or from the caches (one),
// with results stored as graphs/native/linear.cc does. Times are the thread's own, the least of all calls.

#include <time.h>

#include <array>
#include <cstdio>
#include <cstdlib>

#include "packed_dots.h"

using namespace xla_engine;
using Kernel = DotKernel<BFloat16>;

namespace {

double Seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Multiply-adds alone, 24 sums and their operands in registers: GFLOP/s.
double Registers() {
  double least = 1e9;
  constexpr int64_t kTurns = 10000;
  for (int round = 0; round < 300; ++round) {
    const double began = Seconds();
    for (int64_t turn = 0; turn < kTurns; ++turn)
      asm volatile(
          ".irp sum, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31\n\t"
          "vdpbf16ps %%zmm0, %%zmm1, %%zmm\\sum\n\t"
          ".endr" ::
              : "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "xmm16", "xmm17", "xmm18", "xmm19", "xmm20",
                "xmm21", "xmm22", "xmm23", "xmm24", "xmm25", "xmm26", "xmm27", "xmm28", "xmm29", "xmm30", "xmm31");
    least = std::min(least, Seconds() - began);
  }
  return kTurns * 24 * 64 / least / 1e9;
}

struct Rows {
  const BFloat16* rows;
  int64_t width;
  template <typename Place>
  void Write(int64_t n, const Place& place) const {
    std::memcpy(place(0), rows + n * width, width * sizeof(BFloat16));
  }
};

struct Product {
  const char* name;
  int64_t width, features;
  bool residual;
};

constexpr std::array<Product, 4> kLayer = {
    {{"q, k and v", 576, 960, false}, {"output", 576, 576, true}, {"gates and ups", 576, 3072, false}, {"down", 1536, 576, true}}};

void Time(int64_t count, int64_t layers) {
  int64_t size = 0;
  for (const Product& each : kLayer) size += each.width * each.features;
  std::vector<BFloat16> weights(size * layers), rows(count * 1536);
  std::vector<float> out(count * 3072);
  for (int64_t i = 0; i < size * layers; ++i) weights[i].bits = static_cast<uint16_t>(0x3c00 + i % 64);
  for (BFloat16& each : rows) each.bits = 0x3c80;
  Lines kept;
  const int64_t group = Kernel::GroupRows(count), groups = (count + group - 1) / group;
  char* blocks = kept.Bytes(groups * Kernel::GroupBytes(1536));
  std::array<double, 4> prepared, multiplied;
  prepared.fill(1e9), multiplied.fill(1e9);
  for (int64_t pass = 0; pass < 360 / layers; ++pass) {
    const BFloat16* at = weights.data();
    for (int64_t layer = 0; layer < layers; ++layer) {
      for (size_t i = 0; i < kLayer.size(); ++i) {
        const auto [name, width, features, residual] = kLayer[i];
        const int64_t block = width * 16, tasks = features / 32, bytes = Kernel::GroupBytes(width);
        const double began = Seconds();
        const Rows operand = {rows.data(), width};
        for (int64_t g = 0; g < groups; ++g)
          Kernel::Fill(operand, g * group, std::min(group, count - g * group), blocks + g * bytes);
        const double ready = Seconds();
        for (int64_t task = 0; task < tasks; ++task) {
          const auto stream = [&](int64_t which) {
            const auto* from = reinterpret_cast<const char*>(at + which * 2 * block);
            return Stream{from, from + block * sizeof(BFloat16)};
          };
          Kernel::Multiply(blocks, count, width, stream(task), stream(std::min(task + 1, tasks - 1)),
                           [&, stride = features, adds = residual](int64_t n, int64_t found, const auto& sums) {
                             for (int64_t r = 0; r < found; ++r) {
                               float* to = out.data() + (n + r) * stride + task * 32;
                               const Vec one = Load(sums.one + r * 16), other = Load(sums.other + r * 16);
                               Store(to, adds ? Load(to) + one : one);
                               Store(to + 16, adds ? Load(to + 16) + other : other);
                             }
                           });
        }
        prepared[i] = std::min(prepared[i], ready - began);
        multiplied[i] = std::min(multiplied[i], Seconds() - ready);
        at += width * features;
      }
    }
  }
  for (size_t i = 0; i < kLayer.size(); ++i) {
    const Product& each = kLayer[i];
    const double work = 2.0 * static_cast<double>(each.width * each.features * count);
    std::printf("%2lld layers, %4lld rows, %-14s rows prepared in %5.1f us, multiplied in %7.1f us, %4.0f GFLOP/s\n",
                static_cast<long long>(layers), static_cast<long long>(count), each.name, prepared[i] * 1e6, multiplied[i] * 1e6,
                work / multiplied[i] / 1e9);
  }
}

}  // namespace

int main(int count, char** words) {
  const int64_t rows = count > 1 ? std::atoll(words[1]) : 128;
  std::printf("multiply-adds alone: %.0f GFLOP/s\n", Registers());
  Time(rows, 1);
  Time(rows, 30);
}
