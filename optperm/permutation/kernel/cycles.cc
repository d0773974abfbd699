#include "cycles.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "columns.h"
#include "entries.h"
#include "search.h"

namespace optperm {
namespace {

// Use several threads for weight vectors of at least this many entries.
constexpr int64_t kLong = 1 << 15;

// Turns off flush-to-zero, which XLA's threads turn on, for the lifetime of the object.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&saved_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t saved_;
};

// The generator splitmix64 (Steele, Lea & Flood 2014), number `index` >= 1 from a start.
inline uint64_t SplitMix64(uint64_t start, uint64_t index) {
  uint64_t z = start + index * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// floor(a * b / 2^64) for b < 2^32: a uniform number below b from a uniform 64-bit one.
inline uint32_t MultiplyHigh(uint64_t a, uint64_t b) {
  const uint64_t low = (a & 0xFFFFFFFFu) * b;
  return static_cast<uint32_t>(((a >> 32) * b + (low >> 32)) >> 32);
}

// One weight vector in order of location. Weights and ranks are permuted in place.
template <typename T>
struct Row {
  int32_t n;
  const T* recommendation;
  T* weights;
  int32_t* ranks;
  uint64_t seed;
  float aggressiveness;
  int32_t partition_size;
  bool drop_remainder;
  double spread;  // A, the largest finite weight less the smallest
};

// Permutes subsets, one at a time.
template <typename T>
class SubsetPermuter {
 public:
  // The entries' homes are given in order of rank, and are overwritten. Returns the number of entries that moved.
  OPTPERM_FOR_EACH_PROCESSOR int32_t Permute(const Row<T>& row, Home* home, int32_t size,
                                             const Threads& threads);

 private:
  // Step 4: nonfinite entries, and entries with a recommendation of zero, do not take part. Not 0 if there is one.
  Bits<T> SitsOut(int32_t p) const {
    const Bits<T> infinite = ToBits(std::numeric_limits<T>::infinity());
    const Bits<T> wish = entries_.wish[p] & ~kSignBit<T>;
    const Bits<T> weight = ToBits(entries_.weight[p]) & ~kSignBit<T>;
    return Bits<T>{wish - 1 >= infinite - 1} | Bits<T>{weight >= infinite};
  }

  void DropThoseThatSitOut() {
    Bits<T> any = 0;
    for (int32_t p = 0; p < entries_.size; ++p) any |= SitsOut(p);
    if (any == 0) return;
    int32_t end = 0;
    for (int32_t p = 0; p < entries_.size; ++p) {
      const bool takes_part = SitsOut(p) == 0;
      entries_.Copy(p, entries_, end);
      end += takes_part;
    }
    entries_.size = end;
  }

  bool HasTies() const {
    int any = 0;
    for (int32_t p = 1; p < entries_.size; ++p) any |= entries_.weight[p] == entries_.weight[p - 1];
    return any != 0;
  }

  // Marks entries with the same weight as the entry before.
  void MarkTies() {
    const T* weight = entries_.weight;
    const int32_t size = entries_.size;
    ties_ = tie_buffer_.Reserve<uint64_t>((size + 63) / 64);
    for (int32_t begin = 0; begin < size; begin += 64) {
      uint8_t tied[64] = {};
      const int32_t end = std::min(64, size - begin);
      for (int32_t i = begin == 0; i < end; ++i) tied[i] = weight[begin + i] == weight[begin + i - 1];
      uint64_t word = 0;
      for (int32_t i = 0; i < 64; i += 8) {
        // The product brings the lowest bits of eight bytes together in the highest byte.
        uint64_t bytes;
        std::memcpy(&bytes, tied + i, 8);
        word |= bytes * 0x0102040810204080u >> 56 << i;
      }
      ties_[begin >> 6] = word;
    }
  }

  void Gather(const Row<T>& row, int64_t begin, int64_t end) {
    const Home* home = entries_.home;
    for (int64_t p = begin; p < end; ++p) {
      entries_.weight[p] = row.weights[home[p].location];
      entries_.wish[p] = ToBits(row.recommendation[home[p].location]);
    }
  }

  // The first entry, from a given entry, that is marked as tied, or that is not marked; the size if there is none.
  int32_t FindTie(int32_t from, bool is_tied) const {
    if (from >= entries_.size) return entries_.size;
    const uint64_t flip = is_tied ? 0 : ~uint64_t{0};
    int32_t word = from >> 6;
    uint64_t bits = (ties_[word] ^ flip) >> (from & 63) << (from & 63);
    while (bits == 0) {
      if (++word >= (entries_.size + 63) / 64) return entries_.size;
      bits = ties_[word] ^ flip;
    }
    return std::min(entries_.size, (word << 6) + LowestBit(bits));
  }

  // Until here tied entries are in order of rank.
  OPTPERM_RARE void OrderTies(const Row<T>& row) {
    for (int32_t end = 0;;) {
      const int32_t second = FindTie(end, true);
      if (second == entries_.size) return;
      end = FindTie(second, false);
      SortByLocation(row, entries_.home + second - 1, end - second + 1);
    }
  }

  // Many of a row are marked as bits, in order of location.
  void SortByLocation(const Row<T>& row, Home* home, int32_t size) {
    const int32_t words = (row.n + 63) / 64;
    if (size < 16) {
      for (int32_t i = 1; i < size; ++i) {
        const Home here = home[i];
        int32_t j = i;
        for (; j > 0 && home[j - 1].location > here.location; --j) home[j] = home[j - 1];
        home[j] = here;
      }
      return;
    }
    if (size < words / 16) {
      std::sort(home, home + size, [](const Home& a, const Home& b) { return a.location < b.location; });
      return;
    }
    uint64_t* marks = marks_.Reserve<uint64_t>(words);
    std::fill_n(marks, words, 0);
    for (int32_t i = 0; i < size; ++i) marks[home[i].location >> 6] |= uint64_t{1} << (home[i].location & 63);
    for (int32_t word = 0; word < words; ++word) {
      for (uint64_t bits = marks[word]; bits != 0; bits &= bits - 1) {
        const int32_t location = (word << 6) + LowestBit(bits);
        *home++ = {location, row.ranks[location]};
      }
    }
  }

  Buffer weights_, wishes_, tie_buffer_, marks_;
  Entries<T> entries_;
  uint64_t* ties_ = nullptr;  // a bit for each entry
  CycleSearch<T> search_;
};

template <typename T>
OPTPERM_FOR_EACH_PROCESSOR int32_t SubsetPermuter<T>::Permute(const Row<T>& row, Home* home, int32_t size,
                                                              const Threads& threads) {
  entries_ = {size, home, weights_.Reserve<T>(size), wishes_.Reserve<Bits<T>>(size)};
  ShareRange(threads, size, [&](int64_t begin, int64_t end) { Gather(row, begin, end); });
  DropThoseThatSitOut();
  if (entries_.size < 2) return 0;
  const bool has_ties = HasTies();
  if (has_ties) {
    MarkTies();
    OrderTies(row);
    Gather(row, 0, entries_.size);
  }
  const double epsilon = row.spread * (static_cast<double>(row.aggressiveness) + 1.0 / entries_.size);
  const int32_t* take = search_.Run(entries_, epsilon, has_ties ? ties_ : nullptr);
  std::atomic<int32_t> moved{0};
  ShareRange(threads, entries_.size, [&](int64_t begin, int64_t end) {
    int32_t count = 0;
    for (int64_t p = begin; p < end; ++p) {
      const int32_t from = take[p], location = home[p].location;
      row.weights[location] = entries_.weight[from];
      row.ranks[location] = home[from].rank;
      count += from != p;
    }
    moved += count;
  });
  return moved;
}

// Permutes weight vectors, one at a time, and reuses the working memory.
template <typename T>
class RowPermuter {
 public:
  // Returns the number of entries that moved, or -1 if the ranks are not a permutation.
  int32_t Permute(Row<T> row, const Threads& threads) {
    Home* home = homes_.Reserve<Home>(row.n);
    if (!SortByRank(row, home, threads)) return -1;
    row.spread = Spread(row, home);
    if (row.partition_size >= row.n) return subset_.Permute(row, home, row.n, threads);
    // Step 3.
    Home* grouped = grouped_.Reserve<Home>(row.n);
    Partition(row, home, grouped);
    if (threads.count > 1) homes_.Release();  // frees large buffers early
    const int32_t whole = row.n / row.partition_size;
    const int32_t subsets = whole + (row.n % row.partition_size != 0 && !row.drop_remainder);
    const auto permute = [&](SubsetPermuter<T>& permuter, int32_t k) {
      const int32_t begin = k * row.partition_size;
      return permuter.Permute(row, grouped + begin, std::min(row.partition_size, row.n - begin), Threads{});
    };
    if (threads.count == 1) {
      int32_t moved = 0;
      for (int32_t k = 0; k < subsets; ++k) moved += permute(subset_, k);
      return moved;
    }
    std::atomic<int32_t> moved{0};
    Share(threads, subsets, [&](const NextTask& next) {
      const DefaultFloats default_floats;
      SubsetPermuter<T> permuter;
      for (int64_t k = next(); k >= 0; k = next()) moved += permute(permuter, static_cast<int32_t>(k));
    });
    return moved;
  }

 private:
  bool SortByRank(const Row<T>& row, Home* home, const Threads& threads) {
    const uint32_t n = row.n;
    std::atomic<bool> valid{true};
    ShareRange(threads, n, [&](int64_t begin, int64_t end) {
      std::fill(home + begin, home + end, Home{-1, 0});
    });
    ShareRange(threads, n, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const uint32_t rank = row.ranks[i];
        if (rank >= n) {
          valid = false;
          return;
        }
        // Damaged ranks may be equal, and then two threads write to one place.
        Home here{static_cast<int32_t>(i), static_cast<int32_t>(rank)};
        __atomic_store(&home[rank], &here, __ATOMIC_RELAXED);
      }
    });
    int32_t least = valid ? 0 : -1;
    for (uint32_t rank = 0; rank < n; ++rank) least = std::min(least, home[rank].location);
    return least >= 0;  // otherwise, some rank occurs twice
  }

