// Attention on plain vectors over keys and values in eight bits: any CPU, the same bits on each.
//
// A cell is one position's key or value of one head: int8 and one float32 scale, its own largest number / 127, quantised once
// when it is written. Heads are rotated before (hadamard.h), queries and keys behind RoPE, which changes no score, and results
// are rotated back: outliers spread over a head instead of taking all of its steps.
//
// Scores: a query in int8 as well, exact integer sums, then times the key's scale and the query's. Values: a weight times the
// scale of its value, rounded to bf16, times the int8, which bf16 holds exactly, as in attention_vectors.h.

#pragma once

#include "attention_cache.h"
#include "attention_vectors.h"
#include "hadamard.h"

namespace xla_engine {

// Values are widened with their bits on top of a word, so that no shift has to take a sign down.
constexpr float kWidened = 1.0f / (1 << 24);

// The block in which heads are rotated.
inline int64_t RotationBlock(int64_t width) { return width & -width; }

inline float RotationFactor(int64_t width) { return 1.0f / std::sqrt(static_cast<float>(RotationBlock(width))); }

// Rotates a head in place, writes it in eight bits, and returns its scale.
inline float QuantizeHead(float* head, int64_t width, int8_t* to) {
  Rotate(head, width, RotationBlock(width), RotationFactor(width));
  Words size = Cast<Words>(All(1e-30f));
  for (int64_t d = 0; d < width; d += kVector) {
    const Words bits = Cast<Words>(Load(head + d)) & 0x7FFFFFFF;  // as integers, NaN is larger than all numbers
    size = Select(bits > size, bits, size);
  }
  const int32_t most = Largest(size);
  float largest;
  std::memcpy(&largest, &most, sizeof largest);
  const float scale = largest * (1.0f / 127.0f), inverse = 1.0f / scale;
  for (int64_t d = 0; d < width; d += kVector) StoreAs(to + d, Convert<Bytes>(Nearest(Load(head + d) * inverse)));
  return scale;
}

// Writes a position's key and value, which are scratch afterwards. value: null if it is the key.
inline void WriteBytes(const Head<int8_t>& head, int64_t position, float* key, float* value) {
  alignas(64) int8_t keys[kMaxWidth], values[kMaxWidth];
  const float key_scale = QuantizeHead(key, head.width, keys);
  const float value_scale = value ? QuantizeHead(value, head.width, values) : key_scale;
  head.Write(position, keys, value ? values : nullptr, false);
  char* scale = reinterpret_cast<char*>(head.KeyBlock(position) + head.width * kVector) + position % kVector * sizeof(float);
  std::memcpy(scale, &key_scale, sizeof key_scale);
  std::memcpy(scale + kVector * sizeof(float), &value_scale, sizeof value_scale);
}

// The scales of sixteen keys, and of the values of the same positions.
inline Vec KeyScales(const int8_t* block, int64_t width) { return LoadAs<Vec>(block + width * kVector); }
inline Vec ValueScales(const int8_t* block, int64_t width) { return LoadAs<Vec>(block + (width + 4) * kVector); }

struct ByteQueries {
  alignas(64) Word words[kQueries * kMaxWidth / 4 * Dots<int8_t>::kParts];
  int32_t starts[kQueries];  // of sums
  float scales[kQueries];

  static int64_t Pitch(int64_t width) { return width / 4 * Dots<int8_t>::kParts; }

