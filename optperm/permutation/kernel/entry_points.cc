// What Python calls: the kernel by plain C functions, on one thread.
#include <cstdint>

#include "cycles.h"

#if defined(_WIN32)
#define OPTPERM_EXPORT extern "C" __declspec(dllexport)
#else
#define OPTPERM_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

// Returns whether the ranks were permutations.
template <typename T>
bool PermuteRows(const optperm::Problem<T>& problem) {
  optperm::TilePermuter<T> permuter(problem);
  for (int64_t tile = 0; tile < optperm::NumTiles(problem); ++tile) {
    if (!permuter.Permute(tile)) return false;
  }
  return true;
}

}  // namespace

// Counts up whenever the functions below change.
OPTPERM_EXPORT int32_t optperm_interface_version() { return 1; }

OPTPERM_EXPORT bool optperm_permute_rows_f32_host(const optperm::Problem<float>* problem) {
  return PermuteRows(*problem);
}

OPTPERM_EXPORT bool optperm_permute_rows_f64_host(const optperm::Problem<double>* problem) {
  return PermuteRows(*problem);
}
