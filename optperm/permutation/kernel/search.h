// The search for the cycles of one subset.
#ifndef OPTPERM_SEARCH_H_
#define OPTPERM_SEARCH_H_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "entries.h"
#include "key_sorter.h"
#include "places.h"

namespace optperm {

// The most candidates looked at together: enough to spare most of the branches on whether one is still alive,
// few enough that hardly any is memorized meanwhile.
constexpr int32_t kLookAhead = 32;

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
    const int32_t look_ahead = std::clamp(entries.size / 6, 8, kLookAhead);
    uint32_t candidates[kLookAhead];
    for (int32_t next = entries.size; next > 0;) {
      // Sources in descending |m|, on equal |m| the later place first.
      const int32_t stop = std::max(0, next - look_ahead);
      int32_t count = 0;
      while (next > stop) {
        const uint32_t place = order[--next];
        candidates[count] = place;
        count += places_.alive()[place >> 6] >> (place & 63) & 1;
      }
      for (int32_t i = 0; i < count; ++i) SearchFrom(candidates[i]);
    }
    return take_;
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
      for (int32_t i = length; i-- > 0;) rises = 2 * rises + (wish[i] >> (8 * sizeof(T) - 1));
      if (has_ties) {
        const T* w = weight_ + begin;
        for (int32_t i = begin == 0; i < length; ++i) ties |= uint64_t{w[i] == w[i - 1]} << i;
      }
      alive[begin >> 6] = ~uint64_t{0} >> (64 - length);
      rising[begin >> 6] = rises;
      tied[begin >> 6] = ties;
    }
    places_.Summarize();
    std::iota(take_, take_ + size, 0);
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
    // From the lowest place of the cycle upwards, for risers into `up`, for fallers into `down`, and for the
    // others nowhere. Three moves at once, since few cycles are longer; beyond the highest place they stay
    // there.
    int32_t nowhere[64];
    int32_t* const targets[] = {nowhere, take_ + base};
    int32_t *const up = targets[rises & 1], *const down = targets[~rises & 1];
    uint64_t rest = cycle;
    int32_t here = LowestBit(lowest);
    const auto move = [&] {
      rest = (rest & (rest - 1)) | highest;
      const int32_t next = LowestBit(rest);
      up[here] = base + next;
      down[next] = base + here;
      here = next;
    };
    for (int i = 0; i < 3; ++i) move();
    while (rest != highest) move();
    up[high - base] = low;
    down[low - base] = high;
    down[high - base] = base + HighestBit(cycle ^ highest);
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

  void TakePath() {
    for (size_t i = 0; i < path_.size(); ++i) {
      take_[path_[i]] = path_[i + 1 < path_.size() ? i + 1 : 0];
    }
  }

  const T* weight_ = nullptr;
  int32_t size_ = 0;
  double epsilon_ = 0;
  Places places_;
  KeySorter<Bits<T>, static_cast<Bits<T>>(~kSignBit<T>)> sorter_;
  int32_t* take_ = nullptr;
  std::vector<int32_t> path_, visited_;
};

}  // namespace optperm

#endif  // OPTPERM_SEARCH_H_