  void Set(int64_t row, float* query, int64_t width) {
    alignas(64) int8_t bytes[kMaxWidth];
    scales[row] = QuantizeHead(query, width, bytes);
    int32_t total = 0;
    for (int64_t d = 0; d < width; ++d) total += bytes[d];
    starts[row] = -Dots<int8_t>::kOffset * total;
    for (int64_t at = 0; at < width / 4; ++at) {
      Word word;
      std::memcpy(&word, bytes + 4 * at, sizeof word);
      Dots<int8_t>::Spread(word, words + row * Pitch(width) + at * Dots<int8_t>::kParts, 1);
    }
  }
};

template <int kRows, int kBlocks>
void ScoreByteBlocks(const Context<int8_t>& context, const ByteQueries& queries, int64_t row, int64_t first_block, float* scores,
                     int64_t stride) {
  using D = Dots<int8_t>;
  const int64_t words = context.width / 4, pitch = ByteQueries::Pitch(context.width);
  const int64_t last = static_cast<int64_t>(context.keys.size()) - 1;
  const Word* query = queries.words + row * pitch;
  Words sum[kRows][kBlocks];
  const int8_t *keys[kBlocks], *ahead[kBlocks];
  for (int b = 0; b < kBlocks; ++b) {
    keys[b] = context.keys[first_block + b];
    ahead[b] = context.keys[std::min(first_block + b + 2 * kBlocks, last)];
    for (int r = 0; r < kRows; ++r) sum[r][b] = Words{} + queries.starts[row + r];
  }
  for (int64_t word = 0; word < words; ++word) {
    for (int b = 0; b < kBlocks; ++b) {
      if (row == 0) __builtin_prefetch(ahead[b] + word * 4 * kVector, 0, 2);
      auto add = [&](auto part) {
        const auto key = D::template Part<part>(reinterpret_cast<const char*>(keys[b] + word * 4 * kVector));
        for (int r = 0; r < kRows; ++r) sum[r][b] = D::Add(sum[r][b], key, query[r * pitch + word * D::kParts + part]);
      };
      add(std::integral_constant<int, 0>());
      if constexpr (D::kParts == 2) add(std::integral_constant<int, 1>());
    }
  }
  for (int b = 0; b < kBlocks; ++b) {
    const Vec scale = KeyScales(keys[b], context.width);
    for (int r = 0; r < kRows; ++r)
      Store(scores + (row + r) * stride + (first_block + b) * kVector, Convert<Vec>(sum[r][b]) * scale * queries.scales[row + r]);
  }
}

template <int kRows>
void ScoreByteRows(const Context<int8_t>& context, const ByteQueries& queries, int64_t row, float* scores, int64_t stride) {
  constexpr int kBlocks = Beside(kRows);
  const int64_t blocks = context.keys.size();
  int64_t block = 0;
  for (; block + kBlocks <= blocks; block += kBlocks)
    ScoreByteBlocks<kRows, kBlocks>(context, queries, row, block, scores, stride);
  for (; block < blocks; ++block) ScoreByteBlocks<kRows, 1>(context, queries, row, block, scores, stride);
}

// Positions 2 * half and 2 * half + 1 of sixteen words of values, times 2^24, in the form that `Factors<BFloat16>` adds: pairs
// of bf16, or one of the two in float32.
template <int half, int part>
auto WidenedBytes(Words bytes) {
  const auto at = [&](auto place) {
    constexpr int32_t kTop = static_cast<int32_t>(0xFF000000);
    if constexpr (place == 0) return Convert<Vec>(bytes << 24);
    if constexpr (place == 3) return Convert<Vec>(bytes & kTop);
    return Convert<Vec>(bytes << 24 - 8 * place & kTop);
  };
#ifdef XLA_ENGINE_PAIRS
  const Bits first = Cast<Bits>(at(std::integral_constant<int, 2 * half>()));
  return Cast<Words>(first >> 16) | Cast<Words>(at(std::integral_constant<int, 2 * half + 1>()));
#else
  return at(std::integral_constant<int, 2 * half + 1 - part>());
#endif
}

template <int kRows, int kParts>
void WeighByteParts(const Context<int8_t>& context, const Factors<BFloat16>::Type* weights, int64_t stride, int64_t dim, float* out,
                    bool fresh) {
  using F = Factors<BFloat16>;
  constexpr int64_t kPart = 4 * kVector * kVector;  // bytes of sixteen dimensions of a tile
  Vec sum[kRows][kParts] = {};
  for (int r = 0; !fresh && r < kRows; ++r)
    for (int p = 0; p < kParts; ++p) sum[r][p] = Load(out + r * context.width + dim + p * kVector);
  const int64_t words = (context.count + 3) / 4, last = static_cast<int64_t>(context.values.size()) - 1;
  for (int64_t tile = 0; tile * kVector < words; ++tile) {
    const int8_t* rows = context.values[tile] + dim * 4 * kVector;
    const int64_t ahead = context.values[std::min(tile + 1, last)] + dim * 4 * kVector - rows;
    const int64_t end = std::min((tile + 1) * kVector, words);
    for (int64_t word = tile * kVector; word < end; ++word, rows += 4 * kVector) {
      for (int p = 0; p < kParts; ++p) {
        __builtin_prefetch(rows + ahead + p * kPart, 0, 2);
        const Words bytes = LoadAs<Words>(rows + p * kPart);
        auto add = [&](auto half, auto part) {
          const auto value = WidenedBytes<half, part>(bytes);
          for (int r = 0; r < kRows; ++r) sum[r][p] = F::Add(sum[r][p], value, weights[r * stride + F::Place(2 * word + half, part)]);
        };
        constexpr std::integral_constant<int, 0> kFirst;
        constexpr std::integral_constant<int, 1> kSecond;
        add(kFirst, kFirst);
        if constexpr (F::kParts == 2) add(kFirst, kSecond);
        add(kSecond, kFirst);
        if constexpr (F::kParts == 2) add(kSecond, kSecond);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kParts; ++p) Store(out + r * context.width + dim + p * kVector, sum[r][p]);
}

template <int kRows>
void WeighByteRows(const Context<int8_t>& context, const Factors<BFloat16>::Type* weights, int64_t stride, float* out, bool fresh) {
  constexpr int64_t kParts = Beside(kRows);
  int64_t dim = 0;
  for (; dim + kParts * kVector <= context.width; dim += kParts * kVector)
    WeighByteParts<kRows, kParts>(context, weights, stride, dim, out, fresh);
  for (; dim < context.width; dim += kVector) WeighByteParts<kRows, 1>(context, weights, stride, dim, out, fresh);
}

// As in attention_vectors.h, with queries in float32, which are scratch afterwards.
inline void WeightsByVectors(const Context<int8_t>& context, float* queries, const Seen& seen, ScoreForm form, float* scores,
                             int64_t stride, float* sums) {
  const int64_t width = context.width;
  ByteQueries asked;
  for (int64_t row = 0; row < seen.rows; ++row) asked.Set(row, queries + row * width, width);
  ByRows(seen.rows, [&](auto count, int64_t row) { ScoreByteRows<count>(context, asked, row, scores, stride); });
  const int64_t end = (context.count + kVector - 1) / kVector * kVector;
  for (int64_t row = 0; row < seen.rows; ++row) {
    float* weights = scores + row * stride;
    sums[row] = Softmax(weights, seen, row, end, form);
    for (int64_t at = 0; at < end; at += kVector) {
      const Vec weight = Load(weights + at), scaled = weight * ValueScales(context.keys[at / kVector], width);
      // What is not seen may have any scale, NaN included; and pairs of bf16 take subnormal numbers for zero.
      Store(weights + at, Select((weight != 0.0f) & ((scaled >= 1.17549435e-38f) | (scaled != scaled)), scaled, Vec{}));
    }
    Factors<BFloat16>::FromWeights(weights, end);
  }
}

inline void WeighByVectors(const Context<int8_t>& context, const float* weights, int64_t stride, int64_t first, int64_t rows, float* out,
                           bool fresh) {
  using F = Factors<BFloat16>;
  const int64_t before = first / Storage<BFloat16>::kPack * F::kParts;
  ByRows(rows, [&](auto count, int64_t row) {
    const auto* own = reinterpret_cast<const F::Type*>(weights + row * stride) + before;
    WeighByteRows<count>(context, own, stride, out + row * context.width, fresh);
  });
}

// Rotates the results back.
inline void Finish(const Context<int8_t>& context, int64_t rows, float* out) {
  const int64_t width = context.width;
  for (int64_t row = 0; row < rows; ++row)
    Rotate(out + row * width, width, RotationBlock(width), RotationFactor(width) * kWidened);
}

}  // namespace xla_engine