  static double Spread(const Row<T>& row, const Home* home) {
    const auto weight = [&](int32_t p) { return row.weights[home[p].location]; };
    int32_t low = 0, high = row.n - 1;
    while (low < row.n && !std::isfinite(weight(low))) ++low;
    while (high >= 0 && !std::isfinite(weight(high))) --high;
    return low > high ? 0.0 : static_cast<double>(weight(high)) - static_cast<double>(weight(low));
  }

  // Groups the homes by subset, each subset in order of rank.
  OPTPERM_FOR_EACH_PROCESSOR void Partition(const Row<T>& row, const Home* home, Home* grouped);

  Buffer homes_, grouped_;
  std::vector<int32_t> label_, end_;
  std::vector<uint32_t> pick_;
  SubsetPermuter<T> subset_;
};

template <typename T>
OPTPERM_FOR_EACH_PROCESSOR void RowPermuter<T>::Partition(const Row<T>& row, const Home* home, Home* grouped) {
  // Labels of ranks, by the inside-out shuffle of Fisher and Yates.
  constexpr int32_t kPicks = 1024;
  const int32_t n = row.n, size = row.partition_size;
  label_.resize(n);
  pick_.resize(kPicks);
  for (int32_t i = 0, label = 0, left = size; i < n;) {
    const int32_t begin = i, stop = std::min(n, i + kPicks);
    for (int32_t j = begin; j < stop; ++j) pick_[j - begin] = MultiplyHigh(SplitMix64(row.seed, j + 1), j + 1);
    while (i < stop) {
      const int32_t end = std::min(stop, i + left);
      left -= end - i;
      for (; i < end; ++i) {
        const uint32_t pick = pick_[i - begin];
        label_[i] = label_[pick];
        label_[pick] = label;
      }
      if (left == 0) {
        left = size;
        ++label;
      }
    }
  }
  end_.resize(n / size + 1);
  for (size_t k = 0; k < end_.size(); ++k) end_[k] = static_cast<int32_t>(k) * size;
  for (int32_t p = 0; p < n; ++p) grouped[end_[label_[p]]++] = home[p];
}

