// The gated delta rule (Yang, Kautz and Hatamizadeh 2024) over slots, for XLA:CPU: position by position, in place.
//
// A head's memory S [Dk, Dv] is cut into columns that no operation mixes. The columns of a task stay in the first-level
// cache while it walks through the positions of a lane, so that the memory itself is read and written once per call.
// Prefill and decode run the same code for a position: their bits agree by construction.

#include "common.h"
#include "parallel.h"

namespace xla_engine {
namespace {

constexpr int64_t kParts = 4;  // vectors of columns in a task: 32 KB of memory at 128 keys

// What one position brings to one head: key and query [Dk], value [Dv] from the task's first column on.
struct Position {
  const float *key, *query, *value;
  float decay, rate;
  float* out;
};

// S becomes a S + k b (v - a S^T k)^T and the output is S^T q, of `parts` vectors of columns of S [dims, stride].
template <int parts>
void Advance(float* memory, int64_t dims, int64_t stride, const Position& at) {
  Vec recalled[parts] = {}, read[parts] = {};
  for (int64_t k = 0; k < dims; ++k) {
    for (int p = 0; p < parts; ++p) {
      const Vec held = Load(memory + k * stride + p * kVector);
      recalled[p] += held * at.key[k];
      read[p] += held * at.query[k];
    }
  }
  Vec products = {};
  for (int64_t k = 0; k < dims; k += kVector) products += Load(at.key + k) * Load(at.query + k);
  const float overlap = Total(products);
  Vec change[parts];
  for (int p = 0; p < parts; ++p) {
    change[p] = (Load(at.value + p * kVector) - recalled[p] * at.decay) * at.rate;
    Store(at.out + p * kVector, read[p] * at.decay + change[p] * overlap);
  }
  for (int64_t k = 0; k < dims; ++k) {
    for (int p = 0; p < parts; ++p) {
      float* held = memory + k * stride + p * kVector;
      Store(held, Load(held) * at.decay + change[p] * at.key[k]);
    }
  }
}

using Floats = ffi::Buffer<ffi::F32>;
using Integers = ffi::Buffer<ffi::S32>;

// q, k [N, Hk, Dk], v [N, Hv, Dv], decay and rate [N, Hv]; lane p has the positions start .. start + count of slot
// slot[p] in rows p T ..; memory [B, Hv, Dk, Dv], written in place -> out [N, Hv, Dv], zero in rows that are padding.
ffi::Error DeltaRule(ffi::ThreadPool pool, Floats q, Floats k, Floats v, Floats decay, Floats rate, Integers slot,
                     Integers start, Integers count, Floats memory, ffi::ResultBuffer<ffi::F32> out,
                     ffi::ResultBuffer<ffi::F32> updated) {
  const int64_t rows = v.dimensions()[0], heads = v.dimensions()[1], width = v.dimensions()[2];
  const int64_t key_heads = k.dimensions()[1], dims = k.dimensions()[2];
  const int64_t lanes = slot.dimensions()[0], positions = rows / lanes, groups = heads / key_heads;
  if (dims % kVector || width % kVector)
    return ffi::Error::InvalidArgument("head dimensions must come in multiples of 16");
  float* state = updated->typed_data();
  if (state != memory.typed_data()) std::memcpy(state, memory.typed_data(), memory.size_bytes());
  const int64_t step = kParts * kVector, pieces = (width + step - 1) / step;

  ParallelFor(pool, heads * pieces, [&](int64_t task) {
    const int64_t head = task / pieces, first = task % pieces * step;
    const int64_t vectors = std::min(kParts, (width - first) / kVector);
    for (int64_t lane = 0; lane < lanes; ++lane) {  // in order: a lane may go on where the one before it ended
      const int64_t used = count.typed_data()[lane];
      float* held = state + (slot.typed_data()[lane] * heads + head) * dims * width + first;
      if (used > 0 && start.typed_data()[lane] == 0)
        for (int64_t key = 0; key < dims; ++key) std::memset(held + key * width, 0, vectors * kVector * sizeof(float));
      for (int64_t t = 0; t < positions; ++t) {
        const int64_t row = lane * positions + t, at = row * heads + head;
        float* to = out->typed_data() + at * width + first;
        if (t >= used) {
          std::memset(to, 0, vectors * kVector * sizeof(float));
          continue;
        }
        const int64_t shared = (row * key_heads + head / groups) * dims;
        const Position position = {k.typed_data() + shared,     q.typed_data() + shared, v.typed_data() + at * width + first,
                                   decay.typed_data()[at], rate.typed_data()[at],  to};
        if (vectors == kParts) {
          Advance<kParts>(held, dims, width, position);
        } else {
          for (int64_t p = 0; p < vectors; ++p) {
            Position one = position;
            one.value += p * kVector;
            one.out += p * kVector;
            Advance<1>(held + p * kVector, dims, width, one);
          }
        }
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineDeltaRule, DeltaRule,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Integers>()
                                  .Arg<Integers>()
                                  .Arg<Integers>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Ret<Floats>());

}  // namespace xla_engine
