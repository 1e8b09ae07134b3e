// Kernels of graphs/native against sums in double precision, without XLA: also for machines that are emulated.
//
// Prints what failed and exits with 1; prints "ok" otherwise. `native_kernels time` and `attention` print how fast they are,
// `native_kernels bits` hashes of what kernels make of fixed numbers: the same on all machines, but for sums of bf16 ("products" and
// "small") where pairs are summed by bfdot.

#include <chrono>
#include <cstdio>
#include <numeric>
#include <random>
#include <tuple>

#include "attention_bytes.h"
#include "attention_cache.h"
#include "attention_heads.h"
#include "attention_scores.h"
#include "attention_vectors.h"
#include "coded_dots.h"
#include "logprobs.h"

using namespace xla_engine;

namespace {

int failures = 0;

void Check(bool holds, const char* what, int64_t number) {
  if (!holds && failures++ < 10) std::printf("failed: %s (%lld)\n", what, static_cast<long long>(number));
}

std::mt19937 generator(1);

template <typename T>
std::vector<T> Drawn(int64_t count) {
  std::vector<T> drawn(count);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> byte(-127, 127);
  for (T& each : drawn) {
    if constexpr (std::is_same_v<T, int8_t>) {
      each = static_cast<int8_t>(byte(generator));
    } else {
      each = Storage<T>::Round(normal(generator));
    }
  }
  return drawn;
}

double Wide(BFloat16 value) { return Storage<BFloat16>::Widen(value); }
double Wide(float value) { return value; }
double Wide(int8_t value) { return value; }

// Rows side by side, in place of what comes from the network.
template <typename T>
struct Plain {
  const T* rows;
  int64_t width;
  template <typename Place>
  void Write(int64_t n, const Place& place) const {
    std::memcpy(place(0), rows + n * width, width * sizeof(T));
  }
};

// Sums [count][32] of rows from `first` on.
template <typename T>
std::vector<float> Multiplied(Plain<T> operand, int64_t first, int64_t count, const char* packed) {
  using Kernel = DotKernel<>;
  const int64_t width = operand.width, group = Kernel::GroupRows(count), bytes = Kernel::GroupBytes(width);
  const int64_t block = width * static_cast<int64_t>(sizeof(T)) * 16;
  std::vector<float> out(count * 32);
  Lines lines;
  char* blocks = lines.Bytes((count + group - 1) / group * bytes);
  for (int64_t n = 0; n < count; n += group)
    Kernel::Fill(operand, first + n, std::min(group, count - n), blocks + n / group * bytes);
  Kernel::Multiply(blocks, count, width, {packed, packed + block}, {packed, packed + block},
                   [&](int64_t n, int64_t rows, const auto& sums) {
                     for (int64_t r = 0; r < rows; ++r) {
                       std::copy_n(sums.one + r * 16, 16, out.data() + (n + r) * 32);
                       std::copy_n(sums.other + r * 16, 16, out.data() + (n + r) * 32 + 16);
                     }
                   });
  return out;
}

template <typename T>
void CheckProducts(int64_t width) {
  constexpr int64_t kRows = 30;  // up to three blocks of rows or more, of every size
  const auto weights = Drawn<T>(32 * width), rows = Drawn<T>(kRows * width);
  const int64_t words = width * sizeof(T) / 4;
  Lines lines;
  char* packed = lines.Bytes(2 * words * 64);
  const auto* from = reinterpret_cast<const Word*>(weights.data());
  for (int64_t half = 0; half < 2; ++half) Pack(from + half * 16 * words, words, 16, words, packed + half * words * 64);
  for (int64_t f = 0; f < 32; ++f)
    for (int64_t w = 0; w < words; ++w)
      Check(LoadAs<Word>(packed + ((f / 16 * words + w) * 16 + f % 16) * 4) == from[f * words + w], "a packed word", f * words + w);
  const Plain<T> operand = {rows.data(), width};
  const auto whole = Multiplied(operand, 0, kRows, packed);
  for (int64_t n = 0; n < kRows; ++n) {
    for (int64_t f = 0; f < 32; ++f) {
      double sum = 0, size = 0;
      for (int64_t k = 0; k < width; ++k) {
        const double product = Wide(rows[n * width + k]) * Wide(weights[f * width + k]);
        sum += product, size += std::abs(product);
      }
#ifndef XLA_ENGINE_BFDOT
      if constexpr (std::is_same_v<T, BFloat16>) {  // one fused multiply-add for each, the second of a pair first
        float fused = 0;
        for (int64_t k = 0; k < width; ++k) {
          const float x = static_cast<float>(Wide(rows[n * width + (k ^ 1)]));
          fused = std::fma(x, static_cast<float>(Wide(weights[f * width + (k ^ 1)])), fused);
        }
        Check(!std::memcmp(&fused, &whole[n * 32 + f], sizeof fused), "the bits of a sum", n * 32 + f);
      }
#endif
      const double error = std::abs(static_cast<double>(whole[n * 32 + f]) - sum);
      Check(error <= size * 1e-6, "a sum", n * 32 + f);
    }
  }
  for (int64_t count = 1; count <= kRows; ++count) {
    const int64_t first = (kRows - count) / 2;
    const auto some = Multiplied(operand, first, count, packed);
    Check(!std::memcmp(some.data(), whole.data() + first * 32, some.size() * 4), "bits of a row among", count);
  }
}

// Rows of floats, and 32 features in eight bits.
struct Eights {
  int64_t width;
  std::vector<float> rows;
  std::vector<int8_t> weights;   // [2][width / 4][16][4]
  std::vector<BFloat16> scales;  // [2][width / kScaleGroup][16]

