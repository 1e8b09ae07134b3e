// Frozen: runs at commit 78b686d.
// How fast are products of coded weights with rows in eight bits, of one thread with weights in the caches?
//
//   g++ -std=c++17 -O3 -ffp-contract=off FLAGS -Igraphs/native spikes/069_coded_products.cc -o products && ./products
//
// FLAGS: of `xla_engine.runner.native_library.instruction_sets`. Prints G weights/s, the best of many rounds.

#include <chrono>
#include <cstdio>
#include <functional>
#include <random>

#include "coded_dots.h"

using namespace xla_engine;

namespace {

constexpr int64_t kWidth = 1536, kRounds = 300;
std::mt19937 generator(1);
volatile float sink;

double Best(const std::function<void()>& run) {
  double best = 1e9;
  for (int64_t round = 0; round < kRounds; ++round) {
    const auto began = std::chrono::steady_clock::now();
    for (int time = 0; time < 10; ++time) run();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() / 10);
  }
  return 32 * kWidth / best / 1e9;
}

struct Rows {  // in place of what comes from the network
  std::vector<float> values;
  int64_t width = kWidth;
  explicit Rows(int64_t count) : values(count * kWidth) {
    std::normal_distribution<float> normal;
    for (float& each : values) each = normal(generator);
  }
  template <typename Take>
  void Each(int64_t n, const Take& take) const {
    for (int64_t k = 0; k < kWidth; k += kVector) take(k, Load(values.data() + n * kWidth + k));
  }
  template <typename Place>
  void Write(int64_t n, const Place& place) const {
    Each(n, [&](int64_t k, Vec some) { Storage<BFloat16>::Round(some, place(k)); });
  }
};

const auto kAll = [](int64_t, int64_t rows, const auto& sums) {  // sums that nobody reads would not be computed
  float total = 0;
  for (int64_t at = 0; at < rows * 16; ++at) total += sums.one[at] + sums.other[at];
  sink = total;
};

template <typename Kernel, typename... Weights>
double Rate(const Rows& rows, int64_t count, const Weights&... weights) {
  const int64_t group = Kernel::GroupRows(count), bytes = Kernel::GroupBytes(kWidth);
  Lines lines;
  char* blocks = lines.Bytes((count + group - 1) / group * bytes);
  for (int64_t n = 0; n < count; n += group) Kernel::Fill(rows, n, std::min(group, count - n), blocks + n / group * bytes);
  return Best([&] { Kernel::Multiply(blocks, count, kWidth, weights..., kAll); });
}

}  // namespace

int main() {
  std::vector<char> bytes(4 * 32 * kWidth + 64);
  for (char& each : bytes) each = static_cast<char>(generator() >> 24);
  std::vector<BFloat16> halves(32 * kWidth), scales(32 * kWidth / kScaleGroup, {0x3C00});
  for (BFloat16& each : halves) each = Storage<BFloat16>::Round(static_cast<float>(generator() % 255) / 127.0f - 1.0f);
  const auto* at = reinterpret_cast<const char*>(halves.data());
  const Stream plain = {at, at + 32 * kWidth};
  const Stream eights = {bytes.data(), bytes.data() + 16 * kWidth, scales.data(), scales.data() + 16 * kWidth / kScaleGroup};
  std::printf("rows   bf16   int8");
  const char* names[] = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL"};
  for (const char* name : names) std::printf(" %6s", name);
  std::printf("\n");
  for (int64_t count : {1, 4, 8, 12, 32}) {
    const Rows rows(count);
    std::printf("%4lld %6.1f %6.1f", static_cast<long long>(count), Rate<DotKernel<BFloat16>>(rows, count, plain, plain),
                Rate<GroupKernel>(rows, count, eights, eights));
    for (const CodedKind& kind : kCodedKinds) {
      std::vector<char> coded(bytes.begin(), bytes.begin() + 64 + 2 * kind.Bytes(kWidth, true));
      for (size_t scale = 65; scale < coded.size(); scale += 2) coded[scale] &= 0x1F;  // finite, and five bits
      const int32_t header[16] = {kWidth, 32, 1, 1, kind.number, 2};
      std::memcpy(coded.data(), header, sizeof header);
      const CodedWeights weights(coded.data(), static_cast<int64_t>(coded.size()));
      std::printf(" %6.1f", Rate<FoursKernel>(rows, count, FoursTask{&weights, 0, 1}));
    }
    std::printf("\n");
  }
}
