// Frozen: runs at commit 590b30b.
// Where should weights that are unpacked to bf16 stand while a few rows are multiplied: in a strip, in slices of it, or in registers?
//
//   g++ -std=c++17 -O3 -ffp-contract=off -march=x86-64-v4 -mavx512bf16 -mtune=native -Igraphs/native spikes/089_coded_rows.cc -o rows && ./rows
//
// One thread, 24 million weights (beyond the caches). Prints G weights/s, the best of rounds in turns, and checks that all have the same bits.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "coded_weights.h"

using namespace xla_engine;

namespace {

std::mt19937 generator(1);
volatile float sink;

WordRegister Line(Vec first, Vec second) { return (WordRegister)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first); }

// Slices of a strip: sums go on from one to the next.
template <int kRows>
__attribute__((noinline)) void GoOn(const Word* rows, const char* one, const char* other, int64_t words, Sums<float>& sums) {
  Vec sum[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) sum[r][0] = Load(sums.one + r * 16), sum[r][1] = Load(sums.other + r * 16);
  for (int64_t word = 0; word < words; ++word) {
    const Words first = LoadAs<Words>(one + word * 64), second = LoadAs<Words>(other + word * 64);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      sum[r][0] = Dots<BFloat16>::Add(sum[r][0], first, rows[word * kBlockRows + r]);
      sum[r][1] = Dots<BFloat16>::Add(sum[r][1], second, rows[word * kBlockRows + r]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) Store(sums.one + r * 16, sum[r][0]), Store(sums.other + r * 16, sum[r][1]);
}

template <int kRows>
void Slices(const Word* rows, int64_t width, const CodedWeights& weights, int64_t task, Sums<float>& sums) {
  constexpr int64_t kSlice = 256;
  alignas(64) static char strip[2 * 32 * kSlice];
  for (int r = 0; r < kRows; ++r) Store(sums.one + r * 16, Vec{}), Store(sums.other + r * 16, Vec{});
  for (int64_t k = 0; k < width; k += kSlice) {
    const int64_t end = std::min(width, k + kSlice), count = end - k;
    weights.UnpackRun(2 * task, k, end, strip);
    weights.UnpackRun(2 * task + 1, k, end, strip + count * 32);
    GoOn<kRows>(rows + k / 2 * kBlockRows, strip, strip + count * 32, count / 2, sums);
  }
}

// One block, whose lines stay in registers.
template <int index, int kRows>
__attribute__((noinline)) void Registers(const Word* rows, int64_t width, const char* block, float* to) {
  Vec sum[kRows];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) sum[r] = Vec{};
  for (int64_t k = 0; k < width; k += 32) {
    UnpackGroup<index>(block, width, k, [&](int64_t word, Vec first, Vec second) __attribute__((always_inline)) {
      const auto line = (Words)Line(first, second);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) sum[r] = AddPairs(sum[r], line, static_cast<int32_t>(rows[word * kBlockRows + r]));
    });
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) Store(to + r * 16, sum[r]);
}

// One block: while 32 K are multiplied, the next are unpacked to memory.
template <int index, int kRows>
__attribute__((noinline)) void Ahead(const Word* rows, int64_t width, const char* block, float* to) {
  alignas(64) char lines[2][1024];
  Vec sum[kRows];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) sum[r] = Vec{};
  UnpackGroup<index>(block, width, 0, [&](int64_t word, Vec first, Vec second) __attribute__((always_inline)) {
    StoreAs(lines[0] + word * 64, Line(first, second));
  });
  for (int64_t k = 0; k < width; k += 32) {
    const char* now = lines[k / 32 % 2];
    char* next = lines[1 - k / 32 % 2];
    const int64_t after = std::min(k + 32, width - 32);
    UnpackGroup<index>(block, width, after, [&](int64_t word, Vec first, Vec second) __attribute__((always_inline)) {
      const int64_t at = word - after / 2;
      StoreAs(next + at * 64, Line(first, second));
      const Words line = LoadAs<Words>(now + at * 64);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) sum[r] = AddPairs(sum[r], line, static_cast<int32_t>(rows[(k / 2 + at) * kBlockRows + r]));
    });
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) Store(to + r * 16, sum[r]);
}