  template <typename Draw>
  Eights(int64_t count, int64_t columns, const Draw& draw)
      : width(columns), rows(draw(count * columns)), weights(32 * columns), scales(32 * columns / kScaleGroup) {
    for (int8_t& each : weights) each = static_cast<int8_t>(static_cast<int32_t>(generator() % 255) - 127);
    for (BFloat16& each : scales) each = BFloat16{static_cast<uint16_t>(0x3C00 + generator() % 512)};  // 0.0078 to 0.13
  }

  template <typename Take>
  void Each(int64_t n, const Take& take) const {
    for (int64_t k = 0; k < width; k += kVector) take(k, Load(rows.data() + n * width + k));
  }

  Stream Packed() const {
    const auto* at = reinterpret_cast<const char*>(weights.data());
    const BFloat16* of = scales.data();
    return {at, at + 16 * width, of, of + 16 * width / kScaleGroup};
  }

  std::vector<float> Multiplied(int64_t first, int64_t count) const {
    const int64_t group = GroupKernel::GroupRows(count), bytes = GroupKernel::GroupBytes(width);
    std::vector<float> out(count * 32);
    Lines lines;
    char* blocks = lines.Bytes((count + group - 1) / group * bytes);
    for (int64_t n = 0; n < count; n += group)
      GroupKernel::Fill(*this, first + n, std::min(group, count - n), blocks + n / group * bytes);
    GroupKernel::Multiply(blocks, count, width, Packed(), Packed(), [&](int64_t n, int64_t rows, const auto& sums) {
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(sums.one + r * 16, 16, out.data() + (n + r) * 32);
        std::copy_n(sums.other + r * 16, 16, out.data() + (n + r) * 32 + 16);
      }
    });
    return out;
  }

  // The same by the definition (`graphs.ops.int8`), to the bit.
  float Sum(int64_t n, int64_t feature) const {
    float sum = 0;
    for (int64_t g = 0; g < width / kScaleGroup; ++g) {
      std::vector<float> row(rows.begin() + n * width + g * kScaleGroup, rows.begin() + n * width + (g + 1) * kScaleGroup);
      for (int64_t distance : {32, 16, 8, 4, 2, 1}) {
        for (int64_t k = 0; k < kScaleGroup; ++k) {
          if (k & distance) continue;
          const float low = row[k], high = row[k + distance];
          row[k] = low + high, row[k + distance] = low - high;
        }
      }
      for (float& each : row) each *= 0.125f;
      float scale = 1e-30f;
      for (int64_t k = 0; k < kScaleGroup; ++k) scale = std::max(scale, std::abs(row[k]));
      scale *= 1.0f / 127.0f;
      uint32_t bits;
      std::memcpy(&bits, &scale, sizeof bits);
      bits &= 0xFFFFFF00;
      std::memcpy(&scale, &bits, sizeof scale);
      const float inverse = 1.0f / scale;
      int32_t total = 0;
      for (int64_t k = 0; k < kScaleGroup; ++k) {
        const int64_t at = g * kScaleGroup + k;
        total += static_cast<int32_t>(std::nearbyint(row[k] * inverse)) *
                 weights[feature / 16 * 16 * width + (at / 4 * 16 + feature % 16) * 4 + at % 4];
      }
      const float step = Storage<BFloat16>::Widen(scales[(feature / 16 * (width / kScaleGroup) + g) * 16 + feature % 16]);
      sum = std::fma(static_cast<float>(total) * scale, step, sum);
    }
    return sum;
  }
};

