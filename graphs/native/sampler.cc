// The sampler (graphs/sampling) for XLA:CPU: one call from logits to tokens and log-probabilities. Every row is read by itself:
// its bits depend neither on what other rows want nor on how many there are.

#include "adjust.h"
#include "buffers.h"
#include "joined.h"
#include "logprobs.h"
#include "parallel.h"
#include "turn.h"

namespace xla_engine {
namespace {

constexpr int64_t kMostColumns = 16;  // that a task reads
constexpr int64_t kPeaks = 256;       // columns whose peaks are found at once

// Logits, [V, N] or by row.
struct Logits {
  const float* values;
  bool by_row;
  int64_t count, rows;  // V, N

  Logits(const Floats& from, bool is_by_row)
      : values(from.typed_data()), by_row(is_by_row), count(from.dimensions()[is_by_row]), rows(from.dimensions()[!is_by_row]) {}

  // Rows that a task reads. Of columns, whole cache lines where every thread has a task.
  int64_t RowsOfTask(int64_t threads) const {
    if (by_row) return 1;
    for (const int64_t columns : {kMostColumns, int64_t{4}})
      if (rows >= columns * threads && rows % columns == 0) return columns;
    return 1;
  }

  // Calls take(row, its values) for rows first .. first + number.
  template <typename Take>
  void Each(int64_t first, int64_t number, const Take& take) const {
    thread_local std::vector<float> kept;
    const float* from = values + first * count;
    int64_t apart = count;
    if (!by_row && rows > 1) {
      apart = (count + 1023) / 1024 * 1024 + 80;  // rows that began whole pages apart would take each other's places in a cache
      kept.resize(std::max<size_t>(kept.size(), apart * number));
      ReadColumns(values, count, rows, first, number, kept.data(), apart);
      from = kept.data();
    }
    for (int64_t row = 0; row < number; ++row) take(first + row, from + row * apart);
  }
};

// Peaks of columns first .. first + columns of values [count, stride] among entries begin .. end: sixteen columns side by side in a
// vector, or entries of fewer columns one after the other.
void FindPeaks(const float* values, int64_t begin, int64_t end, int64_t stride, int64_t first, int64_t columns, Peak* peaks) {
  const int64_t across = std::max<int64_t>(1, kVector / columns), groups = std::max<int64_t>(1, columns / kVector);
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  struct {
    Vec best = All(kNone);
    Words at = {};
    decltype(Vec{} != Vec{}) invalid = {};
  } held[kPeaks / kVector];
  int64_t entry = begin;
  for (; entry + across <= end; entry += across) {
    for (int64_t group = 0; group < groups; ++group) {
      auto& [best, at, invalid] = held[group];
      const Vec given = Load(values + entry * stride + first + group * kVector);
      const auto larger = given > best;
      best = Select(larger, given, best);
      at = Select(larger, Words{} + static_cast<int32_t>(entry), at);
      invalid = invalid | (given != given);
    }
  }
  const auto offer = [&](int64_t column, float value, int32_t index) {
    Peak& peak = peaks[column];
    if (value > peak.value || value != value || (value == peak.value && index < peak.index)) peak = {value, index};
  };
  std::fill(peaks, peaks + columns, Peak{kNone, std::numeric_limits<int32_t>::max()});
  for (int64_t group = 0; group < groups; ++group) {
    float best[kVector];
    int32_t at[kVector], invalid[kVector];
    Store(best, held[group].best), StoreAs(at, held[group].at), StoreAs(invalid, held[group].invalid);
    for (int64_t place = 0; place < kVector; ++place)
      offer(group * kVector + place % columns, invalid[place] ? std::nanf("") : best[place],
            at[place] + static_cast<int32_t>(place / columns));
  }
  for (; entry < end; ++entry)
    for (int64_t column = 0; column < columns; ++column)
      offer(column, values[entry * stride + first + column], static_cast<int32_t>(entry));
}

int32_t Greedy(const Peak& peak) { return std::isfinite(peak.value) ? peak.index : kNoChoice; }

// Greedy tokens for calls in which no row needs more; each task takes a stretch of the vocabulary.
void ChooseGreedily(ffi::ThreadPool& pool, const Logits& logits, const std::vector<RowFields>& fields, int32_t* token) {
  const int64_t count = logits.count, rows = logits.rows, stretch = logits.by_row ? 8192 : 512;
  const int64_t stretches = (count + stretch - 1) / stretch;
  thread_local std::vector<Peak> kept;
  kept.resize(stretches * rows);
  Peak* peaks = kept.data();  // [stretches, rows]
  const auto of_row = [&](int64_t task) {
    const int64_t row = task / stretches, begin = task % stretches * stretch;
    if (!fields[row].live) return;
    Peak& peak = peaks[task % stretches * rows + row];
    peak = PeakOf(logits.values + row * count + begin, std::min(stretch, count - begin));
    peak.index += static_cast<int32_t>(begin);
  };
  const auto of_columns = [&](int64_t task) {
    const int64_t begin = task * stretch, end = std::min(begin + stretch, count);
    for (int64_t first = 0; first < rows; first += kPeaks)
      FindPeaks(logits.values, begin, end, rows, first, std::min(kPeaks, rows - first), peaks + task * rows + first);
  };
  logits.by_row ? ParallelFor(pool, stretches * rows, of_row) : ParallelFor(pool, stretches, of_columns);
  for (int64_t row = 0; row < rows; ++row) {
    if (!fields[row].live) continue;
    Peak peak = peaks[row];
    for (int64_t part = 1; part < stretches; ++part) {
      const Peak& next = peaks[part * rows + row];
      if (next.value > peak.value || next.value != next.value) peak = next;
      if (peak.value != peak.value) break;
    }
    token[row] = Greedy(peak);
  }
}

// The logits of the distribution that a row is sampled from: -inf for tokens that are cut off.
void Restrict(const float* logits, int64_t count, float peak, float least, const RowFields& row, std::vector<float>& to) {
  to.resize((count + kVector - 1) / kVector * kVector);
  EachVector(logits, count, [&](int64_t index, Vec given) {
    const Vec nothing = All(-std::numeric_limits<float>::infinity());
    const Vec kept = Select(Likelihood(given, peak, row) > Vec{}, given / row.temperature, nothing);
    Store(to.data() + index, Select(given < All(least), nothing, kept));
  });
}

// The rows of a call, and the tables of all slots. Words of a row [N, W] are its sampling parameters as in `RowFields`; in an engine
// with DRY those of repetition, too, and sequence breakers, padded with -1.
class GivenRows {
 public:
  std::vector<RowFields> fields;

