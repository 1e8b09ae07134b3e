// Which rows go to which expert, and the activation between an expert's two products.

#pragma once

#include <optional>

#include "coded_weights.h"
#include "gates.h"
#include "parallel.h"

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

// SwiGLU or with GELU, or with a positive limit the clamped form of gpt-oss (`graphs.experts.routing.gate`).
inline Vec Gate(Vec gate, Vec up, float limit, bool gelu) {
  if (gelu) return Gated(gate, up, true);
  if (limit <= 0) return Swish(gate, up, 1.0f);
  const Vec high = Vec{} + limit, low = -high;
  gate = Select(gate > high, high, gate);
  up = Select(up > high, high, up);
  up = Select(up < low, low, up);
  return Swish(gate, up + 1.0f, 1.702f);
}

// The square of ReLU (So et al. 2021); NaN stays NaN.
inline Vec SquaredRelu(Vec x) {
  const Vec zero = {}, positive = Select(x < zero, zero, x);
  return positive * positive;
}

struct Fours;  // weights whose codes meet rows in eight bits (linear_fours.h)

// The matrices of all experts [E, rows, K] in T, in eight bits with a scale for every 64 columns; or as a quantised file has them,
// uint8 [bytes], which are multiplied in bf16 or as Fours.
template <typename T>
struct Matrices {
  const T* values = nullptr;
  const BFloat16* scales = nullptr;
  std::optional<CodedWeights> coded;
  int64_t rows = 0, width = 0;  // of all experts; none of an array of another form

  Matrices() = default;
  Matrices(const ffi::AnyBuffer& buffer, const Halves& scale) {
    if (buffer.element_type() == ffi::U8) {
      coded.emplace(buffer.untyped_data(), static_cast<int64_t>(buffer.element_count()));
      if (std::is_same_v<T, int8_t> || !coded->Fit() || coded->IsFours() != std::is_same_v<T, Fours>) return;
      rows = coded->Features(), width = coded->Width();
    } else if (!std::is_same_v<T, Fours>) {
      const int64_t* shape = buffer.dimensions();
      values = static_cast<const T*>(buffer.untyped_data());
      rows = shape[0] * shape[1], width = shape[2];
      if (scale.element_count()) scales = reinterpret_cast<const BFloat16*>(scale.untyped_data());
    }
  }
};

// A layer of experts and its input rows.
// Its rows are bf16 as weights are, or float32 where products quantise them.
template <typename T>
struct ExpertLayer {
  using Value = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16, float>;
  const Value* x;                                     // [N, D]
  Matrices<T> gate_up, down;                          // [E, 2 F, D] gates first, or [E, F, D] if plain; [E, D, F]
  const float *gate_up_bias, *down_bias;              // [E, 2 F] or [E, F], and [E, D]; or null
  const float *weight, *residual;                     // [N, K], [N, D]
  float* out;                                         // [N, D]
  int64_t count, width, per_row, experts, inner;      // N, D, K, E, F
  float limit;
  bool gelu;
  bool plain;  // no gate: the square of ReLU between the products
  int64_t Rows() const { return plain ? inner : 2 * inner; }  // of an expert in gate_up
  // If a call computes only one of the two products: the activations between them by assignment, [N K, F]; else null.
  Value* gated = nullptr;        // the first product alone goes here
  const Value* given = nullptr;  // the second alone comes from here
};

}  // namespace xla_engine
