// Routed experts of a bf16 decoder on matrix tiles (Intel AMX), for XLA:CPU: one call per layer.
//
// The rows of each expert in use are gathered into tiles, multiplied by its gates and ups, gated, and multiplied by its
// second matrix while still in the tiles' order; experts that no row takes are not read. A row adds up its experts in
// ascending order and each product runs over its width in order: its bits depend on the row alone.

#include "tiles.h"

namespace xla_engine {
namespace {

#ifdef XLA_ENGINE_AMX

using Floats = ffi::Buffer<ffi::F32>;
using Halves = ffi::Buffer<ffi::BF16>;
using Integers = ffi::Buffer<ffi::S32>;

const BFloat16* Data(const Halves& buffer) { return reinterpret_cast<const BFloat16*>(buffer.untyped_data()); }

constexpr int64_t kRows = 16;  // of a group: the rows of one expert that share a tile

// Rows of one expert, up to sixteen: places in the sorted list of assignments.
struct Group {
  int64_t expert, first, rows;
};

// Assignments, row times K plus choice, by expert; groups in ascending order of experts.
struct Gathered {
  std::vector<int32_t> assignment;
  std::vector<Group> groups;

  Gathered(const int32_t* expert, int64_t count, int64_t experts) {
    std::vector<int64_t> end(experts + 1, 0);
    for (int64_t a = 0; a < count; ++a)
      if (Used(expert[a], experts)) ++end[expert[a] + 1];
    for (int64_t e = 0; e < experts; ++e) end[e + 1] += end[e];
    for (int64_t e = 0; e < experts; ++e)
      for (int64_t first = end[e]; first < end[e + 1]; first += kRows)
        groups.push_back({e, first, std::min(kRows, end[e + 1] - first)});
    assignment.resize(end[experts]);
    for (int64_t a = 0; a < count; ++a)
      if (Used(expert[a], experts)) assignment[end[expert[a]]++] = static_cast<int32_t>(a);
  }

