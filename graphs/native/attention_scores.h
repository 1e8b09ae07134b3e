// From scores to weights: scale, cap, softmax, one row at a time and in one order of operations per row. Sums are
// kept in sixteen lanes by position, so that neither the first key of a call nor its last changes a bit of a row.

#pragma once

#include "common.h"

namespace xla_engine {

constexpr int64_t kQueries = 16;  // query rows attended to together: the rows of a tile
constexpr float kLowest = -std::numeric_limits<float>::infinity();

// How scores are transformed.
struct ScoreForm {
  float scale;
  float softcap;  // scores are softcap * tanh(score / softcap); 0: as they are
};

// The keys that each row of a kernel's call sees, [first, last), counted from the first key that any of its rows sees.
struct Seen {
  int64_t rows;
  int64_t first[kQueries], last[kQueries];
  float sink[kQueries];  // a logit without a value, which takes its share of the weights; kLowest: none
  const float* added[kQueries];  // to the scores of all keys, if any is
};

// tanh from one exponential. The absolute error is 1e-7, which is what a capped score needs.
inline Vec Tanh(Vec x) {
  const Vec decay = Exp(Select(x < 0.0f, x, -x) * 2.0f);
  const Vec size = (1.0f - decay) / (1.0f + decay);
  return Select(x < 0.0f, -size, size);
}

// Softmax numerators of `scores[first, last)` in place, zero elsewhere up to `end`; returns their sum and the sink's.
template <bool kCapped, bool kAdded>
float Softmax(float* scores, int64_t first, int64_t last, int64_t end, ScoreForm form, float sink, const float* added) {
  const int64_t begin = first / kVector * kVector;
  const int32_t lane[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Words lanes = LoadAs<Words>(lane);
  const float inward = kCapped ? form.scale / form.softcap : form.scale;
  Vec peaks = All(kLowest);
  for (int64_t at = begin; at < last; at += kVector) {
    Vec score = Load(scores + at) * inward;
    if constexpr (kCapped) score = Tanh(score) * form.softcap;
    if constexpr (kAdded) score += Load(added + at);
    if (at < first || at + kVector > last) {
      const Words place = lanes + static_cast<int32_t>(at);
      score = Select((place < static_cast<int32_t>(first)) | (place >= static_cast<int32_t>(last)), All(kLowest), score);
    }
    Store(scores + at, score);
    peaks = Select(score > peaks, score, peaks);
  }
  float peak = Largest(peaks);
  if (sink > peak) peak = sink;
  Vec sums = {};
  int64_t at = 0;
  for (; at < begin; at += kVector) Store(scores + at, Vec{});
  for (; at < last; at += kVector) {
    const Vec weight = Exp(Load(scores + at) - peak);
    Store(scores + at, weight);
    sums += weight;
  }
  for (; at < end; at += kVector) Store(scores + at, Vec{});
  const float sum = Total(sums);
  return sink == kLowest ? sum : sum + First(Exp(All(sink - peak)));
}

inline float Softmax(float* scores, const Seen& seen, int64_t row, int64_t end, ScoreForm form) {
  const auto softmax = [&](auto capped, auto added) {
    return Softmax<capped, added>(scores, seen.first[row], seen.last[row], end, form, seen.sink[row], seen.added[row]);
  };
  if (seen.added[row]) return form.softcap > 0 ? softmax(std::true_type(), std::true_type()) : softmax(std::false_type(), std::true_type());
  return form.softcap > 0 ? softmax(std::true_type(), std::false_type()) : softmax(std::false_type(), std::false_type());
}

}  // namespace xla_engine
