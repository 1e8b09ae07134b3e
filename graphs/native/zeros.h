// Zeros that take no memory until they are written: a cache is made for the longest requests, and most are short.

#pragma once

#include <cstring>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "buffers.h"

namespace xla_engine {

// XLA's buffers are private anonymous memory: a page that is given back to the system reads as zeros, and is taken anew
// when it is written.
inline ffi::Error Zeros(ffi::Result<ffi::AnyBuffer> out) {
  char* begin = static_cast<char*>(out->untyped_data());
  char* const end = begin + out->size_bytes();
#ifdef __linux__
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  char* const first = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page);
  char* const last = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(end) / page * page);
  if (first < last && madvise(first, static_cast<size_t>(last - first), MADV_DONTNEED) == 0) {
    std::memset(begin, 0, static_cast<size_t>(first - begin));
    begin = last;
  }
#endif
  std::memset(begin, 0, static_cast<size_t>(end - begin));
  return ffi::Error::Success();
}

}  // namespace xla_engine
