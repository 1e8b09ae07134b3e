// Recurrent layers between their two products, for XLA:CPU, over slots and in place: gated DeltaNet (Yang, Kautz and Hatamizadeh
// 2024) and Mamba-2 (Dao and Gu 2024).
//
//   projected --> convolution, SiLU --> norms of keys and queries --> rule --> norm, gate --> out
//            \--> decays and rates of each head ----------------------/
//
// Kimi Delta Attention (Kimi Team 2025) is a gated DeltaNet with a decay for each channel of a key, and gates that are sigmoids.
// One call runs three phases: everything before the rule, by heads and rows; the rule, by heads and columns of their memories;
// everything behind it, by rows.

#include "buffers.h"
#include "common.h"
#include "gates.h"
#include "parallel.h"
#include "recurrent_inputs.h"
#include "recurrent_rule.h"

namespace xla_engine {
namespace {

constexpr int64_t kGroup = 32;  // rows of a task before the rule
constexpr float kUnitEps = 1e-6f;  // of the L2 norm of keys and queries

// What a layer is given, and its sizes. Rows of `projected` and of `work` have everything of a position:
//   DeltaNet  projected: queries, keys, values, gates, rates, steps    work: queries, keys, values, decays, rates
//   Mamba-2   projected: gates, values, keys, queries, steps           work: values, keys, queries, decays, rates
struct Layer {
  Lanes lanes;
  const float *projected, *decay, *step_bias, *skip, *norm;
  float *work, *out;
  Filters filters;
  int64_t rows, pitch, features, heads, key_heads, dims, width;
  float eps, rate_factor, least, most;  // rates are those of DeltaNet, limits those of Mamba-2's steps
  bool gates_last;                      // the gate of Mamba-2 comes behind the norm
  int64_t channels;                     // decays of a head: 1, or one for each channel of a key