  static bool Used(int32_t expert, int64_t experts) { return expert >= 0 && expert < experts; }
};

// gate * sigmoid(slope * gate) * up.
Vec Swish(Vec gate, Vec up, float slope) {
  const Vec zero = {};
  const Vec scaled = gate * slope;
  const Vec small = Exp(scaled > zero ? -scaled : scaled);  // exp(-|scaled|)
  return gate * up * (scaled > zero ? 1.0f / (1.0f + small) : small / (1.0f + small));
}

// SwiGLU, or with a positive limit the clamped form of gpt-oss (`graphs.moe.gate`).
Vec Gate(Vec gate, Vec up, float limit) {
  if (limit <= 0) return Swish(gate, up, 1.0f);
  const Vec high = Vec{} + limit, low = -high;
  gate = gate > high ? high : gate;
  up = up > high ? high : up;
  up = up < low ? low : up;
  return Swish(gate, up + 1.0f, 1.702f);
}

// Two features of sixteen rows as the words of an operand tile: the first in the lower halves.
__m512i Words16(Vec first, Vec second) {
  const auto low = (__m256i)_mm512_cvtneps_pbh((__m512)first), high = (__m256i)_mm512_cvtneps_pbh((__m512)second);
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

Columns ColumnsOf(const std::vector<Group>& groups, size_t at) {
  const bool pair = at + 1 < groups.size() && groups[at + 1].expert == groups[at].expert;
  return {groups[at].rows, pair ? groups[at + 1].rows : 0};
}

// Calls step(group, columns, experts to the next) for all groups, two of one expert at a time.
template <typename Step>
void ByPairs(const std::vector<Group>& groups, Step step) {
  for (size_t at = 0; at < groups.size();) {
    const Columns columns = ColumnsOf(groups, at);
    const size_t next = at + (columns.second ? 2 : 1);
    const int64_t ahead = next < groups.size() ? groups[next].expert - groups[at].expert : 0;
    step(static_cast<int64_t>(at), columns, ahead);
    at = next;
  }
}

uint32_t* Aligned(std::vector<uint32_t>& buffer, int64_t words) {
  if (static_cast<int64_t>(buffer.size()) < words + 16) buffer.resize(words + 16);
  return buffer.data() + (64 - reinterpret_cast<uintptr_t>(buffer.data()) % 64) % 64 / 4;
}

// x [N, D], expert [N, K] (E: none), weight [N, K], gate_up [E, 2 F, D] gates first, down [E, D, F], biases [E, 2 F] and
// [E, D] or empty, residual [N, D] -> residual plus each row's experts, weighted, [N, D].
ffi::Error RunExperts(ffi::ThreadPool pool, Halves x, Integers expert, Floats weight, Halves gate_up, Halves down,
                      Floats gate_up_bias, Floats down_bias, Floats residual, ffi::ResultBuffer<ffi::F32> out, float limit) {
  const int64_t count = x.dimensions()[0], width = x.dimensions()[1], per_row = expert.dimensions()[1];
  const int64_t experts = gate_up.dimensions()[0], inner = down.dimensions()[2];
  if (width % kFeatures || inner % kFeatures)
    return ffi::Error::InvalidArgument("features must come in multiples of 32");
  const bool biased = gate_up_bias.element_count() > 0;

  const Gathered gathered(expert.typed_data(), count * per_row, experts);
  const std::vector<Group>& groups = gathered.groups;
  const int64_t group_count = static_cast<int64_t>(groups.size());
  const int64_t words = width / 2, inner_words = inner / 2;
  thread_local std::vector<uint32_t> rows_buffer, hidden_buffer;
  uint32_t* tiles = Aligned(rows_buffer, group_count * kRows * words);
  uint32_t* hidden = Aligned(hidden_buffer, group_count * kRows * inner_words);

  const int64_t gate_tasks = inner / 16;  // sixteen gates beside their ups, of all experts in use
  const int64_t down_tasks = width / kFeatures;

  auto prepare = [&](int64_t at) {
    thread_local std::vector<BFloat16> taken;
    taken.resize(kRows * width);
    const Group& group = groups[at];
    for (int64_t r = 0; r < group.rows; ++r) {
      const int64_t row = gathered.assignment[group.first + r] / per_row;
      std::memcpy(taken.data() + r * width, Data(x) + row * width, width * sizeof(BFloat16));
    }
    Interleave(taken.data(), group.rows, words, tiles + at * kRows * words);
  };

  auto multiply = [&](int64_t task) {  // gates and ups of features 16 task ..
    ByPairs(groups, [&](int64_t at, Columns columns, int64_t next) {
      const int64_t e = groups[at].expert, feature = 16 * task;
      const BFloat16* gates = Data(gate_up) + (e * 2 * inner + feature) * width;
      Configure(kFeatures, columns);
      Multiply(Rows<BFloat16>{gates, gates + inner * width, kFeatures, next * 2 * inner * width}, tiles + at * kRows * words, width,
               columns.second > 0, next > 0);
      const float* bias = biased ? gate_up_bias.typed_data() + e * 2 * inner + feature : nullptr;
      for (int half = 0; half < (columns.second ? 2 : 1); ++half) {
        alignas(64) float gate[256], up[256];
        Take(2 * half, gate, 64);
        Take(2 * half + 1, up, 64);
        uint32_t* to = hidden + (at + half) * kRows * inner_words + feature / 2 * kRows;
        for (int64_t f = 0; f < 16; f += 2) {
          Vec pair[2];
          for (int64_t i = 0; i < 2; ++i) {
            Vec g = Load(gate + (f + i) * 16), u = Load(up + (f + i) * 16);
            if (bias) g += bias[f + i], u += bias[inner + f + i];
            pair[i] = Gate(g, u, limit);
          }
          _mm512_storeu_si512(to + f / 2 * kRows, Words16(pair[0], pair[1]));
        }
      }
    });
    _tile_release();
  };

  auto finish = [&](int64_t task) {  // features 32 task .. of every row
    const int64_t feature = task * kFeatures;
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(out->typed_data() + row * width + feature, residual.typed_data() + row * width + feature,
                  kFeatures * sizeof(float));
    ByPairs(groups, [&](int64_t at, Columns columns, int64_t next) {
      const int64_t e = groups[at].expert;
      const BFloat16* upper = Data(down) + (e * width + feature) * inner;
      Configure(kFeatures, columns);
      Multiply(Rows<BFloat16>{upper, upper + 16 * inner, kFeatures, next * width * inner},
               hidden + at * kRows * inner_words, inner, columns.second > 0, next > 0);
      for (int tile = 0; tile < (columns.second ? 4 : 2); ++tile) {
        Turned turned;
        Take(tile, turned.sums, 64);
        const Group& group = groups[at + tile / 2];
        const int64_t first = feature + tile % 2 * 16;
        Vec bias = {};
        if (biased) bias = Load(down_bias.typed_data() + e * width + first);
        for (int64_t r = 0; r < group.rows; ++r) {
          const int64_t assignment = gathered.assignment[group.first + r];
          float* to = out->typed_data() + assignment / per_row * width + first;
          Store(to, Load(to) + (turned.Row(r) + bias) * weight.typed_data()[assignment]);
        }
      }
    });
    _tile_release();
  };

  InPhases(pool, Phase{group_count, prepare}, Phase{gate_tasks, multiply}, Phase{down_tasks, finish});
  return ffi::Error::Success();
}

#endif

}  // namespace

#ifdef XLA_ENGINE_AMX
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineExperts, RunExperts,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Halves>()
                                  .Arg<Integers>()
                                  .Arg<Floats>()
                                  .Arg<Halves>()
                                  .Arg<Halves>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Ret<Floats>()
                                  .Attr<float>("limit"));
#endif

}  // namespace xla_engine
