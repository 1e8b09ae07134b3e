// Runs the calls of a program one after the other as a single call of XLA's (`graphs/joined.py`).
//
// With a few rows XLA takes 3 us for a call that takes 20 to 80, and a thread of its pool that sleeps may need longer than the call to
// wake up (findings/step_programs.md). Here helpers wait for the next call until all are done.

#pragma once

#include <map>
#include <mutex>

#include "buffers.h"
#include "parallel.h"

namespace xla_engine {
namespace {

using Handler = XLA_FFI_Error* (*)(XLA_FFI_CallFrame*);

// The handlers that calls name, of all instruction sets.
struct Handlers {
  std::mutex mutex;
  std::map<int64_t, Handler> by_number;
} handlers;

// The pool of threads that joined calls see: those of XLA's pool, held until all calls are done.
class Team {
 public:
  static std::shared_ptr<Team> Of(ffi::ThreadPool& pool) {
    auto team = std::make_shared<Team>(std::max<int64_t>(1, pool.num_threads()));
    for (Box& box : team->boxes_) pool.Schedule([team, &box] { team->Help(box); });
    return team;
  }

  explicit Team(int64_t threads) : boxes_(threads - 1) {}

  int64_t threads() const { return static_cast<int64_t>(boxes_.size()) + 1; }

  // Tasks are posted as a phase needs them, and the caller of the phase returns when it is over: what still lies in a box then
  // has nothing left to do.
  void Post(XLA_FFI_Task* task, void* data) {
    if (boxes_.empty()) return task(data);
    Box& box = boxes_[next_++ % boxes_.size()];
    box.Run();
    box.Put(task, data);
  }

  void Dismiss() {
    over_.store(true);
    for (Box& box : boxes_) box.Run();
  }

 private:
  // Room for one task, which one thread takes.
  class alignas(64) Box {
   public:
    void Put(XLA_FFI_Task* task, void* data) {
      for (int64_t turn = 0; state_.load() != kEmpty; ++turn) Pause(turn);  // it is being read
      task_ = task, data_ = data;
      state_.store(kFull);
    }
    bool Run() {
      int expected = kFull;
      if (state_.load() != kFull || !state_.compare_exchange_strong(expected, kRead)) return false;
      XLA_FFI_Task* const task = task_;
      void* const data = data_;
      state_.store(kEmpty);
      task(data);
      return true;
    }

   private:
    enum { kEmpty, kFull, kRead };
    std::atomic<int> state_{kEmpty};
    XLA_FFI_Task* task_ = nullptr;
    void* data_ = nullptr;
  };

  void Help(Box& box) {
    if (std::this_thread::get_id() == caller_) return;  // a pool may run a task at once
    for (int64_t turn = 0; !over_.load(); ++turn) {
      if (box.Run()) turn = 0;
      Pause(turn);
    }
  }

