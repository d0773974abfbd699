// The search for the cycles of one subset.
#ifndef OPTPERM_SEARCH_H_
#define OPTPERM_SEARCH_H_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "avx512.h"
#include "entries.h"
#include "key_sorter.h"
#include "places.h"

namespace optperm {

// Finds the cycles of one subset: steps 6 and 7 of the method, for entries that all take part.
template <typename T>
class CycleSearch {
 public:
  // For each place the place whose weight it takes.
  const int32_t* Run(const Entries<T>& entries, double epsilon, bool has_ties) {
    weight_ = entries.weight;
    size_ = entries.size;
    epsilon_ = epsilon;
    const int32_t* order = sorter_.Sort(entries.wish, entries.size);
    take_ = sorter_.spare();
    Prepare(entries, has_ties);
#if OPTPERM_HAS_AVX512
    if (use_avx512) {
      SearchByAvx512(order);
      return take_;
    }
#endif
    Search(order);
    return take_;
  }

 private:
  void Prepare(const Entries<T>& entries, bool has_ties) {
    places_.Reset(size_);
    uint64_t *alive = places_.alive(), *tied = places_.tied();
    for (int32_t begin = 0; begin < size_; begin += 64) {
      const int32_t length = std::min(64, size_ - begin);
      uint64_t ties = 0;
      if (has_ties) {
        const T* w = weight_ + begin;
        for (int32_t i = begin == 0; i < length; ++i) ties |= uint64_t{w[i] == w[i - 1]} << i;
      }
      alive[begin >> 6] = ~uint64_t{0} >> (64 - length);
      tied[begin >> 6] = ties;
    }
    Signs(entries.wish);
    places_.Summarize();
    lowest_word_ = 0;
    highest_word_ = (size_ - 1) >> 6;
  }

  // Which entries should rise: the sign bits of their wishes.
  void Signs(const Bits<T>* wishes) {
    uint64_t* rising = places_.rising();
#if OPTPERM_HAS_AVX512
    if (use_avx512) return avx512::Signs(wishes, size_, rising);
#endif
    for (int32_t begin = 0; begin < size_; begin += 64) {
      uint64_t signs = 0;
      for (int32_t i = std::min(64, size_ - begin); i-- > 0;) {
        signs = 2 * signs + (wishes[begin + i] >> (8 * sizeof(T) - 1));
      }
      rising[begin >> 6] = signs;
    }
  }

  // Whether entries may move between two weights: up takes [w, w + epsilon), down [w - epsilon, w).
  bool ReachesUp(int32_t low, int32_t high) const {
    return static_cast<double>(weight_[high]) < static_cast<double>(weight_[low]) + epsilon_;
  }
  bool ReachesDown(int32_t high, int32_t low) const {
    return static_cast<double>(weight_[low]) >= static_cast<double>(weight_[high]) - epsilon_;
  }

  // The most sources looked at together: enough to spare most of the branches on whether one is still alive, few
  // enough that hardly any is memorized meanwhile.
  static constexpr int32_t kLookAhead = 32;
  int32_t LookAhead() const { return std::clamp(size_ / 6, 8, kLookAhead); }

  // Sources in descending |m|, on equal |m| the later place first. Several are looked at together, and those that
  // are memorized already are left out.
  void Search(const int32_t* order) {
    std::iota(take_, take_ + size_, 0);
    const int32_t look_ahead = LookAhead();
    uint32_t sources[kLookAhead];
    for (int32_t end = size_, begin; end > 0; end = begin) {
      begin = std::max(0, end - look_ahead);
      int32_t count = 0;
      for (int32_t i = begin; i < end; ++i) {
        const uint32_t place = order[i];
        sources[count] = place;
        count += places_.alive()[place >> 6] >> (place & 63) & 1;
      }
      SearchEach<false>(sources, count);
    }
  }

#if OPTPERM_HAS_AVX512
  // The same. What an entry takes from its own word of 64 places is a byte here, so that a few instructions move a
  // cycle, however long.
  OPTPERM_AVX512 OPTPERM_RARE void SearchByAvx512(const int32_t* order) {
    const int32_t words = (size_ + 63) / 64;
    taken_ = taken_buffer_.Reserve<uint8_t>(64 * words);
    far_ = far_buffer_.Reserve<uint64_t>(words);
    for (int32_t i = 0; i < words; ++i) avx512::Stay(taken_ + 64 * i);
    std::fill_n(far_, words, 0);
    const int32_t look_ahead = LookAhead();
    uint32_t sources[kLookAhead + avx512::kLanes];
    for (int32_t end = size_, begin; end > 0; end = begin) {
      begin = std::max(0, end - look_ahead);
      const int32_t count = avx512::Alive(order + begin, end - begin, places_.alive(), sources);
      SearchEach<true>(sources, count);
    }
    avx512::Unpack(taken_, far_, size_, take_);
  }
#endif

