// Attention over a slot cache for XLA:CPU: write new keys and values, then attend, as one FFI call.
//
// Every query reads exactly the keys it may see, in order of position, and nothing else: its bits are a function of
// its own sequence, whatever lane, slot, neighbour, chunk or number of threads computed it.
//
// Layout, with W = elements in 32 bits (2 for bf16, 1 for f32) and D = head dimension padded to whole tiles:
//   keys   [B, KV, S / 16, D / W, 16, W]   sixteen keys side by side: one vector holds one word of each
//   values [B, KV, S / 16 W, D / 16, 16, 16, W]   tiles of 16 W positions by sixteen dimensions
// This is the operand order of AMX tiles (Intel SDM, TDPBF16PS); plain vectors read it without shuffles as well.

#include "common.h"

namespace xla_engine {
namespace {

constexpr int64_t kQueries = 16;   // query rows attended to together: the rows of a tile
constexpr int64_t kMaxWidth = 512;  // of a padded head

// Softmax numerators of `scores[0, length)` in place, zero up to `end`; returns their sum. Both by whole vectors.
float Softmax(float* scores, int64_t length, int64_t end, float scale) {
  const float lowest = -std::numeric_limits<float>::infinity();
  for (int64_t at = length; at < (length + kVector - 1) / kVector * kVector; ++at) scores[at] = lowest;
  Vec peaks = Vec{} + lowest;
  for (int64_t at = 0; at < length; at += kVector) {
    const Vec score = Load(scores + at) * scale;
    Store(scores + at, score);
    peaks = score > peaks ? score : peaks;
  }
  const float peak = Reduce(peaks, [](Vec a, Vec b) { return a > b ? a : b; });
  Vec sums = {};
  int64_t at = 0;
  for (; at < length; at += kVector) {
    const Vec weight = Exp(Load(scores + at) - peak);
    Store(scores + at, weight);
    sums += weight;
  }
  for (; at < end; at += kVector) Store(scores + at, Vec{});
  return Reduce(sums, [](Vec a, Vec b) { return a + b; });
}

// One key/value head of one slot.
template <typename T>
struct Head {
  T* keys;
  T* values;
  int64_t width;  // padded head dimension

  static constexpr int64_t kPack = Storage<T>::kPack;
  int64_t block() const { return width * kVector; }  // elements of sixteen keys
  // The words of sixteen dimensions at key word `word`; the next sixteen are `kVector * kVector` words on.
  T* Values(int64_t word) const {
    return values + (word / kVector * kVector * width + word % kVector * kVector) * kPack;
  }

