#include "cycles.h"

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "columns.h"
#include "places.h"

namespace optperm {
namespace {

// Compiled twice, for any x86-64 processor and for those of the last ten years; the loader chooses.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__)
#define OPTPERM_FOR_EACH_PROCESSOR \
  __attribute__((flatten, target_clones("default", "arch=x86-64-v3")))
#else
#define OPTPERM_FOR_EACH_PROCESSOR
#endif

// Called, not copied into the above: that takes the compiler long, and makes no odds where it runs rarely.
#define OPTPERM_RARE __attribute__((noinline))

// Weight vectors a tile: one cache line of 32-bit entries, so that reading a tile touches each of its
// lines once.
constexpr int64_t kTileRows = 16;

// Candidates looked at together: enough to spare most of the branches on whether one is still alive,
// few enough that hardly any is memorized meanwhile.
constexpr int32_t kLookAhead = 32;

template <typename T>
using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

template <typename T>
constexpr Bits<T> kSignBit = Bits<T>{1} << (8 * sizeof(T) - 1);

template <typename T>
inline Bits<T> ToBits(T value) {
  Bits<T> bits;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

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

// Subnormal numbers are numbers while this lives: XLA's threads take them for zero.
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

// Where a weight is, and its rank, which goes with it wherever it moves.
struct Home {
  int32_t location;
  int32_t rank;
};

// Entries of a weight vector in ascending order of weight, ties by location.
template <typename T>
struct Entries {
  int32_t size = 0;
  Home* home = nullptr;
  T* weight = nullptr;
  Bits<T>* wish = nullptr;  // the bits of the recommendation

  Entries From(int32_t begin, int32_t count) const {
    return {count, home + begin, weight + begin, wish + begin};
  }
};

template <typename T>
class EntriesBuffer {
 public:
  Entries<T> Reserve(int64_t size) {
    if (static_cast<int64_t>(home_.size()) < size) {
      home_.resize(size);
      weight_.resize(size);
      wish_.resize(size);
    }
    return {static_cast<int32_t>(size), home_.data(), weight_.data(), wish_.data()};
  }

 private:
  std::vector<Home> home_;
  std::vector<T> weight_;
  std::vector<Bits<T>> wish_;
};

// Sorts entries by the size of their wish, ties by place: by radix on as many leading bits as a 32- or
// 64-bit item holds beside the place, and by insertion where those bits are equal.
template <typename T>
class WishSorter {
 public:
  // Places 0, ..., entries.size - 1 in ascending order.
  const int32_t* Sort(const Entries<T>& entries) {
    const int32_t size = entries.size;
    if (static_cast<int64_t>(order_.size()) < size) order_.resize(size);
    if (size <= kFew) {
      Count(entries.wish, size);
      return order_.data();
    }
    int place_bits = 1;
    while ((int64_t{1} << place_bits) < size) ++place_bits;
    if (place_bits <= 14) {
      const int digit_bits = std::min(std::max(place_bits - 1, 4), (32 - place_bits) / 2);
      Radix<uint32_t, 2>(entries, place_bits, std::min(digit_bits, 10));
    } else {
      Radix<uint64_t, 3>(entries, place_bits, 11);
    }
    return order_.data();
  }

 private:
  static constexpr int32_t kFew = 128;

  static Bits<T> Size(Bits<T> wish) { return wish & ~kSignBit<T>; }

  // For few entries: the place of each in the order is the number of those that come before it.
  void Count(const Bits<T>* wish, int32_t size) {
    using Signed = std::make_signed_t<Bits<T>>;
    Signed sizes[kFew];
    uint8_t equal[kFew] = {};
    const int32_t padded = (size + 15) & ~15;
    for (int32_t i = 0; i < size; ++i) sizes[i] = Size(wish[i]);
    for (int32_t i = size; i < padded; ++i) sizes[i] = std::numeric_limits<Signed>::max();
    for (int32_t i = 0; i < size; ++i) {
      Signed before = 0;
      for (int32_t j = 0; j < padded; ++j) before += sizes[j] < sizes[i];
      order_[before + equal[before]++] = i;
    }
  }

  template <typename Item, int kDigits>
  void Radix(const Entries<T>& entries, int place_bits, int digit_bits) {
    const int32_t size = entries.size;
    const Bits<T>* wish = entries.wish;
    Bits<T> low = Size(wish[0]), high = low;
    for (int32_t i = 0; i < size; ++i) {
      low = std::min(low, Size(wish[i]));
      high = std::max(high, Size(wish[i]));
    }
    int shift = 0;
    while ((static_cast<uint64_t>(high - low) >> shift) >> (kDigits * digit_bits) != 0) ++shift;

    std::vector<Item>&from = Items<Item>(0), &to = Items<Item>(1);
    if (static_cast<int64_t>(from.size()) < size) {
      from.resize(size);
      to.resize(size);
    }
    const Item mask = (Item{1} << digit_bits) - 1;
    uint32_t starts[kDigits][1 << 11];
    for (int d = 0; d < kDigits; ++d) std::fill_n(starts[d], mask + 1, 0);
    for (int32_t i = 0; i < size; ++i) {
      const Item digits = static_cast<Item>((Size(wish[i]) - low) >> shift);
      from[i] = digits << place_bits | static_cast<Item>(i);
      for (int d = 0; d < kDigits; ++d) ++starts[d][digits >> (d * digit_bits) & mask];
    }
    uint32_t sums[kDigits] = {};
    for (Item digit = 0; digit <= mask; ++digit) {
      for (int d = 0; d < kDigits; ++d) {
        const uint32_t count = starts[d][digit];
        starts[d][digit] = sums[d];
        sums[d] += count;
      }
    }
    for (int d = 0; d < kDigits; ++d) {
      const Item* source = d % 2 == 0 ? from.data() : to.data();
      Item* target = d % 2 == 0 ? to.data() : from.data();
      for (int32_t i = 0; i < size; ++i) {
        const Item item = source[i];
        target[starts[d][item >> place_bits >> (d * digit_bits) & mask]++] = item;
      }
    }
    const Item* sorted = kDigits % 2 == 0 ? from.data() : to.data();
    const Item place_mask = (Item{1} << place_bits) - 1;
    for (int32_t i = 0; i < size; ++i) order_[i] = static_cast<int32_t>(sorted[i] & place_mask);
    for (int32_t i = 1; i < size; ++i) {
      if ((sorted[i] ^ sorted[i - 1]) > place_mask) continue;
      const int32_t begin = i - 1;
      while (i < size && (sorted[i] ^ sorted[begin]) <= place_mask) ++i;
      Insert(wish, begin, i);
    }
  }

  // Sorts a run of order_ whose places ascend.
  void Insert(const Bits<T>* wish, int32_t begin, int32_t end) {
    if (end - begin > 32) return InsertMany(wish, begin, end);
    for (int32_t i = begin + 1; i < end; ++i) {
      const int32_t place = order_[i];
      const Bits<T> size = Size(wish[place]);
      int32_t j = i;
      for (; j > begin && Size(wish[order_[j - 1]]) > size; --j) order_[j] = order_[j - 1];
      order_[j] = place;
    }
  }

  OPTPERM_RARE void InsertMany(const Bits<T>* wish, int32_t begin, int32_t end) {
    std::stable_sort(order_.begin() + begin, order_.begin() + end,
                     [&](int32_t a, int32_t b) { return Size(wish[a]) < Size(wish[b]); });
  }

  template <typename Item>
  std::vector<Item>& Items(int which) {
    if constexpr (sizeof(Item) == 4) {
      return narrow_[which];
    } else {
      return wide_[which];
    }
  }

  std::vector<int32_t> order_;
  std::vector<uint32_t> narrow_[2];
  std::vector<uint64_t> wide_[2];
};

// Finds the cycles of one subset: steps 6 and 7 of the method, for entries that all take part.
template <typename T>
class CycleSearch {
 public:
  // For each place the place whose weight it takes.
  const int32_t* Run(const Entries<T>& entries, double epsilon, bool has_ties) {
    weight_ = entries.weight;
    size_ = entries.size;
    epsilon_ = epsilon;
    Prepare(entries, has_ties);
    const int32_t* order = sorter_.Sort(entries);
    uint32_t candidates[kLookAhead];
    for (int32_t next = entries.size; next > 0;) {
      // Sources in descending |m|, on equal |m| the later place first.
      const int32_t stop = std::max(0, next - kLookAhead);
      int32_t count = 0;
      while (next > stop) {
        const uint32_t place = order[--next];
        candidates[count] = place;
        count += places_.alive()[place >> 6] >> (place & 63) & 1;
      }
      for (int32_t i = 0; i < count; ++i) SearchFrom(candidates[i]);
    }
    return take_.data();
  }

 private:
  void Prepare(const Entries<T>& entries, bool has_ties) {
    const int32_t size = entries.size;
    places_.Reset(size);
    uint64_t *alive = places_.alive(), *rising = places_.rising(), *tied = places_.tied();
    for (int32_t begin = 0; begin < size; begin += 64) {
      const int32_t length = std::min(64, size - begin);
      const Bits<T>* wish = entries.wish + begin;
      uint64_t rises = 0, ties = 0;
      for (int32_t i = 0; i < length; ++i) rises |= uint64_t{wish[i] >> (8 * sizeof(T) - 1)} << i;
      if (has_ties) {
        const T* w = weight_ + begin;
        for (int32_t i = begin == 0; i < length; ++i) ties |= uint64_t{w[i] == w[i - 1]} << i;
      }
      alive[begin >> 6] = ~uint64_t{0} >> (64 - length);
      rising[begin >> 6] = rises;
      tied[begin >> 6] = ties;
    }
    places_.Summarize();
    if (static_cast<int64_t>(take_.size()) < size) take_.resize(size);
    std::iota(take_.begin(), take_.begin() + size, 0);
  }

  // Whether entries may move between two weights: up takes [w, w + epsilon), down [w - epsilon, w).
  bool ReachesUp(int32_t low, int32_t high) const {
    return static_cast<double>(weight_[high]) < static_cast<double>(weight_[low]) + epsilon_;
  }
  bool ReachesDown(int32_t high, int32_t low) const {
    return static_cast<double>(weight_[low]) >= static_cast<double>(weight_[high]) - epsilon_;
  }

  // The search from one source, and its cycle.
  //
  // Without ties among the places in question the cycle of a riser is the risers from it up to the first
  // faller, and that faller, if the faller reaches down to the source: no other faller reaches as far
  // down. If it does not, there is no cycle, ties or not. Likewise for a faller. Here are the cycles that
  // lie within a word of 64 places, with hardly a branch that is hard to predict.
  void SearchFrom(uint32_t source) {
    const uint32_t index = source >> 6, bit = source & 63;
    const uint64_t alive = places_.alive()[index], rising = places_.rising()[index];
    if ((alive >> bit & 1) == 0) return;
    const uint64_t rises = uint64_t{0} - (rising >> bit & 1);  // all ones or all zeros
    const uint64_t one = uint64_t{1} << bit;
    const uint64_t above = alive & ~rising & ~(one | (one - 1));
    const uint64_t below = alive & rising & (one - 1);
    if (((above & rises) | (below & ~rises)) == 0) return SearchWide(source);
    const uint64_t first_above = above & (uint64_t{0} - above);
    const uint64_t first_below = uint64_t{1} << HighestBit(below | 1);
    const uint64_t lowest = (one & rises) | (first_below & ~rises);
    const uint64_t highest = (first_above & rises) | (one & ~rises);
    const uint64_t range = (highest - lowest) | highest;
    const int32_t base = index << 6;
    const int32_t low = base + LowestBit(lowest), high = base + LowestBit(highest);
    const uint64_t tied = places_.tied()[index] & (range ^ lowest);
    if (!IsPlain(low, high, tied)) return SearchCarefully(source, rises, low, high);

    const uint64_t cycle = alive & range;
    places_.alive()[index] = alive & ~cycle;
    // Around the cycle upwards: four moves at once, since few cycles are longer. Going around a shorter
    // one more than once does no harm.
    uint64_t rest = cycle;
    uint32_t here = low - base;
    int32_t* take = take_.data() + base;
    const uint32_t falls = static_cast<uint32_t>(~rises);
    const auto move = [&] {
      rest &= rest - 1;
      rest |= cycle & (uint64_t{0} - static_cast<uint64_t>(rest == 0));
      const uint32_t next = LowestBit(rest);
      const uint32_t swap = (here ^ next) & falls;
      take[here ^ swap] = base + (next ^ swap);
      here = next;
    };
    for (int i = 0; i < 4; ++i) move();
    uint64_t more = cycle;
    for (int i = 0; i < 4; ++i) more &= more - 1;
    if (more != 0) {
      do move();
      while (rest != cycle);
    }
  }

  // The same for a source whose word holds no end of its cycle.
  OPTPERM_RARE void SearchWide(int32_t source) {
    const bool rises = places_.Rises(source);
    const int32_t end = rises ? places_.Up(Places::kFallers, (source | 63) + 1)
                              : places_.Down(Places::kRisers, (source & ~63) - 1);
    if (end == Places::kNone) return places_.Remove(source);
    const int32_t low = std::min(source, end), high = std::max(source, end);
    const uint64_t from_low = ~uint64_t{0} << (low & 63), to_high = ~uint64_t{0} >> (63 - (high & 63));
    const int32_t first = low >> 6, last = high >> 6;
    uint64_t tied = (places_.tied()[first] & from_low & (from_low - 1)) | (places_.tied()[last] & to_high);
    for (int32_t i = first + 1; i < last; ++i) tied |= places_.tied()[i];
    if (!IsPlain(low, high, tied)) return SearchCarefully(source, rises, low, high);

    int32_t here = low;
    for (int32_t i = first; i <= last; ++i) {
      uint64_t& alive = places_.alive()[i];
      uint64_t bits = alive;
      if (i == first) bits &= from_low;
      if (i == last) bits &= to_high;
      alive &= ~bits;
      if (i == first) bits &= bits - 1;
      for (; bits != 0; bits &= bits - 1) {
        const int32_t next = (i << 6) + LowestBit(bits);
        take_[rises ? here : next] = rises ? next : here;
        here = next;
      }
    }
    take_[rises ? high : low] = rises ? low : high;
  }

  // Whether a cycle with these ends is one for certain: no ties, and if the ends reach each other both
  // ways, every move of the cycle is short enough.
  bool IsPlain(int32_t low, int32_t high, uint64_t tied) const {
    return ReachesUp(low, high) & ReachesDown(high, low) & (tied == 0);
  }

  // What is left: the end does not reach the source, or there are ties, or rounding makes the two
  // directions differ.
  OPTPERM_RARE void SearchCarefully(int32_t source, bool rises, int32_t low, int32_t high) {
    if (!(rises ? ReachesDown(high, low) : ReachesUp(low, high))) return places_.Remove(source);
    const int32_t end = rises ? high : low;
    path_.assign(1, source);
    for (int32_t here = source; here != end;) {
      int32_t next = rises ? places_.Up(Places::kRisers, here + 1)
                           : places_.Down(Places::kFallers, here - 1);
      if (next == Places::kNone || (rises ? next > end : next < end)) next = end;
      if (rises ? weight_[source] == weight_[end] : weight_[here] == weight_[next]) {
        return SearchThroughTies(source);
      }
      if (!(rises ? ReachesUp(here, next) : ReachesDown(here, next))) return places_.Remove(source);
      path_.push_back(next);
      here = next;
    }
    for (int32_t place : path_) places_.Remove(place);
    TakePath();
  }

  // Whether a cycle may lead from a source back to it through ties. What comes back from above is a faller
  // of more weight; what comes back from below is a riser of less, and only a faller as heavy as the source
  // gets down there, for those of more weight that do not reach the source reach nothing below it either.
  bool MayReturn(int32_t source, bool rises) {
    if (rises) {
      const int32_t above = places_.Up(Places::kFallers, LastTied(source) + 1);
      if (above != Places::kNone && ReachesDown(above, source)) return true;
    }
    const int32_t below = places_.FirstTied(source) - 1;
    const int32_t target = places_.AnyDown(below), riser = places_.Down(Places::kRisers, below);
    return target != Places::kNone && ReachesDown(source, target) && riser != Places::kNone &&
           ReachesUp(riser, source);
  }

  int32_t LastTied(int32_t place) const {
    return static_cast<int32_t>(std::upper_bound(weight_ + place, weight_ + size_, weight_[place]) -
                                weight_) -
           1;
  }

  // Depth first, nearest first, as the method says it. Visited places are taken out and put back.
  void SearchThroughTies(int32_t source) {
    if (!MayReturn(source, places_.Rises(source))) return places_.Remove(source);
    path_.assign(1, source);
    visited_.clear();
    while (!path_.empty()) {
      const int32_t here = path_.back();
      int32_t next;
      if (places_.Rises(here)) {
        next = places_.AnyUp(here + 1);
        if (next != Places::kNone && !ReachesUp(here, next)) next = Places::kNone;
      } else {
        next = places_.AnyDown(places_.FirstTied(here) - 1);
        if (next != Places::kNone && !ReachesDown(here, next)) next = Places::kNone;
      }
      if (next == source) break;
      if (next == Places::kNone) {
        path_.pop_back();
      } else {
        places_.Remove(next);
        visited_.push_back(next);
        path_.push_back(next);
      }
    }
    for (int32_t place : visited_) places_.Restore(place);
    places_.Remove(source);
    for (int32_t place : path_) places_.Remove(place);
    TakePath();
  }

  void TakePath() {
    for (size_t i = 0; i < path_.size(); ++i) {
      take_[path_[i]] = path_[i + 1 < path_.size() ? i + 1 : 0];
    }
  }

  const T* weight_ = nullptr;
  int32_t size_ = 0;
  double epsilon_ = 0;
  Places places_;
  WishSorter<T> sorter_;
  std::vector<int32_t> take_;
  std::vector<int32_t> path_, visited_;
};

}  // namespace

// One weight vector at a time.
template <typename T>
class TilePermuter<T>::Row {
 public:
  explicit Row(int64_t n) : n_(static_cast<int32_t>(n)), row_(row_buffer_.Reserve(n)) {}

