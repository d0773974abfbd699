#include "cycles.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

namespace optperm {
namespace {

// A cache line of 32-bit entries: reading a tile touches each line of its weight vectors once.
constexpr int64_t kTileRows = 16;

inline int LowestBit(uint64_t word) { return __builtin_ctzll(word); }
inline int HighestBit(uint64_t word) { return 63 - __builtin_clzll(word); }

// A set of places 0, ..., size - 1 with fast search for the nearest one up or down: a tree of 64-bit
// words, in which a bit of one level says whether a word of the level below has any bit set.
class PlaceSet {
 public:
  static constexpr int32_t kNone = -1;

  void Reserve(int64_t size) {
    int64_t total = 0;
    for (int64_t words = Words(size);; words = Words(words)) {
      total += words;
      if (words <= 1) break;
    }
    storage_.resize(total);
  }

  // Makes room for `size` places; the caller fills the words of the lowest level, then calls Summarize.
  uint64_t* Start(int64_t size) {
    depth_ = 0;
    uint64_t* next = storage_.data();
    for (int64_t words = Words(size);; words = Words(words)) {
      levels_[depth_] = next;
      counts_[depth_] = words;
      next += words;
      ++depth_;
      if (words <= 1) break;
    }
    return levels_[0];
  }

  void Summarize() {
    for (int level = 1; level < depth_; ++level) {
      std::fill_n(levels_[level], counts_[level], 0);
      for (int64_t i = 0; i < counts_[level - 1]; ++i) {
        levels_[level][i >> 6] |= static_cast<uint64_t>(levels_[level - 1][i] != 0) << (i & 63);
      }
    }
  }

  bool Has(int32_t place) const { return levels_[0][place >> 6] >> (place & 63) & 1; }

  void Remove(int32_t place) {
    for (int level = 0; level < depth_; ++level, place >>= 6) {
      if (levels_[level][place >> 6] &= ~(uint64_t{1} << (place & 63))) return;
    }
  }

  void Insert(int32_t place) {
    for (int level = 0; level < depth_; ++level, place >>= 6) {
      levels_[level][place >> 6] |= uint64_t{1} << (place & 63);
    }
  }

  // The first member at or above a place.
  int32_t Up(int32_t place) const {
    for (int level = 0; level < depth_; ++level) {
      const int32_t word = place >> 6;
      if (word >= counts_[level]) return kNone;
      const uint64_t bits = levels_[level][word] >> (place & 63);
      if (bits != 0) {
        place += LowestBit(bits);
        while (level-- > 0) place = (place << 6) + LowestBit(levels_[level][place]);
        return place;
      }
      place = word + 1;
    }
    return kNone;
  }

  // The first member at or below a place; the place may be -1.
  int32_t Down(int32_t place) const {
    for (int level = 0; level < depth_ && place >= 0; ++level) {
      const int32_t word = place >> 6;
      const uint64_t bits = levels_[level][word] << (63 - (place & 63));
      if (bits != 0) {
        place -= 63 - HighestBit(bits);
        while (level-- > 0) place = (place << 6) + HighestBit(levels_[level][place]);
        return place;
      }
      place = word - 1;
    }
    return kNone;
  }

 private:
  static int64_t Words(int64_t size) { return (size + 63) / 64; }

  int depth_ = 0;
  uint64_t* levels_[6] = {};
  int64_t counts_[6] = {};
  std::vector<uint64_t> storage_;
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

}  // namespace

// The working memory of one weight vector, and the steps of its permutation.
//
// A place is an index into the entries in ascending order of weight, ties by location.
template <typename T>
class TilePermuter<T>::Row {
 public:
  explicit Row(int64_t n)
      : n_(static_cast<int32_t>(n)),
        location_(n),
        rank_(n),
        weight_(n),
        recommendation_(n),
        key_(n),
        label_(n),
        pick_(n),
        place_(n),
        member_(n),
        member_weight_(n),
        order_(n),
        items_(n),
        spare_(n) {
    std::iota(rank_.begin(), rank_.end(), 0);
    risers_.Reserve(n);
    fallers_.Reserve(n);
  }

  // Permutes weights and ranks, which are in order of location, in place. Returns how many moved, -1 if
  // the ranks are not a permutation.
  int32_t Permute(const T* recommendation, T* weights, int32_t* ranks, uint64_t seed, float aggressiveness,
                  int32_t partition_size, bool drop_remainder) {
    if (!SortByRank(recommendation, weights, ranks)) return -1;
    weights_out_ = weights;
    ranks_out_ = ranks;
    const bool has_ties = OrderTies(recommendation);
    const int32_t count = CollectKeys();
    SortByKey(count);
    const double spread = Spread();
    int32_t moved = 0;
    if (count >= 2) {
      if (partition_size >= n_) {
        moved = PermuteWhole(count, spread, aggressiveness, has_ties);
      } else {
        moved = PermutePartition(count, spread, aggressiveness, has_ties, seed, partition_size,
                                 drop_remainder);
      }
    }
    if (has_ties) std::iota(rank_.begin(), rank_.end(), 0);
    return moved;
  }