void CheckGroups(int64_t width) {
  constexpr int64_t kRows = 30;  // up to three blocks of rows or more, of every size
  Eights eights(kRows, width, [](int64_t count) { return Drawn<float>(count); });
  for (int64_t k = 0; k < kScaleGroup; ++k) eights.rows[k] = k % 2 ? 1e-31f : -0.0f, eights.rows[width + k] *= 1e6f;
  const auto whole = eights.Multiplied(0, kRows);
  for (int64_t n = 0; n < kRows; ++n) {
    for (int64_t f = 0; f < 32; ++f) {
      const float expected = eights.Sum(n, f);
      Check(expected == whole[n * 32 + f], "the bits of a sum of groups", n * 32 + f);
    }
  }
  for (int64_t count = 1; count <= kRows; ++count) {
    const int64_t first = (kRows - count) / 2;
    const auto some = eights.Multiplied(first, count);
    Check(!std::memcmp(some.data(), whole.data() + first * 32, some.size() * 4), "bits of a row in eight bits among", count);
  }
  eights.rows[kScaleGroup - 1] = std::nanf("");
  const auto spoilt = eights.Multiplied(0, 2);
  for (int64_t f = 0; f < 32; ++f) Check(spoilt[f] != spoilt[f] && spoilt[32 + f] == whole[32 + f], "NaN of a row", f);
}

void CheckSaturation() {  // the largest numbers, all of one sign
  constexpr int64_t kWidth = 4096;
  for (float sign : {1.0f, -1.0f}) {
    Eights eights(2, kWidth, [&](int64_t count) { return std::vector<float>(count, sign); });
    std::fill(eights.weights.begin(), eights.weights.end(), 127);
    const auto sums = eights.Multiplied(0, 2);
    for (int64_t f = 0; f < 32; ++f) Check(sums[f] == eights.Sum(0, f), "the largest sum", f);
  }
}

void CheckExponential() {
  for (float x = -90.0f; x <= 0.0f; x += 0.01f) {
    const float found = First(Exp(All(x)));
    Check(std::abs(found - std::exp(static_cast<double>(x))) <= (x < -87.0f ? 1e-37 : 1e-6 * found), "exp", static_cast<int64_t>(x));
  }
  const float nan = First(Exp(All(std::nanf(""))));
  Check(nan != nan, "exp of NaN", 0);
}

// Queries of one head over a cache of keys; what nobody wrote there is no number, or has no number for its scale.
template <typename T>
struct Attention {
  using Taken = std::conditional_t<std::is_same_v<T, int8_t>, float, T>;
  int64_t stride;
  std::vector<Taken> queries;
  std::vector<T> key_store, value_store;
  int32_t table = 0;
  Context<T> context;
  Seen seen = {};
  std::vector<float> scores, out, sums;

  Attention(int64_t head_dim, const std::vector<Taken>& keys, const std::vector<Taken>& values, std::vector<Taken> asked)
      : queries(std::move(asked)), out(kQueries * kMaxWidth), sums(kQueries) {
    const int64_t count = keys.size() / head_dim, page = (count + 63) / 64 * 64, kept = page * (head_dim + Head<T>::kScales);
    stride = page + 16;
    scores.resize(kQueries * stride);
    key_store.resize(kept + 64), value_store.resize(kept + 64);
    for (auto* store : {&key_store, &value_store}) std::memset(static_cast<void*>(store->data()), 0xFF, store->size() * sizeof(T));  // NaN
    const Head<T> head = {key_store.data(), value_store.data(), &table, 1, page, page, head_dim};
    for (int64_t t = 0; t < count; ++t) {
      const Taken *key = keys.data() + t * head_dim, *value = values.data() + t * head_dim;
      if constexpr (std::is_same_v<T, int8_t>) {
        std::vector<float> scratch(key, key + head_dim), other(value, value + head_dim);
        WriteBytes(head, t, scratch.data(), other.data());
      } else {
        head.Write(t, key, value, true);
      }
    }
    context.List(head, 0, count);
    seen.rows = queries.size() / head_dim;
    for (int64_t r = 0; r < seen.rows; ++r) seen.last[r] = count - seen.rows + 1 + r, seen.sink[r] = kLowest;
  }

  void Run() { AttendVectors(context, queries.data(), seen, {0.25f, 0.0f}, scores.data(), stride, out.data(), sums.data()); }
};

// Queries of one head over `count` keys, against the definition.
template <typename T>
void CheckAttention(int64_t head_dim, int64_t count, int64_t rows) {
  using Taken = typename Attention<T>::Taken;
  const auto keys = Drawn<Taken>(count * head_dim), values = Drawn<Taken>(count * head_dim), queries = Drawn<Taken>(rows * head_dim);
  Attention<T> attention(head_dim, keys, values, queries);
  attention.Run();
  const auto& [out, sums, seen] = std::tie(attention.out, attention.sums, attention.seen);
  for (int64_t r = 0; r < rows; ++r) {
    std::vector<double> weight(seen.last[r]);
    double total = 0;
    for (int64_t t = 0; t < seen.last[r]; ++t) {
      double score = 0;
      for (int64_t d = 0; d < head_dim; ++d) score += Wide(queries[r * head_dim + d]) * Wide(keys[t * head_dim + d]);
      total += weight[t] = std::exp(0.25 * score);
    }
    for (int64_t d = 0; d < head_dim; ++d) {
      double expected = 0;
      for (int64_t t = 0; t < seen.last[r]; ++t) expected += weight[t] / total * Wide(values[t * head_dim + d]);
      // Weights are rounded to the type of the values, and what has eight bits is.
      const double allowed = std::is_same_v<T, float> ? 1e-4 : std::is_same_v<T, BFloat16> ? 1e-2 : 1e-1;
      Check(std::abs(out[r * head_dim + d] / sums[r] - expected) < allowed, "attention", r * head_dim + d);
    }
  }
}

