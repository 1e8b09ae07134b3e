// Reads the parameters of handlers from a call of XLA's foreign-function interface (`xla/ffi/api/c_api.h`): buffers by their
// kind, a pool of threads, attributes by name. XLA's own C++ layer over that interface is half of what a small library compiles.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include "xla/ffi/api/c_api.h"

namespace xla_engine {
namespace ffi {

using DataType = XLA_FFI_DataType;
constexpr DataType PRED = XLA_FFI_DataType_PRED, S8 = XLA_FFI_DataType_S8, U8 = XLA_FFI_DataType_U8;
constexpr DataType S32 = XLA_FFI_DataType_S32, U32 = XLA_FFI_DataType_U32, S64 = XLA_FFI_DataType_S64;
constexpr DataType F32 = XLA_FFI_DataType_F32, BF16 = XLA_FFI_DataType_BF16;

// The result of a handler: success if it has no message.
struct Error {
  XLA_FFI_Error_Code code = XLA_FFI_Error_Code_OK;
  std::string message;

  static Error Success() { return {}; }
  static Error InvalidArgument(std::string message) { return {XLA_FFI_Error_Code_INVALID_ARGUMENT, std::move(message)}; }
  static Error Internal(std::string message) { return {XLA_FFI_Error_Code_INTERNAL, std::move(message)}; }
};

// An argument or a result of any type.
class AnyBuffer {
 public:
  explicit AnyBuffer(const XLA_FFI_Buffer* buffer) : buffer_(buffer) {}

  DataType element_type() const { return buffer_->dtype; }
  const int64_t* dimensions() const { return buffer_->dims; }
  void* untyped_data() const { return buffer_->data; }
  __attribute__((noinline)) size_t element_count() const {  // compilers make long code of this loop at each call
    size_t count = 1;
    for (int64_t axis = 0; axis < buffer_->rank; ++axis) count *= static_cast<size_t>(buffer_->dims[axis]);
    return count;
  }
  size_t size_bytes() const { return element_count() * Width(buffer_->dtype); }

 private:
  static size_t Width(DataType type) {
    if (type == PRED || type == S8 || type == U8) return 1;
    return type == BF16 ? 2 : type == S64 ? 8 : 4;
  }

  const XLA_FFI_Buffer* buffer_;
};

template <DataType type>
struct Native;
template <>
struct Native<PRED> {
  using Type = bool;
};
template <>
struct Native<S32> {
  using Type = int32_t;
};
template <>
struct Native<U32> {
  using Type = uint32_t;
};
template <>
struct Native<F32> {
  using Type = float;
};
template <>
struct Native<BF16> {
  using Type = uint16_t;
};

// One of a certain type.
template <DataType type>
class Buffer : public AnyBuffer {
 public:
  using AnyBuffer::AnyBuffer;
  typename Native<type>::Type* typed_data() const { return static_cast<typename Native<type>::Type*>(untyped_data()); }
};

// A buffer that is written.
template <typename Of>
struct Result {
  Of buffer;
  const Of* operator->() const { return &buffer; }
};
template <DataType type>
using ResultBuffer = Result<Buffer<type>>;

// An attribute that is an array.
template <typename T>
class Span {
 public:
  Span(T* values, size_t size) : values_(values), size_(size) {}
  T* begin() const { return values_; }
  T* end() const { return values_ + size_; }
  size_t size() const { return size_; }

 private:
  T* values_;
  size_t size_;
};

class ThreadPool {
 public:
  explicit ThreadPool(const XLA_FFI_CallFrame* frame) : api_(frame->api), context_(frame->ctx) {}

  int64_t num_threads() const {
    int64_t count = 0;
    XLA_FFI_ThreadPool_NumThreads_Args args = {};
    args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
    args.ctx = context_;
    args.num_threads = &count;
    Drop(api_->XLA_FFI_ThreadPool_NumThreads(&args));
    return count;
  }

  // Runs a copy of `work` on a thread of the pool, or on this one if there is no pool.
  template <typename Work>
  void Schedule(const Work& work) {
    XLA_FFI_ThreadPool_Schedule_Args args = {};
    args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
    args.ctx = context_;
    args.data = new Work(work);
    args.task = [](void* data) {
      Work* mine = static_cast<Work*>(data);
      (*mine)();
      delete mine;
    };
    if (Drop(api_->XLA_FFI_ThreadPool_Schedule(&args))) args.task(args.data);
  }

 private:
  // Whether there was an error.
  bool Drop(XLA_FFI_Error* error) const {
    if (!error) return false;
    XLA_FFI_Error_Destroy_Args args = {};
    args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    args.error = error;
    api_->XLA_FFI_Error_Destroy(&args);
    return true;
  }

  const XLA_FFI_Api* api_;
  decltype(XLA_FFI_CallFrame::ctx) context_;
};

template <typename T>
struct Tag {};

// Reads the parameters of a handler from a call, one after the other; `complaint` says what does not fit.
class Reader {
 public:
  Reader(const XLA_FFI_CallFrame* frame, const char* const* names) : frame_(frame), names_(names) {}

  const char* complaint = nullptr;

