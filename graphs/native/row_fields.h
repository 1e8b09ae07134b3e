// Generated from the sampling table by `python -m xla_engine.graphs.sampling.native`. Do not edit.

#pragma once

#include <cstdint>

namespace xla_engine {

// One row as graphs/sampling/native.py packs it; behind it are its stop ids and its sequence breakers, padded with -1.
struct RowFields {
  int32_t position;
  uint32_t live;
  int32_t slot;
  int32_t length;
  int32_t prompt_length;
  int32_t min_remaining;
  int32_t draft;
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
  float repetition_penalty;
  float frequency_penalty;
  float presence_penalty;
  uint32_t has_bias;
  uint32_t has_mask;
  uint32_t seed[2];
  int32_t num_logprobs;
  float dry_multiplier;
  float dry_base;
  int32_t dry_allowed_length;
  int32_t penalty_last_n;
};

}  // namespace xla_engine