RowFields Row(float temperature, int32_t top_k, float top_p, float min_p, uint32_t high, uint32_t low, int32_t position) {
  RowFields row = {};
  row.temperature = temperature, row.top_k = top_k, row.top_p = top_p, row.min_p = min_p;
  row.seed[0] = high, row.seed[1] = low, row.position = position;
  return row;
}

// What may be drawn, what is drawn and its log-probability, against a sort and sums in double precision.
void CheckSampling(int64_t count, RowFields params) {
  auto logits = Drawn<float>(count);
  for (float& logit : logits) logit = std::round(logit * 64) / 16;  // some alike
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  const Peak peak = PeakOf(logits.data(), count);
  Check(peak.index == order[0] && peak.value == logits[order[0]], "the largest logit", count);
  const auto weight = [&](int64_t index) {
    const double found = std::exp((static_cast<double>(logits[index]) - peak.value) / params.temperature);
    return found < params.min_p ? 0.0 : found;
  };
  const int64_t most = params.top_k ? std::min<int64_t>(params.top_k, count) : count;
  double whole = 0, sum = 0;
  int64_t last = 0;
  const float kth = logits[order[most - 1]];
  for (int64_t index = 0; index < count; ++index) whole += logits[index] >= kth ? weight(index) : 0;
  while (last + 1 < most && params.top_p < 1 && sum + weight(order[last]) < whole * params.top_p) sum += weight(order[last++]);
  Weights weights;
  weights.Weigh(logits.data(), count, peak.value, params);
  const float least = params.top_p < 1 ? logits[order[last]] : most < count ? kth : weights.least;
  for (int64_t index = 0; index < count; ++index)
    Check(weight(index) == 0 || (logits[index] >= least) == (logits[index] >= weights.least), "what is kept", index);
  const auto kept = [&](int64_t index) { return logits[index] >= least ? weight(index) : 0.0; };
  double total = 0;
  for (int64_t index = 0; index < count; ++index) total += kept(index);
  for (uint32_t share : {0u, 1u, 1u << 20, 1u << 22, (1u << 23) - 1}) {
    const int32_t drawn = weights.Draw(share);
    double before = 0;
    for (int64_t index = 0; index < drawn; ++index) before += kept(index);
    const double target = static_cast<double>(share) / (1 << 23) * total, allowed = 1e-6 * total;
    Check(kept(drawn) > 0 && before <= target + allowed && before + kept(drawn) >= target - allowed, "a draw", share);
  }
  double exponentials = 0;
  for (int64_t index = 0; index < count; ++index) exponentials += std::exp(static_cast<double>(logits[index]) - peak.value);
  float logprob;
  int32_t top[1 + 2 * kMostLogprobs];
  const int32_t token = order[count / 3];
  Logprobs(logits.data(), count, peak.value, token, 1, 1, &logprob, top);
  Check(std::abs(logprob - (logits[token] - peak.value - std::log(exponentials))) < 3e-6, "a log-probability", count);
  const auto larger = std::count_if(logits.begin(), logits.end(), [&](float logit) { return logit > logits[token]; });
  Check(top[0] == 1 + larger, "a rank", top[0]);
  for (int64_t place = 0; place < kMostLogprobs; ++place)
    Check(top[1 + place] == (place < count ? order[place] : -1), "one of the most likely", place);
}

// Our logarithm is within an ulp of libm's, wherever sums of exponentials can be.
void CheckLog() {
  for (double x = 1e-3; x < 1e7; x *= 1.0009765625) {
    const double wanted = std::log(x);
    Check(std::abs(Log(x) - wanted) <= 2.3e-16 * std::max(std::abs(wanted), 1e-3), "a logarithm", static_cast<int64_t>(x));
  }
  Check(Log(1.0) == 0 && std::isnan(Log(std::nan(""))) && Log(HUGE_VAL) == HUGE_VAL, "a special logarithm", 0);
}

// Multiples of 2^-16 between -1 and 1, and rounded to T, by integers alone: the same on all machines.
template <typename T>
std::vector<T> Fixed(int64_t count) {
  std::vector<T> drawn(count);
  for (T& each : drawn) each = Storage<T>::Round(static_cast<float>(static_cast<int32_t>(generator() >> 15) - 65536) / 65536.0f);
  return drawn;
}