// Permutes tiles, one at a time.
template <typename T>
class TilePermuter {
 public:
  TilePermuter(const Problem<T>& problem, int64_t width)
      : problem_(problem), width_(width), tiles_((problem.rows + width - 1) / width) {}

  int64_t tiles() const { return problem_.batch * tiles_; }

  bool Permute(int64_t tile, const Threads& threads) {
    const DefaultFloats default_floats;
    const Problem<T>& p = problem_;
    const int64_t batch = tile / tiles_, first = tile % tiles_ * width_;
    const int64_t width = std::min(width_, p.rows - first), base = batch * p.n * p.rows + first;
    // No power of two: columns would share few lines of the cache.
    const int64_t stride = p.n + 16;
    // A matrix with one weight vector equals its transpose in memory.
    const bool is_column = p.rows == 1;
    const T* m = p.recommendation + base;
    T* weights = is_column ? p.new_weights + base : weights_.template Reserve<T>(width_ * stride);
    int32_t* ranks = is_column ? p.new_ranks + base : ranks_.Reserve<int32_t>(width_ * stride);
    T* wishes = is_column ? nullptr : wishes_.template Reserve<T>(width_ * stride);
    ShareRange(threads, p.n, [&](int64_t begin, int64_t end) {
      const int64_t from = base + begin * p.rows;
      Transpose(p.weights + from, p.rows, end - begin, width, weights + begin, stride);
      Transpose(p.ranks + from, p.rows, end - begin, width, ranks + begin, stride);
      if (!is_column) Transpose(p.recommendation + from, p.rows, end - begin, width, wishes + begin, stride);
    });
    for (int64_t column = 0; column < width; ++column) {
      const int64_t at = batch * p.rows + first + column, start = column * stride;
      const uint64_t seed = uint64_t{p.seeds[2 * at + 1]} << 32 | p.seeds[2 * at];
      p.moved[at] = row_.Permute({static_cast<int32_t>(p.n), is_column ? m : wishes + start, weights + start,
                                  ranks + start, seed, p.aggressiveness[at], std::max(p.partition_size[at], 1),
                                  p.drop_remainder, 0.0},
                                 threads);
      if (p.moved[at] < 0) return false;
    }
    if (is_column) return true;
    ShareRange(threads, p.n, [&](int64_t begin, int64_t end) {
      const int64_t to = base + begin * p.rows;
      Transpose(weights + begin, stride, width, end - begin, p.new_weights + to, p.rows);
      Transpose(ranks + begin, stride, width, end - begin, p.new_ranks + to, p.rows);
    });
    return true;
  }

 private:
  const Problem<T> problem_;
  const int64_t width_, tiles_;
  Buffer wishes_, weights_, ranks_;
  RowPermuter<T> row_;
};

}  // namespace

template <typename T>
bool PermuteRows(const Problem<T>& problem, const Threads& threads) {
  const int64_t rows = problem.batch * problem.rows;
  if (rows == 0 || problem.n == 0) return true;
  if (rows < threads.count && problem.n >= kLong) {
    TilePermuter<T> permuter(problem, 1);
    for (int64_t row = 0; row < rows; ++row) {
      if (!permuter.Permute(row, threads)) return false;
    }
    return true;
  }
  const int64_t width = TileWidth(rows, threads);
  const int64_t tiles = TilePermuter<T>(problem, width).tiles();
  std::atomic<bool> valid{true};
  Share(threads, tiles, [&](const NextTask& next) {
    TilePermuter<T> permuter(problem, width);
    for (int64_t tile = next(); tile >= 0; tile = next()) {
      if (!permuter.Permute(tile, Threads{})) valid = false;
    }
  });
  return valid;
}

template bool PermuteRows(const Problem<float>&, const Threads&);
template bool PermuteRows(const Problem<double>&, const Threads&);

}  // namespace optperm
