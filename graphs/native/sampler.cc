// The sampler (graphs/sampling) for XLA:CPU: one call from logits to tokens and log-probabilities. Every row is read by itself:
// its bits depend neither on what other rows want nor on how many there are.

#include "adjust.h"
#include "buffers.h"
#include "logprobs.h"
#include "parallel.h"

namespace xla_engine {
namespace {

constexpr int64_t kMostColumns = 16;  // that a task reads
constexpr int64_t kPeaks = 256;       // columns whose peaks are found at once

typedef float Four __attribute__((vector_size(16)));

// Columns first .. first + columns of values [count, stride], each to `apart` floats behind the one before.
void ReadColumns(const float* values, int64_t count, int64_t stride, int64_t first, int64_t columns, float* to, int64_t apart) {
  int64_t row = 0;
  for (; columns % 4 == 0 && row + 4 <= count; row += 4) {
    for (int64_t column = 0; column < columns; column += 4) {
      Four rows[4], pairs[4];
      for (int r = 0; r < 4; ++r) rows[r] = LoadAs<Four>(values + (row + r) * stride + first + column);
      for (int r = 0; r < 2; ++r) {
        pairs[r] = __builtin_shufflevector(rows[r], rows[r + 2], 0, 4, 1, 5);
        pairs[r + 2] = __builtin_shufflevector(rows[r], rows[r + 2], 2, 6, 3, 7);
      }
      float* at = to + column * apart + row;
      for (int c = 0; c < 4; c += 2) {
        StoreAs(at + c * apart, __builtin_shufflevector(pairs[c], pairs[c + 1], 0, 4, 1, 5));
        StoreAs(at + (c + 1) * apart, __builtin_shufflevector(pairs[c], pairs[c + 1], 2, 6, 3, 7));
      }
    }
  }
  for (; row < count; ++row)
    for (int64_t column = 0; column < columns; ++column) to[column * apart + row] = values[row * stride + first + column];
}

// Columns of values [count, stride] as rows.
class Columns {
 public:
  // Floats from one row to the next. Rows that began whole pages apart would take each other's places in a cache.
  static int64_t Apart(int64_t count) { return (count + 1023) / 1024 * 1024 + 80; }

  const float* Read(const float* values, int64_t count, int64_t stride, int64_t first, int64_t columns) {
    if (stride == 1) return values;
    kept_.resize(std::max<size_t>(kept_.size(), Apart(count) * columns));
    ReadColumns(values, count, stride, first, columns, kept_.data(), Apart(count));
    return kept_.data();
  }

