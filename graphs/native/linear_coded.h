// Linear layers with weights in quantised blocks that are unpacked to bf16 (coded_weights.h).

#pragma once

#include "coded_weights.h"
#include "linear.h"

namespace xla_engine {

#if defined(__AVX512BF16__) && !defined(XLA_ENGINE_AMX)

// Rows are in groups of the sizes that `SumGroup` compiles, except for the last group, unless that is too small.
struct CodedKernel {
  using Plain = DotKernel<CodedWeights>;
  static constexpr int64_t kStep = Plain::kStep;

  static int64_t GroupRows(int64_t count) {
    const int64_t last = count % kBlockRows;
    return count > kBlockRows && (last == 0 || last > 4) ? kBlockRows : Plain::GroupRows(count);
  }
  static int64_t GroupBytes(int64_t width) { return Plain::GroupBytes(width); }
  template <typename Operand>
  static void Fill(const Operand& operand, int64_t n, int64_t rows, char* block) {
    Plain::Fill(operand, n, rows, block);
  }
};

#else
using CodedKernel = HalvesKernel;
#endif

// A kind of weights (linear.h).
struct Coded {
  using Element = BFloat16;
  using Kernel = CodedKernel;
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