template <int kRows>
void Compare(const char* name, int kind, int64_t width) {
  const int64_t tasks = 24'000'000 / (32 * width), size = 64 + 2 * tasks * kCodedKinds[kind].Bytes(width, false);
  std::vector<char> plain_bytes(tasks * 64 * width + 64, 60), coded_bytes(size + 64);
  const auto aligned = [](std::vector<char>& bytes) { return bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64; };
  char *plain = aligned(plain_bytes), *coded = aligned(coded_bytes);
  for (int64_t at = 0; at < size; ++at) coded[at] = static_cast<char>(generator() >> 24 & 0x1F);  // finite scales
  const int32_t header[16] = {static_cast<int32_t>(width), static_cast<int32_t>(32 * tasks), 1, 0, kCodedKinds[kind].number,
                              static_cast<int32_t>(2 * tasks)};
  std::memcpy(coded, header, sizeof header);
  const CodedWeights weights(coded, size);
  std::vector<Word> words(width / 2 * kBlockRows);
  for (Word& word : words) word = generator() & 0x3FFF3FFF;
  const Word* rows = words.data();
  const auto* blocks = reinterpret_cast<const char*>(rows);
  Sums<float> sums, expected;
  const auto keep = [&](auto, auto, const auto& found) { sums = found; };
  const auto by_block = [&](int64_t task, const auto& run) {
    weights.OfBlock(2 * task, [&](auto index, const char* at) { run(index, at, sums.one); });
    weights.OfBlock(2 * task + 1, [&](auto index, const char* at) { run(index, at, sums.other); });
  };
  const std::function<void(int64_t)> runs[] = {
      [&](int64_t task) {
        const auto at = [&](int64_t place) { return Stream{plain + place * width * 64, plain + place * width * 64 + width * 32}; };
        DotKernel<BFloat16>::Multiply(blocks, kRows, width, at(task), at(std::min(task + 1, tasks - 1)), keep);
      },
      [&](int64_t task) {
        const CodedTask both{&weights, 2 * task, 2 * task + 1};
        MultiplyTask<DotKernel<BFloat16>>(blocks, kRows, width, both, both, keep);
      },
      [&](int64_t task) { Slices<kRows>(rows, width, weights, task, sums); },
      [&](int64_t task) { SumFew<kRows>(rows, width, {&weights, 2 * task, 2 * task + 1}, sums); },
      [&](int64_t task) { by_block(task, [&](auto index, const char* at, float* to) { Registers<index, kRows>(rows, width, at, to); }); },
      [&](int64_t task) { by_block(task, [&](auto index, const char* at, float* to) { Ahead<index, kRows>(rows, width, at, to); }); },
  };
  double best[6];
  std::fill_n(best, 6, 1e9);
  for (int round = 0; round < 9; ++round) {
    for (int run = 0; run < 6; ++run) {
      const auto began = std::chrono::steady_clock::now();
      for (int64_t task = 0; task < tasks; ++task) runs[run](task), sink = sink + sums.one[0];
      best[run] = std::min(best[run], std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
      if (run == 1) expected = sums;
      if (run > 1 && (std::memcmp(sums.one, expected.one, kRows * 64) || std::memcmp(sums.other, expected.other, kRows * 64)))
        std::puts("other bits");
    }
  }
  std::printf("| %s, %lld | %d |", name, static_cast<long long>(width), kRows);
  for (const double each : best) std::printf(" %.1f |", static_cast<double>(tasks * 32 * width) / each / 1e9);
  std::puts("");
}

}  // namespace

int main() {
  std::puts("| kind, K | rows | bf16 | strip | slices of 256 K | registers, both blocks | registers, a block | a block, unpacked ahead |");
  Compare<1>("Q4_0", 0, 1536), Compare<2>("Q4_0", 0, 1536), Compare<4>("Q4_0", 0, 1536), Compare<8>("Q4_0", 0, 1536);
  Compare<12>("Q4_0", 0, 1536), Compare<8>("Q4_0", 0, 576), Compare<8>("Q5_0", 2, 576), Compare<8>("Q8_0", 4, 576);
  Compare<8>("Q4_1", 1, 1536), Compare<8>("Q4_K", 5, 1536), Compare<8>("Q6_K", 7, 1536);
}