 private:
  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

  bool SortByRank(const T* recommendation, const T* weights, const int32_t* ranks) {
    for (int32_t i = 0; i < n_; ++i) {
      const uint32_t rank = static_cast<uint32_t>(ranks[i]);
      if (rank >= static_cast<uint32_t>(n_)) return false;
      location_[rank] = i;
    }
    bool valid = true;
    for (int32_t rank = 0; rank < n_; ++rank) {
      const int32_t i = location_[rank];
      if (static_cast<uint32_t>(i) >= static_cast<uint32_t>(n_)) return false;
      valid &= ranks[i] == rank;
      weight_[rank] = weights[i];
      recommendation_[rank] = recommendation[i];
    }
    return valid;
  }

  // Puts tied entries in order of location; until here they are in order of rank.
  bool OrderTies(const T* recommendation) {
    bool any = false;
    for (int32_t p = 1; p < n_; ++p) any |= weight_[p] == weight_[p - 1];
    if (!any) return false;
    for (int32_t begin = 0, end; begin < n_; begin = end) {
      for (end = begin + 1; end < n_ && weight_[end] == weight_[begin];) ++end;
      if (end - begin < 2) continue;
      // -0 and +0 are tied but differ in their bits: weights follow their ranks.
      std::sort(rank_.begin() + begin, rank_.begin() + end,
                [&](int32_t a, int32_t b) { return location_[a] < location_[b]; });
      for (int32_t p = begin; p < end; ++p) {
        order_[p] = location_[rank_[p]];
        member_weight_[p] = weight_[rank_[p]];
      }
      for (int32_t p = begin; p < end; ++p) {
        location_[p] = order_[p];
        weight_[p] = member_weight_[p];
        recommendation_[p] = recommendation[order_[p]];
      }
    }
    return true;
  }

  double Spread() const {
    int32_t low = 0, high = n_ - 1;
    while (low < n_ && !std::isfinite(weight_[low])) ++low;
    while (high >= 0 && !std::isfinite(weight_[high])) --high;
    if (low > high) return 0.0;
    return static_cast<double>(weight_[high]) - static_cast<double>(weight_[low]);
  }

  // The places of the entries that take part, and their |m| as integers of the same order.
  int32_t CollectKeys() {
    constexpr Bits kSign = Bits{1} << (8 * sizeof(T) - 1);
    const T infinity = std::numeric_limits<T>::infinity();
    Bits infinite;
    std::memcpy(&infinite, &infinity, sizeof(T));
    int32_t count = 0;
    for (int32_t p = 0; p < n_; ++p) {
      Bits key, weight;
      std::memcpy(&key, &recommendation_[p], sizeof(T));
      std::memcpy(&weight, &weight_[p], sizeof(T));
      key &= ~kSign;
      key_[p] = key;
      place_[count] = p;
      count += (key != 0) & (key < infinite) & ((weight & ~kSign) < infinite);
    }
    return count;
  }

  // Sorts the places in ascending order of (|m|, place) into order_.
  void SortByKey(int32_t count) {
    if (count == 0) return;
    Bits low = key_[place_[0]], high = low;
    for (int32_t i = 0; i < count; ++i) {
      const Bits key = key_[place_[i]];
      low = std::min(low, key);
      high = std::max(high, key);
    }
    int place_bits = 1;
    while ((int64_t{1} << place_bits) < n_) ++place_bits;
    const int digit_bits = place_bits <= 11 ? 8 : 10;
    int key_bits = 2 * digit_bits;
    if (place_bits + key_bits > 32) key_bits = 32 - place_bits;
    int shift = 0;
    while ((static_cast<uint64_t>(high - low) >> shift) >> key_bits != 0) ++shift;
    // radix
    uint32_t histogram[2][1 << 10] = {};
    const uint32_t mask = (1u << digit_bits) - 1;
    const uint32_t place_mask = (uint32_t{1} << place_bits) - 1;
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t quantized = static_cast<uint32_t>((key_[place_[i]] - low) >> shift);
      items_[i] = quantized << place_bits | place_[i];
      ++histogram[0][quantized & mask];
      ++histogram[1][quantized >> digit_bits];
    }
    uint32_t sum0 = 0, sum1 = 0;
    for (uint32_t d = 0; d <= mask; ++d) {
      const uint32_t c0 = histogram[0][d], c1 = histogram[1][d];
      histogram[0][d] = sum0;
      histogram[1][d] = sum1;
      sum0 += c0;
      sum1 += c1;
    }
    for (int32_t i = 0; i < count; ++i) {
      spare_[histogram[0][items_[i] >> place_bits & mask]++] = items_[i];
    }
    for (int32_t i = 0; i < count; ++i) {
      const uint32_t item = spare_[i];
      items_[histogram[1][item >> place_bits >> digit_bits]++] = item;
    }
    for (int32_t i = 0; i < count; ++i) order_[i] = items_[i] & place_mask;
    // fix runs of equal quantized keys
    for (int32_t begin = 0, end; begin < count; begin = end) {
      end = begin + 1;
      if (end == count || items_[end] >> place_bits != items_[begin] >> place_bits) continue;
      while (end < count && items_[end] >> place_bits == items_[begin] >> place_bits) ++end;
      std::stable_sort(order_.begin() + begin, order_.begin() + end,
                       [&](int32_t a, int32_t b) { return key_[a] < key_[b]; });
    }
  }

