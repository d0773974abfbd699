// SGPerm's cycle search in plain C++17, without XLA or Python.
#ifndef OPTPERM_CYCLES_H_
#define OPTPERM_CYCLES_H_

#include <cstdint>

#include "threads.h"

namespace optperm {

// Weight vectors ("rows") of n entries each, `rows` of them in each of `batch` matrices. In memory a
// matrix is (n, rows), row-major, so that a weight vector's entries are `rows` apart. Values of whole
// weight vectors have shape (batch, rows).
template <typename T>
struct Problem {
  int64_t batch;
  int64_t rows;
  int64_t n;
  bool drop_remainder;            // whether to leave out a last subset with too few entries
  const T* recommendation;        // (batch, n, rows) < 0: should rise, > 0: should fall
  const T* weights;               // (batch, n, rows)
  const int32_t* ranks;           // (batch, n, rows) the place of each weight in its vector sorted
  const uint32_t* seeds;          // (batch, rows, 2)
  const float* aggressiveness;    // (batch, rows)
  const int32_t* partition_size;  // (batch, rows)
  T* new_weights;                 // (batch, n, rows)
  int32_t* new_ranks;             // (batch, n, rows)
  int32_t* moved;                 // (batch, rows) the number of entries that moved
};

// Permutes all weight vectors. Returns false, with the outputs undefined, if the ranks of one are not a
// permutation of 0, ..., n - 1.
//
// The phases and their functions: a tile's columns are copied to rows (Transpose); the ranks are inverted (SortByRank);
// ranks are drawn into subsets (Partition). For each subset, its entries are gathered (SubsetPermuter::Permute), wishes
// are sorted by size (KeySorter), cycles are searched (CycleSearch), and weights and ranks are put in place. Finally,
// the rows are copied to columns. avx512.h has other forms of the sort and of the search.
//
// Neighboring weight vectors form tiles, which are divided among the threads. If there are fewer long vectors than
// threads, one vector is permuted at a time, and its subsets are divided among the threads.
template <typename T>
bool PermuteRows(const Problem<T>& problem, const Threads& threads);

}  // namespace optperm

#endif  // OPTPERM_CYCLES_H_
