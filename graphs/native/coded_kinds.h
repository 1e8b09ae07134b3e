// The kinds of quantised blocks: how a weight of each is stored (see coded_weights.h for the order of its bytes).

#pragma once

#include <cstdint>

namespace xla_engine {

struct CodedKind {
  int32_t number;        // ggml's, or above 100 for formats that ggml does not have
  int low, high;         // bits of a code that are stored first (4 or 8), and after them (0 to 2)
  int bias;              // subtracted from a code before it is scaled
  bool nested, minimum;  // nested: a scale is a byte times a float16. minimum: a number is added to scaled codes
  int levels = 0;        // above 0: codes are indices of this table of kLevels; the table's numbers are scaled
  bool zero = false;     // the array has zero points instead of minima: the minimum is -scale * zero point
  bool power = false;    // scales are powers of two

  constexpr int FoursBias() const { return levels ? 128 : bias; }  // the bias in the order "fours", where numbers of tables have 128 added
  constexpr int64_t CodeBytes(int64_t width) const { return width * 2 * (low + high); }
  constexpr bool IsLinear() const { return !levels && !high; }  // `UnpackLinear` serves it
  constexpr int Run() const { return nested && !minimum && !levels ? 16 : 32; }  // how many K share a scale
  constexpr int64_t SmallBytes() const { return nested ? 256 / Run() * 16 * (1 + minimum) : 0; }  // of the scales and minima in bytes of 256 K
  constexpr int64_t StepBytes() const {  // of the scales and minima of 32 K
    return power ? 16 : SmallBytes() / 8 + 32 * (1 + minimum) / (nested ? 8 : 1);
  }
  // Kinds of the same form store their scales alike (`StepsOf`); below kForms.
  constexpr int Form() const { return power ? 0 : nested ? 1 + minimum + 2 * (Run() == 16) : 4 + minimum + zero; }
  constexpr int64_t ScaleBytes(int64_t width) const { return (width / 32 * StepBytes() + 63) / 64 * 64; }
  constexpr int64_t Bytes(int64_t width) const { return CodeBytes(width) + ScaleBytes(width); }
};

constexpr CodedKind kCodedKinds[] = {
    {2, 4, 0, 8, false, false},         // Q4_0
    {3, 4, 0, 0, false, true},          // Q4_1
    {6, 4, 1, 16, false, false},        // Q5_0
    {7, 4, 1, 0, false, true},          // Q5_1
    {8, 8, 0, 128, false, false},       // Q8_0
    {12, 4, 0, 0, true, true},          // Q4_K
    {13, 4, 1, 0, true, true},          // Q5_K
    {14, 4, 2, 32, true, false},        // Q6_K
    {20, 4, 0, 0, false, false, 1},     // IQ4_NL
    {23, 4, 0, 0, true, false, 1},      // IQ4_XS
    {104, 4, 0, 0, false, true, 0, true},          // A4, of AWQ and others
    {108, 8, 0, 128, false, true, 0, true},        // A8
    {39, 4, 0, 0, false, false, 2, false, true},   // MXFP4
};
constexpr int kCodedKindCount = sizeof kCodedKinds / sizeof *kCodedKinds, kForms = 7;
alignas(64) constexpr int8_t kLevels[][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},  // twice the numbers of MXFP4
};

}  // namespace xla_engine