  // Permutes weights and ranks, which are in order of location, in place. Returns how many moved, or -1
  // if the ranks are not a permutation.
  int32_t Permute(const T* recommendation, T* weights, int32_t* ranks, uint64_t seed,
                  float aggressiveness, int32_t partition_size, bool drop_remainder) {
    if (!SortByRank(recommendation, weights, ranks)) return -1;
    has_ties_ = HasTies();
    if (has_ties_) OrderTies();
    const double spread = Spread();
    weights_ = weights;
    ranks_ = ranks;
    if (partition_size >= n_ && AllTakePart()) return PermuteSubset(row_, spread, aggressiveness);
    // Steps 3 and 4: each subset has room for all its entries, and for one more to write to in passing.
    partition_size = std::min(partition_size, n_);
    const int32_t subsets = n_ / partition_size + (n_ % partition_size != 0);
    if (subsets == 1) {
      label_.assign(n_, 0);
    } else {
      Shuffle(seed, partition_size);
    }
    Group(partition_size, subsets);
    int32_t moved = 0;
    for (int32_t k = 0; k < subsets; ++k) {
      if (drop_remainder && k == n_ / partition_size) break;
      const int32_t begin = k * (partition_size + 1);
      moved += PermuteSubset(grouped_.From(begin, end_[k] - begin), spread, aggressiveness);
    }
    return moved;
  }