 private:
  std::vector<float> kept_;
};

// Columns that a task reads: every thread has a task, and whole cache lines where there are enough.
int64_t ColumnsOfTask(int64_t rows, int64_t threads) {
  for (const int64_t columns : {kMostColumns, int64_t{4}})
    if (rows >= columns * threads && rows % columns == 0) return columns;
  return 1;
}

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

// The greedy tokens of values [count, stride], where nothing else is asked for: a stretch of the vocabulary to a task.
void ChooseGreedily(ffi::ThreadPool& pool, const float* values, int64_t count, int64_t stride,
                    const std::vector<RowFields>& fields, int32_t* token) {
  constexpr int64_t kStretch = 512;
  const int64_t stretches = (count + kStretch - 1) / kStretch;
  thread_local std::vector<Peak> kept;
  kept.resize(stretches * stride);
  Peak* peaks = kept.data();
  ParallelFor(pool, stretches, [&](int64_t stretch) {
    const int64_t begin = stretch * kStretch, end = std::min(begin + kStretch, count);
    for (int64_t first = 0; first < stride; first += kPeaks)
      FindPeaks(values, begin, end, stride, first, std::min(kPeaks, stride - first), peaks + stretch * stride + first);
  });
  for (int64_t column = 0; column < stride; ++column) {
    Peak peak = peaks[column];
    for (int64_t stretch = 1; stretch < stretches; ++stretch) {
      const Peak& next = peaks[stretch * stride + column];
      if (next.value > peak.value || next.value != next.value) peak = next;
      if (peak.value != peak.value) break;
    }
    if (fields[column].live) token[column] = Greedy(peak);
  }
}

// Logits of the distribution that a row is drawn from: -inf where it may not be.
void Restrict(const float* logits, int64_t count, float peak, float least, const SamplingParams& params, std::vector<float>& to) {
  to.resize((count + kVector - 1) / kVector * kVector);
  EachVector(logits, count, [&](int64_t index, Vec given) {
    const Vec nothing = All(-std::numeric_limits<float>::infinity());
    const Vec kept = Select(Likelihood(given, peak, params) > Vec{}, given / params.temperature, nothing);
    Store(to.data() + index, Select(given < All(least), nothing, kept));
  });
}

// The parameters of a row's draws.
SamplingParams ParamsOf(const RowFields& row) {
  return {row.temperature, row.top_k, row.top_p, row.min_p, {row.seed[0], row.seed[1]}, static_cast<uint32_t>(row.position)};
}

// logits [V, N]; words [N, W], the rows (`RowFields`), of which `stops` are stop ids; the tables of all slots (`SlotTables`), which
// are read where `adjusts` -> token [N], log-probability [N] and the most likely tokens [1 + 2 kMostLogprobs, N]; zeros for rows
// that are not live.
ffi::Error Sample(ffi::ThreadPool pool, Floats logits, Unsigned words, Integers history, Integers blocks, Integers bias_ids,
                  Floats bias, Unsigned mask, Unsigned draft_masks, ffi::ResultBuffer<ffi::S32> token,
                  ffi::ResultBuffer<ffi::F32> logprob, ffi::ResultBuffer<ffi::S32> top, bool processed, bool adjusts, int64_t stops) {
  const int64_t count = logits.dimensions()[0], rows = logits.dimensions()[1], width = words.dimensions()[1];
  const int64_t columns = ColumnsOfTask(rows, pool.num_threads()), fixed = sizeof(RowFields) / sizeof(uint32_t);
  const int64_t breakers = width - fixed - stops;
  if (breakers < 0) return ffi::Error::InvalidArgument("a row has too few words");
  SlotTables tables = {};
  if (adjusts) {
    const bool has_blocks = blocks.element_count(), has_drafts = draft_masks.element_count();
    tables = {history.typed_data(),
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
  std::vector<RowFields> fields(rows);
  for (int64_t row = 0; row < rows; ++row) std::memcpy(&fields[row], words.typed_data() + row * width, sizeof(RowFields));
  const auto adjustment = [&](int64_t row) {
    return Adjustment(fields[row], words.typed_data() + row * width + fixed, stops, breakers, tables);
  };
  std::memset(token->untyped_data(), 0, token->size_bytes());
  std::memset(logprob->untyped_data(), 0, logprob->size_bytes());
  std::memset(top->untyped_data(), 0, top->size_bytes());
  bool is_greedy = kVector % rows == 0 || rows % kVector == 0;  // and nothing but the token is asked for
  for (int64_t row = 0; row < rows; ++row)
    is_greedy &= !fields[row].live || (fields[row].temperature <= 0 && fields[row].num_logprobs < 0 &&
                                       !(adjusts && adjustment(row).Wanted()));
  if (is_greedy) {
    ChooseGreedily(pool, logits.typed_data(), count, rows, fields, token->typed_data());
    return ffi::Error::Success();
  }
  const auto one = [&](int64_t row, const float* raw) {
    thread_local Weights weights;
    thread_local std::vector<float> adjusted, restricted;
    const int32_t wanted = fields[row].num_logprobs;
    const SamplingParams params = ParamsOf(fields[row]);
    const float* shifted = raw;
    if (const Adjustment adjust = adjustment(row); adjusts && adjust.Wanted()) {
      adjusted.assign(raw, raw + count);
      adjust.Apply(adjusted.data(), count);
      shifted = adjusted.data();
    }
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
  ParallelFor(pool, rows / columns, [&](int64_t task) {
    thread_local Columns read;
    const auto first = fields.begin() + task * columns;
    if (std::none_of(first, first + columns, [](const RowFields& row) { return row.live; })) return;
    const float* raw = read.Read(logits.typed_data(), count, rows, task * columns, columns);
    for (int64_t row = 0; row < columns; ++row)
      if (first[row].live) one(task * columns + row, raw + row * Columns::Apart(count));
  });
  return ffi::Error::Success();
}

// logits [V, N], token [N], wanted [N] -> log-probability [N] and the most likely tokens, as above.
ffi::Error LogprobsOf(ffi::ThreadPool pool, Floats logits, Integers token, Integers wanted, ffi::ResultBuffer<ffi::F32> logprob,
                      ffi::ResultBuffer<ffi::S32> top) {
  const int64_t count = logits.dimensions()[0], rows = logits.dimensions()[1];
  const int64_t columns = ColumnsOfTask(rows, pool.num_threads());
  ParallelFor(pool, rows / columns, [&](int64_t task) {
    thread_local Columns read;
    const float* values = read.Read(logits.typed_data(), count, rows, task * columns, columns);
    for (int64_t row = task * columns; row < (task + 1) * columns; ++row, values += Columns::Apart(count))
      Logprobs(values, count, wanted.typed_data()[row] < 0 ? 0 : PeakOf(values, count).value, token.typed_data()[row],
               wanted.typed_data()[row], rows, logprob->typed_data() + row, top->typed_data() + row);
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineSample, Sample, Attributes({"processed", "adjusts", "stops"}));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineLogprobs, LogprobsOf, Attributes());

}  // namespace xla_engine
