// Vectors of sixteen values on any instruction set: one register, or pairs of smaller ones.
//
// Compilers take apart vectors that are wider than a register value by value where they are compared, selected or shuffled.
// So a wide one is a pair of narrow ones here, and every operation is that of its halves.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __ARM_NEON
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

namespace xla_engine {

constexpr int64_t kVector = 16;  // floats in a vector, keys in a key block

#if defined(__AVX512F__)
constexpr int64_t kRegister = 16;  // 32-bit values of a register
#elif defined(__AVX2__)
constexpr int64_t kRegister = 8;
#else
constexpr int64_t kRegister = 4;
#endif

typedef float FloatRegister __attribute__((vector_size(4 * kRegister)));
typedef int32_t WordRegister __attribute__((vector_size(4 * kRegister)));
typedef uint32_t BitRegister __attribute__((vector_size(4 * kRegister)));
typedef uint16_t ShortRegister __attribute__((vector_size(2 * kRegister)));
typedef int8_t ByteRegister __attribute__((vector_size(kRegister)));

template <typename Half>
struct Pair {
  Half low, high;
};

template <typename V>
constexpr bool kIsPair = false;
template <typename Half>
constexpr bool kIsPair<Pair<Half>> = true;

// Sixteen values in as many registers as it takes.
template <typename Register>
using Sixteen = std::conditional_t<kRegister == 16, Register,
                                   std::conditional_t<kRegister == 8, Pair<Register>, Pair<Pair<Register>>>>;

using Vec = Sixteen<FloatRegister>;
using Words = Sixteen<WordRegister>;
using Bits = Sixteen<BitRegister>;
using Shorts = Sixteen<ShortRegister>;
using Bytes = Sixteen<ByteRegister>;
typedef uint32_t Word __attribute__((may_alias));

#define XLA_ENGINE_BY_HALVES(op)                                                        \
  template <typename Half, typename Other>                                              \
  auto operator op(Pair<Half> a, Pair<Other> b) {                                       \
    return Pair<decltype(a.low op b.low)>{a.low op b.low, a.high op b.high};            \
  }                                                                                     \
  template <typename Half, typename S, std::enable_if_t<std::is_arithmetic_v<S>, int> = 0> \
  auto operator op(Pair<Half> a, S b) {                                                 \
    return Pair<decltype(a.low op b)>{a.low op b, a.high op b};                         \
  }                                                                                     \
  template <typename Half, typename S, std::enable_if_t<std::is_arithmetic_v<S>, int> = 0> \
  auto operator op(S a, Pair<Half> b) {                                                 \
    return Pair<decltype(a op b.low)>{a op b.low, a op b.high};                         \
  }
XLA_ENGINE_BY_HALVES(+)
XLA_ENGINE_BY_HALVES(-)
XLA_ENGINE_BY_HALVES(*)
XLA_ENGINE_BY_HALVES(/)
XLA_ENGINE_BY_HALVES(&)
XLA_ENGINE_BY_HALVES(|)
XLA_ENGINE_BY_HALVES(^)
XLA_ENGINE_BY_HALVES(<<)
XLA_ENGINE_BY_HALVES(>>)
XLA_ENGINE_BY_HALVES(<)
XLA_ENGINE_BY_HALVES(>)
XLA_ENGINE_BY_HALVES(>=)
XLA_ENGINE_BY_HALVES(!=)
#undef XLA_ENGINE_BY_HALVES

template <typename Half>
Pair<Half> operator-(Pair<Half> a) {
  return {-a.low, -a.high};
}
template <typename Half>
Pair<Half>& operator+=(Pair<Half>& a, Pair<Half> b) {
  return a = a + b;
}

// A register at an address of any alignment.
template <typename Register>
struct Loose {
  typedef Register Type __attribute__((aligned(1), may_alias));
};

template <typename V>
V LoadAs(const void* from) {
  if constexpr (kIsPair<V>) {
    using Half = decltype(V::low);
    return {LoadAs<Half>(from), LoadAs<Half>(static_cast<const char*>(from) + sizeof(Half))};
  } else {
    return *static_cast<const typename Loose<V>::Type*>(from);
  }
}

template <typename V>
void StoreAs(void* to, V value) {
  if constexpr (kIsPair<V>) {
    StoreAs(to, value.low);
    StoreAs(static_cast<char*>(to) + sizeof value.low, value.high);
  } else {
    *static_cast<typename Loose<V>::Type*>(to) = value;
  }
}

// The same bits as another type.
template <typename To, typename From>
To Cast(From value) {
  if constexpr (kIsPair<To>) {
    using Half = decltype(To::low);
    return {Cast<Half>(value.low), Cast<Half>(value.high)};
  } else {
    return (To)value;
  }
}

// The same values as another type.
template <typename To, typename From>
To Convert(From value) {
  if constexpr (kIsPair<To>) {
    using Half = decltype(To::low);
    return {Convert<Half>(value.low), Convert<Half>(value.high)};
  } else {
    return __builtin_convertvector(value, To);
  }
}

// `yes` where the comparison holds, `no` elsewhere.
template <typename Mask, typename V>
V Select(Mask mask, V yes, V no) {
  if constexpr (kIsPair<V>) {
    return {Select(mask.low, yes.low, no.low), Select(mask.high, yes.high, no.high)};
  } else {
    return mask ? yes : no;
  }
}

// One value in every place of a register.
inline FloatRegister Broadcast(float value) {
#if defined(__AVX512F__)
  return (FloatRegister)_mm512_set1_ps(value);
#elif defined(__AVX2__)
  return (FloatRegister)_mm256_set1_ps(value);
#elif defined(__ARM_NEON)
  return (FloatRegister)vdupq_n_f32(value);
#else
  return FloatRegister{value, value, value, value};
#endif
}

// a b + c with one rounding. It is named everywhere, and compilers may fuse nothing by themselves (-ffp-contract=off): which of
// two products they would fuse with a sum differs from one instruction set, optimisation and compiler to the next.
inline FloatRegister Fused(FloatRegister a, FloatRegister b, FloatRegister c) {
#if defined(__AVX512F__)
  return (FloatRegister)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (FloatRegister)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
  return (FloatRegister)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return FloatRegister{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]), __builtin_fmaf(a[2], b[2], c[2]),
                       __builtin_fmaf(a[3], b[3], c[3])};
