// Frozen: runs at commit 936bf3d.
// How many products a second does the attention of one thread make, with so many query rows over so many keys?
//
//   g++ -std=c++17 -O3 -ffp-contract=off -march=x86-64-v4 -mavx512bf16 -mavx512vnni -mtune=native -Igraphs/native \
//     spikes/104_attention_rows.cc -o rows && ./rows
//
// Prints 10^9 multiplications and additions a second by the thread's processor time, the best of nine rounds over three heads,
// and a hash of results and sums: compile it at two commits and run both in turns.

#include <cstdio>
#include <ctime>
#include <random>

#include "attention_vectors.h"

using namespace xla_engine;

namespace {

constexpr int kHeads = 3, kRounds = 9;

double Seconds() {  // of this thread on a core: other programs take the others
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <typename T>
class Aligned {
 public:
  explicit Aligned(int64_t count) : kept_(count + 64) {}
  T* data() { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(kept_.data()) + 63) / 64 * 64); }

 private:
  std::vector<T> kept_;
};

template <typename T>
void Measure(int64_t rows, int64_t count, int64_t width) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  const int64_t page = (count + 31) / 32 * 32, stride = page + 16;
  Aligned<T> keys(kHeads * page * width), values(kHeads * page * width), queries(rows * width);
  Aligned<float> scores(kQueries * stride), out(kQueries * width);
  const auto draw = [&](Aligned<T>& to, int64_t size) {
    for (int64_t i = 0; i < size; ++i) to.data()[i] = Storage<T>::Round(normal(generator));
  };
  draw(keys, kHeads * page * width), draw(values, kHeads * page * width), draw(queries, rows * width);
  Seen seen = {};
  seen.rows = rows;
  for (int64_t r = 0; r < rows; ++r) seen.last[r] = count - (rows - 1 - r) / 3, seen.sink[r] = kLowest;
  const int32_t table[] = {0};
  float sums[kQueries];
  uint64_t hash = 14695981039346656037u;
  const auto add = [&](const float* from, int64_t size) {
    for (int64_t i = 0; i < size; ++i) {
      uint32_t bits;
      std::memcpy(&bits, from + i, sizeof bits);
      hash = (hash ^ bits) * 1099511628211u;
    }
  };
  double best = 1e9;
  const WithoutDenormals scope;
  for (int round = 0; round < kRounds; ++round) {
    const double began = Seconds();
    for (int64_t head = 0; head < kHeads; ++head) {
      const Head<T> from = {keys.data() + head * page * width, values.data() + head * page * width, table, 1, page, page, width};
      Context<T> context;
      context.List(from, 0, count);
      AttendVectors(context, queries.data(), seen, {0.125f, 0.0f}, scores.data(), stride, out.data(), sums);
      if (round == 0) add(out.data(), rows * width), add(sums, rows);
    }
    best = std::min(best, (Seconds() - began) / kHeads);
  }
  std::printf("%s %2ld rows %4ld keys of %3ld: %8.1f us, %6.2f, hash %016lx\n", sizeof(T) == 2 ? "bf16" : "f32 ", static_cast<long>(rows),
              static_cast<long>(count), static_cast<long>(width), best * 1e6, 2e-9 * static_cast<double>(rows * count * width) / best,
              static_cast<unsigned long>(hash));
}

}  // namespace

int main() {
  for (int64_t width : {64, 128})
    for (int64_t count : {256, 1024, 4096})
      for (int64_t rows : {1, 3, 4, 8, 15, 16}) Measure<BFloat16>(rows, count, width);
  for (int64_t rows : {1, 3, 8, 16}) Measure<float>(rows, 1024, 64);
}
