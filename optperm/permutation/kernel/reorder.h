// LaPerm's synchronization: assigns weights to places.
#ifndef OPTPERM_REORDER_H_
#define OPTPERM_REORDER_H_

#include <cstdint>

#include "threads.h"

namespace optperm {

// Rows as in cycles.h: matrices of (n, rows).
template <typename Key>
struct ReorderProblem {
  int64_t batch;
  int64_t rows;
  int64_t n;
  const Key* keys;       // (batch, n, rows) signed integers in the order of the entries
  const int32_t* ranks;  // (batch, n, rows) the ranks of other entries in their rows
  int32_t* new_ranks;    // (batch, n, rows) the ranks of the keys, ties by location
  int32_t* sources;      // (batch, n, rows) the location of the new rank among the other entries
};

// Returns false, with the outputs undefined, if the ranks of a row are not a permutation.
template <typename Key>
bool ReorderRows(const ReorderProblem<Key>& problem, const Threads& threads);

}  // namespace optperm

#endif  // OPTPERM_REORDER_H_