  // places [7, N]: the fields before the sampling parameters. stops [N, E]. adjusts: whether the tables are read; otherwise they may
  // be empty.
  GivenRows(const Integers& places, const Unsigned& words, const Integers& stops, const Integers& history, const Integers& blocks,
            const Integers& bias_ids, const Floats& bias, const Unsigned& mask, const Unsigned& draft_masks, bool adjusts)
      : fields(words.dimensions()[0]),
        words_(words.typed_data()),
        stops_(stops.typed_data()),
        width_(words.dimensions()[1]),
        stop_count_(stops.dimensions()[1]),
        adjusts_(adjusts) {
    const size_t rows = fields.size();
    for (size_t row = 0; row < rows; ++row) {
      uint32_t* own = reinterpret_cast<uint32_t*>(&fields[row]);
      for (int64_t place = 0; place < kPlaces; ++place) own[place] = places.typed_data()[place * rows + row];
      std::memcpy(own + kPlaces, words_ + row * width_, std::min(width_, kParameters) * sizeof(uint32_t));
    }
    if (!adjusts) return;
    const bool has_blocks = blocks.element_count(), has_drafts = draft_masks.element_count();
    tables_ = {history.typed_data(),
               has_blocks ? blocks.typed_data() : nullptr,
               history.dimensions()[1],
               has_blocks ? blocks.dimensions()[1] : 1,
               history.dimensions()[0],
               bias_ids.typed_data(),
               bias.typed_data(),
               bias.dimensions()[1],
               mask.typed_data(),
               has_drafts ? draft_masks.typed_data() : nullptr,
               mask.dimensions()[1],
               has_drafts ? draft_masks.dimensions()[1] : 0};
  }