  int32_t PermuteWhole(int32_t count, double spread, float aggressiveness, bool has_ties) {
    if (count == n_) {
      return Search(count, weight_.data(), place_.data(), order_.data(), spread, aggressiveness, has_ties);
    }
    for (int32_t i = 0; i < count; ++i) {
      member_[place_[i]] = i;
      member_weight_[i] = weight_[place_[i]];
    }
    for (int32_t i = 0; i < count; ++i) order_[i] = member_[order_[i]];
    return Search(count, member_weight_.data(), place_.data(), order_.data(), spread, aggressiveness,
                  has_ties);
  }

  int32_t PermutePartition(int32_t count, double spread, float aggressiveness, bool has_ties, uint64_t seed,
                           int32_t partition_size, bool drop_remainder) {
    const int32_t whole = n_ / partition_size, remainder = n_ % partition_size;
    const int32_t subsets = whole + (remainder > 0);
    // shuffle
    for (int32_t i = 0; i < n_ - 1; ++i) pick_[i] = MultiplyHigh(SplitMix64(seed, i + 1), n_ - i);
    for (int32_t label = 0, i = 0; i < n_; ++label) {
      const int32_t end = std::min(n_, i + partition_size);
      for (; i < end; ++i) label_[i] = label;
    }
    for (int32_t last = n_ - 1; last > 0; --last) std::swap(label_[last], label_[pick_[n_ - 1 - last]]);
    begin_.assign(subsets + 1, 0);
    cursor_.resize(subsets + 1);
    // distribute by subset
    for (int32_t i = 0; i < count; ++i) ++begin_[label_[rank_[place_[i]]] + 1];
    for (int32_t k = 0; k < subsets; ++k) begin_[k + 1] += begin_[k];
    std::copy(begin_.begin(), begin_.end(), cursor_.begin());
    // pick_ is reused for the places grouped by subset
    int32_t* grouped = reinterpret_cast<int32_t*>(pick_.data());
    for (int32_t i = 0; i < count; ++i) {
      const int32_t p = place_[i], k = cursor_[label_[rank_[p]]]++;
      grouped[k] = p;
      member_[p] = k;
      member_weight_[k] = weight_[p];
    }
    std::copy(begin_.begin(), begin_.end(), cursor_.begin());
    for (int32_t i = 0; i < count; ++i) {
      const int32_t p = order_[i], label = label_[rank_[p]];
      spare_[cursor_[label]++] = member_[p] - begin_[label];
    }
    int32_t moved = 0;
    for (int32_t k = 0; k < subsets; ++k) {
      if (k == whole && drop_remainder) break;
      const int32_t begin = begin_[k], size = begin_[k + 1] - begin;
      if (size < 2) continue;
      moved += Search(size, member_weight_.data() + begin, grouped + begin,
                      reinterpret_cast<int32_t*>(spare_.data()) + begin, spread, aggressiveness, has_ties);
    }
    return moved;
  }

