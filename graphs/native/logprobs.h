// Log-probabilities of one row: of a token, and of the most likely ones.

#pragma once

#include "sampling.h"

namespace xla_engine {

constexpr int64_t kMostLogprobs = 20;  // `MAX_LOGPROBS` of graphs.row_state.limits

// The natural logarithm of a normal number: one computation everywhere, where libm's follows the machine. Reduction to
// [sqrt(1/2), sqrt(2)) and the polynomial of fdlibm's e_log.c; within an ulp.
inline double Log(double x) {
  if (!(x > 0) || x > std::numeric_limits<double>::max()) return std::log(x);  // NaN and infinities are exact
  int64_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int64_t exponent = (bits - 0x3FE6A09E667F3BCD) >> 52;
  bits -= exponent * (int64_t{1} << 52);
  double f;
  std::memcpy(&f, &bits, sizeof f);
  f -= 1;
  const double s = f / (2 + f), z = s * s, w = z * z, half = 0.5 * f * f, n = static_cast<double>(exponent);
  const double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
  const double odd = 2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01);
  const double rest = z * (6.666666666666735130e-01 + w * odd) + even;
  return n * 6.93147180369123816490e-01 - ((half - (s * (half + rest) + n * 1.90821492927058770002e-10)) - f);
}

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

// Computes what `graphs.sampling.logprobs.logprobs` returns, for one of `stride` rows: the rank of the token, the ids of the most
// likely tokens and the bits of their log-probabilities. wanted: -1 nothing, 0 the token alone, n > 0 also the n most likely.
inline void Logprobs(const float* values, int64_t count, float peak, int32_t token, int32_t wanted, int64_t stride, float* logprob,
                     int32_t* top) {
  *logprob = 0;
  for (int64_t place = 0; place < 1 + 2 * kMostLogprobs; ++place) top[place * stride] = 0;
  if (wanted < 0) return;
  const double normaliser = Log(Normaliser(values, count, peak));
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
