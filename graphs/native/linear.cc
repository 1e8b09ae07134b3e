// Linear layers of a bf16 decoder on matrix tiles (Intel AMX), for XLA:CPU: each call is one product with what
// stands before and behind it.
//
// Weights stay as in the checkpoint, [F, K] row-major, and stream through the caches once: 32 features at a time,
// the next 32 prefetched. Activations are interleaved to the tiles' order once per call (Intel SDM, TDPBF16PS).
// Sums run over K in order, 32 at a time, whatever the number of rows: a row's bits depend on the row alone.

#include "common.h"

namespace xla_engine {
namespace {

#ifdef XLA_ENGINE_AMX

constexpr int64_t kTile = 16 * 32;     // elements of an operand tile
constexpr int64_t kFeatures = 32;      // of a task
constexpr int64_t kPrefetched = 64 << 10;  // bytes: what stays in the second-level cache until it is wanted

// bf16 pairs of sixteen rows side by side: word p of row n at [p / 16][p % 16][n]. Rows behind `rows` are zero.
void Interleave(const BFloat16* x, int64_t rows, int64_t width, BFloat16* tiles) {
  const auto* words = reinterpret_cast<const uint32_t*>(x);
  auto* to = reinterpret_cast<uint32_t*>(tiles);
  const int64_t pairs = width / 2;
  const __m512i step = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                          _mm512_set1_epi32(static_cast<int>(pairs)));
  const auto mask = static_cast<__mmask16>(rows >= 16 ? 0xFFFF : (1 << rows) - 1);
  for (int64_t pair = 0; pair < pairs; ++pair)
    _mm512_storeu_si512(to + pair * 16, _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), mask, step, words + pair, 4));
}

// bf16 of x / rms(x) * weight (Zhang and Sennrich 2019).
void Normalise(const float* x, const float* weight, float eps, int64_t width, BFloat16* to) {
  Vec squares = {};
  for (int64_t k = 0; k < width; k += kVector) squares += Load(x + k) * Load(x + k);
  const float mean = Reduce(squares, [](Vec a, Vec b) { return a + b; }) / static_cast<float>(width);
  const float scale = 1.0f / std::sqrt(mean + eps);
  for (int64_t k = 0; k < width; k += kVector) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)(Load(x + k) * scale * Load(weight + k)));
    std::memcpy(to + k, &rounded, sizeof rounded);
  }
}

// Tiles 0-3 add up [feature half][row half], 4 and 5 hold weights, 6 and 7 activations. `first` and `second` rows
// stand in the two halves, 1 to 16; the last call of a row count may be partial.
struct Columns {
  int64_t first, second;  // second may be 0
};

void Configure(int64_t features, Columns columns) {
  TileShapes shapes;
  const int64_t upper = std::min<int64_t>(features, 16), lower = std::max<int64_t>(features - 16, 1);
  const int64_t second = std::max<int64_t>(columns.second, 1);
  shapes.Set(0, upper, 4 * columns.first);
  shapes.Set(1, lower, 4 * columns.first);
  shapes.Set(2, upper, 4 * second);
  shapes.Set(3, lower, 4 * second);
  shapes.Set(4, upper, 64);
  shapes.Set(5, lower, 64);
  shapes.Set(6, 16, 4 * columns.first);
  shapes.Set(7, 16, 4 * second);
  Configure(shapes);
}

// What a task multiplies: up to sixteen rows of weights in each half. The next task's stand `step` elements on.
struct Rows {
  const BFloat16 *upper, *lower;  // lower is null if there is no second half
  int64_t features;               // in both halves
  int64_t step;
};

