// Hadamard transforms by sums and differences in float32, in one order on every instruction set.

#pragma once

#include "vectors.h"

namespace xla_engine {

// Sums and differences of the values of a register `distance` apart: the lower of each two in front.
template <int distance, typename Register>
__attribute__((always_inline)) inline Register Butterfly(Register v) {
  Register turned;
  WordRegister signs;
  for (int lane = 0; lane < kRegister; ++lane) signs[lane] = lane & distance ? INT32_MIN : 0;
  if constexpr (kRegister == 16) {
    if constexpr (distance == 8) turned = __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    if constexpr (distance == 4) turned = __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    if constexpr (distance == 2) turned = __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    if constexpr (distance == 1) turned = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
  } else if constexpr (kRegister == 8) {
    if constexpr (distance == 4) turned = __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
    if constexpr (distance == 2) turned = __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    if constexpr (distance == 1) turned = __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
  } else {
    if constexpr (distance == 2) turned = __builtin_shufflevector(v, v, 2, 3, 0, 1);
    if constexpr (distance == 1) turned = __builtin_shufflevector(v, v, 1, 0, 3, 2);
  }
  return turned + (Register)((WordRegister)v ^ signs);
}

// Four times the Hadamard transform of sixteen values.
template <typename V>
__attribute__((always_inline)) inline V Transformed(V v) {
  if constexpr (kIsPair<V>) {
    return {Transformed(v.low + v.high), Transformed(v.low - v.high)};
  } else {
    if constexpr (kRegister > 8) v = Butterfly<8>(v);
    if constexpr (kRegister > 4) v = Butterfly<4>(v);
    return Butterfly<1>(Butterfly<2>(v));
  }
}

// The Hadamard transform of every `block` of `values[0, width)` times `factor`, in place. A block is a power of two, 16 or more;
// with the factor 1 / sqrt(block) the transform is its own inverse.
inline void Rotate(float* values, int64_t width, int64_t block, float factor) {
  for (int64_t distance = block / 2; distance >= kVector; distance /= 2)
    for (int64_t from = 0; from < width; from += 2 * distance)
      for (int64_t d = from; d < from + distance; d += kVector) {
        const Vec one = Load(values + d), other = Load(values + d + distance);
        Store(values + d, one + other);
        Store(values + d + distance, one - other);
      }
  for (int64_t d = 0; d < width; d += kVector) Store(values + d, Transformed(Load(values + d)) * factor);
}

}  // namespace xla_engine
