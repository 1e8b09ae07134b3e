// Attention over a cache for XLA:CPU: write new keys and values, then attend, as one FFI call.
//
// Every query reads the tiles that hold the keys it may see, in order of position, and nothing else: its bits are a
// function of its own sequence, whatever lane, slot, page, neighbour, chunk or number of threads computed it.

#pragma once

#include "attention_cache.h"
#include "attention_heads.h"
#include "attention_latent.h"
#include "attention_scores.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "buffers.h"
#include "parallel.h"
#include "zeros.h"

namespace xla_engine {
namespace {  // stores of each type are a library of their own

struct Arguments {
  Projection projection;
  const int32_t *slot, *start, *count;  // [P]
  const int32_t* reach;                 // [P, T], one past the last key that a query sees; or null: after its own
  const int32_t* tables;                // [B, pages]
  const float *q_norm, *k_norm;         // [Dh] or null
  const float* sinks;                   // [heads] or null
  const float* distances;               // [heads, 2 * span] or null: what a key d behind a query adds to its score, at span + d
  int64_t span;
  int64_t lanes, width, heads, kv_heads;
  int64_t rows, pages, page;  // of the tables; positions of a page
  int64_t window;             // keys a query sees, itself included; 0: all
  int64_t stored_parts;       // 2: keys and values; 1: keys that are the values, too; 0: none, those in the cache are another layer's
  bool latent;                // values are not stored: they are the keys as these are in the cache
  ScoreForm form;

  // The first key that a query at `position` sees.
  int64_t First(int64_t position) const { return window ? std::max<int64_t>(position + 1 - window, 0) : 0; }
  // One past the last key that a lane's query sees.
  int64_t Last(int64_t lane, int64_t t) const { return reach ? reach[lane * width + t] : start[lane] + t + 1; }
  // The same of the queries [first, end).
  int64_t Furthest(int64_t lane, int64_t first, int64_t end) const {
    int64_t last = start[lane] + end;
    for (int64_t t = first; reach && t < end; ++t) last = std::max(last, Last(lane, t));
    return last;
  }
};

// A thread's scratch memory, kept between tasks. Rows are whole cache lines, an odd number of them: rows a power of
// two apart would share cache sets.
template <typename T>
class Scratch {
 public:
  Context<T> context;
  int64_t score_stride = 0, weight_stride = 0;  // elements
  std::vector<float> sums;

  // For `rows` queries, of which `scored` at most have scores at a time.
  void Prepare(const Head<T>& head, int64_t first, int64_t last, int64_t scored = kQueries, int64_t rows = kQueries) {
    context.List(head, first, last);
    score_stride = ((last - first + 31) / 32 * 2 | 1) * 16;
    weight_stride = ((last - first + 31) / 32 | 1) * 32;
    scores_.resize(std::max(scores_.size(), static_cast<size_t>(scored * score_stride / 16)));
    weights_.resize(std::max(weights_.size(), static_cast<size_t>(rows * weight_stride / 32)));
  }

  // For values that are the keys: a segment of them, and the results of `rows` queries.
  void PrepareLatent(int64_t width, int64_t rows) {
    turned_.resize(std::max(turned_.size(), static_cast<size_t>(kSegment * width * sizeof(T) / sizeof(Line))));
    results_.resize(std::max(results_.size(), static_cast<size_t>(rows * width / 16)));
    sums.resize(std::max(sums.size(), static_cast<size_t>(rows)));
  }

  float* scores() { return scores_.data()->scores; }
  BFloat16* weights() { return weights_.data()->weights; }
  T* turned() { return reinterpret_cast<T*>(turned_.data()); }
  float* results() { return results_.data()->scores; }

 private:
  union alignas(64) Line {
    float scores[16];
    BFloat16 weights[32];
  };
  std::vector<Line> scores_, weights_, turned_, results_;
};

// The steps of attention to keys that are the values, of up to `kLatentRows` queries or those of one token.
template <typename T>
struct ByLatent {
  Scratch<T>& scratch;
  bool tiles;

  ByLatent(Scratch<T>& own, bool uses_tiles) : scratch(own), tiles(uses_tiles) {}