  int64_t inner() const { return heads * width; }
  int64_t keys() const { return key_heads * dims; }
  int64_t decays() const { return heads * channels; }
  int64_t work_pitch() const { return features + decays() + heads; }
  const float* Projected(int64_t row) const { return projected + row * pitch; }
  float* Work(int64_t row) const { return work + row * work_pitch(); }
  float* Out(int64_t row) const { return out + row * inner(); }
  bool IsUsed(int64_t row) const { return row % lanes.positions < lanes.count[row / lanes.positions]; }
};

template <bool corrects>
struct Places {  // in a row: of the convolution's inputs and the gates in `projected`, of the rest in `work`
  const Layer& layer;
  int64_t mixed() const { return corrects ? 0 : layer.inner(); }
  int64_t gates() const { return corrects ? layer.features : 0; }
  int64_t rates() const { return layer.features + layer.inner(); }  // of DeltaNet
  int64_t steps() const { return layer.features + layer.inner() + (corrects ? layer.heads : 0); }
  int64_t queries() const { return corrects ? 0 : layer.inner() + layer.keys(); }
  int64_t keys() const { return corrects ? layer.keys() : layer.inner(); }
  int64_t values() const { return corrects ? 2 * layer.keys() : 0; }
};

// Up to sixteen values.
inline Vec LoadSome(const float* from, int64_t count) {
  float values[kVector] = {};
  std::memcpy(values, from, count * sizeof(float));
  return Load(values);
}

inline void StoreSome(float* to, int64_t count, Vec value) {
  float values[kVector];
  Store(values, value);
  std::memcpy(to, values, count * sizeof(float));
}

// exp of any value.
inline Vec AnyExp(Vec x) {
  const Vec zero = {}, small = Exp(Select(x > zero, -x, x));
  return Select(x > zero, 1.0f / small, small);
}

// log(1 + exp(x)) = max(x, 0) + log(1 + u) with u = exp(-|x|), and log(1 + u) = 2 artanh(u / (2 + u)) (Abramowitz and Stegun 1964,
// 4.1.27), where the argument is at most 1/3: seven terms of the series.
inline Vec Softplus(Vec x) {
  const Vec zero = {}, u = Exp(Select(x > zero, -x, x));
  const Vec z = u / (u + 2.0f), square = z * z;
  Vec sum = zero + 1.0f / 13;
  for (const float each : {1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f}) sum = Fused(sum, square, each);
  return Select(x > zero, x, zero) + 2.0f * z * sum;
}

inline float Squares(const float* values, int64_t count) {
  Vec squares = {};
  for (int64_t at = 0; at < count; at += kVector) squares = Fused(Load(values + at), Load(values + at), squares);
  return Total(squares);
}

inline void Scale(float* values, int64_t count, float factor) {
  for (int64_t at = 0; at < count; at += kVector) Store(values + at, Load(values + at) * factor);
}

// Decays and rates of every head at a position.
template <bool corrects>
void Pace(const Layer& layer, int64_t row) {
  const Places<corrects> places{layer};
  const float* from = layer.Projected(row);
  float *to = layer.Work(row) + layer.features, *rates = to + layer.decays();
  for (int64_t at = 0; at < layer.decays(); at += kVector) {
    const int64_t count = std::min(kVector, layer.decays() - at);
    Vec step = Softplus(LoadSome(from + places.steps() + at, count) + LoadSome(layer.step_bias + at, count));
    if constexpr (!corrects) {
      const Vec least = All(layer.least), most = All(layer.most);
      step = Select(step < least, least, step);
      step = Select(step > most, most, step);
    }
    const Vec speed = layer.channels > 1 ? All(layer.decay[at / layer.channels]) : LoadSome(layer.decay + at, count);
    StoreSome(to + at, count, Exp(-(AnyExp(speed) * step)));
    if constexpr (!corrects) StoreSome(rates + at, count, step);
  }
  for (int64_t head = 0; corrects && head < layer.heads; head += kVector) {
    const int64_t count = std::min(kVector, layer.heads - head);
    StoreSome(rates + head, count, Logistic(LoadSome(from + places.rates() + head, count)) * layer.rate_factor);
  }
}

// The convolution of a head's keys, queries or values, at all positions of a lane; DeltaNet's keys and queries are normalised.
template <bool corrects>
void Mix(const Layer& layer, const Windows& windows, int64_t block, int64_t first_lane, int64_t last_lane) {
  const Places<corrects> places{layer};
  const int64_t shared = 2 * layer.key_heads, at = corrects ? block : block - layer.heads;
  const bool is_value = corrects ? block >= shared : block < layer.heads;
  const int64_t width = is_value ? layer.width : layer.dims;
  const int64_t first = is_value ? places.values() + (corrects ? block - shared : block) * width
                                 : std::min(places.keys(), places.queries()) + at * width;
  const float* turned = layer.filters.Turned(first, width);
  const float scale = first < places.queries() + layer.keys() ? 1.0f / std::sqrt(static_cast<float>(layer.dims)) : 1.0f;
  for (int64_t lane = first_lane; lane < last_lane; ++lane) {
    for (int64_t position = 0; position < layer.lanes.count[lane]; ++position) {
      float* to = layer.Work(lane * layer.lanes.positions + position) + first;
      Convolve(windows, layer.filters, turned, lane, position, first, width, to);
      if (corrects && !is_value) Scale(to, width, 1.0f / std::sqrt(Squares(to, width) + kUnitEps) * scale);
    }
  }
}

// The rule for some columns of a head, through all lanes. memory: that of a lane.
template <bool corrects, typename OfLane>
void Remember(const Layer& layer, int64_t head, int64_t first, const OfLane& memory) {
  const Places<corrects> places{layer};
  const int64_t vectors = std::min(kParts, (layer.width - first) / kVector), own = head * layer.width + first;
  const int64_t shared = head / (layer.heads / layer.key_heads) * layer.dims;
  const int64_t key = places.keys() + shared, query = places.queries() + shared, value = places.values() + own;
  const int64_t decay = layer.features + head * layer.channels, rate = layer.features + layer.decays() + head;
  const bool by_channel = corrects && layer.channels > 1;
  for (int64_t lane = 0; lane < layer.lanes.number; ++lane) {  // in order: a lane may go on where the one before it ended
    if (layer.lanes.count[lane] <= 0) continue;
    const auto position = [&](int64_t t) -> Position {
      const int64_t row = lane * layer.lanes.positions + t;
      const float* from = layer.Work(row);
      return {from + key, from + query, from + value, by_channel ? 1.0f : from[decay], from[rate], layer.Out(row) + own,
              from + decay};
    };
    const Memory whole = memory(lane);
    const int64_t offset = head * layer.dims * layer.width + first;
    const Memory part = {whole.before ? whole.before + offset : nullptr, whole.after ? whole.after + offset : nullptr};
    (by_channel ? Follow<corrects, corrects, decltype(position)> : Follow<corrects, false, decltype(position)>)(
        part, layer.dims, layer.width, vectors, layer.lanes.count[lane], position);
  }
}

inline void Norm(float* values, int64_t count, float eps) {
  Scale(values, count, 1.0f / std::sqrt(Squares(values, count) / static_cast<float>(count) + eps));
}

// DeltaNet: every head of the output normalised and gated.
void Finish(const Layer& layer, const Places<true>& places, int64_t row) {
  const float* gates = layer.Projected(row) + places.gates();
  for (int64_t head = 0; head < layer.heads; ++head) {
    float* out = layer.Out(row) + head * layer.width;
    Norm(out, layer.width, layer.eps);
    for (int64_t at = 0; at < layer.width; at += kVector) {
      const Vec gate = Load(gates + head * layer.width + at), normed = Load(out + at) * Load(layer.norm + at);
      Store(out + at, layer.channels > 1 ? Logistic(gate) * normed : Gated(gate, normed, false));
    }
  }
}

// Mamba-2: the output plus the skip, gated, and normalised in groups.
void Finish(const Layer& layer, const Places<false>& places, int64_t row) {
  const float *gates = layer.Projected(row) + places.gates(), *values = layer.Work(row) + places.values();
  float* out = layer.Out(row);
  for (int64_t head = 0; head < layer.heads; ++head)
    for (int64_t at = head * layer.width; at < (head + 1) * layer.width; at += kVector)
      Store(out + at, Fused(Load(values + at), layer.skip[head], Load(out + at)));
  const auto gate = [&] {
    for (int64_t at = 0; at < layer.inner(); at += kVector) Store(out + at, Gated(Load(gates + at), Load(out + at), false));
  };
  if (!layer.gates_last) gate();
  if (layer.norm) {
    const int64_t group = layer.inner() / layer.key_heads;
    for (int64_t at = 0; at < layer.inner(); at += group) Norm(out + at, group, layer.eps);
    for (int64_t at = 0; at < layer.inner(); at += kVector) Store(out + at, Load(out + at) * Load(layer.norm + at));
  }
  if (layer.gates_last) gate();
}

// inputs: where those of every slot stand; kept: where they are written, null if they stay.   memory: that of a lane.
template <bool corrects, typename OfLane>
void Run(ffi::ThreadPool& pool, const Layer& layer, const float* inputs, float* kept, const OfLane& memory) {
  const Places<corrects> places{layer};
  const Windows windows(layer.lanes, layer.filters.kernel - 1, layer.features, layer.projected + places.mixed(), layer.pitch,
                        inputs);
  const int64_t lanes = layer.lanes.number, together = std::max<int64_t>(1, kGroup / layer.lanes.positions);
  const int64_t groups = (lanes + together - 1) / together, blocks = 2 * layer.key_heads + layer.heads;
  const auto before = [&](int64_t task) {
    const int64_t block = task % (blocks + 1), first = task / (blocks + 1) * together, last = std::min(lanes, first + together);
    if (block < blocks) return Mix<corrects>(layer, windows, block, first, last);
    for (int64_t row = first * layer.lanes.positions; row < last * layer.lanes.positions; ++row)
      if (layer.IsUsed(row)) Pace<corrects>(layer, row);
  };
  const int64_t step = kParts * kVector, pieces = (layer.width + step - 1) / step;
  const auto rule = [&](int64_t task) {
    if (task < layer.heads * pieces) return Remember<corrects>(layer, task / pieces, task % pieces * step, memory);
    windows.Keep(task - layer.heads * pieces, layer.features, kept);
  };
  const auto behind = [&](int64_t row) {
    if (layer.IsUsed(row))
      Finish(layer, places, row);
    else
      std::memset(layer.Out(row), 0, layer.inner() * sizeof(float));
  };
  InPhases(pool, Phase{groups * (blocks + 1), before}, Phase{layer.heads * pieces + (kept ? lanes : 0), rule},
           Phase{layer.rows, behind});
}

using Out = ffi::ResultBuffer<ffi::F32>;

Layer Described(Floats projected, Floats convolution, Floats bias, Floats decay, Floats step_bias, Floats skip, Floats norm,
                Integers slot, Integers start, Integers count, Floats memory, Out out, Out work, int64_t key_heads, float eps,
                float rate_factor, float least, float most, bool gates_last) {
  const int64_t rows = projected.dimensions()[0], lanes = slot.dimensions()[0];
  const Lanes all = {slot.typed_data(), start.typed_data(), count.typed_data(), lanes, rows / lanes};
  return {all,
          projected.typed_data(),
          decay.typed_data(),
          step_bias.typed_data(),
          OrNull(skip),
          OrNull(norm),
          work->typed_data(),
          out->typed_data(),
          {convolution.typed_data(), OrNull(bias), convolution.dimensions()[1]},
          rows,
          projected.dimensions()[1],
          convolution.dimensions()[0],
          memory.dimensions()[1],
          key_heads,
          memory.dimensions()[2],
          memory.dimensions()[3],
          eps,
          rate_factor,
          least,
          most,
          gates_last,
          step_bias.dimensions()[0] / memory.dimensions()[1]};
}

ffi::Error Unfit() {
  return ffi::Error::InvalidArgument("head dimensions must come in multiples of 16, and the kernel may cover 16 positions");
}

bool Fits(const Layer& layer) { return !(layer.dims % kVector || layer.width % kVector || layer.filters.kernel > 16); }

// projected [N, F], convolution [C, kernel], bias [C] or none, decay [Hv], step_bias [Hv channels], skip [Hv] or none, norm [Dv] of DeltaNet, or
// [Hv Dv] or none; lane p has the positions start .. start + count of slot slot[p] in rows p T ..; inputs [B, kernel - 1, C] and
// memory [B, Hv, Dk, Dv] are written in place -> out [N, Hv Dv], zero in rows that are padding; work [N, C + Hv channels + Hv]; both states.
template <bool corrects>
ffi::Error Update(ffi::ThreadPool pool, Floats projected, Floats convolution, Floats bias, Floats decay, Floats step_bias,
                  Floats skip, Floats norm, Integers slot, Integers start, Integers count, Floats inputs, Floats memory, Out out,
                  Out work, Out kept, Out updated, int64_t key_heads, float eps, float rate_factor, float least, float most,
                  bool gates_last) {
  const Layer layer = Described(projected, convolution, bias, decay, step_bias, skip, norm, slot, start, count, memory, out, work,
                                key_heads, eps, rate_factor, least, most, gates_last);
  if (!Fits(layer)) return Unfit();
  float *state = updated->typed_data(), *own = kept->typed_data();
  if (state != memory.typed_data()) std::memcpy(state, memory.typed_data(), memory.size_bytes());
  if (own != inputs.typed_data()) std::memcpy(own, inputs.typed_data(), inputs.size_bytes());
  Run<corrects>(pool, layer, own, own, [&](int64_t lane) {
    float* at = state + slot.typed_data()[lane] * layer.inner() * layer.dims;
    return Memory{start.typed_data()[lane] == 0 ? nullptr : at, at};
  });
  return ffi::Error::Success();
}

// The same outputs for lanes that each continue a slot of their own; the states are not changed.
template <bool corrects>
ffi::Error Outputs(ffi::ThreadPool pool, Floats projected, Floats convolution, Floats bias, Floats decay, Floats step_bias,
                   Floats skip, Floats norm, Integers slot, Integers start, Integers count, Floats inputs, Floats memory, Out out,
                   Out work, int64_t key_heads, float eps, float rate_factor, float least, float most, bool gates_last) {
  const Layer layer = Described(projected, convolution, bias, decay, step_bias, skip, norm, slot, start, count, memory, out, work,
                                key_heads, eps, rate_factor, least, most, gates_last);
  if (!Fits(layer)) return Unfit();
  Run<corrects>(pool, layer, inputs.typed_data(), nullptr, [&](int64_t lane) {
    return Memory{memory.typed_data() + slot.typed_data()[lane] * layer.inner() * layer.dims, nullptr};
  });
  return ffi::Error::Success();
}

}  // namespace

#define XLA_ENGINE_SIZES "key_heads", "eps", "rate_factor", "least", "most", "gates_last"
XLA_ENGINE_HANDLER(XlaEngineDeltaNet, Update<true>, XLA_ENGINE_SIZES)
XLA_ENGINE_HANDLER(XlaEngineDeltaNetOutputs, Outputs<true>, XLA_ENGINE_SIZES)
XLA_ENGINE_HANDLER(XlaEngineMamba, Update<false>, XLA_ENGINE_SIZES)
XLA_ENGINE_HANDLER(XlaEngineMambaOutputs, Outputs<false>, XLA_ENGINE_SIZES)
#undef XLA_ENGINE_SIZES

}  // namespace xla_engine