  ThreadPool Take(Tag<ThreadPool>) { return ThreadPool(frame_); }
  AnyBuffer Take(Tag<AnyBuffer>) {
    const bool there = argument_ < frame_->args.size;
    Expect(there, "an argument is missing");
    return AnyBuffer(there ? static_cast<const XLA_FFI_Buffer*>(frame_->args.args[argument_++]) : &kNone);
  }
  template <DataType type>
  Buffer<type> Take(Tag<Buffer<type>>) {
    return Typed<type>(Take(Tag<AnyBuffer>()));
  }
  Result<AnyBuffer> Take(Tag<Result<AnyBuffer>>) {
    const bool there = result_ < frame_->rets.size;
    Expect(there, "a result is missing");
    return {AnyBuffer(there ? static_cast<const XLA_FFI_Buffer*>(frame_->rets.rets[result_++]) : &kNone)};
  }
  template <DataType type>
  ResultBuffer<type> Take(Tag<ResultBuffer<type>>) {
    return {Typed<type>(Take(Tag<Result<AnyBuffer>>()).buffer)};
  }
  float Take(Tag<float>) { return Scalar<float>(F32); }
  int64_t Take(Tag<int64_t>) { return Scalar<int64_t>(S64); }
  bool Take(Tag<bool>) { return Scalar<bool>(PRED); }
  Span<const int64_t> Take(Tag<Span<const int64_t>>) {
    const auto* array = static_cast<const XLA_FFI_Array*>(Attribute(XLA_FFI_AttrType_ARRAY));
    const bool fits = array && array->dtype == S64;
    Expect(fits, "an attribute has another type");
    return {fits ? static_cast<const int64_t*>(array->data) : nullptr, fits ? array->size : 0};
  }

  // Whether there is nothing more.
  void End() { Expect(argument_ == frame_->args.size && result_ == frame_->rets.size, "there are more arguments or results"); }

 private:
  static constexpr XLA_FFI_Buffer kNone = {};

  void Expect(bool holds, const char* otherwise) {
    if (!holds && !complaint) complaint = otherwise;
  }

  template <DataType type>
  Buffer<type> Typed(const AnyBuffer& any) {
    Expect(any.element_type() == type, "an argument or a result has another type");
    Buffer<type> typed(&kNone);
    static_cast<AnyBuffer&>(typed) = any;
    return typed;
  }

  template <typename T>
  T Scalar(DataType type) {
    const auto* scalar = static_cast<const XLA_FFI_Scalar*>(Attribute(XLA_FFI_AttrType_SCALAR));
    const bool fits = scalar && scalar->dtype == type;
    Expect(fits, "an attribute has another type");
    return fits ? *static_cast<const T*>(scalar->value) : T();
  }

  // The attribute of the next name, or null.
  const void* Attribute(XLA_FFI_AttrType type) {
    const char* name = *names_++;
    const XLA_FFI_Attrs& all = frame_->attrs;
    for (int64_t at = 0; at < all.size; ++at)
      if (all.names[at]->len == std::strlen(name) && !std::memcmp(all.names[at]->ptr, name, all.names[at]->len))
        return all.types[at] == type ? all.attrs[at] : nullptr;
    return nullptr;
  }

  const XLA_FFI_CallFrame* frame_;
  const char* const* names_;
  int64_t argument_ = 0, result_ = 0;
};

// A call whose parameters were read; braces around them keep their order.
struct Outcome {
  Error error;

  template <typename... Types>
  Outcome(Reader& reader, Error (*handler)(Types...), Types... parameters) {
    reader.End();
    error = reader.complaint ? Error::InvalidArgument(reader.complaint) : handler(std::move(parameters)...);
  }
};

inline XLA_FFI_Error* Failed(const XLA_FFI_CallFrame* frame, const Error& error) {
  XLA_FFI_Error_Create_Args args = {};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = error.message.c_str();
  args.errc = error.code;
  return frame->api->XLA_FFI_Error_Create(&args);
}

// Answers a call: one that asks for the interface's version, or one that `run` answers.
template <typename Run>
XLA_FFI_Error* Guarded(XLA_FFI_CallFrame* frame, const Run& run) {
  if (auto* asked = frame->extension_start; asked && asked->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata& metadata = *reinterpret_cast<XLA_FFI_Metadata_Extension*>(asked)->metadata;
    metadata.api_version.major_version = XLA_FFI_API_MAJOR;
    metadata.api_version.minor_version = XLA_FFI_API_MINOR;
    metadata.traits = 0;
    metadata.state_type_id = XLA_FFI_UNKNOWN_TYPE_ID;
    return nullptr;
  }
  try {
    return run();
  } catch (const std::exception& thrown) {  // out of memory
    return Failed(frame, Error::Internal(thrown.what()));
  }
}

// Answers a call by running `handler` with what its parameters spell out. names: of the attributes, in the parameters' order.
template <typename... Types>
XLA_FFI_Error* Answer(XLA_FFI_CallFrame* frame, Error (*handler)(Types...), const char* const* names) {
  return Guarded(frame, [&]() -> XLA_FFI_Error* {
    Reader reader(frame, names);
    const Error error = Outcome{reader, handler, reader.Take(Tag<Types>())...}.error;
    return error.code == XLA_FFI_Error_Code_OK ? nullptr : Failed(frame, error);
  });
}

}  // namespace ffi

// Defines the symbol of a handler `Error(ThreadPool, arguments, results, attributes)`; behind it the attributes' names.
#define XLA_ENGINE_HANDLER(symbol, handler, ...)               \
  extern "C" XLA_FFI_Error* symbol(XLA_FFI_CallFrame* frame) { \
    static constexpr const char* kNames[8] = {__VA_ARGS__};    \
    return ffi::Answer(frame, &handler, kNames);               \
  }

using Floats = ffi::Buffer<ffi::F32>;
using Halves = ffi::Buffer<ffi::BF16>;
using Integers = ffi::Buffer<ffi::S32>;
using Unsigned = ffi::Buffer<ffi::U32>;
using Flags = ffi::Buffer<ffi::PRED>;

inline const float* OrNull(const Floats& buffer) { return buffer.element_count() ? buffer.typed_data() : nullptr; }

}  // namespace xla_engine
