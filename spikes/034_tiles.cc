// Frozen: runs at commit bbbb585.
// What products of many rows reach on matrix tiles (Intel AMX), by how weights, rows and results come and go.
//
// 034_tiles THREADS ROWS ROUNDS: one line per form, its name, a tab, and the best and the median GFLOP/s. The products are
// the four of SmolLM2-135M's 30 layers, each thread taking tasks of 32 features; weights are packed as in packed.h.

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int kLayers = 30;
struct Shape {
  int64_t steps, features;  // 64 bytes of K each
} constexpr kShapes[] = {{18, 960}, {18, 576}, {18, 3072}, {48, 576}};

struct Form {
  const char* name;
  bool turns;      // threads take tasks in turns, else each its own half
  bool far;        // all weights, else one task's again and again
  bool add;        // sums are added to rows in memory, else dropped
  int64_t part;    // steps of K whose weights are used for all rows before the next
  bool ahead;      // fetch the next task's weights
};

void Configure() {
  struct alignas(64) {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shapes;
  asm volatile("" ::: "memory");
  _tile_loadconfig(&shapes);
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds of body(thread) on all threads.
template <typename Body>
double Timed(int threads, const Body& body) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> team;
  for (int thread = 1; thread < threads; ++thread)
    team.emplace_back([&, thread] {
      Configure();
      for (ready++; !go;) _mm_pause();
      body(thread);
    });
  Configure();
  while (ready < threads - 1) _mm_pause();
  const double began = Now();
  go = true;
  body(0);
  for (auto& each : team) each.join();
  return Now() - began;
}

// A task: 32 features of all rows.
void Multiply(const Form& form, const char* a, const char* one, const char* next, int64_t steps, int64_t rows, float* out,
              int64_t pitch) {
  alignas(64) static thread_local float sums[1024 / 32][4][256];
  const int64_t bytes = steps * 1024, lines = form.ahead ? std::max<int64_t>(1, 512 / rows) : 0;
  int64_t fetched = 0;
  for (int64_t step = 0; step < steps; step += form.part) {
    const int64_t end = std::min(step + form.part, steps);
    for (int64_t n = 0; n < rows; n += 32) {
      auto* of = sums[n / 32];
      if (step == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      } else {
        _tile_loadd(0, of[0], 64);
        _tile_loadd(1, of[1], 64);
        _tile_loadd(2, of[2], 64);
        _tile_loadd(3, of[3], 64);
      }
      for (int64_t k = step; k < end; ++k) {
        _tile_loadd(6, one + k * 1024, 64);
        _tile_loadd(4, a + n / 16 * bytes + k * 1024, 64);
        _tile_loadd(7, one + bytes + k * 1024, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + (n / 16 + 1) * bytes + k * 1024, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        for (int64_t line = 0; line < lines && fetched < 2 * bytes; line += 1, fetched += 128) {
          __builtin_prefetch(next + fetched, 0, 2);
          __builtin_prefetch(next + fetched + 64, 0, 2);
        }
      }
      _tile_stored(0, of[0], 64);
      _tile_stored(1, of[1], 64);
      _tile_stored(2, of[2], 64);
      _tile_stored(3, of[3], 64);
      asm volatile("" ::: "memory");
      if (!form.add || end < steps) continue;
      for (int64_t r = 0; r < 32; ++r)
        for (int64_t half = 0; half < 2; ++half) {
          float* to = out + (n + r) * pitch + half * 16;
          _mm512_storeu_ps(to, _mm512_loadu_ps(to) + _mm512_loadu_ps(of[r / 16 * 2 + half] + r % 16 * 16));
        }
    }
  }
}

}  // namespace

int main(int, char** arguments) {
  const int threads = std::atoi(arguments[1]), rows = std::atoi(arguments[2]), rounds = std::atoi(arguments[3]);
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return 1;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr int kCalls = 100000;
  double best = 1e9;
  for (int round = 0; round < rounds; ++round)
    best = std::min(best, Timed(threads, [](int) {
      for (int call = 0; call < kCalls; ++call) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }));
  const double limit = threads * 4.0 * 16384 * kCalls / best / 1e9;
  std::printf("tile products alone\t%.0f\t%.0f\n", limit, limit);

  int64_t layer = 0;
  double flops = 0;
  for (const Shape& shape : kShapes) {
    layer += shape.steps * 64 * shape.features;
    flops += 64.0 * rows * shape.steps * shape.features;
  }
  const auto make = [](int64_t bytes) {
    void* made = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    std::memset(made, 0, bytes);
    return static_cast<char*>(made);
  };
  const char *weights = make(kLayers * layer + (1 << 18)), *a = make(rows * 48 * 64);
  float* out = reinterpret_cast<float*>(make(rows * 3072 * 4));
  constexpr Form kForms[] = {
      {"weights of one task, sums dropped", false, false, false, 64, false},
      {"the same, K in parts", false, false, false, 9, false},
      {"all weights, sums dropped", false, true, false, 64, false},
      {"sums added to rows, features in turns", true, true, true, 64, false},
      {"sums added to rows, a half of the features each", false, true, true, 64, false},
      {"the same, K in parts", false, true, true, 9, false},
      {"the same, K in parts, next weights fetched", false, true, true, 9, true},
  };
  std::vector<std::vector<double>> seconds(std::size(kForms));
  for (int round = 0; round < rounds; ++round)
    for (size_t at = 0; at < std::size(kForms); ++at) {
      const Form& form = kForms[at];
      std::vector<std::atomic<int>> taken(kLayers * 4), done(kLayers * 4);
      seconds[at].push_back(Timed(threads, [&](int thread) {
        const char* from = weights;
        for (int product = 0; product < kLayers * 4; ++product) {
          const Shape shape = kShapes[product % 4];
          const int64_t tasks = shape.features / 32, bytes = shape.steps * 2048;
          const int64_t first = tasks * thread / threads, last = tasks * (thread + 1) / threads;
          for (int64_t own = first;; ++own) {
            const int64_t task = form.turns ? taken[product]++ : own;
            if (task >= (form.turns ? tasks : last)) break;
            const char* one = form.far ? from + task * bytes : weights + thread * (1 << 17);
            Multiply(form, a, one, one + bytes, shape.steps, rows, out + task * 32, shape.features);
          }
          for (done[product]++; done[product] < threads;) _mm_pause();
          from += tasks * bytes;
        }
      }));
    }
  for (size_t at = 0; at < std::size(kForms); ++at) {
    auto& found = seconds[at];
    std::sort(found.begin(), found.end());
    const double scale = flops * kLayers / 1e9;
    std::printf("%s\t%.0f\t%.0f\n", kForms[at].name, scale / found.front(), scale / found[found.size() / 2]);
  }
}