 private:
  bool SortByRank(const T* recommendation, const T* weights, const int32_t* ranks) {
    const uint32_t n = n_;
    std::fill_n(row_.home, n, Home{-1, 0});
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t rank = ranks[i];
      if (rank >= n) return false;
      row_.home[rank] = Home{static_cast<int32_t>(i), static_cast<int32_t>(rank)};
    }
    for (uint32_t rank = 0; rank < n; ++rank) {
      const int32_t i = row_.home[rank].location;
      if (i < 0) return false;  // another rank stood twice
      row_.weight[rank] = weights[i];
      row_.wish[rank] = ToBits(recommendation[i]);
    }
    return true;
  }

  bool HasTies() const {
    int any = 0;
    for (int32_t p = 1; p < n_; ++p) any |= row_.weight[p] == row_.weight[p - 1];
    return any != 0;
  }

  // Until here tied entries are in order of rank.
  OPTPERM_RARE void OrderTies() {
    for (int32_t begin = 0, end; begin < n_; begin = end) {
      for (end = begin + 1; end < n_ && row_.weight[end] == row_.weight[begin];) ++end;
      if (end - begin == 1) continue;
      tie_.resize(end - begin);
      std::iota(tie_.begin(), tie_.end(), begin);
      std::sort(tie_.begin(), tie_.end(),
                [&](int32_t a, int32_t b) { return row_.home[a].location < row_.home[b].location; });
      const Entries<T> sorted = tie_buffer_.Reserve(end - begin);
      for (int32_t i = 0; i < end - begin; ++i) Copy(row_, tie_[i], sorted, i);
      for (int32_t i = 0; i < end - begin; ++i) Copy(sorted, i, row_, begin + i);
    }
  }

