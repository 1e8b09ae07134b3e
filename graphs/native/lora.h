// What low-rank adapters add to a product (Hu et al. 2021): row n gets B (A norm(x)) of its own adapter, and rows without one
// keep their bits.
//
// Every sum runs in one order, over K and then over the rank, whatever the number of rows: prefill, decode and verify steps
// give a row the same bits. Rows of one adapter read A together.

#pragma once

#include "operand.h"
#include "product.h"

namespace xla_engine {

class Adapters {
 public:
  using Ends = ffi::Span<const int64_t>;

  // x [N, K]; adapted [N]; norm [K] or [0]; adapter [N], read where adapted, 1 is the first; a [L, P, r, K]; b [L, F / 16, r, 16],
  // whose features up to ends[p] belong to part p; ranks [L, P], beyond which both are zero.
  Adapters(const ffi::AnyBuffer& x, const Flags& adapted, const Floats& norm, const Integers& adapter, const Halves& a,
           const Halves& b, const Integers& ranks, float eps, Ends ends)
      : source_(x, norm, adapted, eps),
        down_(reinterpret_cast<const BFloat16*>(a.untyped_data())),
        up_(reinterpret_cast<const BFloat16*>(b.untyped_data())),
        ranks_(ranks.typed_data()),
        parts_(a.dimensions()[1]),
        rank_(a.dimensions()[2]),
        features_(b.dimensions()[2]),
        ends_(ends),
        at_(source_.total, -1) {
    const int32_t* of = adapter.typed_data();
    auto& places = source_.places;
    std::stable_sort(places.begin(), places.begin() + source_.count, [&](int32_t m, int32_t n) { return of[m] < of[n]; });
    for (int64_t n = 0; n < source_.count; ++n) {
      at_[places[n]] = static_cast<int32_t>(n);
      const int64_t adapter = of[places[n]] - 1;
      if (!n || adapter != adapter_.back()) first_.push_back(n), adapter_.push_back(adapter);
      run_.push_back(adapter_.size() - 1);
    }
    first_.push_back(source_.count);
    thread_local Lines kept;
    rows_ = reinterpret_cast<float*>(kept.Bytes(source_.count * (source_.width + parts_ * rank_) * sizeof(float)));
    hidden_ = rows_ + source_.count * source_.width;
  }

  // Whether the widths are those that the loops below take.
  bool Fit() const {
    bool fit = source_.width % kVector == 0 && rank_ % kRanks == 0 && static_cast<int64_t>(ends_.size()) == parts_;
    for (const int64_t end : ends_) fit = fit && end % kVector == 0;
    return fit;
  }

  int64_t Rows() const { return source_.count; }
  int64_t Shrinks() const { return (first_.size() - 1) * (parts_ * rank_ / kRanks); }

  // Task n of Rows(): one row, normalised.
  void Read(int64_t n) {
    source_.Each(n, [&](int64_t k, Vec values) { Store(rows_ + n * source_.width + k, values); });
  }

  // A task of Shrinks(), once all rows are read: kRanks rows of one A times the rows that have it.
  void Shrink(int64_t task) {
    const int64_t blocks = parts_ * rank_ / kRanks, run = task / blocks, j = task % blocks * kRanks, width = source_.width;
    const BFloat16* weights = Down(task);
    if (!weights) return;
    if (const BFloat16* next = task + 1 < Shrinks() ? Down(task + 1) : nullptr)
      for (int64_t k = 0; k < kRanks * width; k += 32) __builtin_prefetch(next + k);
    Blocks(first_[run], first_[run + 1], [&](auto some, int64_t n) {
      ShrinkRows<some>(rows_ + n * width, width, weights, hidden_ + n * parts_ * rank_ + j, parts_ * rank_);
    });
  }

  // Puts the places of `count` rows, among them all that have an adapter, in the order in which `Add` takes them: those
  // without one first, then those of one adapter together.
  void Order(std::vector<int32_t>& places, int64_t count) {
    std::stable_sort(places.begin(), places.begin() + count, [&](int32_t m, int32_t n) { return at_[m] < at_[n]; });
    plain_ = count - source_.count;
  }