  std::vector<Box> boxes_;  // of each helper
  size_t next_ = 0;
  std::atomic<bool> over_{false};
  const std::thread::id caller_ = std::this_thread::get_id();
};

XLA_FFI_Error* PostTask(XLA_FFI_ThreadPool_Schedule_Args* args) {
  reinterpret_cast<Team*>(args->ctx)->Post(args->task, args->data);
  return nullptr;
}

XLA_FFI_Error* CountThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = reinterpret_cast<Team*>(args->ctx)->threads();
  return nullptr;
}

// Runs the calls that the attribute "program" describes (`graphs/joined.py`), in 64-bit integers:
//   handlers: a count, then numbers
//   buffers in the last result: a count, then for each its offset, type, rank and dimensions
//   calls: a count, then for each the index of its handler; counts of arguments, results and attributes; arguments and results,
//   as indices into the arguments, results and buffers; attributes: sixteen bytes of a name, a type, how many values it is an
//   array of or -1, values.
// Returns the error of the first call that fails.
XLA_FFI_Error* RunCalls(XLA_FFI_CallFrame* frame) {
  static constexpr const char* kNames[] = {"program"};
  constexpr int64_t kMost = 8;  // attributes
  ffi::Reader reader(frame, kNames);
  const auto program = reader.Take(ffi::Tag<ffi::Span<const int64_t>>());
  if (reader.complaint) return ffi::Failed(frame, ffi::Error::InvalidArgument(reader.complaint));
  int64_t* at = const_cast<int64_t*>(program.begin());
  std::vector<Handler> found(*at++);
  {
    const std::lock_guard<std::mutex> lock(handlers.mutex);
    for (Handler& each : found) {
      each = handlers.by_number[*at++];
      if (!each) return ffi::Failed(frame, ffi::Error::Internal("a joined call has no kernel: load its library first"));
    }
  }
  std::vector<void*> places(frame->args.args, frame->args.args + frame->args.size);
  places.insert(places.end(), frame->rets.rets, frame->rets.rets + frame->rets.size);
  char* memory = static_cast<char*>(static_cast<const XLA_FFI_Buffer*>(places.back())->data);
  std::vector<XLA_FFI_Buffer> buffers(*at++);
  for (XLA_FFI_Buffer& each : buffers) {
    each = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, static_cast<XLA_FFI_DataType>(at[1]), memory + at[0], at[2], at + 3};
    places.push_back(&each);
    at += 3 + each.rank;
  }

  ffi::ThreadPool pool(frame);
  const std::shared_ptr<Team> team = Team::Of(pool);
  struct Dismissal {
    Team& team;
    ~Dismissal() { team.Dismiss(); }
  } const at_the_end{*team};
  XLA_FFI_Api api = {};
  std::memcpy(static_cast<void*>(&api), frame->api, std::min(frame->api->struct_size, sizeof api));
  api.XLA_FFI_ThreadPool_Schedule = PostTask;
  api.XLA_FFI_ThreadPool_NumThreads = CountThreads;
  XLA_FFI_Error* error = nullptr;
  std::vector<void*> given;
  for (int64_t calls = *at++; calls > 0 && !error; --calls) {
    const Handler handler = found[*at++];
    const int64_t arguments = *at++, results = *at++, attributes = *at++;
    given.clear();
    for (int64_t each = 0; each < arguments + results; ++each) given.push_back(places[*at++]);
    XLA_FFI_ByteSpan names[kMost], *name_of[kMost];
    XLA_FFI_AttrType types[kMost];
    XLA_FFI_Scalar scalars[kMost];
    XLA_FFI_Array arrays[kMost];
    void* values[kMost];
    for (int64_t each = 0; each < std::min(attributes, kMost); ++each) {
      const char* name = reinterpret_cast<const char*>(at);
      names[each] = {name, strnlen(name, 16)};
      name_of[each] = &names[each];
      const auto type = static_cast<XLA_FFI_DataType>(at[2]);
      const int64_t count = at[3];
      at += 4;
      types[each] = count < 0 ? XLA_FFI_AttrType_SCALAR : XLA_FFI_AttrType_ARRAY;
      scalars[each] = {type, at};
      arrays[each] = {type, static_cast<size_t>(std::max<int64_t>(count, 0)), at};
      values[each] = count < 0 ? static_cast<void*>(&scalars[each]) : &arrays[each];
      at += std::abs(count);
    }
    XLA_FFI_CallFrame call = {};
    call.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    call.api = &api;
    call.ctx = reinterpret_cast<decltype(call.ctx)>(team.get());
    call.stage = frame->stage;
    call.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, arguments, nullptr, given.data()};
    call.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, results, nullptr, given.data() + arguments};
    call.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, attributes, types, name_of, values};
    error = handler(&call);
  }
  return error;
}

}  // namespace

extern "C" XLA_FFI_Error* XlaEngineJoined(XLA_FFI_CallFrame* frame) { return ffi::Guarded(frame, [&] { return RunCalls(frame); }); }

// Makes a handler known to joined calls by its number.
extern "C" void XlaEngineKnow(int64_t number, Handler handler) {
  const std::lock_guard<std::mutex> lock(handlers.mutex);
  handlers.by_number[number] = handler;
}

}  // namespace xla_engine
