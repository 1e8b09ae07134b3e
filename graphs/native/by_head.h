// Products of each head with a weight of its own, as latent attention has them, for XLA:CPU.
//
// The weights of all heads are packed as one matrix (product.h), whose tasks are each one head's. A row of x holds the inputs of all heads.

#pragma once

#include "products.h"

namespace xla_engine {

// Multiplies the live rows of x [N, heads * width] by weights [heads * features, width]: out [N, heads * features].
template <typename Clear>
void ByHeadProduct(ffi::ThreadPool& pool, const Source& source, int64_t heads, const PackedWeights<BFloat16>& weights, int64_t features,
                   const Phase<Clear>& clear, float* out) {
  using Kernel = HalvesKernel;
  thread_local Lines prepared;
  const int64_t count = source.count, width = weights.width, whole = heads * features;
  const int64_t group = Kernel::GroupRows(count), groups = (count + group - 1) / group, bytes = Kernel::GroupBytes(width);
  const int64_t tasks = features / kFeatures;  // of a head
  char* blocks = prepared.Bytes(heads * groups * bytes);
  std::vector<Source> of_head(heads, source);
  for (int64_t head = 0; head < heads; ++head) {
    of_head[head].width = width;
    for (auto& place : of_head[head].places) place = static_cast<int32_t>(place * heads + head);
  }
  const auto fill = [&](int64_t task) {
    const int64_t head = task / groups, first = task % groups * group;
    Kernel::Fill(of_head[head], first, std::min(group, count - first), blocks + task * bytes);
  };
  const auto pick = [&](int64_t task) { return weights.At(task * kFeatures, task * kFeatures + 16); };
  const auto multiply = [&](int64_t task) {
    const Stream stream = pick(task);
    MultiplyTask<Kernel>(blocks + task / tasks * groups * bytes, count, width, stream, task + 1 < heads * tasks ? pick(task + 1) : stream,
                         [&](int64_t n, int64_t rows, const auto& sums) {
                           for (int64_t r = 0; r < rows; ++r) {
                             float* to = out + source.places[n + r] * whole + task * kFeatures;
                             Store(to, Load(sums.one + r * 16));
                             Store(to + 16, Load(sums.other + r * 16));
                           }
                         });
  };
  InPhases(pool, clear, Phase{heads * groups, fill}, Phase{count ? heads * tasks : 0, multiply});
}

// packed weight [H F, K] times x [N, H K], head by head -> [N, H F]; rows that are not live are zeros. norm: [0], there is none.
inline ffi::Error ByHead(ffi::ThreadPool pool, ffi::AnyBuffer x, Flags live, Floats norm, ffi::AnyBuffer weight, ffi::ResultBuffer<ffi::F32> out) {
  const PackedWeights<BFloat16> weights{static_cast<const BFloat16*>(weight.untyped_data()), nullptr, weight.dimensions()[1]};
  const Source source(x, norm, live, 0);
  const int64_t heads = source.width / weights.width, features = weight.dimensions()[0] / std::max<int64_t>(heads, 1);
  if (source.width % weights.width || weights.width % HalvesKernel::kStep || weight.dimensions()[0] % (heads * kFeatures))
    return ffi::Error::InvalidArgument("heads come in whole tasks of features");
  const int64_t row = heads * features * static_cast<int64_t>(sizeof(float));
  const auto clear = [&](int64_t block) { source.Clear(block, out->typed_data(), row); };
  ByHeadProduct(pool, source, heads, weights, features, Phase{source.Gaps(), clear}, out->typed_data());
  return ffi::Error::Success();
}

}  // namespace xla_engine