  bool IsAdjusted(int64_t row) const { return adjusts_ && Of(row).Wanted(); }

  // A row's logits before its temperature: `raw`, or those in `kept`.
  const float* Adjusted(int64_t row, const float* raw, int64_t count, std::vector<float>& kept) const {
    if (!IsAdjusted(row)) return raw;
    kept.assign(raw, raw + count);
    Of(row).Apply(kept.data(), count);
    return kept.data();
  }

 private:
  static constexpr int64_t kPlaces = offsetof(RowFields, temperature) / sizeof(uint32_t);
  static constexpr int64_t kParameters = sizeof(RowFields) / sizeof(uint32_t) - kPlaces;

  Adjustment Of(int64_t row) const {
    const int32_t* const breakers = reinterpret_cast<const int32_t*>(words_ + row * width_ + kParameters);
    return {fields[row],
            {stops_ + row * stop_count_, stop_count_},
            {breakers, std::max<int64_t>(0, width_ - kParameters)},
            tables_};
  }

  const uint32_t* words_;
  const int32_t* stops_;
  int64_t width_, stop_count_;
  bool adjusts_;
  SlotTables tables_ = {};
};

// logits [V, N], or [N, V] by row; the rows, of which tables are read where `adjusts` -> token [N], log-probability [N] and the most
// likely tokens [1 + 2 kMostLogprobs, N]; zeros for rows that are not live.
ffi::Error Sample(ffi::ThreadPool pool, Floats given, Integers places, Unsigned words, Integers stops, Integers history,
                  Integers blocks, Integers bias_ids, Floats bias, Unsigned mask, Unsigned draft_masks,
                  ffi::ResultBuffer<ffi::S32> token, ffi::ResultBuffer<ffi::F32> logprob, ffi::ResultBuffer<ffi::S32> top,
                  bool processed, bool adjusts, bool by_row) {
  const Logits logits(given, by_row);
  const int64_t count = logits.count, rows = logits.rows, of_task = logits.RowsOfTask(pool.num_threads());
  const GivenRows all(places, words, stops, history, blocks, bias_ids, bias, mask, draft_masks, adjusts);
  const std::vector<RowFields>& fields = all.fields;
  std::memset(token->untyped_data(), 0, token->size_bytes());
  std::memset(logprob->untyped_data(), 0, logprob->size_bytes());
  std::memset(top->untyped_data(), 0, top->size_bytes());
  bool is_greedy = by_row || kVector % rows == 0 || rows % kVector == 0;  // and nothing but the token is asked for
  for (int64_t row = 0; row < rows; ++row)
    is_greedy &= !fields[row].live || (fields[row].temperature <= 0 && fields[row].num_logprobs < 0 && !all.IsAdjusted(row));
  if (is_greedy) {
    ChooseGreedily(pool, logits, fields, token->typed_data());
    return ffi::Error::Success();
  }
  const auto one = [&](int64_t row, const float* raw) {
    thread_local Weights weights;
    thread_local std::vector<float> adjusted, restricted;
    const int32_t wanted = fields[row].num_logprobs;
    const RowFields params = fields[row];  // a copy: stores to weights cannot change it
    const float* shifted = all.Adjusted(row, raw, count, adjusted);
    Peak peak = PeakOf(shifted, count);
    int32_t& chosen = token->typed_data()[row];
    chosen = Greedy(peak);
    if (chosen == kNoChoice) return;
    const float* scored = processed ? shifted : raw;
    if (params.temperature > 0) {
      weights.Weigh(shifted, count, peak.value, params);
      chosen = weights.Draw(Uniform(params));
      if (processed && wanted >= 0) {
        Restrict(shifted, count, peak.value, weights.least, params, restricted);
        scored = restricted.data();
      }
    }
    if (wanted < 0) return;
    if (scored != shifted) peak = PeakOf(scored, count);
    Logprobs(scored, count, peak.value, chosen, wanted, rows, logprob->typed_data() + row, top->typed_data() + row);
  };
  ParallelFor(pool, rows / of_task, [&](int64_t task) {
    const auto first = fields.begin() + task * of_task;
    if (std::none_of(first, first + of_task, [](const RowFields& row) { return row.live; })) return;
    logits.Each(task * of_task, of_task, [&](int64_t row, const float* raw) {
      if (fields[row].live) one(row, raw);
    });
  });
  return ffi::Error::Success();
}

// logits and rows as for `Sample` -> the logits of the distributions that the rows are sampled from, [N, V]: adjusted, divided by
// temperatures and cut, as processed log-probabilities have them; zeros for rows that are not live.
ffi::Error Process(ffi::ThreadPool pool, Floats given, Integers places, Unsigned words, Integers stops, Integers history,
                   Integers blocks, Integers bias_ids, Floats bias, Unsigned mask, Unsigned draft_masks,
                   ffi::ResultBuffer<ffi::F32> processed, bool by_row) {
  const Logits logits(given, by_row);
  const int64_t count = logits.count, of_task = logits.RowsOfTask(pool.num_threads());
  const GivenRows all(places, words, stops, history, blocks, bias_ids, bias, mask, draft_masks, true);
  const auto one = [&](int64_t row, const float* raw) {
    thread_local Weights weights;
    thread_local std::vector<float> adjusted, restricted;
    const RowFields params = all.fields[row];
    const float* found = all.Adjusted(row, raw, count, adjusted);
    const float peak = PeakOf(found, count).value;
    if (params.temperature > 0 && std::isfinite(peak)) {
      weights.Weigh(found, count, peak, params);
      Restrict(found, count, peak, weights.least, params, restricted);
      found = restricted.data();
    }
    std::copy(found, found + count, processed->typed_data() + row * count);
  };
  std::memset(processed->untyped_data(), 0, processed->size_bytes());
  ParallelFor(pool, logits.rows / of_task, [&](int64_t task) {
    logits.Each(task * of_task, of_task, [&](int64_t row, const float* raw) {
      if (all.fields[row].live) one(row, raw);
    });
  });
  return ffi::Error::Success();
}

// logits as above, token [N], wanted [N] -> log-probability [N] and the most likely tokens, as above.
ffi::Error LogprobsOf(ffi::ThreadPool pool, Floats given, Integers token, Integers wanted, ffi::ResultBuffer<ffi::F32> logprob,
                      ffi::ResultBuffer<ffi::S32> top, bool by_row) {
  const Logits logits(given, by_row);
  const int64_t of_task = logits.RowsOfTask(pool.num_threads());
  ParallelFor(pool, logits.rows / of_task, [&](int64_t task) {
    logits.Each(task * of_task, of_task, [&](int64_t row, const float* values) {
      const int32_t most = wanted.typed_data()[row];
      const float peak = most < 0 ? 0 : PeakOf(values, logits.count).value;
      Logprobs(values, logits.count, peak, token.typed_data()[row], most, logits.rows, logprob->typed_data() + row,
               top->typed_data() + row);
    });
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_ENGINE_HANDLER(XlaEngineSample, Sample, "processed", "adjusts", "by_row")
XLA_ENGINE_HANDLER(XlaEngineProcess, Process, "by_row")
XLA_ENGINE_HANDLER(XlaEngineLogprobs, LogprobsOf, "by_row")

}  // namespace xla_engine
