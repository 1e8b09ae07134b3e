// The gated delta rule (Yang, Kautz and Hatamizadeh 2024) over slots, for XLA:CPU: position by position, in place. And
// the rule of Mamba-2 (Dao and Gu 2024), which is the same without the correction of what the memory recalls.
//
// A head's memory S [Dk, Dv] is cut into columns that no operation mixes. The columns of a task stay in the first-level
// cache while it walks through the positions of a lane, so that the memory itself is read and written once per call. One
// sweep over them changes them by a position and asks them for the next: four operations, one load and one store a vector.
// Prefill, decode and verify steps run the same code for a position: their bits agree by construction.

#include "buffers.h"
#include "common.h"
#include "parallel.h"

namespace xla_engine {
namespace {

constexpr int64_t kParts = kRegister == 16 ? 4 : 1;  // vectors of columns in a task, so that their sums stay in registers

// The inputs of one position to one head: key and query [Dk], value [Dv] from the task's first column on.
struct Position {
  const float *key, *query, *value;
  float decay, rate;
  float* out;
};

// What the memory recalls for a position's key, and what the query reads, of `parts` vectors of columns.
template <int parts>
struct Found {
  Vec recalled[parts], read[parts];
};

// Writes the output of a position, and returns the change of the memory.
template <bool corrects, int parts>
inline void Change(const Position& at, int64_t dims, const Found<parts>& found, Vec* change) {
  Vec products = {};
  for (int64_t k = 0; k < dims; k += kVector) products = Fused(Load(at.key + k), Load(at.query + k), products);
  const float overlap = Total(products);
  for (int p = 0; p < parts; ++p) {
    const Vec value = Load(at.value + p * kVector);
    change[p] = (corrects ? Fused(-found.recalled[p], at.decay, value) : value) * at.rate;
    Store(at.out + p * kVector, Fused(change[p], overlap, found.read[p] * at.decay));
  }
}

// One sweep over `parts` vectors of columns of S [dims, stride]: changes them by `change` of the position `at`, if there is
// one, and asks them for `next`, if there is one.
template <bool corrects, bool changes, bool asks, int parts>
__attribute__((always_inline)) inline void Sweep(float* memory, int64_t dims, int64_t stride, const Position& at,
                                                 const Vec* change, const Position& next, Found<parts>& found) {
  found = {};
  for (int64_t k = 0; k < dims; ++k) {
    for (int p = 0; p < parts; ++p) {
      float* held = memory + k * stride + p * kVector;
      Vec now = Load(held);
      if constexpr (changes) {
        now = Fused(change[p], at.key[k], now * at.decay);
        Store(held, now);
      }
      if constexpr (asks && corrects) found.recalled[p] = Fused(now, next.key[k], found.recalled[p]);
      if constexpr (asks) found.read[p] = Fused(now, next.query[k], found.read[p]);
    }
  }
}

// For `count` positions in turn, S becomes a S + k b (v - a S^T k)^T, or without correction a S + k b v^T, and the output
// is S^T q. One piece of machine code for all callers.
template <bool corrects, int parts, typename Positions>
__attribute__((noinline)) void Advance(float* memory, int64_t dims, int64_t stride, int64_t count, const Positions& positions) {
  Position at = positions(0);
  Found<parts> found;
  Vec change[parts];
  Sweep<corrects, false, true, parts>(memory, dims, stride, at, change, at, found);
  for (int64_t t = 1; t < count; ++t) {
    Change<corrects, parts>(at, dims, found, change);
    const Position next = positions(t);
    Sweep<corrects, true, true, parts>(memory, dims, stride, at, change, next, found);
    at = next;
  }
  Change<corrects, parts>(at, dims, found, change);
  Sweep<corrects, true, false, parts>(memory, dims, stride, at, change, at, found);
}

// The inputs of a call: q, k [N, Hk, Dk], v [N, Hv, Dv], decay and rate [N, Hv]; lane p has the positions
// start .. start + count of slot slot[p] in rows p T ..; out [N, Hv, Dv] is zero in rows that are padding.
struct Call {
  const float *q, *k, *v, *decay, *rate;
  const int32_t *slot, *start, *count;
  int64_t rows, lanes, heads, key_heads, dims, width;
  float* out;
};

// The memory of a lane [Hv, Dk, Dv]: that before its first position, null for zeros, and that after the last, null if
// nobody reads it.
struct Memory {
  const float* before;
  float* after;
};

// `vectors` of columns of a head's memory [dims, width], through `count` positions. They are swept where they are, or with
// more positions side by side: a power of two apart, they would take each other's places in the cache.
template <bool corrects, typename Positions>
void Follow(const Memory& held, int64_t dims, int64_t width, int64_t vectors, int64_t count, const Positions& positions) {
  constexpr int64_t kInPlace = 2;  // positions
  const int64_t columns = vectors * kVector;
  thread_local std::vector<float> scratch;
  float* memory = held.after;
  int64_t stride = width;
  if (held.before != held.after || count > kInPlace) {
    scratch.resize(dims * columns);
    memory = scratch.data();
    stride = columns;
    if (!held.before) std::memset(memory, 0, dims * columns * sizeof(float));
    for (int64_t k = 0; k < dims && held.before; ++k)
      std::memcpy(memory + k * columns, held.before + k * width, columns * sizeof(float));
  }
  if (vectors == kParts) {
    Advance<corrects, kParts>(memory, dims, stride, count, positions);
  } else {
    for (int64_t column = 0; column < columns; column += kVector)
      Advance<corrects, 1>(memory + column, dims, stride, count, [&](int64_t t) {
        Position at = positions(t);
        at.value += column, at.out += column;
        return at;
      });
  }
  if (held.after && memory != held.after)
    for (int64_t k = 0; k < dims; ++k)
      std::memcpy(held.after + k * width, memory + k * columns, columns * sizeof(float));
}

// Every head's columns, task by task, through the positions of all lanes. memory: that of a lane.
template <bool corrects, typename OfLane>
void Walk(ffi::ThreadPool pool, const Call& call, const OfLane& memory) {
  const int64_t positions = call.rows / call.lanes, groups = call.heads / call.key_heads;
  const int64_t step = kParts * kVector, pieces = (call.width + step - 1) / step;
  ParallelFor(pool, call.heads * pieces, [&](int64_t task) {
    const int64_t head = task / pieces, first = task % pieces * step;
    const int64_t vectors = std::min(kParts, (call.width - first) / kVector);
    for (int64_t lane = 0; lane < call.lanes; ++lane) {  // in order: a lane may go on where the one before it ended
      const int64_t used = call.count[lane];
      const auto position = [&](int64_t t) -> Position {
        const int64_t row = lane * positions + t, at = row * call.heads + head, own = at * call.width + first;
        const int64_t shared = (row * call.key_heads + head / groups) * call.dims;
        return {call.k + shared, call.q + shared, call.v + own, call.decay[at], call.rate[at], call.out + own};
      };
      for (int64_t t = used; t < positions; ++t) std::memset(position(t).out, 0, vectors * kVector * sizeof(float));
      if (used <= 0) continue;
      const Memory whole = memory(lane);
      const int64_t offset = head * call.dims * call.width + first;
      const Memory own = {whole.before ? whole.before + offset : nullptr, whole.after ? whole.after + offset : nullptr};
      Follow<corrects>(own, call.dims, call.width, vectors, used, position);
    }
  });
}

Call Described(Floats q, Floats k, Floats v, Floats decay, Floats rate, Integers slot, Integers start, Integers count,
               float* out) {
  return {q.typed_data(),    k.typed_data(),     v.typed_data(),     decay.typed_data(), rate.typed_data(),
          slot.typed_data(), start.typed_data(), count.typed_data(), v.dimensions()[0],  slot.dimensions()[0],
          v.dimensions()[1], k.dimensions()[1],  k.dimensions()[2],  v.dimensions()[2],  out};
}

ffi::Error Unfit() { return ffi::Error::InvalidArgument("head dimensions must come in multiples of 16"); }

// Memory [B, Hv, Dk, Dv] is written in place.
template <bool corrects>
ffi::Error Rule(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats decay, Floats rate, Integers slot,
                     Integers start, Integers count, Floats memory, ffi::ResultBuffer<ffi::F32> out,
                     ffi::ResultBuffer<ffi::F32> updated) {
  const Call call = Described(q, k, v, decay, rate, slot, start, count, out->typed_data());
  if (call.dims % kVector || call.width % kVector) return Unfit();
  float* state = updated->typed_data();
  if (state != memory.typed_data()) std::memcpy(state, memory.typed_data(), memory.size_bytes());
  Walk<corrects>(pool, call, [&](int64_t lane) {
    float* own = state + call.slot[lane] * call.heads * call.dims * call.width;
    return Memory{call.start[lane] == 0 ? nullptr : own, own};
  });
  return ffi::Error::Success();
}

// The same outputs for lanes that each continue a slot of their own; the memory is not changed.
template <bool corrects>
ffi::Error Outputs(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats decay, Floats rate, Integers slot,
                        Integers start, Integers count, Floats memory, ffi::ResultBuffer<ffi::F32> out) {
  const Call call = Described(q, k, v, decay, rate, slot, start, count, out->typed_data());
  if (call.dims % kVector || call.width % kVector) return Unfit();
  Walk<corrects>(pool, call, [&](int64_t lane) {
    return Memory{memory.typed_data() + call.slot[lane] * call.heads * call.dims * call.width, nullptr};
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_ENGINE_HANDLER(XlaEngineDeltaRule, Rule<true>)
XLA_ENGINE_HANDLER(XlaEngineDeltaOutputs, Outputs<true>)
XLA_ENGINE_HANDLER(XlaEngineSsdRule, Rule<false>)
XLA_ENGINE_HANDLER(XlaEngineSsdOutputs, Outputs<false>)

}  // namespace xla_engine