// The sums of a task's features by up to 32 rows of activations, with or without fetching the next task's weights.
void Multiply(const Rows& rows, const BFloat16* tiles, int64_t width, bool second, bool ahead) {
  const BFloat16 *upper = rows.upper, *lower = rows.lower;
  const int64_t pitch = width * sizeof(BFloat16);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t k = 0; k < width; k += 32) {
    if (ahead) {  // sixteen rows stand together: 32 of their columns are as many bytes as these sixteen lines
      for (int64_t line = 0; line < 16; ++line) __builtin_prefetch(upper + rows.step + k * 16 + line * 32, 0, 2);
      if (lower)
        for (int64_t line = 0; line < 16; ++line) __builtin_prefetch(lower + rows.step + k * 16 + line * 32, 0, 2);
    }
    _tile_loadd(4, upper + k, pitch);
    _tile_loadd(6, tiles + k * 16, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (lower) {
      _tile_loadd(5, lower + k, pitch);
      _tile_dpbf16ps(1, 5, 6);
    }
    if (second) {
      _tile_loadd(7, tiles + 16 * width + k * 16, 64);
      _tile_dpbf16ps(2, 4, 7);
      if (lower) _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Runs the product of `weights` with N prepared rows. `prepare(n, tiles)` fills the tiles of rows n .. n + 15;
// `pick(task)` names a task's weights; `finish(task, n, columns)` takes tiles 0-3 away.
template <typename Prepare, typename Pick, typename Finish>
void Product(ffi::ThreadPool& pool, int64_t count, int64_t width, int64_t tasks, const Prepare& prepare, const Pick& pick,
             const Finish& finish) {
  thread_local std::vector<BFloat16> buffer;
  const int64_t groups = (count + 15) / 16;
  if (static_cast<int64_t>(buffer.size()) < groups * 16 * width + 32) buffer.resize(groups * 16 * width + 32);
  BFloat16* tiles = buffer.data() + (64 - reinterpret_cast<uintptr_t>(buffer.data()) % 64) % 64 / sizeof(BFloat16);
  std::atomic<int64_t> prepared{0};
  const bool ahead = kFeatures * width * static_cast<int64_t>(sizeof(BFloat16)) <= kPrefetched;
  ParallelFor(pool, groups + tasks, [&](int64_t index) {
    if (index < groups) {
      prepare(index * 16, std::min<int64_t>(16, count - index * 16), tiles + index * 16 * width);
      prepared.fetch_add(1);
      return;
    }
    const Rows rows = pick(index - groups);
    while (prepared.load() < groups) _mm_pause();
    Columns configured = {0, 0};
    for (int64_t n = 0; n < count; n += 32) {
      const Columns columns = {std::min<int64_t>(16, count - n), std::min<int64_t>(16, std::max<int64_t>(count - n - 16, 0))};
      if (columns.first != configured.first || columns.second != configured.second) Configure(rows.features, columns);
      configured = columns;
      Multiply(rows, tiles + n * width, width, columns.second > 0, ahead && n == 0);
      finish(index - groups, n, columns);
    }
    _tile_release();
  });
}

// One tile of sums, [16 features][16 rows], turned: row n's sixteen features.
struct Turned {
  alignas(64) float sums[16 * 16];
  Vec Row(int64_t n) const {
    const __m512i step = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    return (Vec)_mm512_i32gather_ps(step, sums + n, 4);
  }
};

void Take(int tile, float* to, int64_t stride) {
  switch (tile) {
    case 0: _tile_stored(0, to, stride * 4); break;
    case 1: _tile_stored(1, to, stride * 4); break;
    case 2: _tile_stored(2, to, stride * 4); break;
    default: _tile_stored(3, to, stride * 4);
  }
}

using Floats = ffi::Buffer<ffi::F32>;
using Halves = ffi::Buffer<ffi::BF16>;

const BFloat16* Data(const Halves& buffer) { return reinterpret_cast<const BFloat16*>(buffer.untyped_data()); }

ffi::Error Check(int64_t width) {
  return width % 32 ? ffi::Error::InvalidArgument("features must come in multiples of 32") : ffi::Error::Success();
}

// x [N, K], norm [K], weight [F, K] -> weight times norm(x), feature-major [F, N].
ffi::Error NormLinear(ffi::ThreadPool pool, Floats x, Floats norm, Halves weight, ffi::ResultBuffer<ffi::F32> out, float eps) {
  const int64_t count = x.dimensions()[0], width = x.dimensions()[1], features = weight.dimensions()[0];
  if (auto error = Check(width); error.failure()) return error;
  const BFloat16* from = Data(weight);
  float* to = out->typed_data();
  Product(
      pool, count, width, (features + kFeatures - 1) / kFeatures,
      [&](int64_t n, int64_t rows, BFloat16* tiles) {
        thread_local std::vector<BFloat16> normed;
        normed.resize(16 * width);
        for (int64_t r = 0; r < rows; ++r)
          Normalise(x.typed_data() + (n + r) * width, norm.typed_data(), eps, width, normed.data() + r * width);
        Interleave(normed.data(), rows, width, tiles);
      },
      [&](int64_t task) {
        const BFloat16* upper = from + task * kFeatures * width;
        const int64_t left = std::min(kFeatures, features - task * kFeatures);
        return Rows{upper, left > 16 ? upper + 16 * width : nullptr, left, kFeatures * width};
      },
      [&](int64_t task, int64_t n, Columns columns) {
        float* at = to + task * kFeatures * count + n;
        const bool lower = features - task * kFeatures > 16;
        _tile_stored(0, at, count * sizeof(float));
        if (lower) _tile_stored(1, at + 16 * count, count * sizeof(float));
        if (columns.second) _tile_stored(2, at + 16, count * sizeof(float));
        if (columns.second && lower) _tile_stored(3, at + 16 * count + 16, count * sizeof(float));
      });
  return ffi::Error::Success();
}

// residual [N, F] + weight [F, K] times x [N, K], [N, F].
ffi::Error LinearAdd(ffi::ThreadPool pool, Halves x, Halves weight, Floats residual, ffi::ResultBuffer<ffi::F32> out) {
  const int64_t count = x.dimensions()[0], width = x.dimensions()[1], features = weight.dimensions()[0];
  if (auto error = Check(width); error.failure()) return error;
  if (auto error = Check(features); error.failure()) return error;
  const BFloat16* from = Data(weight);
  Product(
      pool, count, width, features / kFeatures,
      [&](int64_t n, int64_t rows, BFloat16* tiles) { Interleave(Data(x) + n * width, rows, width, tiles); },
      [&](int64_t task) {
        const BFloat16* upper = from + task * kFeatures * width;
        return Rows{upper, upper + 16 * width, kFeatures, kFeatures * width};
      },
      [&](int64_t task, int64_t n, Columns columns) {
        Turned turned;
        for (int tile = 0; tile < (columns.second ? 4 : 2); ++tile) {
          Take(tile, turned.sums, 16);
          const int64_t row = n + tile / 2 * 16, rows = tile < 2 ? columns.first : columns.second;
          for (int64_t r = 0; r < rows; ++r) {
            const int64_t at = (row + r) * features + task * kFeatures + tile % 2 * 16;
            Store(out->typed_data() + at, Load(residual.typed_data() + at) + turned.Row(r));
          }
        }
      });
  return ffi::Error::Success();
}

// silu(gate) * up (Shazeer 2020).
Vec Gated(Vec gate, Vec up) {
  const Vec zero = {};
  const Vec small = Exp(gate > zero ? -gate : gate);  // exp(-|gate|)
  return gate * up * (gate > zero ? 1.0f / (1.0f + small) : small / (1.0f + small));
}

// x [N, K], norm [K], weight [2 F, K], gates first -> silu(gate) * up of norm(x), [N, F].
ffi::Error NormGated(ffi::ThreadPool pool, Floats x, Floats norm, Halves weight, ffi::ResultBuffer<ffi::BF16> out, float eps) {
  const int64_t count = x.dimensions()[0], width = x.dimensions()[1], features = weight.dimensions()[0] / 2;
  if (auto error = Check(width); error.failure()) return error;
  if (auto error = Check(features); error.failure()) return error;
  const BFloat16 *gates = Data(weight), *ups = gates + features * width;
  auto* to = reinterpret_cast<BFloat16*>(out->untyped_data());
  Product(
      pool, count, width, features / 16,
      [&](int64_t n, int64_t rows, BFloat16* tiles) {
        thread_local std::vector<BFloat16> normed;
        normed.resize(16 * width);
        for (int64_t r = 0; r < rows; ++r)
          Normalise(x.typed_data() + (n + r) * width, norm.typed_data(), eps, width, normed.data() + r * width);
        Interleave(normed.data(), rows, width, tiles);
      },
      [&](int64_t task) {
        const int64_t first = task * 16 * width;
        return Rows{gates + first, ups + first, kFeatures, 16 * width};
      },
      [&](int64_t task, int64_t n, Columns columns) {
        Turned gate, up;
        for (int half = 0; half < (columns.second ? 2 : 1); ++half) {
          Take(2 * half, gate.sums, 16);
          Take(2 * half + 1, up.sums, 16);
          const int64_t rows = half ? columns.second : columns.first;
          for (int64_t r = 0; r < rows; ++r) {
            const __m256bh rounded = _mm512_cvtneps_pbh((__m512)Gated(gate.Row(r), up.Row(r)));
            std::memcpy(to + (n + half * 16 + r) * features + task * 16, &rounded, sizeof rounded);
          }
        }
      });
  return ffi::Error::Success();
}

#endif

}  // namespace

// Whether this build and this machine have matrix tiles.
extern "C" bool XlaEngineTiles() {
#ifdef XLA_ENGINE_AMX
  return RequestTiles();
#else
  return false;
#endif
}

#ifdef XLA_ENGINE_AMX
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineNormLinear, NormLinear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Halves>()
                                  .Ret<Floats>()
                                  .Attr<float>("eps"));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineLinearAdd, LinearAdd,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Halves>()
                                  .Arg<Halves>()
                                  .Arg<Floats>()
                                  .Ret<Floats>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineNormGated, NormGated,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Floats>()
                                  .Arg<Floats>()
                                  .Arg<Halves>()
                                  .Ret<Halves>()
                                  .Attr<float>("eps"));
#endif

}  // namespace xla_engine