  static void Copy(const Entries<T>& from, int32_t i, const Entries<T>& to, int32_t j) {
    to.home[j] = from.home[i];
    to.weight[j] = from.weight[i];
    to.wish[j] = from.wish[i];
  }

  // A, the largest finite weight less the smallest.
  double Spread() const {
    int32_t low = 0, high = n_ - 1;
    while (low < n_ && !std::isfinite(row_.weight[low])) ++low;
    while (high >= 0 && !std::isfinite(row_.weight[high])) --high;
    if (low > high) return 0.0;
    return static_cast<double>(row_.weight[high]) - static_cast<double>(row_.weight[low]);
  }

  // Step 4: a recommendation of zero and what is not finite sit out. Not 0 if an entry does.
  Bits<T> SitsOut(int32_t p) const {
    const Bits<T> infinite = ToBits(std::numeric_limits<T>::infinity());
    const Bits<T> wish = row_.wish[p] & ~kSignBit<T>, weight = ToBits(row_.weight[p]) & ~kSignBit<T>;
    return Bits<T>{wish - 1 >= infinite - 1} | Bits<T>{weight >= infinite};
  }

  bool AllTakePart() const {
    Bits<T> any = 0;
    for (int32_t p = 0; p < n_; ++p) any |= SitsOut(p);
    return any == 0;
  }