// FNV-1a of the bits of numbers.
struct Hash {
  uint64_t value = 14695981039346656037u;
  template <typename T>
  void Add(const T* from, int64_t count) {
    for (int64_t at = 0; at < count * static_cast<int64_t>(sizeof(T)); ++at)
      value = (value ^ reinterpret_cast<const uint8_t*>(from)[at]) * 1099511628211u;
  }
  void Print(const char* name) const { std::printf("%s %016llx\n", name, static_cast<unsigned long long>(value)); }
};

// Rows of floats, and tasks of 32 features of any bytes in the order "fours" (`coded_dots.h`) or "pairs", with finite scales.
struct CodedRows {
  int64_t width;
  std::vector<float> rows;
  Lines lines;
  const char* array;
  CodedWeights weights;

  CodedRows(const CodedKind& kind, int64_t count, int64_t columns, int64_t tasks, bool fours = true)
      : width(columns), rows(Fixed<float>(count * columns)), weights(nullptr, 0) {
    const int64_t block = kind.Bytes(width), size = 64 + 2 * tasks * block, codes = block - kind.ScaleBytes(width);
    char* bytes = lines.Bytes(size);
    for (int64_t at = 0; at < size; ++at) bytes[at] = static_cast<char>(generator() >> 24);
    for (int64_t at = 64; at < size; at += block)
      for (int64_t scale = codes + !kind.power; scale < block; scale += 1 + !kind.power)
        bytes[at + scale] = static_cast<char>(kind.power ? 0x70 + (bytes[at + scale] & 15) : bytes[at + scale] & 0x3F);
    const int32_t header[16] = {static_cast<int32_t>(width), static_cast<int32_t>(32 * tasks), 1, fours, kind.number,
                                static_cast<int32_t>(2 * tasks)};
    std::memcpy(bytes, header, sizeof header);
    array = bytes;
    weights = CodedWeights(bytes, size);
    Check(weights.Fit(), "an array of coded weights", kind.number);
  }

  template <typename Take>
  void Each(int64_t n, const Take& take) const {
    for (int64_t k = 0; k < width; k += kVector) take(k, Load(rows.data() + n * width + k));
  }

  template <typename Take>
  void Multiply(int64_t first, int64_t count, int64_t tasks, const Take& take) const {
    const int64_t group = FoursKernel::GroupRows(count), bytes = FoursKernel::GroupBytes(width);
    thread_local Lines kept;
    char* blocks = kept.Bytes((count + group - 1) / group * bytes);
    for (int64_t n = 0; n < count; n += group)
      FoursKernel::Fill(*this, first + n, std::min(group, count - n), blocks + n / group * bytes);
    for (int64_t task = 0; task < tasks; ++task)
      FoursKernel::Multiply(blocks, count, width, {&weights, 2 * task, 2 * task + 1}, take);
  }

  // Sums [count][32].
  std::vector<float> Multiplied(int64_t first, int64_t count) const {
    std::vector<float> out(count * 32);
    Multiply(first, count, 1, [&](int64_t n, int64_t some, const auto& sums) {
      for (int64_t r = 0; r < some; ++r) {
        std::copy_n(sums.one + r * 16, 16, out.data() + (n + r) * 32);
        std::copy_n(sums.other + r * 16, 16, out.data() + (n + r) * 32 + 16);
      }
    });
    return out;
  }
};

// Against sums in double precision of what the weights are in bf16.
void CheckCoded(const CodedKind& kind) {
  constexpr int64_t kRows = 30, kWidth = 512;
  const CodedRows coded(kind, kRows, kWidth, 1);
  const auto whole = coded.Multiplied(0, kRows);
  for (int64_t f = 0; f < 32; ++f) {
    float row[kWidth];
    FoursKernel::Row(coded.weights, f, row);
    for (int64_t n = 0; n < kRows; ++n) {
      double sum = 0, squares = 0;
      for (int64_t k = 0; k < kWidth; ++k) {
        const double product = static_cast<double>(coded.rows[n * kWidth + k]) * static_cast<double>(row[k]);
        sum += product, squares += product * product;
      }
      Check(std::abs(static_cast<double>(whole[n * 32 + f]) - sum) <= 0.1 * std::sqrt(squares), "a sum of codes", kind.number);
    }
  }
  for (int64_t count = 1; count <= kRows; ++count) {
    const int64_t first = (kRows - count) / 2;
    const auto some = coded.Multiplied(first, count);
    Check(!std::memcmp(some.data(), whole.data() + first * 32, some.size() * 4), "bits of a row times codes among", count);
  }
}

template <typename T>
void HashAttention(Hash& hash, int64_t head_dim, int64_t count, int64_t rows) {
  using Taken = typename Attention<T>::Taken;
  const auto keys = Fixed<Taken>(count * head_dim), values = Fixed<Taken>(count * head_dim);
  Attention<T> attention(head_dim, keys, values, Fixed<Taken>(rows * head_dim));
  attention.Run();
  hash.Add(attention.out.data(), rows * head_dim);
  hash.Add(attention.sums.data(), rows);
}

