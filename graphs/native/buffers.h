// What handlers take: buffers by their kind, and the binding that their parameters spell out.

#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace xla_engine {

namespace ffi = xla::ffi;

using Floats = ffi::Buffer<ffi::F32>;
using Halves = ffi::Buffer<ffi::BF16>;
using Integers = ffi::Buffer<ffi::S32>;
using Unsigned = ffi::Buffer<ffi::U32>;
using Flags = ffi::Buffer<ffi::PRED>;

inline const float* OrNull(const Floats& buffer) { return buffer.element_count() ? buffer.typed_data() : nullptr; }

// The binding of a handler `Error(ThreadPool, arguments, results, attributes)` by its own parameters: only the attributes'
// names have to be told.
class Attributes {
 public:
  explicit Attributes(std::initializer_list<std::string> names = {}) : names_(names) {}

  template <typename... Types>
  auto To(ffi::Error (*handler)(Types...)) const {
    return Bound(ffi::Ffi::Bind(), Parameters<Types...>(), handler, names_.begin());
  }

 private:
  using Names = std::vector<std::string>;

  template <typename...>
  struct Parameters {};

  template <typename Binding, typename Handler>
  static auto Bound(Binding&& binding, Parameters<>, Handler handler, Names::const_iterator) {
    return std::move(binding).To(handler);
  }

  template <typename Binding, typename First, typename... Rest, typename Handler>
  static auto Bound(Binding&& binding, Parameters<First, Rest...>, Handler handler, Names::const_iterator name) {
    const Parameters<Rest...> rest;
    if constexpr (std::is_same_v<First, ffi::ThreadPool>) {
      return Bound(std::move(binding).template Ctx<First>(), rest, handler, name);
    } else if constexpr (!std::is_void_v<typename ffi::ArgBinding<First>::Arg>) {
      return Bound(std::move(binding).template Arg<First>(), rest, handler, name);
    } else if constexpr (!std::is_void_v<typename ffi::RetBinding<First>::Ret>) {
      return Bound(std::move(binding).template Ret<typename ffi::RetBinding<First>::Ret>(), rest, handler, name);
    } else {
      return Bound(std::move(binding).template Attr<First>(*name), rest, handler, name + 1);
    }
  }

  Names names_;
};

}  // namespace xla_engine
