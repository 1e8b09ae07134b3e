// Transposes tables of 32-bit values, four by four.

#pragma once

#include "common.h"

namespace xla_engine {

// to[c * to_pitch + r] = from[r * pitch + c] for four rows and columns.
template <typename T>
void TurnFour(const T* from, int64_t pitch, T* to, int64_t to_pitch) {
  typedef uint32_t Four __attribute__((vector_size(16)));
  const Four a = LoadAs<Four>(from), b = LoadAs<Four>(from + pitch);
  const Four c = LoadAs<Four>(from + 2 * pitch), d = LoadAs<Four>(from + 3 * pitch);
  const Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), more_ab = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), more_cd = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  StoreAs(to, __builtin_shufflevector(ab, cd, 0, 1, 4, 5));
  StoreAs(to + to_pitch, __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
  StoreAs(to + 2 * to_pitch, __builtin_shufflevector(more_ab, more_cd, 0, 1, 4, 5));
  StoreAs(to + 3 * to_pitch, __builtin_shufflevector(more_ab, more_cd, 2, 3, 6, 7));
}

// Columns first .. first + columns of values [count, stride], each to `apart` values behind the one before.
inline void ReadColumns(const float* values, int64_t count, int64_t stride, int64_t first, int64_t columns, float* to,
                        int64_t apart) {
  int64_t row = 0;
  for (; columns % 4 == 0 && row + 4 <= count; row += 4)
    for (int64_t column = 0; column < columns; column += 4)
      TurnFour(values + row * stride + first + column, stride, to + column * apart + row, apart);
  for (; row < count; ++row)
    for (int64_t column = 0; column < columns; ++column) to[column * apart + row] = values[row * stride + first + column];
}

}  // namespace xla_engine
