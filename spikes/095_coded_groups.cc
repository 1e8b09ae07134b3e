// Frozen: runs at commit 1e5b2cf.
// What does it gain to unpack a task while its first group of rows is multiplied, in place of before?
//
//   g++ -std=c++17 -O3 -ffp-contract=off -march=x86-64-v4 -mavx512bf16 -mtune=native -Igraphs/native spikes/095_coded_groups.cc -o groups && ./groups
//
// One thread, 24 million weights (beyond the caches). Prints G weights/s, the best of rounds in turns, and checks that both have the same bits.

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <random>
#include <vector>

#include "coded_weights.h"

using namespace xla_engine;

namespace {

std::mt19937 generator(1);
volatile float sink;

double Seconds() {  // of this thread on a core: other programs take the others
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void Compare(const char* name, int kind, int64_t width, int64_t count) {
  using Kernel = DotKernel<BFloat16>;
  const int64_t tasks = 24'000'000 / (32 * width), size = 64 + 2 * tasks * kCodedKinds[kind].Bytes(width, false);
  std::vector<char> plain_bytes(tasks * 64 * width + 64, 60), coded_bytes(size + 64), strip_bytes(64 * width + 64);
  const auto aligned = [](std::vector<char>& bytes) { return bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64; };
  char *plain = aligned(plain_bytes), *coded = aligned(coded_bytes), *strip = aligned(strip_bytes);
  for (int64_t at = 0; at < size; ++at) coded[at] = static_cast<char>(generator() >> 24 & 0x1F);  // finite scales
  const int32_t header[16] = {static_cast<int32_t>(width), static_cast<int32_t>(32 * tasks), 1, 0, kCodedKinds[kind].number,
                              static_cast<int32_t>(2 * tasks)};
  std::memcpy(coded, header, sizeof header);
  const CodedWeights weights(coded, size);
  const int64_t group = Kernel::GroupRows(count), groups = (count + group - 1) / group;
  std::vector<Word> words(groups * width / 2 * kBlockRows);
  for (Word& word : words) word = generator() & 0x3FFF3FFF;
  const auto* blocks = reinterpret_cast<const char*>(words.data());
  std::vector<float> found(count * 32), expected;
  const auto keep = [&](int64_t n, int64_t rows, const Sums<float>& sums) {
    std::memcpy(found.data() + n * 32, sums.one, rows * 64);
    std::memcpy(found.data() + n * 32 + rows * 16, sums.other, rows * 64);
  };
  const std::function<void(int64_t)> runs[] = {
      [&](int64_t task) {
        const auto at = [&](int64_t place) { return Stream{plain + place * width * 64, plain + place * width * 64 + width * 32}; };
        Kernel::Multiply(blocks, count, width, at(task), at(std::min(task + 1, tasks - 1)), keep);
      },
      [&](int64_t task) {
        weights.Unpack(2 * task, strip);
        weights.Unpack(2 * task + 1, strip + width * 32);
        Kernel::Multiply(blocks, count, width, {strip, strip + width * 32}, {strip, strip + width * 32}, keep);
      },
      [&](int64_t task) {
        const CodedTask both{&weights, 2 * task, 2 * task + 1};
        MultiplyTask<Kernel>(blocks, count, width, both, both, keep);
      },
  };
  double best[3] = {1e9, 1e9, 1e9};
  for (int round = 0; round < 9; ++round) {
    for (int run = 0; run < 3; ++run) {
      const double began = Seconds();
      for (int64_t task = 0; task < tasks; ++task) runs[run](task), sink = sink + found[0];
      best[run] = std::min(best[run], Seconds() - began);
      if (run == 1) expected = found;
      if (run == 2 && found != expected) std::puts("other bits");
    }
  }
  std::printf("| %s, %lld | %lld |", name, static_cast<long long>(width), static_cast<long long>(count));
  for (const double each : best) std::printf(" %.2f |", static_cast<double>(tasks * 32 * width) / each / 1e9);
  std::puts("");
}

}  // namespace

int main() {
  std::puts("| kind, K | rows | bf16 | unpacked before | unpacked while the first group is multiplied |");
  for (const int64_t rows : {8, 16, 24, 32, 64}) Compare("Q4_1", 1, 576, rows);
  for (const int64_t rows : {16, 32}) Compare("Q4_0", 0, 1536, rows), Compare("Q4_1", 1, 1536, rows), Compare("Q4_K", 5, 1536, rows), Compare("Q6_K", 7, 1536, rows), Compare("Q8_0", 4, 576, rows);
}
