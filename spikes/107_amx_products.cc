// Frozen: runs at commit 49612931.
// How many weights a second does one thread multiply on AMX, of bf16, of eight bits and of packed ones in both numerics?
//
//   g++ -std=c++17 -O3 -ffp-contract=off FLAGS -Igraphs/native -isystem $FFI spikes/107_amx_products.cc -o products && ./products
//
// FLAGS: of `amx` in `xla_engine.runner.native_library.instruction_sets`; FFI: what jax.ffi.include_dir() says. 64 million weights in
// pages of 2 MiB, if the system has them. Prints G weights/s by the thread's processor time, the best of rounds, and a hash of the
// sums: compile it at two commits and run both in turns. Arguments: widths, then 0 and numbers of rows.

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <random>

#include "linear_coded.h"
#include "linear_fours.h"
#include "products.h"

using namespace xla_engine;

namespace {

#ifndef WEIGHTS
#define WEIGHTS 64000000
#endif
constexpr int64_t kWeights = WEIGHTS;
constexpr int kRounds = WEIGHTS < 4000000 ? 60 : 4;

double Seconds() {  // of this thread on a core: other programs take the others
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

char* Pages(int64_t bytes) {
  const int64_t size = (bytes + (1 << 21)) >> 21 << 21;
  auto* pages = static_cast<char*>(std::aligned_alloc(1 << 21, size));
  madvise(pages, size, MADV_HUGEPAGE);
  return pages;
}

struct Rows {
  int64_t width;
  std::vector<float> values;

  Rows(int64_t count, int64_t columns) : width(columns), values(count * columns) {
    std::mt19937 generator(7);
    for (float& value : values) value = (static_cast<int>(generator() >> 8 & 0xFFFF) - 32768) / 16384.0f;
  }
  template <typename Take>
  void Each(int64_t n, const Take& take) const {
    for (int64_t k = 0; k < width; k += kVector) take(k, Load(values.data() + n * width + k));
  }
  template <typename Place>
  void Write(int64_t n, const Place& place) const {
    Each(n, [&](int64_t k, Vec each) { Storage<BFloat16>::Round(each, place(k / 32 * 32) + k % 32); });
  }
};

// Random bytes, in scales finite: the same 64 blocks again and again.
char* Array(const CodedKind& kind, int64_t width, int64_t tasks, bool fours) {
  const int64_t block = kind.Bytes(width), codes = kind.CodeBytes(width);
  char* all = Pages(64 + 2 * tasks * block);
  const int32_t header[16] = {static_cast<int32_t>(width), static_cast<int32_t>(32 * tasks), 1, fours, kind.number,
                              static_cast<int32_t>(2 * tasks)};
  std::memcpy(all, header, sizeof header);
  std::mt19937_64 generator(1);
  for (int64_t each = 0; each < 2 * tasks; ++each) {
    char* at = all + 64 + each * block;
    if (each >= 64) {
      std::memcpy(at, at - 64 * block, block);
    } else {
      for (int64_t byte = 0; byte < block; ++byte) at[byte] = static_cast<char>(generator() >> 40 & (byte < codes ? 255 : 0xBB));
    }
  }
  return all;
}

template <typename Kernel, typename Pick>
void Run(const char* name, const Rows& rows, int64_t count, int64_t tasks, const Pick& pick) {
  const int64_t group = Kernel::GroupRows(count), groups = (count + group - 1) / group, bytes = Kernel::GroupBytes(rows.width);
  Lines kept;
  char* blocks = kept.Bytes(groups * bytes);
  for (int64_t g = 0; g < groups; ++g) Kernel::Fill(rows, g * group, std::min(group, count - g * group), blocks + g * bytes);
  double best = 1e9;
  uint64_t hash = 0;
  for (int round = 0; round < kRounds; ++round) {
    const WithoutDenormals scope;
    const double began = Seconds();
    for (int64_t task = 0; task < tasks; ++task) {
      const auto take = [&](int64_t, int64_t of_group, const Sums<float>& sums) {
        if (round || task >= 64) return;
        for (int64_t at = 0; at < of_group * 16; ++at)
          for (const float* from : {sums.one, sums.other}) {
            uint32_t bits;
            std::memcpy(&bits, from + at, sizeof bits);
            hash += (bits ^ hash >> 7) * 1099511628211u;
          }
      };
      MultiplyTask<Kernel>(blocks, count, rows.width, pick(task), pick(std::min(task + 1, tasks - 1)), take);
    }
    best = std::min(best, Seconds() - began);
  }
  std::printf("%-14s K %4lld rows %2lld  %6.2f  %016llx\n", name, static_cast<long long>(rows.width), static_cast<long long>(count),
              static_cast<double>(kWeights) / best / 1e9, static_cast<unsigned long long>(hash));
  std::fflush(stdout);
}

// The kernel that products take for so many rows, at commits that have one for many rows.
template <typename Kernel, typename = void>
struct ForMany {
  static constexpr int64_t kFrom = 1 << 30;
  using Type = Kernel;
};
template <typename Kernel>
struct ForMany<Kernel, std::void_t<typename Kernel::Many>> {
  static constexpr int64_t kFrom = Kernel::kMany;
  using Type = typename Kernel::Many;
};

template <typename Kernel, typename Pick>
void RunChosen(const std::string& name, const Rows& rows, int64_t count, int64_t tasks, const Pick& pick) {
  if (count >= ForMany<Kernel>::kFrom) return Run<typename ForMany<Kernel>::Type>(name.c_str(), rows, count, tasks, pick);
  Run<Kernel>(name.c_str(), rows, count, tasks, pick);
}

void All(int64_t width, const std::vector<int64_t>& counts) {
  const int64_t tasks = kWeights / (32 * width);
  char* plain = Pages(tasks * 64 * width);
  std::mt19937 generator(1);
  for (int64_t word = 0; word < tasks * 16 * width; ++word)
    reinterpret_cast<Word*>(plain)[word] = word < 1 << 20 ? generator() & 0xBDFFBDFF : reinterpret_cast<Word*>(plain)[word - (1 << 20)];
  const struct {
    const char* name;
    int place;
  } kinds[] = {{"Q4_0", 0}, {"Q4_1", 1}, {"Q5_0", 2}, {"Q8_0", 4}, {"Q4_K", 5}, {"Q5_K", 6}, {"Q6_K", 7}};
  std::vector<BFloat16> scales(32 * width / kScaleGroup * 2);
  for (BFloat16& each : scales) each = BFloat16{static_cast<uint16_t>(0x3C00 + generator() % 512)};
  for (const int64_t count : counts) {
    const Rows rows(count, width);
    RunChosen<HalvesKernel>("bf16", rows, count, tasks, [&](int64_t task) {
      const char* at = plain + task * width * 64;
      return Stream{at, at + width * 32};
    });
    if (width % kScaleGroup == 0)
      RunChosen<GroupKernel>("int8", rows, count, tasks, [&](int64_t task) {
        const char* at = plain + task * width * 32;
        return Stream{at, at + width * 16, scales.data(), scales.data() + 16 * width / kScaleGroup};
      });
  }
  std::free(plain);
  for (const auto& [name, place] : kinds) {
    if (place > 4 && width % 256) continue;
    for (const bool fours : {false, true}) {
      char* array = Array(kCodedKinds[place], width, tasks, fours);
      const CodedWeights weights(array, 64 + 2 * tasks * kCodedKinds[place].Bytes(width));
      for (const int64_t count : counts) {
        const Rows rows(count, width);
        const std::string title = std::string(name) + (fours ? " fast" : "");
        if (fours) {
          RunChosen<FoursKernel>(title, rows, count, tasks, [&](int64_t task) { return FoursTask{&weights, 2 * task, 2 * task + 1}; });
        } else {
          RunChosen<xla_engine::Coded::Kernel>(title, rows, count, tasks,
                                               [&](int64_t task) { return CodedTask{&weights, 2 * task, 2 * task + 1}; });
        }
      }
      std::free(array);
    }
  }
}

}  // namespace

int main(int count, char** words) {
#ifdef XLA_ENGINE_AMX
  if (!RequestTiles()) return std::puts("no tiles"), 1;
#endif
  std::vector<int64_t> widths, rows;
  bool later = false;
  for (int at = 1; at < count; ++at) {
    const int64_t number = std::atoll(words[at]);
    if (number == 0) later = true;
    else (later ? rows : widths).push_back(number);
  }
  if (widths.empty()) widths = {576, 1536};
  if (rows.empty()) rows = {1, 4, 8, 16, 32, 128};
  for (const int64_t width : widths) All(width, rows);
}