  // The search from each of these sources, from the last one on, and its cycle.
  //
  // Without ties among the places in question the cycle of a riser is the risers from it up to the first
  // faller, and that faller, if the faller reaches down to the source: no other faller reaches as far
  // down. If it does not, there is no cycle, ties or not. Likewise for a faller. Here are the cycles that
  // lie within a word of 64 places, with hardly a branch that is hard to predict.
  template <bool kByAvx512>
  OPTPERM_INLINE void SearchEach(const uint32_t* sources, int32_t count) {
    uint64_t* const alive_words = places_.alive();
    const uint64_t *const rising_words = places_.rising(), *const tied_words = places_.tied();
    const T* const weights = weight_;
    const double epsilon = epsilon_;
    while (count > 0) {
      const uint32_t source = sources[--count], index = source >> 6, base = source & ~uint32_t{63};
      const uint64_t alive = alive_words[index], rising = rising_words[index];
      const uint64_t one = uint64_t{1} << (source & 63);
      if ((alive & one) == 0) continue;
      const uint64_t rises = uint64_t{0} - (rising >> (source & 63) & 1);  // all ones or all zeros
      const uint64_t above = alive & ~rising & ~(one | (one - 1));
      const uint64_t below = alive & rising & (one - 1);
      if (((above & rises) | (below & ~rises)) == 0) {
        if (kByAvx512) {
          SearchWide<true>(source);
        } else {
          SearchWideRarely(source);
        }
        continue;
      }
      const uint64_t first_above = above & (uint64_t{0} - above);
      const uint64_t first_below = uint64_t{1} << HighestBit(below | 1);
      const uint64_t lowest = (one & rises) | (first_below & ~rises);
      const uint64_t highest = (first_above & rises) | (one & ~rises);
      const uint64_t range = (highest - lowest) | highest;
      const int32_t low = base + LowestBit(lowest), high = base + LowestBit(highest);
      const double low_weight = weights[low], high_weight = weights[high];
      const int up = high_weight < low_weight + epsilon, down = low_weight >= high_weight - epsilon;
      const int apart = (tied_words[index] & (range ^ lowest)) == 0;
      if ((up & down & apart) == 0) {
        if ((up | down) == 0) {
          alive_words[index] = alive ^ one;
        } else {
          SearchCarefully(source, rises != 0, low, high);
        }
        continue;
      }
      const uint64_t cycle = alive & range;
      alive_words[index] = alive & ~cycle;
#if OPTPERM_HAS_AVX512
      if (kByAvx512) {
        avx512::MoveCycle(taken_ + base, cycle, lowest ^ highest ^ one, source & 63);
        continue;
      }
#endif
      Move(take_ + base, base, cycle, highest, low - base, high - base, rises);
    }
  }

  // From the lowest place of the cycle upwards, for risers into `up`, for fallers into `down`, and for the
  // others nowhere. Three moves at once, since few cycles are longer; beyond the highest place they stay
  // there.
  static OPTPERM_INLINE void Move(int32_t* take, int32_t base, uint64_t cycle, uint64_t highest, int32_t low,
                                  int32_t high, uint64_t rises) {
    int32_t nowhere[64];
    int32_t* const targets[] = {nowhere, take};
    int32_t *const up = targets[rises & 1], *const down = targets[~rises & 1];
    uint64_t rest = cycle;
    int32_t here = low;
    const auto move = [&] {
      rest = (rest & (rest - 1)) | highest;
      const int32_t next = LowestBit(rest);
      up[here] = base + next;
      down[next] = base + here;
      here = next;
    };
    for (int i = 0; i < 3; ++i) move();
    while (rest != highest) move();
    up[high] = base + low;
    down[low] = base + high;
    down[high] = base + HighestBit(cycle ^ highest);
  }

