#include "reorder.h"

#include <algorithm>
#include <atomic>
#include <type_traits>

#include "columns.h"
#include "entries.h"
#include "key_sorter.h"

namespace optperm {
namespace {

// Works on one row at a time, in order of location, and reuses the working memory.
template <typename Key>
class RowReorderer {
 public:
  // Sorts by the keys, which are overwritten, and replaces the ranks by the new ranks. Returns false if the ranks are
  // not a permutation.
  OPTPERM_FOR_EACH_PROCESSOR bool Reorder(int32_t n, Key* keys, int32_t* ranks, int32_t* sources);

 private:
  using Unsigned = std::make_unsigned_t<Key>;

  Buffer locations_;
  KeySorter<Unsigned, static_cast<Unsigned>(-1)> sorter_;
};

template <typename Key>
OPTPERM_FOR_EACH_PROCESSOR bool RowReorderer<Key>::Reorder(int32_t n, Key* keys, int32_t* ranks,
                                                           int32_t* sources) {
  int32_t* locations = locations_.Reserve<int32_t>(n);
  std::fill_n(locations, n, -1);
  for (int32_t i = 0; i < n; ++i) {
    if (static_cast<uint32_t>(ranks[i]) >= static_cast<uint32_t>(n)) return false;
    locations[ranks[i]] = i;
  }
  int32_t least = 0;
  for (int32_t rank = 0; rank < n; ++rank) least = std::min(least, locations[rank]);
  if (least < 0) return false;  // some rank occurs twice
  // As unsigned integers in the same order.
  Unsigned* shifted = reinterpret_cast<Unsigned*>(keys);
  for (int32_t i = 0; i < n; ++i) shifted[i] ^= Unsigned{1} << (8 * sizeof(Key) - 1);
  const int32_t* order = sorter_.Sort(shifted, n);
  for (int32_t rank = 0; rank < n; ++rank) {
    ranks[order[rank]] = rank;
    sources[order[rank]] = locations[rank];
  }
  return true;
}

}  // namespace

template <typename Key>
bool ReorderRows(const ReorderProblem<Key>& problem, const Threads& threads) {
  const ReorderProblem<Key>& p = problem;
  const int64_t width = TileWidth(p.batch * p.rows, threads), tiles = (p.rows + width - 1) / width;
  const int64_t stride = p.n + 16;  // no power of two: columns would share few lines of the cache
  std::atomic<bool> valid{true};
  Share(threads, p.batch * tiles, [&](const NextTask& next) {
    RowReorderer<Key> reorderer;
    Buffer key_buffer, rank_buffer, source_buffer;
    Key* keys = key_buffer.Reserve<Key>(width * stride);
    int32_t* ranks = rank_buffer.Reserve<int32_t>(width * stride);
    int32_t* sources = source_buffer.Reserve<int32_t>(width * stride);
    for (int64_t tile = next(); tile >= 0; tile = next()) {
      const int64_t first = tile % tiles * width, columns = std::min(width, p.rows - first);
      const int64_t base = tile / tiles * p.n * p.rows + first;
      Transpose(p.keys + base, p.rows, p.n, columns, keys, stride);
      Transpose(p.ranks + base, p.rows, p.n, columns, ranks, stride);
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t start = column * stride;
        if (!reorderer.Reorder(static_cast<int32_t>(p.n), keys + start, ranks + start, sources + start)) {
          valid = false;
        }
      }
      Transpose(ranks, stride, columns, p.n, p.new_ranks + base, p.rows);
      Transpose(sources, stride, columns, p.n, p.sources + base, p.rows);
    }
  });
  return valid;
}

template bool ReorderRows(const ReorderProblem<int32_t>&, const Threads&);
template bool ReorderRows(const ReorderProblem<int64_t>&, const Threads&);

}  // namespace optperm
