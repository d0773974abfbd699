// SGPerm's cycle search: plain C++17 that knows nothing of XLA or Python.
#ifndef OPTPERM_CYCLES_H_
#define OPTPERM_CYCLES_H_

#include <cstdint>
#include <memory>

namespace optperm {

// Weight vectors ("rows") of n entries each, `rows` of them in each of `batch` matrices. In memory a
// matrix is (n, rows), row-major, so that a weight vector's entries lie `rows` apart. What belongs to a
// weight vector as a whole is (batch, rows).
template <typename T>
struct Problem {
  int64_t batch;
  int64_t rows;
  int64_t n;
  bool drop_remainder;            // whether a last subset of too few entries sits out
  const T* recommendation;        // (batch, n, rows) < 0: should rise, > 0: should fall
  const T* weights;               // (batch, n, rows)
  const int32_t* ranks;           // (batch, n, rows) the place of each weight in its vector sorted
  const uint32_t* seeds;          // (batch, rows, 2)
  const float* aggressiveness;    // (batch, rows)
  const int32_t* partition_size;  // (batch, rows)
  T* new_weights;                 // (batch, n, rows)
  int32_t* new_ranks;             // (batch, n, rows)
  int32_t* moved;                 // (batch, rows) how many entries moved
};

// The work is cut into tiles of neighboring weight vectors, which may be permuted in any order, by any
// thread.
template <typename T>
int64_t NumTiles(const Problem<T>& problem);

// Permutes tiles, one at a time; the working memory is kept from tile to tile. One for each thread.
template <typename T>
class TilePermuter {
 public:
  explicit TilePermuter(const Problem<T>& problem);
  ~TilePermuter();

  // Returns false, with the tile's outputs undefined, if the ranks of a weight vector are not a
  // permutation of 0, ..., n - 1.
  bool Permute(int64_t tile);

 private:
  class Row;
  const Problem<T> problem_;
  std::unique_ptr<Row> row_;
};

}  // namespace optperm

#endif  // OPTPERM_CYCLES_H_
