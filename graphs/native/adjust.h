// The changes to a row's logits before a token is chosen, in the order of STAGES (graphs/row_state/sampling_fields.py): the same as in
// graphs/sampling/logits_processors.py.

#pragma once

#include "common.h"
#include "row_fields.h"

namespace xla_engine {

// Wide data of all slots (`Rows` and `Tables` of graphs.row_state.rows).
struct SlotTables {
  const int32_t *history, *blocks;  // blocks: null where slots are contiguous
  int64_t positions, max_blocks, num_blocks;  // of a slot or a block; of a slot; in all
  const int32_t* bias_ids;
  const float* bias;
  int64_t biases;
  const uint32_t *mask, *draft_masks;  // draft_masks: null in an engine without drafts
  int64_t mask_words, drafts;
};

// Token ids of a row, padded with -1.
struct Ids {
  const int32_t* ids;
  int64_t count;
};

class Adjustment {
 public:
  Adjustment(const RowFields& row, Ids stops, Ids breakers, const SlotTables& tables)
      : row_(row), stops_(stops), breakers_(breakers), tables_(tables) {}

  bool Wanted() const { return row_.has_bias || row_.has_mask || IsPenalised() || IsDry() || row_.min_remaining > 0; }

  void Apply(float* logits, int64_t count) const {
    if (row_.has_bias) AddBias(logits, count);
    if (IsPenalised() || IsDry()) {
      thread_local std::vector<int32_t> tokens;
      tokens.resize(row_.length);
      for (int64_t position = 0; position < row_.length; ++position) tokens[position] = Token(position);
      if (IsPenalised()) Penalise(tokens, logits, count);
      if (IsDry()) ApplyDry(tokens, logits, count);
    }
    if (row_.min_remaining > 0)
      for (int64_t stop = 0; stop < stops_.count; ++stop)
        if (IsIn(stops_.ids[stop], count)) logits[stops_.ids[stop]] = kForbidden;
    if (row_.has_mask) Forbid(logits, count);
  }

 private:
  static constexpr float kForbidden = -std::numeric_limits<float>::infinity();
  static constexpr int64_t kLongest = 64;  // `LONGEST` of graphs.sampling.logits_processors

  // A number for each token, zero but for those of one row at a time.
  class Numbers {
   public:
    explicit Numbers(int64_t count) { kept().resize(std::max<size_t>(kept().size(), count)); }
    ~Numbers() {
      for (const int32_t token : tokens_) kept()[token] = 0;
    }
    int32_t& operator[](int32_t token) {
      int32_t& number = kept()[token];
      if (!number) tokens_.push_back(token);
      return number;
    }
    const std::vector<int32_t>& tokens() const { return tokens_; }

   private:
    static std::vector<int32_t>& kept() {
      thread_local std::vector<int32_t> numbers;
      return numbers;
    }
    std::vector<int32_t> tokens_;  // that have a number
  };

  bool IsPenalised() const { return row_.repetition_penalty != 1 || row_.frequency_penalty != 0 || row_.presence_penalty != 0; }
  bool IsDry() const { return row_.dry_multiplier > 0; }
  static bool IsIn(int64_t token, int64_t count) { return 0 <= token && token < count; }

  int32_t Token(int64_t position) const {
    if (!tables_.blocks) return tables_.history[row_.slot * tables_.positions + position];
    const int64_t block = tables_.blocks[row_.slot * tables_.max_blocks + position / tables_.positions];
    const int64_t inside = std::clamp<int64_t>(block, 0, tables_.num_blocks - 1);
    return tables_.history[inside * tables_.positions + position % tables_.positions];
  }

  void AddBias(float* logits, int64_t count) const {
    for (int64_t at = row_.slot * tables_.biases; at < (row_.slot + 1) * tables_.biases; ++at)
      if (IsIn(tables_.bias_ids[at], count)) logits[tables_.bias_ids[at]] += tables_.bias[at];
  }

  // Repetition penalty (Keskar et al. 2019, section 4.1) for prompt and output, the others for output alone.
  void Penalise(const std::vector<int32_t>& tokens, float* logits, int64_t count) const {
    const int64_t length = row_.length, first = row_.penalty_last_n < 0 ? 0 : std::max<int64_t>(0, length - row_.penalty_last_n);
    Numbers times(count);  // that a token was generated, and one
    for (int64_t position = first; position < length; ++position) {
      if (!IsIn(tokens[position], count)) continue;
      int32_t& number = times[tokens[position]];
      number = std::max(number, 1) + (position >= row_.prompt_length);
    }
    for (const int32_t token : times.tokens()) {
      float& logit = logits[token];
      const int32_t output = times[token] - 1;
      logit = logit > 0 ? logit / row_.repetition_penalty : logit * row_.repetition_penalty;
      logit -= row_.frequency_penalty * static_cast<float>(output);
      if (output > 0) logit -= row_.presence_penalty;
    }
  }

  bool Breaks(int32_t token) const {
    const int32_t* end = breakers_.ids + breakers_.count;
    return std::find(breakers_.ids, end, token) != end;
  }

  // DRY: the longer the run of tokens that a token would repeat, the larger its penalty.
  void ApplyDry(const std::vector<int32_t>& tokens, float* logits, int64_t count) const {
    const int64_t end = row_.length - 1;
    Numbers longest(count);
    for (int64_t place = 0; place < end; ++place) {
      int64_t length = 0;
      const int64_t most_of_it = std::min(kLongest, place + 1);
      while (length < most_of_it && tokens[place - length] == tokens[end - length] && !Breaks(tokens[end - length])) ++length;
      const int32_t following = tokens[place + 1];
      if (!length || !IsIn(following, count) || Breaks(following)) continue;
      int32_t& most = longest[following];
      most = std::max(most, static_cast<int32_t>(length));
    }
    for (const int32_t token : longest.tokens())
      if (const int32_t length = longest[token]; length >= row_.dry_allowed_length) logits[token] -= Lost(length);
  }

  // One product after the other, as in JAX. Not above 1e30.
  float Lost(int32_t length) const {
    float lost = row_.dry_multiplier;
    for (int32_t more = 0; more <= length; ++more)
      if (more > row_.dry_allowed_length) lost = std::min(lost * row_.dry_base, 1e30f);
    return lost;
  }

  void Forbid(float* logits, int64_t count) const {
    const bool is_behind = row_.draft > 0 && tables_.draft_masks;
    const uint32_t* words = is_behind ? tables_.draft_masks + (row_.slot * tables_.drafts + row_.draft - 1) * tables_.mask_words
                                      : tables_.mask + row_.slot * tables_.mask_words;
    alignas(64) static constexpr int32_t kPlaces[kVector] = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                                             1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
    const Words places = LoadAs<Words>(kPlaces), none = Words{};
    const Vec forbidden = All(kForbidden);
    int64_t first = 0;
    for (; first + 2 * kVector <= count; first += 2 * kVector) {
      const uint32_t word = words[first / 32];
      if (word == ~0u) continue;
      for (int64_t half = 0; half < 2 * kVector; half += kVector) {
        float* at = logits + first + half;
        const Words allowed = (none + static_cast<int32_t>(word >> half)) & places;
        Store(at, Select(allowed != none, Load(at), forbidden));
      }
    }
    for (int64_t token = first; token < count; ++token)
      if (~words[token / 32] >> (token % 32) & 1) logits[token] = kForbidden;
  }

  const RowFields& row_;
  Ids stops_, breakers_;
  const SlotTables& tables_;
};

}  // namespace xla_engine
