// Which rows go to which expert, and the activation between an expert's two products.

#pragma once

#include "common.h"
#include "parallel.h"
#include "product.h"

namespace xla_engine {

// Rows of one expert that are multiplied together: places in the sorted list of assignments.
struct Group {
  int64_t expert, first, rows;
};

// Assignments, row times K plus choice, by expert; groups in ascending order of experts.
struct Gathered {
  std::vector<int32_t> assignment;
  std::vector<Group> groups;

  Gathered(const int32_t* expert, int64_t count, int64_t experts, int64_t rows) {
    std::vector<int64_t> end(experts + 1, 0);
    for (int64_t a = 0; a < count; ++a)
      if (Used(expert[a], experts)) ++end[expert[a] + 1];
    for (int64_t e = 0; e < experts; ++e) end[e + 1] += end[e];
    for (int64_t e = 0; e < experts; ++e)
      for (int64_t first = end[e]; first < end[e + 1]; first += rows)
        groups.push_back({e, first, std::min(rows, end[e + 1] - first)});
    assignment.resize(end[experts]);
    for (int64_t a = 0; a < count; ++a)
      if (Used(expert[a], experts)) assignment[end[expert[a]]++] = static_cast<int32_t>(a);
  }

  static bool Used(int32_t expert, int64_t experts) { return expert >= 0 && expert < experts; }
};

// gate * sigmoid(slope * gate) * up.
inline Vec Swish(Vec gate, Vec up, float slope) {
  const Vec zero = {};
  const Vec scaled = gate * slope;
  const Vec small = Exp(Select(scaled > zero, -scaled, scaled));  // exp(-|scaled|)
  return gate * up * Select(scaled > zero, 1.0f / (1.0f + small), small / (1.0f + small));
}

// SwiGLU, or with a positive limit the clamped form of gpt-oss (`graphs.experts.routing.gate`).
inline Vec Gate(Vec gate, Vec up, float limit) {
  if (limit <= 0) return Swish(gate, up, 1.0f);
  const Vec high = Vec{} + limit, low = -high;
  gate = Select(gate > high, high, gate);
  up = Select(up > high, high, up);
  up = Select(up < low, low, up);
  return Swish(gate, up + 1.0f, 1.702f);
}

class CodedWeights;

// A layer of experts and its input rows.
// Its rows are bf16 as weights are, or float32 where these are in eight bits.
template <typename T>
struct ExpertLayer {
  using Value = std::conditional_t<std::is_same_v<T, int8_t>, float, BFloat16>;
  const Value* x;                                     // [N, D]
  const T *gate_up, *down;                            // [E, 2 F, D] gates first, [E, D, F]
  const BFloat16 *gate_up_scale, *down_scale;         // [E, 2 F, D / 64] and [E, D, F / 64], or null
  const float *gate_up_bias, *down_bias;              // [E, 2 F] and [E, D], or null
  const float *weight, *residual;                     // [N, K], [N, D]
  float* out;                                         // [N, D]
  int64_t count, width, per_row, experts, inner;      // N, D, K, E, F
  float limit;
  // If a call computes only one of the two products: the activations between them by assignment, [N K, F]; else null.
  Value* gated = nullptr;        // the first product alone goes here
  const Value* given = nullptr;  // the second alone comes from here
  // Weights as a quantised file has them, in place of those above.
  const CodedWeights *coded_gate_up = nullptr, *coded_down = nullptr;
};

}  // namespace xla_engine