  // The same for a source whose word holds no end of its cycle.
  template <bool kByAvx512>
  OPTPERM_INLINE void SearchWide(int32_t source) {
    uint64_t* const alive_words = places_.alive();
    const uint64_t* const tied_words = places_.tied();
    const bool rises = places_.Rises(source);
    const int32_t end = NearestBeyondWord(source, rises);
    if (end == Places::kNone) return RemoveFrom(source, rises);
    const int32_t low = std::min(source, end), high = std::max(source, end);
    const uint64_t from_low = ~uint64_t{0} << (low & 63), to_high = ~uint64_t{0} >> (63 - (high & 63));
    const int32_t first = low >> 6, last = high >> 6;
    uint64_t tied = (tied_words[first] & from_low & (from_low - 1)) | (tied_words[last] & to_high);
    for (int32_t i = first + 1; i < last; ++i) tied |= tied_words[i];
    if (!IsPlain(low, high, tied)) return SearchCarefully(source, rises, low, high);

    int32_t here = Places::kNone;
    for (int32_t i = first; i <= last; ++i) {
      const uint64_t alive = alive_words[i], inside = i == first ? from_low : i == last ? to_high : ~uint64_t{0};
      uint64_t bits = alive & inside;
      if (bits == 0) continue;
      alive_words[i] = alive & ~inside;
      const int32_t next = (i << 6) + LowestBit(bits);
      if (here != Places::kNone) Take<kByAvx512>(rises ? here : next, rises ? next : here);
      here = (i << 6) + HighestBit(bits);
#if OPTPERM_HAS_AVX512
      if (kByAvx512) {
        const uint64_t all_but_lowest = bits & (bits - 1), all_but_highest = bits ^ uint64_t{1} << (here & 63);
        avx512::Move(taken_ + (i << 6), rises ? all_but_lowest : all_but_highest,
                     rises ? all_but_highest : all_but_lowest);
        continue;
      }
#endif
      for (int32_t a = next; (bits &= bits - 1) != 0;) {
        const int32_t b = (i << 6) + LowestBit(bits);
        Take<kByAvx512>(rises ? a : b, rises ? b : a);
        a = b;
      }
    }
    Take<kByAvx512>(rises ? high : low, rises ? low : high);
  }

  OPTPERM_RARE void SearchWideRarely(int32_t source) { SearchWide<false>(source); }

  // The end of a source's cycle, beyond its word.
  OPTPERM_INLINE int32_t NearestBeyondWord(int32_t source, bool rises) {
    const int32_t index = source >> 6, next = rises ? index + 1 : index - 1;
    if (next < lowest_word_ || next > highest_word_) return Places::kNone;
    const uint64_t ends = places_.alive()[next] & (places_.rising()[next] ^ (uint64_t{0} - rises));
    if (ends != 0) return (next << 6) + (rises ? LowestBit(ends) : HighestBit(ends));
    return rises ? places_.Up(Places::kFallers, (next + 1) << 6) : places_.Down(Places::kRisers, (next << 6) - 1);
  }

  // Takes out a source that has no end, and all beyond it, which have none either.
  void RemoveFrom(int32_t source, bool rises) {
    uint64_t* alive = places_.alive();
    const int32_t index = source >> 6;
    const uint64_t one = uint64_t{1} << (source & 63);
    if (rises) {
      alive[index] &= one - 1;
      while (highest_word_ > index) alive[highest_word_--] = 0;
    } else {
      alive[index] &= ~(one | (one - 1));
      while (lowest_word_ < index) alive[lowest_word_++] = 0;
    }
  }

  // Whether a cycle with these ends is one for certain: no ties, and if the ends reach each other both
  // ways, every move of the cycle is short enough.
  bool IsPlain(int32_t low, int32_t high, uint64_t tied) const {
    const int up = ReachesUp(low, high), down = ReachesDown(high, low), apart = tied == 0;
    return (up & down & apart) != 0;  // one branch
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

  // What is not moved within a word by AVX-512 is marked as that.
  template <bool kByAvx512>
  OPTPERM_INLINE void Take(int32_t place, int32_t from) {
    take_[place] = from;
    if (kByAvx512) far_[place >> 6] |= uint64_t{1} << (place & 63);
  }

  void TakePath() {
    for (size_t i = 0; i < path_.size(); ++i) {
      const int32_t next = path_[i + 1 < path_.size() ? i + 1 : 0];
      if (use_avx512) {
        Take<true>(path_[i], next);
      } else {
        Take<false>(path_[i], next);
      }
    }
  }

  const T* weight_ = nullptr;
  int32_t size_ = 0;
  double epsilon_ = 0;
  Places places_;
  KeySorter<Bits<T>, static_cast<Bits<T>>(~kSignBit<T>)> sorter_;
  int32_t* take_ = nullptr;
  Buffer taken_buffer_, far_buffer_;
  uint8_t* taken_ = nullptr;  // for AVX-512: for each entry the place in its word whose weight it takes
  uint64_t* far_ = nullptr;   // which entries take_ holds already
  int32_t lowest_word_ = 0, highest_word_ = 0;  // beyond which no place is alive
  std::vector<int32_t> path_, visited_;
};

}  // namespace optperm

#endif  // OPTPERM_SEARCH_H_