  // Step 3: label_[rank], the subset of each entry, by the inside-out shuffle of Fisher and Yates.
  void Shuffle(uint64_t seed, int32_t partition_size) {
    label_.resize(n_);
    pick_.resize(n_);
    for (int32_t i = 0; i < n_; ++i) pick_[i] = MultiplyHigh(SplitMix64(seed, i + 1), i + 1);
    for (int32_t label = 0, begin = 0; begin < n_; ++label, begin += partition_size) {
      const int32_t end = std::min(n_ - begin, partition_size) + begin;
      for (int32_t i = begin; i < end; ++i) {
        label_[i] = label_[pick_[i]];
        label_[pick_[i]] = label;
      }
    }
  }

  // Copies the entries that take part to grouped_, subset by subset, from place k * (size + 1) on.
  void Group(int32_t size, int32_t subsets) {
    grouped_ = grouped_buffer_.Reserve(int64_t{subsets} * (size + 1));
    end_.resize(subsets);
    for (int32_t k = 0; k < subsets; ++k) end_[k] = k * (size + 1);
    for (int32_t p = 0; p < n_; ++p) {
      int32_t& end = end_[label_[row_.home[p].rank]];
      Copy(row_, p, grouped_, end);
      end += SitsOut(p) == 0;
    }
  }