  int32_t Search(int32_t size, const T* w, const int32_t* places, const int32_t* order, double spread,
                 float aggressiveness, bool has_ties) {
    const double epsilon = spread * (static_cast<double>(aggressiveness) + 1.0 / size);
    uint64_t* rising = risers_.Start(size);
    uint64_t* falling = fallers_.Start(size);
    for (int32_t begin = 0; begin < size; begin += 64) {
      const int32_t length = std::min(64, size - begin);
      uint64_t bits = 0;
      for (int32_t j = 0; j < length; ++j) {
        bits |= static_cast<uint64_t>(recommendation_[places[begin + j]] < 0) << j;
      }
      const uint64_t all = length == 64 ? ~uint64_t{0} : (uint64_t{1} << length) - 1;
      rising[begin >> 6] = bits;
      falling[begin >> 6] = ~bits & all;
    }
    risers_.Summarize();
    fallers_.Summarize();
    int32_t moved = 0;
    for (int32_t i = size - 1; i >= 0; --i) {
      const int32_t source = order[i];
      if (risers_.Has(source)) {
        const int32_t top = fallers_.Up(source + 1);
        if (top < 0 || double(w[top]) - epsilon > double(w[source])) {
          risers_.Remove(source);
          continue;
        }
        // TODO ties, edges
        int32_t here = source;
        while (true) {
          risers_.Remove(here);
          ++moved;
          int32_t next = risers_.Up(here + 1);
          if (next < 0 || next > top) break;
          Take(places[here], places[next]);
          here = next;
        }
        Take(places[here], places[top]);
        Take(places[top], places[source]);
        fallers_.Remove(top);
        ++moved;
      } else if (fallers_.Has(source)) {
        const int32_t bottom = risers_.Down(source - 1);
        if (bottom < 0 || double(w[bottom]) + epsilon <= double(w[source])) {
          fallers_.Remove(source);
          continue;
        }
        int32_t here = source;
        while (true) {
          fallers_.Remove(here);
          ++moved;
          int32_t next = fallers_.Down(here - 1);
          if (next < bottom) break;
          Take(places[here], places[next]);
          here = next;
        }
        Take(places[here], places[bottom]);
        Take(places[bottom], places[source]);
        risers_.Remove(bottom);
        ++moved;
      }
    }
    return moved;
  }

  void Take(int32_t place, int32_t from) {
    weights_out_[location_[place]] = weight_[from];
    ranks_out_[location_[place]] = rank_[from];
  }

  const int32_t n_;
  std::vector<int32_t> location_;
  std::vector<int32_t> rank_;
  std::vector<T> weight_;
  std::vector<T> recommendation_;
  std::vector<Bits> key_;
  std::vector<int32_t> label_;
  std::vector<uint32_t> pick_;
  std::vector<int32_t> place_;
  std::vector<int32_t> member_;
  std::vector<T> member_weight_;
  std::vector<int32_t> order_;
  std::vector<uint32_t> items_;
  std::vector<uint32_t> spare_;
  std::vector<int32_t> begin_;
  std::vector<int32_t> cursor_;
  PlaceSet risers_, fallers_;
  T* weights_out_ = nullptr;
  int32_t* ranks_out_ = nullptr;
};

template <typename T>
int64_t NumTiles(const Problem<T>& problem) {
  return problem.batch * ((problem.rows + kTileRows - 1) / kTileRows);
}

template <typename T>
TilePermuter<T>::TilePermuter(const Problem<T>& problem)
    : problem_(problem), row_(std::make_unique<Row>(problem.n)) {}

template <typename T>
TilePermuter<T>::~TilePermuter() = default;

template <typename T>
bool TilePermuter<T>::Permute(int64_t tile) {
  const Problem<T>& p = problem_;
  const int64_t tiles = (p.rows + kTileRows - 1) / kTileRows;
  const int64_t batch = tile / tiles, first = tile % tiles * kTileRows;
  const int64_t width = std::min(kTileRows, p.rows - first);
  const int64_t stride = p.n + 16;
  static thread_local std::vector<T> m, w;
  static thread_local std::vector<int32_t> r;
  m.resize(stride * kTileRows);
  w.resize(stride * kTileRows);
  r.resize(stride * kTileRows);
  const int64_t base = batch * p.n * p.rows + first;
  for (int64_t i = 0; i < p.n; ++i) {
    for (int64_t c = 0; c < width; ++c) {
      m[c * stride + i] = p.recommendation[base + i * p.rows + c];
      w[c * stride + i] = p.weights[base + i * p.rows + c];
      r[c * stride + i] = p.ranks[base + i * p.rows + c];
    }
  }
  for (int64_t c = 0; c < width; ++c) {
    const int64_t row = batch * p.rows + first + c;
    const uint64_t seed = uint64_t{p.seeds[2 * row + 1]} << 32 | p.seeds[2 * row];
    const int32_t moved =
        row_->Permute(m.data() + c * stride, w.data() + c * stride, r.data() + c * stride, seed,
                      p.aggressiveness[row], p.partition_size[row], p.drop_remainder);
    if (moved < 0) return false;
    p.moved[row] = moved;
  }
  for (int64_t i = 0; i < p.n; ++i) {
    for (int64_t c = 0; c < width; ++c) {
      p.new_weights[base + i * p.rows + c] = w[c * stride + i];
      p.new_ranks[base + i * p.rows + c] = r[c * stride + i];
    }
  }
  return true;
}

template int64_t NumTiles(const Problem<float>&);
template int64_t NumTiles(const Problem<double>&);
template class TilePermuter<float>;
template class TilePermuter<double>;

}  // namespace optperm
