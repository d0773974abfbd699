// The functions that Python calls: plain C functions around the kernel, on the library's threads.
#include <cstdint>

#include "cycles.h"

#if defined(_WIN32)
#define OPTPERM_EXPORT extern "C" __declspec(dllexport)
#else
#define OPTPERM_EXPORT extern "C" __attribute__((visibility("default")))
#endif

// Increase this number whenever the functions below change.
OPTPERM_EXPORT int32_t optperm_interface_version() { return 2; }

OPTPERM_EXPORT void optperm_set_max_threads(int64_t count) { optperm::max_threads = count; }

OPTPERM_EXPORT bool optperm_permute_rows_float32_host(const optperm::Problem<float>* problem) {
  return optperm::PermuteRows(*problem, optperm::OwnThreads());
}

OPTPERM_EXPORT bool optperm_permute_rows_float64_host(const optperm::Problem<double>* problem) {
  return optperm::PermuteRows(*problem, optperm::OwnThreads());
}
