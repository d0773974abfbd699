// The search from one source if the order does not determine the cycle, because weights are tied, or because rounding
// makes the two directions of a move differ.
#ifndef OPTPERM_CAREFUL_SEARCH_H_
#define OPTPERM_CAREFUL_SEARCH_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "entries.h"
#include "places.h"

namespace optperm {

// Whether entries may move between two weights: up takes [w, w + epsilon), down [w - epsilon, w).
template <typename T>
struct Reach {
  const T* weight = nullptr;
  double epsilon = 0;

  bool Up(int32_t low, int32_t high) const {
    return static_cast<double>(weight[high]) < static_cast<double>(weight[low]) + epsilon;
  }
  bool Down(int32_t high, int32_t low) const {
    return static_cast<double>(weight[low]) >= static_cast<double>(weight[high]) - epsilon;
  }
  bool IsTied(int32_t a, int32_t b) const { return weight[a] == weight[b]; }
};

struct Path {
  const int32_t* places;
  int32_t length;
};

template <typename T>
class CarefulSearch {
 public:
  // The cycle from a source, each place followed by the one whose weight it takes; empty if there is none. `end` is
  // the nearest faller above a source that should rise, or the nearest riser below one that should fall. All that is
  // memorized now is taken out of the places.
  OPTPERM_FOR_EACH_PROCESSOR Path Run(Places* places, const Reach<T>& reach, int32_t source, int32_t end);

 private:
  // Places of a word.
  struct Taken {
    int32_t word;
    uint64_t bits;
  };

  // The cycle of a riser is the risers from it up to the first faller of more weight, and that faller. But a faller
  // as heavy as the source comes before, and goes down first: what it finds there may lead up again.
  bool SearchUp(int32_t source, int32_t end) {
    if (reach_.IsTied(source, end)) {
      if (MayReturnFromBelow(source)) return SearchThrough(source);
      end = places_->Up(Places::kFallers, places_->LastTied(source) + 1);
      if (end == Places::kNone || !reach_.Down(end, source)) {
        TakeOutTied(source, ~uint64_t{0}, nullptr);  // none of them finds a cycle any more
        return false;
      }
    }
    if (!reach_.Down(end, source)) return false;
    for (int32_t here = source; here != end;) {
      const int32_t riser = places_->Up(Places::kRisers, here + 1);
      const int32_t next = riser == Places::kNone ? end : std::min(riser, end);
      if (!reach_.Up(here, next)) return false;
      path_[length_++] = here = next;
    }
    return true;
  }

  // The cycle of a faller is the fallers from it down to the first riser, and that riser, if none are tied.
  bool SearchDown(int32_t source, int32_t end) {
    if (!reach_.Up(end, source)) return false;
    for (int32_t here = source; here != end;) {
      const int32_t next = std::max(places_->Down(Places::kFallers, here - 1), end);
      if (reach_.IsTied(here, next)) return MayReturnFromBelow(source) && SearchThrough(source);
      if (!reach_.Down(here, next)) return false;
      path_[length_++] = here = next;
    }
    return true;
  }

  // Whether a search that goes below the weight of the source may come back. Only a riser below does, and only
  // a faller as heavy as the source gets there: those of more weight that do not reach the source reach nothing
  // below it either. If it may not, no faller as heavy as the source finds a cycle any more. If it may, it does,
  // without a step to what is heavier than the source: all fallers between that riser and the source reach the riser.
  bool MayReturnFromBelow(int32_t source) {
    const int32_t below = places_->FirstTied(source) - 1, target = places_->AnyDown(below);
    if (target != Places::kNone && reach_.Down(source, target)) {
      const int32_t riser = places_->Down(Places::kRisers, below);
      if (riser != Places::kNone && reach_.Up(riser, source)) return true;
    }
    TakeOutTied(source, 0, nullptr);
    return false;
  }

  // Takes out all fallers as heavy as a place, and of the risers those marked in each word. What is taken out is
  // written to `taken`, if it is to be put back.
  void TakeOutTied(int32_t place, uint64_t risers, std::vector<Taken>* taken) {
    const int32_t low = places_->FirstTied(place), high = places_->LastTied(place);
    for (int32_t word = low >> 6; word <= high >> 6; ++word) {
      uint64_t bits = places_->alive()[word] & (~places_->rising()[word] | risers);
      if (word == low >> 6) bits &= ~uint64_t{0} << (low & 63);
      if (word == high >> 6) bits &= ~uint64_t{0} >> (63 - (high & 63));
      places_->alive()[word] &= ~bits;
      if (taken != nullptr && bits != 0) taken->push_back({word, bits});
    }
  }

