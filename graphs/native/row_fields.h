// Generated from the sampling table by `python -m xla_engine.graphs.sampling.native`. Do not edit.

#pragma once

#include <cstdint>

namespace xla_engine {

// One row: its place, and its sampling parameters in the order of the table.
struct RowFields {
  int32_t position{0};
  int32_t live{0};
  int32_t slot{0};
  int32_t length{0};
  int32_t prompt_length{0};
  int32_t min_remaining{0};
  int32_t draft{0};
  float temperature{0};
  int32_t top_k{0};
  float top_p{1};
  float min_p{0};
  float repetition_penalty{1};
  float frequency_penalty{0};
  float presence_penalty{0};
  uint32_t has_bias{0};
  uint32_t has_mask{0};
  uint32_t seed[2]{0};
  int32_t num_logprobs{-1};
  float dry_multiplier{0};
  float dry_base{1};
  int32_t dry_allowed_length{0};
  int32_t penalty_last_n{-1};
};

}  // namespace xla_engine
