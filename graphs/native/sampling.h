// One row's choice: the largest logit, the weights of what may be drawn, the cut of top-k and top-p, the draw.
//
// Weights are whole numbers, 2^30 for the most likely token, and are summed in 64 bits: no order of additions changes a sum.

#pragma once

#include "common.h"
#include "row_fields.h"

namespace xla_engine {

constexpr int64_t kGroup = 64;  // entries of the vocabulary whose weights are summed first
constexpr float kWhole = 1 << 30;
constexpr int32_t kNoChoice = -2;  // `NO_CHOICE` of graphs.row_state.rows

// Calls take(index, values index .. index + 16) for all of `values`; behind the last are -inf.
template <typename Take>
void EachVector(const float* values, int64_t count, const Take& take) {
  int64_t index = 0;
  for (; index + kVector <= count; index += kVector) take(index, Load(values + index));
  if (index == count) return;
  alignas(64) float rest[kVector];
  for (int64_t place = 0; place < kVector; ++place)
    rest[place] = index + place < count ? values[index + place] : -std::numeric_limits<float>::infinity();
  take(index, Load(rest));
}

// Whether a comparison holds in any place.
template <typename Mask>
bool Any(Mask mask) {
  return Reduce(mask, [](auto a, auto b) { return a | b; }) != 0;
}

// The largest logit of a row and its lowest index; NaN if any entry is NaN.
struct Peak {
  float value;
  int32_t index;
};

inline Peak PeakOf(const float* values, int64_t count) {
  constexpr int32_t kPlaces[kVector] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Vec best = All(-std::numeric_limits<float>::infinity());
  Words at = LoadAs<Words>(kPlaces), place = at;
  decltype(best != best) invalid = {};
  EachVector(values, count, [&](int64_t, Vec given) {
    const auto larger = given > best;
    best = Select(larger, given, best);
    at = Select(larger, place, at);
    invalid = invalid | (given != given);
    place = place + static_cast<int32_t>(kVector);
  });
  if (Any(invalid)) return {std::numeric_limits<float>::quiet_NaN(), 0};
  const float value = Largest(best);
  const Words last = Words{} + std::numeric_limits<int32_t>::max();
  return {value, Reduce(Select(best != value, last, at), [](auto a, auto b) { return Select(a > b, b, a); })};
}

// Probabilities relative to the most likely token's; zero below min-p.
inline Vec Likelihood(Vec logits, float peak, const RowFields& row) {
  const Vec found = Exp((logits - peak) / row.temperature);
  return Select(found < All(row.min_p), Vec{}, found);
}

// The weights of a row whose largest logit is `peak`, a number.
class Weights {
 public:
  void Weigh(const float* logits, int64_t count, float peak, const RowFields& row) {
    logits_ = logits;
    weights_.assign((count + kGroup - 1) / kGroup * kGroup, 0);
    EachVector(logits, count, [&](int64_t index, Vec given) {
      StoreAs(weights_.data() + index, Nearest(Likelihood(given, peak, row) * kWhole));
    });
    Sum();
    const bool limited = row.top_k > 0 && row.top_k < count;
    least = limited || row.top_p < 1 ? Least(limited ? row.top_k : 0, row.top_p) : -std::numeric_limits<float>::infinity();
    if (least > -std::numeric_limits<float>::infinity()) Restrict(count);
  }

  // The first entry at which the sum of weights passes `share` 2^-23 of the whole.
  int32_t Draw(uint32_t share) const {
    auto left = static_cast<uint64_t>(static_cast<unsigned __int128>(total_) * share >> 23);
    int64_t at = 0;
    for (; left >= sums_[at / kGroup]; at += kGroup) left -= sums_[at / kGroup];
    for (; left >= static_cast<uint64_t>(weights_[at]); ++at) left -= weights_[at];
    return static_cast<int32_t>(at);
  }

  float least;  // the smallest logit that top-k and top-p keep

 private:
  struct Entry {
    float logit;
    int32_t weight;
  };
  using Place = std::vector<Entry>::iterator;
  static constexpr int64_t kBins = 30 * 16 + 2;  // of weights: sixteen to an octave, one for none and one for the largest

  void Sum() {
    sums_.resize(weights_.size() / kGroup);
    total_ = 0;
    for (size_t group = 0; group < sums_.size(); ++group) {
      uint64_t sum = 0;
      for (int64_t place = 0; place < kGroup; ++place) sum += static_cast<uint32_t>(weights_[group * kGroup + place]);
      total_ += sums_[group] = sum;
    }
  }

  void Restrict(int64_t count) {
    EachVector(logits_, count, [&](int64_t index, Vec given) {
      int32_t* held = weights_.data() + index;
      StoreAs(held, Select(given < All(least), Words{}, LoadAs<Words>(held)));
    });
    Sum();
  }

