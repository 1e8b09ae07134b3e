// Linear layers with weights in quantised blocks that are multiplied by rows in int8 (coded_dots.h).

#pragma once

#include "coded_tiles.h"
#include "linear.h"

namespace xla_engine {

// A kind of weights (linear.h).
struct Fours {
  using Element = int8_t;  // of rows; gated activations stay in float32
  using Kernel = FoursKernel;
  static constexpr bool kWholeTasks = true;

  FoursWeights weights;
  int64_t features = 0;

  Fours(const ffi::AnyBuffer& weight, const Halves&)
      : weights{{weight.untyped_data(), static_cast<int64_t>(weight.element_count())}} {
    if (weights.coded.Fit()) features = weights.coded.Features();
  }

  std::string Complaint(const Source& source, bool whole) const {
    const CodedWeights& coded = weights.coded;
    if (!coded.Fit() || !coded.IsFours() || coded.Width() != source.width) return "coded weights of another form";
    return whole && features % kFeatures ? Unfit(Kernel::kStep) : "";
  }
};

}  // namespace xla_engine
