// Log-probabilities of one row: of a token, and of the most likely ones.

#pragma once

#include "sampling.h"

namespace xla_engine {

constexpr int64_t kMostLogprobs = 20;  // `MAX_LOGPROBS` of graphs.row_state.limits

// exp(values - peak), summed: sixteen at a time within a group, then group by group.
inline double Normaliser(const float* values, int64_t count, float peak) {
  double total = 0;
  for (int64_t first = 0; first < count; first += kGroup) {
    Vec sums = {};
    EachVector(values + first, std::min(kGroup, count - first), [&](int64_t, Vec given) { sums = sums + Exp(given - peak); });
    total += Total(sums);
  }
  return total;
}

// The most likely entries of a row, the lowest index first where they tie.
struct Best {
  float values[kMostLogprobs];
  int32_t indices[kMostLogprobs];
  int64_t held = 0;

  Best(const float* values, int64_t count) {
    for (int64_t first = 0; first < count; first += kVector) {
      const int64_t end = std::min(first + kVector, count);
      if (held == kMostLogprobs && end - first == kVector && !Any(Load(values + first) > All(this->values[held - 1]))) continue;
      for (int64_t index = first; index < end; ++index) Offer(values[index], static_cast<int32_t>(index));
    }
  }

 private:
  void Offer(float value, int32_t index) {
    if (held == kMostLogprobs && !(value > values[held - 1])) return;
    int64_t place = held < kMostLogprobs ? held++ : held - 1;
    for (; place > 0 && value > values[place - 1]; --place) {
      values[place] = values[place - 1];
      indices[place] = indices[place - 1];
    }
    values[place] = value;
    indices[place] = index;
  }
};

// Entries of a row that are larger than `value`.
inline int32_t CountLarger(const float* values, int64_t count, float value) {
  Words larger = {};
  EachVector(values, count, [&](int64_t, Vec given) { larger = larger + Select(given > All(value), Words{} + 1, Words{}); });
  return Reduce(larger, [](auto a, auto b) { return a + b; });
}

// What `graphs.sampling.logprobs.logprobs` gives for one of `stride` rows: rank of the token, ids of the most likely, bits of
// their log-probabilities. wanted: -1 none, 0 the token's alone, else also those of the most likely.
inline void Logprobs(const float* values, int64_t count, float peak, int32_t token, int32_t wanted, int64_t stride, float* logprob,
                     int32_t* top) {
  *logprob = 0;
  for (int64_t place = 0; place < 1 + 2 * kMostLogprobs; ++place) top[place * stride] = 0;
  if (wanted < 0) return;
  const double normaliser = std::log(Normaliser(values, count, peak));
  const auto relative = [&](float value) { return static_cast<float>(static_cast<double>(value) - peak - normaliser); };
  *logprob = relative(values[token]);
  if (wanted == 0) return;
  const Best best(values, count);
  top[0] = 1 + CountLarger(values, count, values[token]);
  for (int64_t place = 0; place < kMostLogprobs; ++place) {
    const float found = place < best.held ? relative(best.values[place]) : 0.0f;
    top[(1 + place) * stride] = place < best.held ? best.indices[place] : -1;
    std::memcpy(top + (1 + kMostLogprobs + place) * stride, &found, sizeof found);
  }
}

}  // namespace xla_engine