  // `alone`: the next position is not written by the same call. It shares a word with this one if this one is even:
  // it is zeroed then, because products run over whole words and stale NaN must not stay in one.
  void Write(int64_t position, const T* key, const T* value, bool alone) const {
    T* to = keys + position / kVector * block() + position % kVector * kPack;
    for (int64_t d = 0; d < width; ++d) to[d / kPack * kVector * kPack + d % kPack] = key[d];
    T* row = Values(position / kPack) + position % kPack;
    const bool clear = alone && position % kPack < kPack - 1;
    for (int64_t d = 0; d < width; ++d) {
      T* word = row + (d / kVector * kVector * kVector + d % kVector) * kPack;
      word[0] = value[d];
      if (clear) word[1] = T{};
    }
  }
};

// ---- plain vectors ---------------------------------------------------------------------------------------------

template <typename T, int kRows, int kBlocks>
void ScoreBlocks(const Head<T>& head, const float* queries, int64_t first_block, float* scores, int64_t stride) {
  Vec sum[kRows][kBlocks] = {};
  const T* keys = head.keys + first_block * head.block();
  for (int64_t word = 0; word < head.width / Head<T>::kPack; ++word) {
    for (int b = 0; b < kBlocks; ++b) {
      const T* words = keys + b * head.block() + word * kVector * Head<T>::kPack;
      const Vec first = Storage<T>::template Part<0>(words);
      for (int r = 0; r < kRows; ++r) sum[r][b] += first * queries[r * head.width + word * Head<T>::kPack];
      if constexpr (Head<T>::kPack == 2) {
        const Vec second = Storage<T>::template Part<1>(words);
        for (int r = 0; r < kRows; ++r) sum[r][b] += second * queries[r * head.width + word * 2 + 1];
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int b = 0; b < kBlocks; ++b) Store(scores + r * stride + (first_block + b) * kVector, sum[r][b]);
}

template <typename T, int kRows>
void ScoreRows(const Head<T>& head, const float* queries, int64_t keys, float* scores, int64_t stride) {
  constexpr int kBlocks = kRows >= 4 ? 2 : 4;
  const int64_t blocks = (keys + kVector - 1) / kVector;
  int64_t block = 0;
  for (; block + kBlocks <= blocks; block += kBlocks)
    ScoreBlocks<T, kRows, kBlocks>(head, queries, block, scores, stride);
  for (; block < blocks; ++block) ScoreBlocks<T, kRows, 1>(head, queries, block, scores, stride);
}

template <typename T, int kRows, int kParts>
void WeighParts(const Head<T>& head, const float* weights, int64_t stride, int64_t keys, int64_t dim, float* out) {
  Vec sum[kRows][kParts] = {};
  for (int64_t word = 0; word < (keys + Head<T>::kPack - 1) / Head<T>::kPack; ++word) {
    const T* row = head.Values(word) + dim * kVector * Head<T>::kPack;
    for (int p = 0; p < kParts; ++p) {
      const T* words = row + p * kVector * kVector * Head<T>::kPack;
      const Vec first = Storage<T>::template Part<0>(words);
      for (int r = 0; r < kRows; ++r) sum[r][p] += first * weights[r * stride + word * Head<T>::kPack];
      if constexpr (Head<T>::kPack == 2) {
        const Vec second = Storage<T>::template Part<1>(words);
        for (int r = 0; r < kRows; ++r) sum[r][p] += second * weights[r * stride + word * 2 + 1];
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int p = 0; p < kParts; ++p) Store(out + r * head.width + dim + p * kVector, sum[r][p]);
}

template <typename T, int kRows>
void WeighRows(const Head<T>& head, const float* weights, int64_t stride, int64_t keys, float* out) {
  constexpr int64_t kParts = kRows >= 4 ? 2 : 4;
  int64_t dim = 0;
  for (; dim + kParts * kVector <= head.width; dim += kParts * kVector)
    WeighParts<T, kRows, kParts>(head, weights, stride, keys, dim, out);
  for (; dim < head.width; dim += kVector) WeighParts<T, kRows, 1>(head, weights, stride, keys, dim, out);
}

// Calls step(rows at a time as a constant, first row) until `rows` are done; a row's bits do not depend on the cut.
template <typename Step>
void ByRows(int64_t rows, Step step) {
  int64_t row = 0;
  for (; row + 6 <= rows; row += 6) step(std::integral_constant<int, 6>(), row);
  for (; row + 3 <= rows; row += 3) step(std::integral_constant<int, 3>(), row);
  for (; row < rows; ++row) step(std::integral_constant<int, 1>(), row);
}

// Queries [rows, width] of one head against its first `keys` keys; row r sees `lengths[r]` of them.
template <typename T>
void AttendVectors(const Head<T>& head, const T* queries, int64_t rows, const int64_t* lengths, int64_t keys, float scale,
                   float* scores, int64_t stride, float* out, float* sums) {
  float wide[kQueries * kMaxWidth];
  for (int64_t i = 0; i < rows * head.width; ++i) wide[i] = Storage<T>::Widen(queries[i]);
  ByRows(rows, [&](auto count, int64_t row) {
    ScoreRows<T, count>(head, wide + row * head.width, keys, scores + row * stride, stride);
  });
  const int64_t end = (keys + kVector - 1) / kVector * kVector;
  for (int64_t row = 0; row < rows; ++row) sums[row] = Softmax(scores + row * stride, lengths[row], end, scale);
  ByRows(rows, [&](auto count, int64_t row) {
    WeighRows<T, count>(head, scores + row * stride, stride, keys, out + row * head.width);
  });
}

// ---- AMX tiles -------------------------------------------------------------------------------------------------

#ifdef XLA_ENGINE_AMX

constexpr int64_t kTileKeys = 32;  // keys summed by one tile product

// As AttendVectors. Tiles 0-3 add up, 4 and 5 are the operands, 6 and 7 the operands of the last, partial key tile:
// values behind the last key are never read, so stale NaN in a slot is harmless.
void AttendTiles(const Head<BFloat16>& head, const BFloat16* queries, int64_t rows, const int64_t* lengths, int64_t keys,
                 float scale, float* scores, int64_t stride, float* out, float* sums, BFloat16* weights) {
  const int64_t rest = (keys % kTileKeys + 1) / 2;  // words of the partial tile
  TileShapes shapes;
  for (int tile = 0; tile < 4; ++tile) shapes.Set(tile, rows, 64);
  shapes.Set(4, rows, 64);
  shapes.Set(5, 16, 64);
  shapes.Set(6, rows, 4 * std::max<int64_t>(rest, 1));
  shapes.Set(7, std::max<int64_t>(rest, 1), 64);
  Configure(shapes);

  const int64_t blocks = (keys + kVector - 1) / kVector;
  const int64_t pitch = head.width * sizeof(BFloat16);
  int64_t block = 0;
  for (; block + 4 <= blocks; block += 4) {
    const BFloat16* at = head.keys + block * head.block();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t dim = 0; dim < head.width; dim += 32) {
      _tile_loadd(4, queries + dim, pitch);
      const BFloat16* tile = at + dim * kVector;
      _tile_loadd(5, tile, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, tile + head.block(), 64);
      _tile_dpbf16ps(1, 4, 5);
      _tile_loadd(5, tile + 2 * head.block(), 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, tile + 3 * head.block(), 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    float* to = scores + block * kVector;
    _tile_stored(0, to, stride * sizeof(float));
    _tile_stored(1, to + kVector, stride * sizeof(float));
    _tile_stored(2, to + 2 * kVector, stride * sizeof(float));
    _tile_stored(3, to + 3 * kVector, stride * sizeof(float));
  }
  for (; block < blocks; ++block) {
    _tile_zero(0);
    for (int64_t dim = 0; dim < head.width; dim += 32) {
      _tile_loadd(4, queries + dim, pitch);
      _tile_loadd(5, head.keys + block * head.block() + dim * kVector, 64);
      _tile_dpbf16ps(0, 4, 5);
    }
    _tile_stored(0, scores + block * kVector, stride * sizeof(float));
  }

  const int64_t end = (keys + kTileKeys - 1) / kTileKeys * kTileKeys;
  for (int64_t row = 0; row < rows; ++row) {
    float* at = scores + row * stride;
    sums[row] = Softmax(at, lengths[row], end, scale);
    for (int64_t key = 0; key < end; key += 32) {
      const __m512bh packed = _mm512_cvtne2ps_pbh((__m512)Load(at + key + 16), (__m512)Load(at + key));
      std::memcpy(weights + row * stride + key, &packed, sizeof packed);
    }
  }

  Written();
  const int64_t whole = keys / kTileKeys * kTileKeys;
  const int64_t weight_pitch = stride * sizeof(BFloat16);
  constexpr int64_t kTile = 16 * 32;  // elements
  for (int64_t dim = 0; dim < head.width; dim += 64) {
    const bool wide = dim + 32 < head.width;  // the width is a multiple of 32
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t key = 0; key < whole; key += kTileKeys) {
      const BFloat16* tile = head.values + key * head.width + dim * kTileKeys;
      _tile_loadd(4, weights + key, weight_pitch);
      _tile_loadd(5, tile, 64);
      _tile_dpbf16ps(0, 4, 5);
      _tile_loadd(5, tile + kTile, 64);
      _tile_dpbf16ps(1, 4, 5);
      if (!wide) continue;
      _tile_loadd(5, tile + 2 * kTile, 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(5, tile + 3 * kTile, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
    if (rest) {
      const BFloat16* tile = head.values + whole * head.width + dim * kTileKeys;
      _tile_loadd(6, weights + whole, weight_pitch);
      _tile_loadd(7, tile, 64);
      _tile_dpbf16ps(0, 6, 7);
      _tile_loadd(7, tile + kTile, 64);
      _tile_dpbf16ps(1, 6, 7);
      if (wide) {
        _tile_loadd(7, tile + 2 * kTile, 64);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(7, tile + 3 * kTile, 64);
        _tile_dpbf16ps(3, 6, 7);
      }
    }
    const int64_t pitch_out = head.width * sizeof(float);
    _tile_stored(0, out + dim, pitch_out);
    _tile_stored(1, out + dim + kVector, pitch_out);
    if (wide) {
      _tile_stored(2, out + dim + 2 * kVector, pitch_out);
      _tile_stored(3, out + dim + 3 * kVector, pitch_out);
    }
  }
  _tile_release();
}

#endif

// ---- the call --------------------------------------------------------------------------------------------------

struct Arguments {
  const float* qkv;    // [F, N], or [N, F]
  const float* rope;   // [N, 2, Dh / 2]
  const int32_t *slot, *start, *count;  // [P]
  int64_t lanes, width, heads, kv_heads, head_dim, padded, positions;
  int64_t row_stride, feature_stride;  // of qkv

  // One head of row `row` of qkv, rotated unless it is a value, rounded and padded.
  template <typename T>
  void Gather(int64_t row, int64_t head, bool rotate, T* to) const {
    const float* from = qkv + row * row_stride + head * head_dim * feature_stride;
    const int64_t half = head_dim / 2;
    const float *cosine = rope + row * head_dim, *sine = cosine + half;
    for (int64_t d = 0; d < half; ++d) {
      const float low = from[d * feature_stride], high = from[(d + half) * feature_stride];
      to[d] = Storage<T>::Round(rotate ? low * cosine[d] - high * sine[d] : low);
      to[d + half] = Storage<T>::Round(rotate ? high * cosine[d] + low * sine[d] : high);
    }
    for (int64_t d = head_dim; d < padded; ++d) to[d] = T{};
  }
};

template <typename T>
void Run(ffi::ThreadPool& pool, const Arguments& a, bool tiles, T* keys, T* values, T* out) {
  const int64_t groups = a.heads / a.kv_heads;
  const int64_t tokens = std::max<int64_t>(1, kQueries / groups);  // of one task
  const int64_t pieces = (a.width + tokens - 1) / tokens;
  const int64_t slot_size = a.positions * a.padded;  // of one head
  const int64_t stride = (a.positions + 31) / 32 * 32 + 16;
  auto head_of = [&](int64_t lane, int64_t kv) {
    const int64_t offset = (a.slot[lane] * a.kv_heads + kv) * slot_size;
    return Head<T>{keys + offset, values + offset, a.padded};
  };

  auto write = [&](int64_t lane, int64_t kv) {
    alignas(64) T key[kMaxWidth], value[kMaxWidth];
    const Head<T> head = head_of(lane, kv);
    const int64_t end = a.start[lane] + a.count[lane];
    const bool continued = lane + 1 < a.lanes && a.slot[lane + 1] == a.slot[lane] && a.start[lane + 1] == end &&
                           a.count[lane + 1] > 0;
    for (int64_t t = 0; t < a.count[lane]; ++t) {
      const int64_t row = lane * a.width + t;
      a.Gather(row, a.heads + kv, true, key);
      a.Gather(row, a.heads + a.kv_heads + kv, false, value);
      head.Write(a.start[lane] + t, key, value, t + 1 == a.count[lane] && !continued);
    }
  };

  auto attend = [&](int64_t lane, int64_t kv, int64_t first) {
    const int64_t last = std::min<int64_t>(first + tokens, a.width);
    const int64_t used = std::min<int64_t>(last, a.count[lane]);
    for (int64_t t = std::max<int64_t>(first, used); t < last; ++t)  // padding
      std::memset(static_cast<void*>(out + ((lane * a.width + t) * a.heads + kv * groups) * a.head_dim), 0,
                  groups * a.head_dim * sizeof(T));
    if (first >= used) return;
    const Head<T> head = head_of(lane, kv);
    const int64_t rows_wanted = (used - first) * groups;
    const int64_t end = a.start[lane] + used;
    thread_local std::vector<float> scores;
    thread_local std::vector<BFloat16> packed;
    if (static_cast<int64_t>(scores.size()) < kQueries * stride) {
      scores.resize(kQueries * stride);
      packed.resize(kQueries * stride);
    }
    alignas(64) T queries[kQueries * kMaxWidth];
    alignas(64) float result[kQueries * kMaxWidth];
    float sums[kQueries];
    int64_t lengths[kQueries];
    const float scale = 1.0f / std::sqrt(static_cast<float>(a.head_dim));
    for (int64_t from = 0; from < rows_wanted; from += kQueries) {
      const int64_t rows = std::min(kQueries, rows_wanted - from);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t t = first + (from + r) / groups, g = (from + r) % groups;
        a.Gather(lane * a.width + t, kv * groups + g, true, queries + r * a.padded);
        lengths[r] = a.start[lane] + t + 1;
      }
#ifdef XLA_ENGINE_AMX
      if constexpr (std::is_same_v<T, BFloat16>) {
        if (tiles)
          AttendTiles(head, queries, rows, lengths, end, scale, scores.data(), stride, result, sums, packed.data());
        else
          AttendVectors(head, queries, rows, lengths, end, scale, scores.data(), stride, result, sums);
      } else
#endif
        AttendVectors(head, queries, rows, lengths, end, scale, scores.data(), stride, result, sums);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t t = first + (from + r) / groups, g = (from + r) % groups;
        T* to = out + ((lane * a.width + t) * a.heads + kv * groups + g) * a.head_dim;
        for (int64_t d = 0; d < a.head_dim; ++d) to[d] = Storage<T>::Round(result[r * a.padded + d] / sums[r]);
      }
    }
  };

  if (a.width == 1) {  // decode: slots are distinct, a row needs nothing of another
    ParallelFor(pool, a.lanes * a.kv_heads, [&](int64_t task) {
      write(task % a.lanes, task / a.lanes);
      attend(task % a.lanes, task / a.lanes, 0);
    });
    return;
  }
  ParallelFor(pool, a.lanes * a.kv_heads, [&](int64_t task) { write(task / a.kv_heads, task % a.kv_heads); });
  ParallelFor(pool, a.lanes * a.kv_heads * pieces, [&](int64_t task) {
    const int64_t lane = task / (a.kv_heads * pieces), rest = task % (a.kv_heads * pieces);
    attend(lane, rest / pieces, rest % pieces * tokens);
  });
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> qkv, ffi::Buffer<ffi::F32> rope, ffi::Buffer<ffi::S32> slot,
                  ffi::Buffer<ffi::S32> start, ffi::Buffer<ffi::S32> count, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                  ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> new_keys,
                  ffi::Result<ffi::AnyBuffer> new_values, bool feature_major) {
  const auto shape = keys.dimensions();  // [B, KV, S / 16, D / W, 16, W]
  Arguments a;
  a.qkv = qkv.typed_data();
  a.rope = rope.typed_data();
  a.slot = slot.typed_data();
  a.start = start.typed_data();
  a.count = count.typed_data();
  const int64_t rows = rope.dimensions()[0];
  a.lanes = slot.element_count();
  a.width = rows / a.lanes;
  a.head_dim = 2 * rope.dimensions()[2];
  a.kv_heads = shape[1];
  a.heads = static_cast<int64_t>(qkv.element_count()) / rows / a.head_dim - 2 * a.kv_heads;
  a.padded = shape[3] * shape[5];
  a.positions = shape[2] * kVector;
  a.row_stride = feature_major ? 1 : (a.heads + 2 * a.kv_heads) * a.head_dim;
  a.feature_stride = feature_major ? rows : 1;
  if (a.padded > kMaxWidth) return ffi::Error::InvalidArgument("the head dimension is above 512");
  if (keys.untyped_data() != new_keys->untyped_data() || values.untyped_data() != new_values->untyped_data())
    return ffi::Error::Internal("the cache was copied: donate it and do not use it afterwards");
  for (int64_t lane = 0; lane < a.lanes; ++lane) {
    if (a.count[lane] < 0 || a.count[lane] > a.width) return ffi::Error::InvalidArgument("count out of range");
    if (a.count[lane] && (a.slot[lane] < 0 || a.slot[lane] >= shape[0] || a.start[lane] < 0 ||
                          a.start[lane] + a.count[lane] > a.positions))
      return ffi::Error::InvalidArgument("a lane lies outside the cache");
  }
  bool tiles = false;
#ifdef XLA_ENGINE_AMX
  static const bool granted = RequestTiles();
  tiles = granted;
#endif
  if (keys.element_type() == ffi::DataType::BF16) {
    Run(pool, a, tiles, reinterpret_cast<BFloat16*>(keys.untyped_data()),
        reinterpret_cast<BFloat16*>(values.untyped_data()), reinterpret_cast<BFloat16*>(out->untyped_data()));
  } else if (keys.element_type() == ffi::DataType::F32) {
    Run(pool, a, tiles, reinterpret_cast<float*>(keys.untyped_data()), reinterpret_cast<float*>(values.untyped_data()),
        reinterpret_cast<float*>(out->untyped_data()));
  } else {
    return ffi::Error::InvalidArgument("the cache must be bf16 or f32");
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineAttend, Attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("feature_major"));

}  // namespace xla_engine
