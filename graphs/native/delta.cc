// The gated delta rule (Yang, Kautz and Hatamizadeh 2024) over slots, for XLA:CPU: position by position, in place. And
// the rule of Mamba-2 (Dao and Gu 2024), which is the same without the correction of what the memory recalls.
//
// A head's memory S [Dk, Dv] is cut into columns that no operation mixes. The columns of a task stay in the first-level
// cache while it walks through the positions of a lane, so that the memory itself is read and written once per call.
// Prefill, decode and verify steps run the same code for a position: their bits agree by construction.

#include "buffers.h"
#include "common.h"
#include "parallel.h"

namespace xla_engine {
namespace {

constexpr int64_t kParts = 4;  // vectors of columns in a task: 32 KB of memory at 128 keys

// The inputs of one position to one head: key and query [Dk], value [Dv] from the task's first column on.
struct Position {
  const float *key, *query, *value;
  float decay, rate;
  float* out;
};

// S becomes a S + k b (v - a S^T k)^T, or without correction a S + k b v^T, and the output is S^T q, of `parts` vectors
// of columns of S [dims, stride]. One piece of machine code for all callers.
template <bool corrects, int parts>
__attribute__((noinline)) void Advance(float* memory, int64_t dims, int64_t stride, const Position& at) {
  Vec recalled[parts] = {}, read[parts] = {};
  for (int64_t k = 0; k < dims; ++k) {
    for (int p = 0; p < parts; ++p) {
      const Vec held = Load(memory + k * stride + p * kVector);
      if constexpr (corrects) recalled[p] = Fused(held, at.key[k], recalled[p]);
      read[p] = Fused(held, at.query[k], read[p]);
    }
  }
  Vec products = {};
  for (int64_t k = 0; k < dims; k += kVector) products = Fused(Load(at.key + k), Load(at.query + k), products);
  const float overlap = Total(products);
  Vec change[parts];
  for (int p = 0; p < parts; ++p) {
    const Vec value = Load(at.value + p * kVector);
    change[p] = (corrects ? Fused(-recalled[p], at.decay, value) : value) * at.rate;
    Store(at.out + p * kVector, Fused(change[p], overlap, read[p] * at.decay));
  }
  for (int64_t k = 0; k < dims; ++k) {
    for (int p = 0; p < parts; ++p) {
      float* held = memory + k * stride + p * kVector;
      Store(held, Fused(change[p], at.key[k], Load(held) * at.decay));
    }
  }
}

// The inputs of a call: q, k [N, Hk, Dk], v [N, Hv, Dv], decay and rate [N, Hv]; lane p has the positions
// start .. start + count of slot slot[p] in rows p T ..; out [N, Hv, Dv] is zero in rows that are padding.
struct Call {
  const float *q, *k, *v, *decay, *rate;
  const int32_t *slot, *start, *count;
  int64_t rows, lanes, heads, key_heads, dims, width;
  float* out;
};

// Every head's columns, task by task, through the positions of all lanes. columns: where those of a lane lie, holding
// the memory before its first position.
template <bool corrects, typename Columns>
void Walk(ffi::ThreadPool pool, const Call& call, const Columns& columns) {
  const int64_t positions = call.rows / call.lanes, groups = call.heads / call.key_heads;
  const int64_t step = kParts * kVector, pieces = (call.width + step - 1) / step;
  ParallelFor(pool, call.heads * pieces, [&](int64_t task) {
    const int64_t head = task / pieces, first = task % pieces * step;
    const int64_t vectors = std::min(kParts, (call.width - first) / kVector);
    for (int64_t lane = 0; lane < call.lanes; ++lane) {  // in order: a lane may go on where the one before it ended
      const int64_t used = call.count[lane];
      const auto [held, stride] = columns(lane, head, first, vectors);
      for (int64_t t = 0; t < positions; ++t) {
        const int64_t row = lane * positions + t, at = row * call.heads + head;
        float* to = call.out + at * call.width + first;
        if (t >= used) {
          std::memset(to, 0, vectors * kVector * sizeof(float));
          continue;
        }
        const int64_t shared = (row * call.key_heads + head / groups) * call.dims;
        const Position position = {call.k + shared, call.q + shared,  call.v + at * call.width + first,
                                   call.decay[at],  call.rate[at],    to};
        if (vectors == kParts) {
          Advance<corrects, kParts>(held, call.dims, stride, position);
        } else {
          for (int64_t p = 0; p < vectors; ++p) {
            Position one = position;
            one.value += p * kVector;
            one.out += p * kVector;
            Advance<corrects, 1>(held + p * kVector, call.dims, stride, one);
          }
        }
      }
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

// The columns of one lane, and how far apart their rows are.
struct Held {
  float* memory;
  int64_t stride;
};

// Memory [B, Hv, Dk, Dv] is written in place.
template <bool corrects>
ffi::Error Rule(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats decay, Floats rate, Integers slot,
                     Integers start, Integers count, Floats memory, ffi::ResultBuffer<ffi::F32> out,
                     ffi::ResultBuffer<ffi::F32> updated) {
  const Call call = Described(q, k, v, decay, rate, slot, start, count, out->typed_data());
  if (call.dims % kVector || call.width % kVector) return Unfit();
  float* state = updated->typed_data();
  if (state != memory.typed_data()) std::memcpy(state, memory.typed_data(), memory.size_bytes());
  Walk<corrects>(pool, call, [&](int64_t lane, int64_t head, int64_t first, int64_t vectors) {
    float* held = state + (call.slot[lane] * call.heads + head) * call.dims * call.width + first;
    if (call.count[lane] > 0 && call.start[lane] == 0)
      for (int64_t key = 0; key < call.dims; ++key)
        std::memset(held + key * call.width, 0, vectors * kVector * sizeof(float));
    return Held{held, call.width};
  });
  return ffi::Error::Success();
}

// The same outputs for lanes that each continue a slot of their own; the memory is not changed.
template <bool corrects>
ffi::Error Outputs(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats decay, Floats rate, Integers slot,
                        Integers start, Integers count, Floats memory, ffi::ResultBuffer<ffi::F32> out) {
  const Call call = Described(q, k, v, decay, rate, slot, start, count, out->typed_data());
  if (call.dims % kVector || call.width % kVector) return Unfit();
  Walk<corrects>(pool, call, [&](int64_t lane, int64_t head, int64_t first, int64_t vectors) {
    thread_local std::vector<float> scratch;
    const int64_t stride = vectors * kVector;
    scratch.resize(call.dims * stride);
    const float* held = memory.typed_data() + (call.slot[lane] * call.heads + head) * call.dims * call.width + first;
    if (call.count[lane] > 0)
      for (int64_t key = 0; key < call.dims; ++key)
        std::memcpy(scratch.data() + key * stride, held + key * call.width, stride * sizeof(float));
    return Held{scratch.data(), stride};
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_ENGINE_HANDLER(XlaEngineDeltaRule, Rule<true>)
XLA_ENGINE_HANDLER(XlaEngineDeltaOutputs, Outputs<true>)
XLA_ENGINE_HANDLER(XlaEngineSsdRule, Rule<false>)
XLA_ENGINE_HANDLER(XlaEngineSsdOutputs, Outputs<false>)

}  // namespace xla_engine
