// Routed experts, for XLA:CPU: one call per layer. Weights of each kind are a library.
//
// The rows of each expert in use are gathered, multiplied by its gates and ups, gated, and multiplied by its second matrix;
// experts that no row takes are not read. A row adds up its experts in ascending order and each product runs over its width
// in order: its bits depend on the row alone.

#pragma once

#include "buffers.h"
#include "experts_dots.h"
#include "experts_tiles.h"

namespace xla_engine {

// What is wrong with a call's shapes and types for weights of type T, or an empty text. x: rows of the first product that there is.
template <typename T>
std::string Complaint(const ffi::AnyBuffer& x, int64_t width, int64_t inner, bool fit) {
  const int64_t step = std::is_same_v<T, int8_t> ? kScaleGroup : kFeatures;
  if (!inner || !fit) return "experts of another form";
  if (width % step || inner % step) return "features must come in multiples of " + std::to_string(step);
  if (x.element_type() != (std::is_same_v<T, BFloat16> ? ffi::BF16 : ffi::F32))
    return "experts in bf16 take rows in bf16, those in eight bits float32";
  return "";
}

template <typename T>
void Set(const T*& pointer, const ffi::AnyBuffer& buffer) {
  pointer = static_cast<const T*>(buffer.untyped_data());
}

// x [N, D], expert [N, K] (E: none), weight [N, K], gate_up [E, 2 F, D] gates first, down [E, D, F] (`Matrices`), their scales for
// every 64 columns or [0, 0], biases [E, 2 F] and [E, D] or empty, residual [N, D] -> residual plus each row's experts, weighted, [N, D].
// plain: there is no gate, and gate_up is [E, F, D].
template <typename T>
ffi::Error Experts(ffi::ThreadPool pool, ffi::AnyBuffer x, Integers expert, Floats weight, ffi::AnyBuffer gate_up,
                   Halves gate_up_scale, ffi::AnyBuffer down, Halves down_scale, Floats gate_up_bias, Floats down_bias,
                   Floats residual, ffi::ResultBuffer<ffi::F32> out, float limit, bool gelu, bool plain) {
  ExpertLayer<T> layer{};
  layer.gate_up = {gate_up, gate_up_scale};
  layer.down = {down, down_scale};
  const int64_t width = x.dimensions()[1], inner = layer.down.width;
  layer.inner = inner;
  layer.plain = plain;
  const bool fit = layer.gate_up.width == width && layer.down.rows % width == 0 &&
                   layer.gate_up.rows * width == layer.down.rows * layer.Rows();
  if (const std::string complaint = Complaint<T>(x, width, inner, fit); !complaint.empty()) return ffi::Error::InvalidArgument(complaint);
  Set(layer.x, x);
  layer.gate_up_bias = OrNull(gate_up_bias);
  layer.down_bias = OrNull(down_bias);
  layer.weight = weight.typed_data();
  layer.residual = residual.typed_data();
  layer.out = out->typed_data();
  layer.count = x.dimensions()[0];
  layer.width = width;
  layer.per_row = expert.dimensions()[1];
  layer.experts = layer.down.rows / width;
  layer.limit = limit;
  layer.gelu = gelu;
  RunExperts(pool, expert.typed_data(), layer);
  return ffi::Error::Success();
}

// The two halves of a layer, for several devices that share the features of each product. The first half returns the
// activations between the products for every assignment, [N K, F], zero where there is no expert.
template <typename T>
ffi::Error GatedExperts(ffi::ThreadPool pool, ffi::AnyBuffer x, Integers expert, ffi::AnyBuffer gate_up, Halves gate_up_scale,
                        Floats gate_up_bias, ffi::Result<ffi::AnyBuffer> out, float limit, bool gelu, bool plain) {
  ExpertLayer<T> layer{};
  layer.gate_up = {gate_up, gate_up_scale};
  const int64_t width = x.dimensions()[1], inner = out->dimensions()[1];
  layer.inner = inner;
  layer.plain = plain;
  const bool fit = layer.gate_up.width == width && inner && layer.gate_up.rows % layer.Rows() == 0;
  if (const std::string complaint = Complaint<T>(x, width, inner, fit); !complaint.empty()) return ffi::Error::InvalidArgument(complaint);
  std::memset(out->untyped_data(), 0, out->size_bytes());
  Set(layer.x, x);
  layer.gate_up_bias = OrNull(gate_up_bias);
  layer.count = x.dimensions()[0];
  layer.width = width;
  layer.per_row = expert.dimensions()[1];
  layer.experts = layer.gate_up.rows / layer.Rows();
  layer.limit = limit;
  layer.gelu = gelu;
  layer.gated = static_cast<decltype(layer.gated)>(out->untyped_data());
  RunExperts(pool, expert.typed_data(), layer);
  return ffi::Error::Success();
}

// The second half: hidden [N K, F], down [E, D, F] and residual [N, D], where D are the features of one device -> [N, D].
template <typename T>
ffi::Error DownExperts(ffi::ThreadPool pool, ffi::AnyBuffer hidden, Integers expert, Floats weight, ffi::AnyBuffer down,
                       Halves down_scale, Floats down_bias, Floats residual, ffi::ResultBuffer<ffi::F32> out) {
  ExpertLayer<T> layer{};
  layer.down = {down, down_scale};
  const int64_t width = residual.dimensions()[1], inner = layer.down.width;
  const bool fit = hidden.dimensions()[1] == inner && layer.down.rows % width == 0;
  if (const std::string complaint = Complaint<T>(hidden, width, inner, fit); !complaint.empty()) return ffi::Error::InvalidArgument(complaint);
  layer.down_bias = OrNull(down_bias);
  layer.weight = weight.typed_data();
  layer.residual = residual.typed_data();
  layer.out = out->typed_data();
  layer.count = residual.dimensions()[0];
  layer.width = width;
  layer.per_row = expert.dimensions()[1];
  layer.experts = layer.down.rows / width;
  layer.inner = inner;
  Set(layer.given, hidden);
  RunExperts(pool, expert.typed_data(), layer);
  return ffi::Error::Success();
}

// The handlers of a library of weights of type T.
#define XLA_ENGINE_EXPERTS(Name, T)                                                          \
  XLA_ENGINE_HANDLER(XlaEngineExperts##Name, Experts<T>, "limit", "gelu", "plain")           \
  XLA_ENGINE_HANDLER(XlaEngineGatedExperts##Name, GatedExperts<T>, "limit", "gelu", "plain") \
  XLA_ENGINE_HANDLER(XlaEngineDownExperts##Name, DownExperts<T>)

}  // namespace xla_engine