  // Once all of A is done: adds to sixteen features, from `feature` on, of the ordered rows n .. n + rows;
  // to[at[r] * stride] is the first of row n + r. What the features from `next` on need is fetched meanwhile.
  void Add(int64_t n, int64_t rows, int64_t feature, int64_t next, float* to, const int32_t* at, int64_t stride) const {
    const int64_t part = std::upper_bound(ends_.begin(), ends_.end(), feature) - ends_.begin();
    for (int64_t r = std::max<int64_t>(0, plain_ - n), end; r < rows; r = end) {
      const int64_t first = n + r - plain_, run = run_[first], used = RankOf(adapter_[run], part);
      end = std::min(rows, first_[run + 1] + plain_ - n);
      const BFloat16* weights = up_ + (adapter_[run] * features_ + feature) * rank_;
      const float* hidden = hidden_ + (first * parts_ + part) * rank_;
      const BFloat16* ahead = weights + (next - feature) * rank_;
      for (int64_t j = 0; next < features_ && j < used; j += 2) __builtin_prefetch(ahead + j * kVector);
      Blocks(0, used ? end - r : 0, [&](auto some, int64_t m) {
        ExpandRows<some>(hidden + m * parts_ * rank_, parts_ * rank_, used, weights, to, at + r + m, stride);
      });
    }
  }

 private:
  static constexpr int64_t kRanks = 4;                                            // of a task
  static constexpr int64_t kSums = (kRegister == 8 ? 8 : 16) * kRegister / kVector;  // of sixteen, that half of the registers hold

  static Vec Wide(const BFloat16* from) { return Cast<Vec>(Convert<Bits>(LoadAs<Shorts>(from)) << 16); }

  // The rows of A of a task of `Shrink`, or null where its ranks are beyond the adapter's.
  const BFloat16* Down(int64_t task) const {
    const int64_t blocks = parts_ * rank_ / kRanks, adapter = adapter_[task / blocks], j = task % blocks * kRanks;
    return j % rank_ < RankOf(adapter, j / rank_) ? down_ + (adapter * parts_ * rank_ + j) * source_.width : nullptr;
  }

  // Ranks of an adapter's part, as many as blocks of them hold.
  int64_t RankOf(int64_t adapter, int64_t part) const {
    return std::min(rank_, (ranks_[adapter * parts_ + part] + kRanks - 1) / kRanks * kRanks);
  }

  // Calls run(constant number of rows, n) for blocks of the rows n .. end.
  template <typename Run>
  static void Blocks(int64_t n, int64_t end, const Run& run) {
    for (; n + 4 <= end; n += 4) run(std::integral_constant<int, 4>(), n);
    for (; n + 2 <= end; n += 2) run(std::integral_constant<int, 2>(), n);
    for (; n < end; ++n) run(std::integral_constant<int, 1>(), n);
  }

  // Sums of `rows` rows x, `width` apart, by kRanks rows of A, to hidden[row * stride + rank].
  template <int rows>
  __attribute__((noinline)) static void ShrinkRows(const float* x, int64_t width, const BFloat16* a, float* hidden,
                                                   int64_t stride) {
    constexpr int ranks = std::clamp<int64_t>(kSums / rows, 1, kRanks);  // at a time
    for (int first = 0; first < kRanks; first += ranks) {
      Vec sums[rows][ranks] = {};
      for (int64_t k = 0; k < width; k += kVector) {
        for (int j = 0; j < ranks; ++j) {
          const Vec weights = Wide(a + (first + j) * width + k);
          for (int r = 0; r < rows; ++r) sums[r][j] = Fused(Load(x + r * width + k), weights, sums[r][j]);
        }
      }
      for (int r = 0; r < rows; ++r)
        for (int j = 0; j < ranks; ++j) hidden[r * stride + first + j] = Total(sums[r][j]);
    }
  }

  // Adds to sixteen features of `rows` rows their sums over the rank; `b` is packed [rank][16].
  template <int rows>
  __attribute__((noinline)) static void ExpandRows(const float* hidden, int64_t hidden_stride, int64_t rank, const BFloat16* b,
                                                   float* to, const int32_t* at, int64_t stride) {
    Vec sums[rows] = {};
    for (int64_t j = 0; j < rank; ++j) {
      const Vec weights = Wide(b + j * kVector);
      for (int r = 0; r < rows; ++r) sums[r] = Fused(weights, hidden[r * hidden_stride + j], sums[r]);
    }
    for (int r = 0; r < rows; ++r) Store(to + at[r] * stride, Load(to + at[r] * stride) + sums[r]);
  }

  Source source_;  // rows with an adapter, those of one adapter together
  const BFloat16 *down_, *up_;
  const int32_t* ranks_;
  int64_t parts_, rank_, features_;
  Ends ends_;
  std::vector<int32_t> at_;       // by place: which of the rows it is, or -1
  std::vector<int64_t> run_;      // of each row: which of the runs of rows that share an adapter
  std::vector<int64_t> adapter_;  // of each run, from 0
  std::vector<int64_t> first_;    // row of each run, and the number of rows
  int64_t plain_ = 0;             // rows without an adapter, which come first in `Add`
  float *rows_, *hidden_;         // [rows, K], [rows, P, r]
};

}  // namespace xla_engine