  int32_t PermuteSubset(const Entries<T>& entries, double spread, float aggressiveness) {
    if (entries.size < 2) return 0;
    const double epsilon = spread * (static_cast<double>(aggressiveness) + 1.0 / entries.size);
    const int32_t* take = search_.Run(entries, epsilon, has_ties_);
    int32_t moved = 0;
    for (int32_t p = 0; p < entries.size; ++p) {
      const int32_t from = take[p], location = entries.home[p].location;
      weights_[location] = entries.weight[from];
      ranks_[location] = entries.home[from].rank;
      moved += from != p;
    }
    return moved;
  }

  const int32_t n_;
  EntriesBuffer<T> row_buffer_, grouped_buffer_, tie_buffer_;
  Entries<T> row_, grouped_;
  std::vector<int32_t> label_, end_, tie_;
  std::vector<uint32_t> pick_;
  CycleSearch<T> search_;
  bool has_ties_ = false;
  T* weights_ = nullptr;
  int32_t* ranks_ = nullptr;
};

template <typename T>
int64_t NumTiles(const Problem<T>& problem) {
  return problem.batch * ((problem.rows + kTileRows - 1) / kTileRows);
}

template <typename T>
TilePermuter<T>::TilePermuter(const Problem<T>& problem)
    : problem_(problem),
      stride_(problem.n + 16),  // no power of two: columns would share few lines of the cache
      row_(std::make_unique<Row>(problem.n)),
      recommendation_(stride_ * kTileRows),
      weights_(stride_ * kTileRows),
      ranks_(stride_ * kTileRows) {}

template <typename T>
TilePermuter<T>::~TilePermuter() = default;

template <typename T>
OPTPERM_FOR_EACH_PROCESSOR bool TilePermuter<T>::Permute(int64_t tile) {
  const DefaultFloats default_floats;
  const Problem<T>& p = problem_;
  const int64_t tiles = (p.rows + kTileRows - 1) / kTileRows;
  const int64_t batch = tile / tiles, first = tile % tiles * kTileRows;
  const int64_t width = std::min(kTileRows, p.rows - first);
  const int64_t base = batch * p.n * p.rows + first;
  Transpose(p.recommendation + base, p.rows, p.n, width, recommendation_.data(), stride_);
  Transpose(p.weights + base, p.rows, p.n, width, weights_.data(), stride_);
  Transpose(p.ranks + base, p.rows, p.n, width, ranks_.data(), stride_);
  for (int64_t column = 0; column < width; ++column) {
    const int64_t row = batch * p.rows + first + column, start = column * stride_;
    const uint64_t seed = uint64_t{p.seeds[2 * row + 1]} << 32 | p.seeds[2 * row];
    const int32_t moved =
        row_->Permute(&recommendation_[start], &weights_[start], &ranks_[start], seed,
                      p.aggressiveness[row], std::max(p.partition_size[row], 1), p.drop_remainder);
    if (moved < 0) return false;
    p.moved[row] = moved;
  }
  Transpose(weights_.data(), stride_, width, p.n, p.new_weights + base, p.rows);
  Transpose(ranks_.data(), stride_, width, p.n, p.new_ranks + base, p.rows);
  return true;
}

template int64_t NumTiles(const Problem<float>&);
template int64_t NumTiles(const Problem<double>&);
template class TilePermuter<float>;
template class TilePermuter<double>;

}  // namespace optperm