  // The smallest logit that top-k (0: off) and top-p keep; entries that tie with it are kept. Entries are counted and weighed by
  // bins, and only those of the bin with the cut are examined one by one.
  float Least(int32_t top_k, float top_p) {
    FillBins();
    uint64_t whole = total_;
    float kth = -std::numeric_limits<float>::infinity();
    if (top_k) {
      auto left = static_cast<uint64_t>(top_k);
      int64_t bin = kBins - 1;
      for (whole = 0; bin > 0 && counts_[bin] < left; --bin) left -= counts_[bin], whole += masses_[bin];
      if (bin > 0) {
        Gather(bin);
        std::nth_element(entries_.begin(), entries_.begin() + (left - 1), entries_.end(), IsLarger);
        kth = entries_[left - 1].logit;
        for (const Entry& entry : entries_) whole += entry.logit >= kth ? entry.weight : 0;
      }
    }
    if (top_p >= 1) return kth;
    auto wanted = static_cast<uint64_t>(std::ceil(static_cast<double>(top_p) * static_cast<double>(whole)));
    int64_t bin = kBins - 1;
    for (; masses_[bin] < wanted; --bin) wanted -= masses_[bin];
    for (; masses_[bin] == 0; --bin) {  // a nucleus of nothing: the most likely entry
    }
    Gather(bin);
    return std::max(kth, Reaching(entries_.begin(), entries_.end(), wanted));
  }

  // The bins of weights: 0 for none, higher ones for larger weights.
  static Words BinOf(Words weights) {
    const Words bins = (Cast<Words>(Convert<Vec>(weights)) >> 19) - (127 * 16 - 1);
    return Select(bins > Words{}, bins, Words{});
  }

  void FillBins() {
    std::fill(counts_, counts_ + kBins, 0);
    std::fill(masses_, masses_ + kBins, 0);
    alignas(64) int32_t bins[kVector];
    for (size_t index = 0; index < weights_.size(); index += kVector) {
      if (sums_[index / kGroup] == 0) continue;
      StoreAs(bins, BinOf(LoadAs<Words>(weights_.data() + index)));
      for (int64_t place = 0; place < kVector; ++place) {
        ++counts_[bins[place]];
        masses_[bins[place]] += weights_[index + place];
      }
    }
  }

  // The entries of a bin, in the order of the vocabulary.
  void Gather(int64_t bin) {
    entries_.clear();
    alignas(64) int32_t bins[kVector];
    for (size_t index = 0; index < weights_.size(); index += kVector) {
      const Words found = BinOf(LoadAs<Words>(weights_.data() + index));
      if (Reduce(found != static_cast<int32_t>(bin), [](auto a, auto b) { return a & b; })) continue;  // in no place
      StoreAs(bins, found);
      for (int64_t place = 0; place < kVector; ++place)
        if (bins[place] == bin) entries_.push_back({logits_[index + place], weights_[index + place]});
    }
  }

  // The largest logit that weighs `wanted` or more together with all that are larger.
  static float Reaching(Place begin, Place end, uint64_t wanted) {
    while (end - begin > 1) {
      const Place middle = begin + (end - begin) / 2;
      std::nth_element(begin, middle, end, IsLarger);
      const uint64_t upper = Weight(begin, middle);
      if (upper >= wanted) {
        end = middle;
      } else {
        wanted -= upper;
        begin = middle;
      }
    }
    return begin->logit;
  }

  static uint64_t Weight(Place begin, Place end) {
    uint64_t sum = 0;
    for (; begin != end; ++begin) sum += begin->weight;
    return sum;
  }

  static bool IsLarger(const Entry& a, const Entry& b) { return a.logit > b.logit; }

  const float* logits_ = nullptr;
  std::vector<int32_t> weights_;  // by entry, zero behind the last
  std::vector<uint64_t> sums_;    // of groups
  uint64_t total_ = 0;
  uint32_t counts_[kBins];
  uint64_t masses_[kBins];
  std::vector<Entry> entries_;
};

// Threefry-2x32 of 20 rounds (Salmon et al. 2011), as jax.random has it.
inline void Threefry(const uint32_t key[2], uint32_t words[2]) {
  constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
  words[0] += keys[0];
  words[1] += keys[1];
  for (uint32_t round = 0; round < 5; ++round) {
    for (const int by : kRotations[round % 2]) {
      words[0] += words[1];
      words[1] = (words[1] << by | words[1] >> (32 - by)) ^ words[0];
    }
    words[0] += keys[(round + 1) % 3];
    words[1] += keys[(round + 2) % 3] + round + 1;
  }
}

// The number that jax.random.uniform(fold_in(seed, position)) gives, times 2^23.
inline uint32_t Uniform(const RowFields& row) {
  uint32_t key[2] = {0, static_cast<uint32_t>(row.position)}, words[2] = {0, 0};
  Threefry(row.seed, key);
  Threefry(key, words);
  return (words[0] ^ words[1]) >> 9;
}

}  // namespace xla_engine
