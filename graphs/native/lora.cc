// What low-rank adapters add to products (Hu et al. 2021), for XLA:CPU: row n gets B (A norm(x)) of its own adapter, and rows
// without one keep their bits.
//
// Rows of one adapter are taken together, so that its matrices are read once. Every sum runs in one order, over K and then
// over the rank, whatever the number of rows: prefill, decode and verify steps give a row the same bits.

#include "buffers.h"
#include "gates.h"
#include "operand.h"
#include "product.h"

namespace xla_engine {
namespace {

using Ends = ffi::Span<const int64_t>;

constexpr int64_t kRanks = 4;        // of a block whose sums stay in registers
constexpr int64_t kChunk = 2;        // vectors of features of a task
constexpr int64_t kSmall = 1 << 16;  // multiplications that other threads are not woken for (finding 054)

Vec Wide(const BFloat16* from) { return Cast<Vec>(Convert<Bits>(LoadAs<Shorts>(from)) << 16); }

// Sums of `rows` rows x, `stride` apart, by kRanks rows of A, to hidden[row][rank].
template <int rows>
__attribute__((noinline)) void Shrink(const float* x, int64_t width, const BFloat16* a, float* hidden, int64_t stride) {
  Vec sums[rows][kRanks] = {};
  for (int64_t k = 0; k < width; k += kVector) {
    for (int j = 0; j < kRanks; ++j) {
      const Vec weights = Wide(a + j * width + k);
      for (int r = 0; r < rows; ++r) sums[r][j] = Fused(Load(x + r * width + k), weights, sums[r][j]);
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int j = 0; j < kRanks; ++j) hidden[r * stride + j] = Total(sums[r][j]);
}

// Adds to sixteen features of `rows` rows their sums over the rank; `b` is packed [rank][16]. to[place[r] * features] is row r's.
template <int rows>
__attribute__((noinline)) void Expand(const float* hidden, int64_t stride, int64_t rank, const BFloat16* b, float* to,
                                      const int32_t* place, int64_t features) {
  Vec sums[rows] = {};
  for (int64_t j = 0; j < rank; ++j) {
    const Vec weights = Wide(b + j * kVector);
    for (int r = 0; r < rows; ++r) sums[r] = Fused(weights, hidden[r * stride + j], sums[r]);
  }
  for (int r = 0; r < rows; ++r) Store(to + place[r] * features, Load(to + place[r] * features) + sums[r]);
}

// Calls run(kernel of so many rows, n) for blocks of the rows n .. end.
template <typename Four, typename Two, typename One, typename Run>
void Blocks(int64_t n, int64_t end, const Four& four, const Two& two, const One& one, const Run& run) {
  for (; n + 4 <= end; n += 4) run(four, n);
  for (; n + 2 <= end; n += 2) run(two, n);
  for (; n < end; ++n) run(one, n);
}

// x [N, K]; adapted [N]; norm [K] or [0]; adapter [N], read where adapted; a [L, P, r, K]; b [L, F / 16, r, 16], whose features
// up to ends[p] belong to part p; ranks [L, P], beyond which both are zero. Adds to y [N, F].
ffi::Error Add(ffi::ThreadPool& pool, const ffi::AnyBuffer& x, const Flags& adapted, const Floats& norm, const Integers& adapter,
               const Halves& a, const Halves& b, const Integers& ranks, float* y, float eps, Ends ends) {
  Source source(x, norm, adapted, eps);
  if (!source.count) return ffi::Error::Success();
  const int64_t width = source.width, count = source.count, features = b.dimensions()[2];
  const int64_t parts = a.dimensions()[1], rank = a.dimensions()[2], hidden_width = parts * rank;
  bool whole = width % kVector == 0 && rank % kRanks == 0 && static_cast<int64_t>(ends.size()) == parts;
  for (const int64_t end : ends) whole = whole && end % kVector == 0;
  if (!whole) return ffi::Error::InvalidArgument("widths must come in multiples of 16, ranks of 4");
  const int32_t* of = adapter.typed_data();
  std::stable_sort(source.places.begin(), source.places.begin() + count, [&](int32_t m, int32_t n) { return of[m] < of[n]; });
  std::vector<int64_t> first;  // row of each run of rows that share an adapter
  for (int64_t n = 0; n < count; ++n)
    if (!n || of[source.places[n]] != of[source.places[n - 1]]) first.push_back(n);
  const int64_t runs = first.size();
  first.push_back(count);

  thread_local Lines kept;
  auto* rows = reinterpret_cast<float*>(kept.Bytes(count * (width + hidden_width) * sizeof(float)));
  float* hidden = rows + count * width;
  const auto* down = reinterpret_cast<const BFloat16*>(a.untyped_data());
  const auto* up = reinterpret_cast<const BFloat16*>(b.untyped_data());
  const auto adapter_of = [&](int64_t run) { return static_cast<int64_t>(of[source.places[first[run]]]) - 1; };
  const auto rank_of = [&](int64_t run, int64_t part) {  // as many as blocks of ranks hold
    const int64_t used = ranks.typed_data()[adapter_of(run) * parts + part];
    return std::min(rank, (used + kRanks - 1) / kRanks * kRanks);
  };

  const auto read = [&](int64_t n) { source.Each(n, [&](int64_t k, Vec values) { Store(rows + n * width + k, values); }); };
  const int64_t blocks = hidden_width / kRanks;
  const auto shrink = [&](int64_t task) {
    const int64_t run = task / blocks, j = task % blocks * kRanks;
    if (j % rank >= rank_of(run, j / rank)) return;
    const BFloat16* weights = down + (adapter_of(run) * hidden_width + j) * width;
    Blocks(first[run], first[run + 1], Shrink<4>, Shrink<2>, Shrink<1>, [&](const auto& some, int64_t n) {
      some(rows + n * width, width, weights, hidden + n * hidden_width + j, hidden_width);
    });
  };
  const int64_t vectors = features / kVector, chunks = (vectors + kChunk - 1) / kChunk;
  const auto expand = [&](int64_t task) {
    for (int64_t run = 0; run < runs; ++run) {
      const BFloat16* weights = up + adapter_of(run) * features * rank;
      int64_t part = 0;
      for (int64_t v = task * kChunk; v < std::min(vectors, (task + 1) * kChunk); ++v) {
        while (v * kVector >= ends[part]) ++part;
        const int64_t used = rank_of(run, part);
        if (!used) continue;
        Blocks(first[run], first[run + 1], Expand<4>, Expand<2>, Expand<1>, [&](const auto& some, int64_t n) {
          some(hidden + n * hidden_width + part * rank, hidden_width, used, weights + v * rank * kVector, y + v * kVector,
               source.places.data() + n, features);
        });
      }
    }
  };
  if (count * (hidden_width * width + rank * features) > kSmall) {
    InPhases(pool, Phase{count, read}, Phase{runs * blocks, shrink}, Phase{chunks, expand});
    return ffi::Error::Success();
  }
  for (int64_t n = 0; n < count; ++n) read(n);
  for (int64_t task = 0; task < runs * blocks; ++task) shrink(task);
  for (int64_t task = 0; task < chunks; ++task) expand(task);
  return ffi::Error::Success();
}

// y [N, F] is written in place.
ffi::Error Lora(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags adapted, Floats norm, Integers adapter, Halves a, Halves b,
                Integers ranks, Floats y, ffi::ResultBuffer<ffi::F32> out, float eps, Ends ends) {
  if (y.typed_data() != out->typed_data()) return ffi::Error::Internal("the result has to take the product's place");
  return Add(pool, x, adapted, norm, adapter, a, b, ranks, out->typed_data(), eps, ends);
}

// The same to gates and ups, y [N, 2 F], gates first; then act(gate) * up [N, F] of the rows that are live, bf16 or float32.
ffi::Error GatedLora(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags adapted, Floats norm, Integers adapter, Halves a, Halves b,
                     Integers ranks, Floats y, Flags live, ffi::ResultBuffer<ffi::F32> both, ffi::Result<ffi::AnyBuffer> out, float eps, Ends ends,
                     bool gelu) {
  if (y.typed_data() != both->typed_data()) return ffi::Error::Internal("the result has to take the product's place");
  ffi::Error error = Add(pool, x, adapted, norm, adapter, a, b, ranks, both->typed_data(), eps, ends);
  if (error.failure()) return error;
  const int64_t total = y.dimensions()[0], features = y.dimensions()[1] / 2;
  const bool* flags = live.element_count() ? live.typed_data() : nullptr;
  const bool halves = out->element_type() == ffi::BF16;
  ParallelFor(pool, total, [&](int64_t n) {
    const int64_t bytes = features * (halves ? sizeof(BFloat16) : sizeof(float));
    char* to = static_cast<char*>(out->untyped_data()) + n * bytes;
    if (flags && !flags[n]) {
      std::memset(to, 0, bytes);
      return;
    }
    const float* gates = both->typed_data() + n * 2 * features;
    for (int64_t f = 0; f < features; f += kVector) {
      const Vec values = Gated(Load(gates + f), Load(gates + features + f), gelu);
      if (halves) {
        Round(values, reinterpret_cast<BFloat16*>(to) + f);
      } else {
        Store(reinterpret_cast<float*>(to) + f, values);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineLora, Lora, Attributes({"eps", "ends"}));
XLA_FFI_DEFINE_HANDLER_SYMBOL(XlaEngineGatedLora, GatedLora, Attributes({"eps", "ends", "gelu"}));

}  // namespace xla_engine
