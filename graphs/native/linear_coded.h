// Coded weights as a kind of linear layers.

#pragma once

#include "coded_weights.h"
#include "linear.h"

namespace xla_engine {

// A kind of weights (linear.h).
struct Coded {
  using Element = BFloat16;
  using Kernel = HalvesKernel;
  static constexpr bool kWholeTasks = true;

  CodedWeights weights;
  int64_t features = 0;

  Coded(const ffi::AnyBuffer& weight, const Halves&) : weights(weight.untyped_data(), weight.element_count()) {
    if (weights.Fit()) features = weights.Features();
  }

  std::string Complaint(const Source& source, bool whole) const {
    if (!weights.Fit() || weights.IsFours() || weights.Width() != source.width) return "coded weights of another form";
    return whole && features % kFeatures ? Unfit(Kernel::kStep) : "";
  }
};

}  // namespace xla_engine