  // The weights of a few queries, whose place is from row `from` on.
  template <typename Taken>
  void Weights(Taken* queries, const Seen& seen, ScoreForm form, int64_t from) const {
    float* sums = scratch.sums.data() + from;
#ifdef XLA_ENGINE_AMX
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (tiles) {
        ShapeTiles(seen.rows, scratch.context.count);
        WeightsByTiles(scratch.context, queries, seen, form, scratch.scores(), scratch.score_stride,
                       scratch.weights() + from * scratch.weight_stride, scratch.weight_stride, sums);
        return _tile_release();
      }
    }
#endif
    WeightsByVectors(scratch.context, queries, seen, form, scratch.scores() + from * scratch.score_stride, scratch.score_stride, sums);
  }

  // Adds the weighted values from position `first` on, a segment, for all rows.
  void Weigh(int64_t first, int64_t rows) const {
    const int64_t last = std::min(first + kSegment, scratch.context.count), width = scratch.context.width;
    TurnKeys(scratch.context, first, last, scratch.turned());
    thread_local Context<T> part;
    part.count = last - first;
    part.width = width;
    part.values.clear();
    for (int64_t at = 0; at < part.count; at += Head<T>::kTile) part.values.push_back(scratch.turned() + at * width);
    for (int64_t from = 0; from < rows; from += kQueries) {
      const int64_t some = std::min(kQueries, rows - from);
      float* out = scratch.results() + from * width;
#ifdef XLA_ENGINE_AMX
      if constexpr (std::is_same_v<T, BFloat16>) {
        if (tiles) {
          ShapeTiles(some, part.count);
          WeighTiles(part, scratch.weights() + from * scratch.weight_stride + first, scratch.weight_stride, out, first == 0);
          _tile_release();
          continue;
        }
      }
#endif
      WeighByVectors(part, scratch.scores() + from * scratch.score_stride, scratch.score_stride, first, some, out, first == 0);
    }
  }
};

// Tokens of a task: so many that keys are turned for many queries at once, and tasks enough for all threads; no bit depends on it.
inline int64_t LatentTokens(const ffi::ThreadPool& pool, const Arguments& a, int64_t groups) {
  int64_t longest = 1;
  for (int64_t lane = 0; lane < a.lanes; ++lane)
    if (a.count[lane] > 0) longest = std::max(longest, a.Furthest(lane, 0, a.count[lane]));
  const int64_t rows = std::min<int64_t>(kLatentRows, kLatentWeights / (longest * static_cast<int64_t>(sizeof(float))));
  const int64_t share = a.lanes * a.width / (2 * std::max<int64_t>(1, pool.num_threads()));
  return std::max<int64_t>(1, std::min(rows / groups, share));
}

template <typename T>
using ResultOf = std::conditional_t<std::is_same_v<T, int8_t>, BFloat16, T>;

template <typename T>
constexpr ffi::DataType kType = std::is_same_v<T, int8_t> ? ffi::S8 : std::is_same_v<T, float> ? ffi::F32 : ffi::BF16;

// T: of the store. In int8, heads are taken in float32 and results are bf16.
template <typename T, typename Out = ResultOf<T>>
void Run(ffi::ThreadPool& pool, const Arguments& a, bool tiles, T* keys, T* values, Out* out) {
  constexpr bool kBytes = std::is_same_v<T, int8_t>;
  [[maybe_unused]] const bool uses_tiles = tiles && std::is_same_v<T, BFloat16>;
  using Taken = std::conditional_t<kBytes, float, T>;
  const int64_t groups = a.heads / a.kv_heads;
  const int64_t tokens = a.latent ? LatentTokens(pool, a, groups) : std::max<int64_t>(1, kQueries / groups);  // of one task
  const int64_t pieces = (a.width + tokens - 1) / tokens;
  auto head_of = [&](int64_t lane, int64_t kv) {
    Head<T> head = {keys, values, a.tables + a.slot[lane] * a.pages, a.pages, a.page, a.kv_heads * a.page, a.projection.padded};
    head.keys += kv * a.page * head.KeyWidth();
    head.values = a.latent ? nullptr : head.values + kv * a.page * head.width;
    return head;
  };

  auto write = [&](int64_t lane, int64_t kv) {
    alignas(64) Taken key[kMaxWidth], value[kMaxWidth];
    const Head<T> head = head_of(lane, kv);
    const int64_t end = a.start[lane] + a.count[lane];
    bool continued = false;  // by another lane, which may be written at the same time
    for (int64_t other = 0; other < a.lanes; ++other)
      continued |= a.slot[other] == a.slot[lane] && a.start[other] == end && a.count[other] > 0;
    for (int64_t t = 0; t < a.count[lane]; ++t) {
      const int64_t row = lane * a.width + t;
      a.projection.Rotated(row, a.heads + kv, a.k_norm, key);
      if (!a.latent) a.projection.Value(row, a.heads + (a.stored_parts - 1) * a.kv_heads + kv, value);
      const bool odd = (a.start[lane] + t) % 2;
      if constexpr (kBytes)
        WriteBytes(head, a.start[lane] + t, key, a.latent ? nullptr : value);
      else
        head.Write(a.start[lane] + t, key, a.latent ? nullptr : value, odd ? t > 0 || a.width == 1 : t + 1 < a.count[lane] || !continued);
    }
  };

  auto attend = [&](int64_t lane, int64_t kv, int64_t first_token) {
    const int64_t last_token = std::min<int64_t>(first_token + tokens, a.width);
    const int64_t used = std::min<int64_t>(last_token, a.count[lane]);
    for (int64_t t = std::max<int64_t>(first_token, used); t < last_token; ++t)  // padding
      std::memset(static_cast<void*>(out + ((lane * a.width + t) * a.heads + kv * groups) * a.projection.head_dim), 0,
                  groups * a.projection.head_dim * sizeof(Out));
    if (first_token >= used) return;
    thread_local Scratch<T> scratch;
    // Whole tiles by absolute position, so that a row's keys stand in the same tiles whatever rows are beside it.
    const int64_t begin = a.First(a.start[lane] + first_token) / Head<T>::kTile * Head<T>::kTile;
    const int64_t last = a.Furthest(lane, first_token, used), width = a.projection.padded;
    alignas(64) Taken queries[kQueries * kMaxWidth];
    Seen seen;
    const int64_t rows_wanted = (used - first_token) * groups;
    const auto ask = [&](int64_t from) {
      seen.rows = std::min(kQueries, rows_wanted - from);
      for (int64_t r = 0; r < seen.rows; ++r) {
        const int64_t t = first_token + (from + r) / groups, head = kv * groups + (from + r) % groups;
        a.projection.Rotated(lane * a.width + t, head, a.q_norm, queries + r * width);
        seen.first[r] = a.First(a.start[lane] + t) - begin;
        seen.last[r] = a.Last(lane, t) - begin;
        seen.sink[r] = a.sinks ? a.sinks[head] : kLowest;
        seen.added[r] = a.distances ? a.distances + (2 * head + 1) * a.span + begin - (a.start[lane] + t) : nullptr;
      }
    };
    const auto give = [&](int64_t from, const float* result, const float* sums) {
      for (int64_t r = 0; r < std::min(kQueries, rows_wanted - from); ++r) {
        const int64_t t = first_token + (from + r) / groups, head = kv * groups + (from + r) % groups;
        Out* to = out + ((lane * a.width + t) * a.heads + head) * a.projection.head_dim;
        const float* from = result + r * width;
        int64_t d = 0;
        for (; d + kVector <= a.projection.head_dim; d += kVector) Storage<Out>::Round(Load(from + d) / sums[r], to + d);
        for (; d < a.projection.head_dim; ++d) to[d] = Storage<Out>::Round(from[d] / sums[r]);
      }
    };
    if (a.latent) {
      scratch.Prepare(head_of(lane, kv), begin, last, uses_tiles ? kQueries : rows_wanted, rows_wanted);
      scratch.PrepareLatent(width, rows_wanted);
      for (int64_t from = 0; from < rows_wanted; from += kQueries) {
        ask(from);
        ByLatent(scratch, uses_tiles).Weights(queries, seen, a.form, from);
      }
      for (int64_t first = 0; first < scratch.context.count; first += kSegment) ByLatent(scratch, uses_tiles).Weigh(first, rows_wanted);
      Finish(scratch.context, rows_wanted, scratch.results());
      for (int64_t from = 0; from < rows_wanted; from += kQueries)
        give(from, scratch.results() + from * width, scratch.sums.data() + from);
      return;
    }
    scratch.Prepare(head_of(lane, kv), begin, last);
    alignas(64) float result[kQueries * kMaxWidth];
    float sums[kQueries];
    for (int64_t from = 0; from < rows_wanted; from += kQueries) {
      ask(from);
#ifdef XLA_ENGINE_AMX
      if constexpr (std::is_same_v<T, BFloat16>) {
        if (tiles)
          AttendTiles(scratch.context, queries, seen, a.form, scratch.scores(), scratch.score_stride, scratch.weights(),
                      scratch.weight_stride, result, sums);
        else
          AttendVectors(scratch.context, queries, seen, a.form, scratch.scores(), scratch.score_stride, result, sums);
      } else
#endif
        AttendVectors(scratch.context, queries, seen, a.form, scratch.scores(), scratch.score_stride, result, sums);
      give(from, result, sums);
    }
  };

  if (a.width == 1) {  // decode: slots are distinct, a row needs nothing of another
    ParallelFor(pool, a.lanes * a.kv_heads, [&](int64_t task) {
      if (a.stored_parts) write(task % a.lanes, task / a.lanes);
      attend(task % a.lanes, task / a.lanes, 0);
    });
    return;
  }
  if (a.stored_parts)
    ParallelFor(pool, a.lanes * a.kv_heads, [&](int64_t task) { write(task / a.kv_heads, task % a.kv_heads); });
  ParallelFor(pool, a.lanes * a.kv_heads * pieces, [&](int64_t task) {
    const int64_t lane = task / (a.kv_heads * pieces), rest = task % (a.kv_heads * pieces);
    attend(lane, rest / pieces, rest % pieces * tokens);
  });
}

// Returns what is wrong with the lanes' slots and positions, or null: a lane must lie within its table, over pages of the pool,
// and this call must not overwrite keys that the lane reads.
const char* Misplaced(const Arguments& a, int64_t pool_pages) {
  for (int64_t lane = 0; lane < a.lanes; ++lane) {
    if (a.count[lane] < 0 || a.count[lane] > a.width) return "count out of range";
    if (a.count[lane] == 0) continue;
    if (a.slot[lane] < 0 || a.slot[lane] >= a.rows || a.start[lane] < 0) return "a lane lies outside the cache";
    int64_t end = a.start[lane] + a.count[lane];
    const int64_t begin = a.First(a.start[lane]), furthest = a.Furthest(lane, 0, a.count[lane]);
    const int32_t* table = a.tables + a.slot[lane] * a.pages;
    for (int64_t page = begin / a.page; page * a.page < furthest; ++page)
      if (table[page % a.pages] < 0 || table[page % a.pages] >= pool_pages) return "a block table names no page";
    for (int64_t other = lane + 1; a.width > 1 && other < a.lanes; ++other)
      if (a.slot[other] == a.slot[lane]) end = std::max<int64_t>(end, a.start[other] + a.count[other]);
    if (furthest > end) return "a query reaches beyond what the call writes";
    for (int64_t t = 0; t < a.count[lane]; ++t)
      if (a.Last(lane, t) <= a.start[lane] + t) return "a query does not reach its own key";
    // A ring has room for one more, since a write may clear the position behind it.
    if (end > a.pages * a.page && end - begin >= a.pages * a.page) return "a lane lies outside the cache";
  }
  return nullptr;
}

// T: of the store. Reach: `Integers` (see `Arguments`), or nothing.
template <typename T, typename... Reach>
struct Attention {
  static ffi::Error Attend(ffi::ThreadPool pool, Floats qkv, Floats rope, Integers slot, Integers start, Integers count,
                           Reach... reach, Integers tables, Floats q_norm, Floats k_norm, Floats sinks, Floats distances,
                           ffi::AnyBuffer keys, ffi::AnyBuffer values, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_keys,
                           ffi::Result<ffi::AnyBuffer> new_values, int64_t layer, int64_t window, float scale, float softcap,
                           float eps, int64_t stored_parts, bool value_norm, bool norm_last) {
    const auto shape = keys.dimensions();  // [layers, pages, KV, S / 16, D / W, 16, W], in int8 D / W + 2
    Arguments a;
    Projection& projection = a.projection;
    projection.qkv = qkv.typed_data();
    projection.rope = rope.typed_data();
    projection.eps = eps;
    projection.value_norm = value_norm;
    projection.norm_last = norm_last;
    a.slot = slot.typed_data();
    a.start = start.typed_data();
    a.count = count.typed_data();
    a.reach = nullptr;
    (..., (a.reach = reach.typed_data()));
    a.tables = tables.typed_data();
    a.q_norm = OrNull(q_norm);
    a.k_norm = OrNull(k_norm);
    a.sinks = OrNull(sinks);
    a.distances = OrNull(distances);
    a.window = window;
    a.stored_parts = stored_parts;
    a.latent = values.element_count() == 0;
    a.form = {scale, softcap};
    const int64_t rows = rope.dimensions()[0];
    a.lanes = slot.element_count();
    a.width = rows / a.lanes;
    projection.head_dim = 2 * rope.dimensions()[2];
    a.kv_heads = shape[2];
    a.heads = static_cast<int64_t>(qkv.element_count()) / rows / projection.head_dim - stored_parts * a.kv_heads;
    if (keys.element_type() != kType<T> || values.element_type() != kType<T> || out->element_type() != kType<ResultOf<T>>)
      return ffi::Error::InvalidArgument("the cache or the result has another type");
    const int64_t key_width = shape[4] * shape[6];
    projection.padded = key_width - (std::is_same_v<T, int8_t> ? Head<int8_t>::kScales : 0);
    a.rows = tables.dimensions()[0];
    a.pages = tables.dimensions()[1];
    a.page = shape[3] * kVector;
    projection.width = (a.heads + stored_parts * a.kv_heads) * projection.head_dim;
    a.span = static_cast<int64_t>(distances.element_count()) / (2 * a.heads);
    if (a.distances && distances.dimensions()[0] != a.heads) return ffi::Error::InvalidArgument("distances of other heads");
    if (projection.padded > kMaxWidth) return ffi::Error::InvalidArgument("the head dimension is above 640");
    if (a.latent && stored_parts != 1)
      return ffi::Error::InvalidArgument("keys that are the values have none beside them");
    if (keys.untyped_data() != new_keys->untyped_data() || (!a.latent && values.untyped_data() != new_values->untyped_data()))
      return ffi::Error::Internal("the cache was copied: donate it and do not use it afterwards");
    if (layer < 0 || layer >= shape[0]) return ffi::Error::InvalidArgument("the store has no such layer");
    const int64_t before = layer * shape[1] * a.kv_heads * a.page;  // positions
    for (int64_t lane = 0; a.distances && lane < a.lanes; ++lane)
      if (a.start[lane] + a.count[lane] + 2 * kVector > a.span) return ffi::Error::InvalidArgument("distances are too short");
    if (const char* complaint = Misplaced(a, shape[1])) return ffi::Error::InvalidArgument(complaint);
    bool tiles = false;
#ifdef XLA_ENGINE_AMX
    static const bool granted = RequestTiles();
    tiles = granted;
#endif
    Run(pool, a, tiles, static_cast<T*>(keys.untyped_data()) + before * key_width,
        static_cast<T*>(values.untyped_data()) + before * projection.padded, static_cast<ResultOf<T>*>(out->untyped_data()));
    return ffi::Error::Success();
  }
};

}  // namespace

#define XLA_ENGINE_ATTENTION_NAMES "layer", "window", "scale", "softcap", "eps", "stored_parts", "value_norm", "norm_last"
// The handlers of a library of stores of one type.
#define XLA_ENGINE_ATTENTION(Name, T)                                                                                   \
  using Causal##Name = Attention<T>;                                                                                    \
  using Reaching##Name = Attention<T, Integers>;                                                                        \
  XLA_ENGINE_HANDLER(XlaEngineAttend##Name, Causal##Name::Attend, XLA_ENGINE_ATTENTION_NAMES)                           \
  XLA_ENGINE_HANDLER(XlaEngineAttendReaching##Name, Reaching##Name::Attend, XLA_ENGINE_ATTENTION_NAMES)                   \
  XLA_ENGINE_HANDLER(XlaEngineZeros##Name, Zeros)

}  // namespace xla_engine
