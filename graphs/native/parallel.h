// The loop over threads: tasks in phases, shared out in runs of neighbours.
//
// Neighbouring tasks of a product write neighbouring parts of the same rows. If workers took tasks in turns, they would take
// cache lines from each other, including those that the hardware prefetches: a product of 256 rows took 1.4 times as long
// (findings/products.md).

#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include "buffers.h"
#include "common.h"

namespace xla_engine {

// Tasks body(0) .. body(count - 1), in any order and on any worker.
template <typename Body>
struct Phase {
  int64_t count;
  const Body& body;
};

template <typename Body>
Phase(int64_t, const Body&) -> Phase<Body>;

// Between two looks at what another thread will change.
inline void Pause(int64_t turn) {
  constexpr int64_t kPatience = 1000;  // pauses before the core is offered to others
  if (turn > kPatience) std::this_thread::yield();
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

// The tasks of a phase. Each worker starts with a run of its own; when that is done, it helps with the others'.
class Runs {
 public:
  Runs(int64_t workers, int64_t count) : workers_(workers), count_(count) {
    if (workers > kFew) many_ = std::vector<Place>(workers);
    next_ = workers > kFew ? many_.data() : few_;
    for (int64_t run = 0; run < workers; ++run) next_[run].task = Begin(run);
  }

  // The next task for `worker`, or the number of tasks if none is left.
  int64_t Take(int64_t worker) {
    for (int64_t ahead = 0; ahead < workers_; ++ahead) {
      const int64_t run = (worker + ahead) % workers_, end = Begin(run + 1);
      if (next_[run].task.load() >= end) continue;
      const int64_t task = next_[run].task.fetch_add(1);
      if (task < end) return task;
    }
    return count_;
  }

  void Done() { done_.fetch_add(1); }

  // Returns when every task is done.
  void Wait() const {
    for (int64_t turn = 0; done_.load() < count_; ++turn) Pause(turn);
  }

 private:
  static constexpr int64_t kFew = 4;  // workers that take no memory of their own
  struct alignas(64) Place {
    std::atomic<int64_t> task;
  };

  int64_t Begin(int64_t run) const { return count_ * run / workers_; }

  int64_t workers_, count_;
  Place few_[kFew];
  std::vector<Place> many_;
  Place* next_;
  alignas(64) std::atomic<int64_t> done_{0};
};

// Runs the phases one after the other on the pool and the calling thread, without denormals; returns when all tasks are done.
template <typename... Bodies>
void InPhases(ffi::ThreadPool& pool, const Phase<Bodies>&... phases) {
  const int64_t workers = std::max<int64_t>(1, std::min<int64_t>(pool.num_threads(), std::max({phases.count...})));
  // A helper that starts late finds no task left and does not touch a body, which may be gone by then.
  using Progress = std::array<Runs, sizeof...(phases)>;
  std::shared_ptr<Progress> progress(new Progress{Runs(workers, phases.count)...});
  auto work = [progress, phases...](int64_t worker) {
    const WithoutDenormals scope;
    Runs* runs = progress->data();
    const auto run = [&](const auto& phase) {
      for (int64_t task; (task = runs->Take(worker)) < phase.count; runs->Done()) phase.body(task);
      runs++->Wait();
    };
    (run(phases), ...);
  };
  for (int64_t helper = 1; helper < workers; ++helper) pool.Schedule([work, helper] { work(helper); });
  work(0);
}

// Runs body(0) .. body(count - 1) on the pool and the calling thread; returns when all are done.
template <typename Body>
void ParallelFor(ffi::ThreadPool& pool, int64_t count, const Body& body) {
  InPhases(pool, Phase{count, body});
}

}  // namespace xla_engine