#endif
}
inline FloatRegister Fused(FloatRegister a, float b, FloatRegister c) { return Fused(a, Broadcast(b), c); }
inline FloatRegister Fused(FloatRegister a, FloatRegister b, float c) { return Fused(a, b, Broadcast(c)); }
inline FloatRegister Fused(FloatRegister a, float b, float c) { return Fused(a, Broadcast(b), Broadcast(c)); }
inline float Fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

template <typename V>
auto Low(V value) {
  if constexpr (kIsPair<V>) {
    return value.low;
  } else {
    return value;
  }
}
template <typename V>
auto High(V value) {
  if constexpr (kIsPair<V>) {
    return value.high;
  } else {
    return value;
  }
}
template <typename Half, typename B, typename C>
Pair<Half> Fused(Pair<Half> a, B b, C c) {
  return {Fused(a.low, Low(b), Low(c)), Fused(a.high, High(b), High(c))};
}

inline Vec Load(const float* from) { return LoadAs<Vec>(from); }
inline void Store(float* to, Vec value) { StoreAs(to, value); }
inline Vec All(float value) { return Vec{} + value; }

// To the nearest integer, ties to even.
template <typename V>
auto Nearest(V value) {
  if constexpr (kIsPair<V>) {
    using Half = decltype(Nearest(value.low));
    return Pair<Half>{Nearest(value.low), Nearest(value.high)};
  } else {
#if defined(__AVX512F__)
    return (WordRegister)_mm512_cvtps_epi32((__m512)value);
#elif defined(__AVX2__)
    return (WordRegister)_mm256_cvtps_epi32((__m256)value);
#elif defined(__ARM_NEON)
    return (WordRegister)vcvtnq_s32_f32((float32x4_t)value);
#else
    return (WordRegister)_mm_cvtps_epi32((__m128)value);
#endif
  }
}

// Folds `combine` over all values, halves first: one order, whatever the data.
template <typename V, typename Combine>
auto Reduce(V v, Combine combine) {
  if constexpr (kIsPair<V>) {
    return Reduce(combine(v.low, v.high), combine);
  } else {
    if constexpr (sizeof(V) == 64) {
      v = combine(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
      v = combine(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
      v = combine(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
      v = combine(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    } else if constexpr (sizeof(V) == 32) {
      v = combine(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
      v = combine(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
      v = combine(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
    } else {
      v = combine(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
      v = combine(v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
    }
    return v[0];
  }
}

inline float Total(Vec v) {
  return Reduce(v, [](auto a, auto b) { return a + b; });
}

template <typename V>
auto Largest(V v) {
  return Reduce(v, [](auto a, auto b) { return Select(a > b, a, b); });
}

// The first value of a vector.
template <typename V>
auto First(V v) {
  if constexpr (kIsPair<V>) {
    return First(v.low);
  } else {
    return v[0];
  }
}

}  // namespace xla_engine
