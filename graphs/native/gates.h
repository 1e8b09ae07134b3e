// What stands between the two products of a gated MLP.

#pragma once

#include "common.h"

namespace xla_engine {

// 1 / (1 + exp(-z)), without overflow.
inline Vec Logistic(Vec z) {
  const Vec zero = {};
  const Vec small = Exp(Select(z > zero, -z, z));  // exp(-|z|)
  return Select(z > zero, zero + 1.0f, small) / (1.0f + small);
}

// act(gate) * up (Shazeer 2020): SiLU, or GELU by tanh (Hendrycks and Gimpel 2016), where (1 + tanh z) / 2 is the
// logistic function of 2 z.
inline Vec Gated(Vec gate, Vec up, bool gelu) {
  const Vec z = gelu ? 1.5957691216057308f * Fused(gate * gate * gate, 0.044715f, gate) : gate;
  return gate * up * Logistic(z);
}

}  // namespace xla_engine