  // Depth first, nearest first, as the method says it. Visited places are taken out, and those that are not on the
  // path are put back, but for those that lead nowhere whatever was visited before. Where a faller leads nowhere,
  // all as heavy as it do.
  bool SearchThrough(int32_t source) {
    length_ = 1;
    taken_.clear();
    int32_t lowest = source;  // of the visited places
    while (length_ > 0) {
      const int32_t here = path_[length_ - 1];
      const bool rises = places_->Rises(here);
      if (rises && Climb(here, source)) {
        if (path_[length_ - 1] == source) break;
        continue;
      }
      const int32_t bound = rises ? here + 1 : places_->FirstTied(here) - 1;
      const int32_t next = rises ? places_->AnyUp(bound) : places_->AnyDown(bound);
      if (next != Places::kNone && (rises ? reach_.Up(here, next) : reach_.Down(here, next))) {
        path_[length_++] = next;
        if (next == source) break;
        places_->Remove(next);
        lowest = std::min(lowest, next);
        continue;
      }
      --length_;
      const bool is_for_good = !rises && lowest > bound;
      if (!is_for_good) MarkTaken(here);
      if (rises) {
        LeaveLower(here, next);
      } else {
        TakeOutTied(here, 0, is_for_good ? nullptr : &taken_);
      }
      places_->alive()[source >> 6] |= uint64_t{1} << (source & 63);
    }
    for (const Taken& taken : taken_) places_->Restore(taken.word, taken.bits);
    if (length_ == 0) return false;
    --length_;  // the source again
    return true;
  }

  // After a riser that leads nowhere, which is below the source. What is next above it, no higher than the source, is
  // out of its reach, and so out of the reach of all risers below it: no way leads from the places below that next one
  // to the source. So the path goes back to before it came there, or to before the risers that led to this one.
  void LeaveLower(int32_t riser, int32_t next) {
    for (; length_ > 0 && path_[length_ - 1] < next; MarkTaken(path_[--length_])) {
      if (path_[length_ - 1] > riser && places_->Rises(path_[length_ - 1])) return;
    }
    if (length_ == 0) return;
    // The faller that came there: below it there are no others.
    MarkTaken(path_[--length_]);
    TakeOutTied(path_[length_], 0, &taken_);
  }

  void MarkTaken(int32_t place) {
    const int32_t word = place >> 6;
    const uint64_t bit = uint64_t{1} << (place & 63);
    if (!taken_.empty() && taken_.back().word == word) {
      taken_.back().bits |= bit;
    } else {
      taken_.push_back({word, bit});
    }
  }

  // From a riser through the next ones within its word, and to the first faller or the source, if it reaches them all.
  bool Climb(int32_t here, int32_t source) {
    const int32_t word = here >> 6, base = here & ~63;
    const uint64_t alive = places_->alive()[word], above = alive & (~uint64_t{1} << (here & 63));
    if (above == 0) return false;
    const uint64_t source_bit = word == source >> 6 ? uint64_t{1} << (source & 63) : 0;
    const uint64_t ends = above & (~places_->rising()[word] | source_bit), end = ends & (0 - ends);
    uint64_t run = above & (end | (end - 1));
    if (!reach_.Up(here, base + HighestBit(run))) return false;
    places_->alive()[word] = alive & (~run | source_bit);
    for (; run != 0; run &= run - 1) path_[length_++] = base + LowestBit(run);
    return true;
  }

  Places* places_ = nullptr;
  Reach<T> reach_;
  Buffer path_buffer_;
  int32_t* path_ = nullptr;
  int32_t length_ = 0;  // of the path
  std::vector<Taken> taken_;
};

template <typename T>
OPTPERM_FOR_EACH_PROCESSOR Path CarefulSearch<T>::Run(Places* places, const Reach<T>& reach, int32_t source,
                                                      int32_t end) {
  places_ = places;
  reach_ = reach;
  path_ = path_buffer_.Reserve<int32_t>(places->size() + 1);  // the source may be at both ends
  path_[0] = source;
  length_ = 1;
  const bool found = places->Rises(source) ? SearchUp(source, end) : SearchDown(source, end);
  if (!found) length_ = 0;
  for (int32_t i = 0; i < length_; ++i) places->Remove(path_[i]);
  places->Remove(source);
  return {path_, length_};
}

}  // namespace optperm

#endif  // OPTPERM_CAREFUL_SEARCH_H_