// Heads normed and rotated, by vectors and by what is left of them.
void HashHeads(Hash& hash, int64_t head_dim) {
  const auto halves = Fixed<BFloat16>(6 * head_dim);
  std::vector<float> numbers, out(kMaxWidth);
  for (const BFloat16& half : halves) numbers.push_back(Storage<BFloat16>::Widen(half) * 1.1f);
  const float* rope = numbers.data() + 3 * head_dim;
  const Projection projection = {numbers.data(), rope, 3 * head_dim, head_dim, (head_dim + 15) / 16 * 16, 1e-5f};
  for (const float* norm : {static_cast<const float*>(nullptr), rope + head_dim}) {
    for (int64_t head = 0; head < 3; ++head) {
      projection.Rotated(0, head, norm, out.data());
      hash.Add(out.data(), head_dim);
    }
  }
}

void HashSampling(Hash& hash, int64_t count, RowFields params) {
  auto logits = Fixed<float>(count);
  for (float& logit : logits) logit *= 9.0f;
  const Peak peak = PeakOf(logits.data(), count);
  Weights weights;
  weights.Weigh(logits.data(), count, peak.value, params);
  for (params.position = 0; params.position < 50; ++params.position) {
    const int32_t token = weights.Draw(Uniform(params));
    float logprob;
    int32_t top[1 + 2 * kMostLogprobs];
    Logprobs(logits.data(), count, peak.value, token, 1, 1, &logprob, top);
    hash.Add(&token, 1), hash.Add(&logprob, 1), hash.Add(top, 1 + 2 * kMostLogprobs);
  }
}

// Numbers around the least that is no denormal: products and sums of them, and numbers that are denormals themselves.
void HashSmall(Hash& hash) {
  const WithoutDenormals scope;
  for (const auto& exponents : {std::pair{-60, -60}, std::pair{-124, 0}, std::pair{0, -124}}) {
    const int left = exponents.first, right = exponents.second;  // no binding: clang before 16 captures none
    const auto small = [](int64_t count, int exponent) {
      auto drawn = Fixed<float>(count);
      for (float& each : drawn) each = std::ldexp(each, exponent);
      return drawn;
    };
    const auto halves = [&](int64_t count, int exponent) {
      std::vector<BFloat16> rounded;
      for (float each : small(count, exponent)) rounded.push_back(Storage<BFloat16>::Round(each));
      return rounded;
    };
    constexpr int64_t kWidth = 64;
    const auto weights = halves(32 * kWidth, left), rows = halves(7 * kWidth, right);
    const auto sums = Multiplied(Plain<BFloat16>{rows.data(), kWidth}, 0, 7, reinterpret_cast<const char*>(weights.data()));
    hash.Add(sums.data(), sums.size());
    const auto keys = halves(17 * kWidth, left), values = halves(17 * kWidth, right);
    Attention<BFloat16> attention(kWidth, keys, values, halves(kWidth, right));
    attention.Run();
    hash.Add(attention.out.data(), kWidth);
    const auto eights = Eights(7, kWidth, [&](int64_t count) { return small(count, left); }).Multiplied(0, 7);
    hash.Add(eights.data(), eights.size());
  }
}

void PrintBits() {
  Hash products, rest, groups, bytes;
  for (int64_t width : {16, 576}) {
    const auto weights = Fixed<BFloat16>(32 * width), rows = Fixed<BFloat16>(7 * width);  // weights packed as they are
    const Plain<BFloat16> operand = {rows.data(), width};
    const auto sums = Multiplied(operand, 0, 7, reinterpret_cast<const char*>(weights.data()));
    products.Add(sums.data(), sums.size());
  }
  for (float x = -90.0f; x <= 0.0f; x += 0.0625f) {
    const float found = First(Exp(All(x)));
    rest.Add(&found, 1);
  }
  Hash logs;
  for (double x = 1; x < 1e7; x *= 1.0009765625) {
    const double found = Log(x);
    logs.Add(&found, 1);
  }
  for (int64_t keys : {1, 17, 200}) HashAttention<BFloat16>(products, 64, keys, 1), HashAttention<float>(rest, 48, keys, 1);
  HashAttention<BFloat16>(products, 96, 200, 16), HashAttention<float>(rest, 64, 200, 7);
  for (int64_t head_dim : {32, 64, 80, 128}) HashHeads(rest, head_dim);
  Hash sampler;
  for (int64_t count : {5, 300, 4097})
    for (int32_t top_k : {0, 40})
      for (float top_p : {1.0f, 0.9f}) HashSampling(sampler, count, Row(0.75f, top_k, top_p, 0.001f, 7, 11, 0));
  for (int64_t width : {64, 576}) {
    Eights eights(7, width, [](int64_t count) { return Fixed<float>(count); });
    const auto sums = eights.Multiplied(0, 7);
    groups.Add(sums.data(), sums.size());
  }
  Hash small;
  HashSmall(small);
  Hash coded;
  generator.seed(2);
  for (const CodedKind& kind : kCodedKinds) {
    const auto sums = CodedRows(kind, 7, 512, 1).Multiplied(0, 7);
    coded.Add(sums.data(), sums.size());
    const CodedRows pairs(kind, 0, 512, 1, false);
    std::vector<char> values(2 * 16 * 512);
    for (int64_t block : {0, 1}) {
      pairs.weights.Unpack(block, values.data());
      coded.Add(values.data(), values.size());
    }
  }
  generator.seed(3);
  for (int64_t keys : {1, 17, 200}) HashAttention<int8_t>(bytes, 64, keys, 1);
  HashAttention<int8_t>(bytes, 48, 90, 7), HashAttention<int8_t>(bytes, 128, 200, 16);
  products.Print("products");
  small.Print("small");
  bytes.Print("bytes");
  rest.Print("rest");
  sampler.Print("sampler");
  groups.Print("groups");
  logs.Print("logs");
  coded.Print("coded");
}

// Microseconds of one head over `count` keys, one thread, keys and values in the caches.
template <typename T>
void TimeAttention(const char* name, int64_t head_dim, int64_t count, int64_t rows) {
  using Taken = typename Attention<T>::Taken;
  Attention<T> attention(head_dim, Drawn<Taken>(count * head_dim), Drawn<Taken>(count * head_dim), Drawn<Taken>(rows * head_dim));
  for (int64_t r = 0; r < rows; ++r) attention.seen.last[r] = count;
  constexpr int kTimes = 10;
  double least = 1e9;
  for (int round = 0; round < 200; ++round) {
    const auto began = std::chrono::steady_clock::now();
    for (int time = 0; time < kTimes; ++time) attention.Run();
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count() / kTimes);
  }
  std::printf("%-5s %4lld queries x %4lld keys x %3lld: %7.2f us, %6.1f GFLOP/s\n", name, static_cast<long long>(rows),
              static_cast<long long>(count), static_cast<long long>(head_dim), least * 1e6,
              4e-9 * static_cast<double>(rows * count * head_dim) / least);
}

// Gigaflops and bytes of weights of one thread.
template <typename T>
void Time(const char* name, int64_t count, int64_t width, int64_t tasks) {
  const int64_t block = width * sizeof(T) * 16;
  const auto weights = Drawn<T>(tasks * 32 * width), rows = Drawn<T>(count * width);
  const auto* packed = reinterpret_cast<const char*>(weights.data());
  const int64_t group = DotKernel<>::GroupRows(count), bytes = DotKernel<>::GroupBytes(width);
  Lines lines;
  char* blocks = lines.Bytes((count + group - 1) / group * bytes);
  const Plain<T> operand = {rows.data(), width};
  for (int64_t n = 0; n < count; n += group)
    DotKernel<>::Fill(operand, n, std::min(group, count - n), blocks + n / group * bytes);
  double least = 1e9;
  volatile float sink = 0;
  for (int round = 0; round < 7; ++round) {
    const auto began = std::chrono::steady_clock::now();
    for (int64_t task = 0; task < tasks; ++task) {
      const char* at = packed + task * 2 * block;
      const char* next = packed + std::min(task + 1, tasks - 1) * 2 * block;
      DotKernel<>::Multiply(blocks, count, width, {at, at + block}, {next, next + block},
                             [&](int64_t, int64_t, const auto& sums) { sink = sink + static_cast<float>(sums.one[0]); });
    }
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  const double elements = static_cast<double>(tasks) * 32 * width;
  std::printf("%-5s %4lld rows x %lld: %7.1f GFLOP/s, %6.1f GB/s of weights\n", name, static_cast<long long>(count),
              static_cast<long long>(width), 2 * elements * count / least / 1e9, elements * sizeof(T) / least / 1e9);
}

// The same in eight bits, with the scales.
void TimeGroups(int64_t count, int64_t width, int64_t tasks) {
  std::vector<Eights> of;
  for (int64_t task = 0; task < tasks; ++task) of.emplace_back(task ? 0 : count, width, [](int64_t size) { return Fixed<float>(size); });
  const int64_t group = GroupKernel::GroupRows(count), bytes = GroupKernel::GroupBytes(width);
  Lines lines;
  char* blocks = lines.Bytes((count + group - 1) / group * bytes);
  for (int64_t n = 0; n < count; n += group)
    GroupKernel::Fill(of[0], n, std::min(group, count - n), blocks + n / group * bytes);
  double least = 1e9;
  volatile float sink = 0;
  for (int round = 0; round < 7; ++round) {
    const auto began = std::chrono::steady_clock::now();
    for (int64_t task = 0; task < tasks; ++task)
      GroupKernel::Multiply(blocks, count, width, of[task].Packed(), of[std::min(task + 1, tasks - 1)].Packed(),
                            [&](int64_t, int64_t, const auto& sums) { sink = sink + sums.one[0]; });
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  const double elements = static_cast<double>(tasks) * 32 * width;
  std::printf("int8  %4lld rows x %lld: %7.1f GFLOP/s, %6.1f GB/s of weights\n", static_cast<long long>(count),
              static_cast<long long>(width), 2 * elements * count / least / 1e9,
              elements * (1 + 2.0 / kScaleGroup) / least / 1e9);
}

// The same of coded weights.
void TimeCoded(const char* name, const CodedKind& kind, int64_t count, int64_t width, int64_t tasks) {
  const CodedRows coded(kind, count, width, tasks);
  double least = 1e9;
  volatile float sink = 0;
  for (int round = 0; round < 7; ++round) {
    const auto began = std::chrono::steady_clock::now();
    coded.Multiply(0, count, tasks, [&](int64_t, int64_t, const auto& sums) { sink = sink + sums.one[0]; });
    least = std::min(least, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
  }
  const double elements = static_cast<double>(tasks) * 32 * width;
  std::printf("%-5s %4lld rows x %lld: %7.1f GFLOP/s, %6.1f GB/s of weights, %5.1f G weights/s\n", name, static_cast<long long>(count),
              static_cast<long long>(width), 2 * elements * count / least / 1e9,
              static_cast<double>(2 * tasks * kind.Bytes(width)) / least / 1e9, elements / least / 1e9);
}

}  // namespace

int main(int count, char** words) {
  if (count > 1 && !std::strcmp(words[1], "bits")) {
    PrintBits();
    return 0;
  }
  if (count > 1 && !std::strcmp(words[1], "attention")) {
    for (int64_t rows : {1, 2, 3, 4, 15, 16}) {
      for (int64_t keys : {128, 512, 2048}) TimeAttention<BFloat16>("bf16", 64, keys, rows);
      for (int64_t keys : {128, 512, 2048}) TimeAttention<int8_t>("int8", 64, keys, rows);
      TimeAttention<BFloat16>("bf16", 128, 512, rows), TimeAttention<float>("f32", 64, 512, rows);
    }
    return 0;
  }
  if (count > 1) {
    for (int64_t rows : {1, 2, 4, 8, 12, 16, 32, 64, 256}) {
      Time<BFloat16>("bf16", rows, 576, rows > 64 ? 48 : 2000);
      Time<BFloat16>("bf16", rows, 1536, rows > 64 ? 18 : 800);
      TimeGroups(rows, 576, rows > 64 ? 48 : 4000);
      TimeGroups(rows, 1536, rows > 64 ? 18 : 1600);
      for (int64_t width : {576, 1536}) {
        if (rows == 2) continue;
        TimeCoded("Q4_0", kCodedKinds[0], rows, width, rows > 64 ? 48 : 2000);
        TimeCoded("Q4_1", kCodedKinds[1], rows, width, rows > 64 ? 48 : 2000);
        TimeCoded("Q8_0", kCodedKinds[4], rows, width, rows > 64 ? 48 : 1000);
      }
    }
    return 0;
  }
  for (int64_t width : {16, 48, 576}) CheckProducts<BFloat16>(width);
#ifdef XLA_ENGINE_WIDENS
  for (int32_t widened : {-1, 0xAAA}) {  // groups of all sizes, and of odd ones, in the same products
    Widening<BFloat16>::rows = widened;
    for (int64_t width : {16, 576}) CheckProducts<BFloat16>(width);
  }
  Widening<BFloat16>::rows = 0;
#endif
  for (int64_t width : {64, 192, 576}) CheckGroups(width);
  for (const CodedKind& kind : kCodedKinds) CheckCoded(kind);
  CheckSaturation();
  CheckExponential();
  CheckLog();
  for (int64_t keys : {1, 2, 17, 32, 33, 200}) {
    CheckAttention<BFloat16>(64, keys, 1), CheckAttention<float>(48, keys, 1), CheckAttention<int8_t>(64, keys, 1);
    if (keys > 16) CheckAttention<BFloat16>(96, keys, 16), CheckAttention<float>(64, keys, 7), CheckAttention<int8_t>(48, keys, 16);
  }
  for (int64_t size : {1, 15, 64, 199, 5000})
    for (int32_t top_k : {0, 1, 40, 3000})
      for (float top_p : {1.0f, 0.999f, 0.5f})
        for (float min_p : {0.0f, 0.02f}) CheckSampling(size, Row(1.5f, top_k, top_p, min_p, 1, 2, 3));
  if (!failures) std::printf("ok\n");
  return failures != 0;
}
