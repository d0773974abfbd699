// The search for the cycles of one subset.
#ifndef OPTPERM_SEARCH_H_
#define OPTPERM_SEARCH_H_

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "avx512.h"
#include "careful_search.h"
#include "entries.h"
#include "key_sorter.h"
#include "places.h"

namespace optperm {

// Finds the cycles of one subset: steps 6 and 7 of the method, for entries that all take part.
template <typename T>
class CycleSearch {
 public:
  // For each place, the place whose weight it takes. In `ties`, if there are ties, a bit marks a place with the same
  // weight as the place before.
  const int32_t* Run(const Entries<T>& entries, double epsilon, const uint64_t* ties) {
    reach_ = {entries.weight, epsilon};
    size_ = entries.size;
    // All places in ascending |m|, with room for the places whose weights they take.
    const int32_t* order = sorter_.Sort(entries.wish, size_);
    take_ = sorter_.spare();
    Prepare(entries, ties);
    ties != nullptr ? Search<true>(order) : Search<false>(order);
    return take_;
  }

 private:
  void Prepare(const Entries<T>& entries, const uint64_t* ties) {
    places_.Reset(size_);
    uint64_t* const alive = places_.alive();
    const int32_t words = (size_ + 63) / 64;
    std::fill_n(alive, words, ~uint64_t{0});
    alive[words - 1] >>= 64 * words - size_;
    if (ties != nullptr) std::copy_n(ties, words, places_.tied());
    Signs(entries.wish);
    places_.Summarize(ties != nullptr);
    lowest_word_ = 0;
    highest_word_ = words - 1;
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

  // The maximum number of sources in a group: large enough to save most branches on whether a source is alive, and
  // small enough that few sources are memorized in the meantime.
  static constexpr int32_t kLookAhead = 32;
  int32_t LookAhead() const { return std::clamp(size_ / 6, 8, kLookAhead); }

  // Sources in descending |m|; with equal |m|, the later place comes first. Works on groups of sources, and leaves out
  // memorized sources.
  template <bool kTies>
  void Search(const int32_t* order) {
#if OPTPERM_HAS_AVX512
    if (use_avx512) return SearchByAvx512<kTies>(order);
#endif
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
      SearchEach<false, kTies>(sources, count);
    }
  }

#if OPTPERM_HAS_AVX512
  // The same. Here, a byte holds the place in its word of 64 places whose weight an entry takes, so that a few
  // instructions move a cycle of any length.
  template <bool kTies>
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
      SearchEach<true, kTies>(sources, count);
    }
    avx512::Unpack(taken_, far_, size_, take_);
  }
#endif

  // The search from each of these sources, from the last one on, and its cycle.
  //
  // If the first faller above a riser does not reach down to it, there is no cycle: no other faller reaches as far
  // down. If it does, the cycle is the risers from the source up to that faller, and the faller, which is not tied
  // with the source. Likewise for a faller, where none of these places are tied with each other. This function finds
  // the cycles within a word of 64 places, with few branches that are hard to predict.
  template <bool kByAvx512, bool kTies>
  OPTPERM_INLINE void SearchEach(const uint32_t* sources, int32_t count) {
    uint64_t* const alive_words = places_.alive();
    const uint64_t *const rising_words = places_.rising(), *const tied_words = places_.tied();
    const T* const weights = reach_.weight;
    const double epsilon = reach_.epsilon;
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
          SearchWide<true, kTies>(source);
        } else {
          SearchWideRarely<kTies>(source);
        }
        continue;
      }
      const uint64_t first_above = above & (uint64_t{0} - above);
      const uint64_t first_below = uint64_t{1} << HighestBit(below | 1);
      const uint64_t lowest = (one & rises) | (first_below & ~rises);
      const uint64_t highest = (first_above & rises) | (one & ~rises);
      const uint64_t cycle = alive & ((highest - lowest) | highest);
      const int32_t low = base + LowestBit(lowest), high = base + LowestBit(highest);
      const double low_weight = weights[low], high_weight = weights[high];
      const int up = high_weight < low_weight + epsilon, down = low_weight >= high_weight - epsilon;
      int apart = 1;
      if (kTies) {
        const int ends = low_weight < high_weight, all = AreApart(cycle, lowest, tied_words[index]);
        apart = (ends & static_cast<int>(rises & 1)) | (all & static_cast<int>(~rises & 1));
      }
      if ((up & down & apart) == 0) {
        if ((up | down) == 0) {
          alive_words[index] = alive ^ one;
        } else if (!kTies || !SearchWord<kByAvx512>(source)) {
          SearchCarefully<kByAvx512>(source, rises != 0 ? high : low);
        }
        continue;
      }
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
  template <bool kByAvx512, bool kTies>
  OPTPERM_INLINE void SearchWide(int32_t source) {
    uint64_t* const alive_words = places_.alive();
    const bool rises = places_.Rises(source);
    const int32_t end = NearestBeyondWord(source, rises);
    if (end == Places::kNone) return RemoveFrom(source, rises);
    const int32_t low = std::min(source, end), high = std::max(source, end);
    const uint64_t from_low = ~uint64_t{0} << (low & 63), to_high = ~uint64_t{0} >> (63 - (high & 63));
    const int32_t first = low >> 6, last = high >> 6;
    const int up = reach_.Up(low, high), down = reach_.Down(high, low);
    const int apart = !kTies || (rises ? !reach_.IsTied(low, high) : AreAllApart(first, last, from_low, to_high));
    if ((up & down & apart) == 0) return SearchCarefully<kByAvx512>(source, end);

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

  template <bool kTies>
  OPTPERM_RARE void SearchWideRarely(int32_t source) {
    SearchWide<false, kTies>(source);
  }

  // Whether no places of a cycle within a word are tied with the next ones up, the dead places between them included.
  static OPTPERM_INLINE bool AreApart(uint64_t cycle, uint64_t lowest, uint64_t tied_word) {
    const uint64_t tied = tied_word & ~(lowest | (lowest - 1)), above = (cycle << 1) & tied;
    // From each place of the cycle on, as far as places are tied: the carries of a sum run through them.
    const uint64_t tied_with_lower = (((above + tied) ^ tied) | above) & tied;
    return (tied_with_lower & cycle) == 0;
  }

  // Whether no places at all are tied between two ends in different words.
  bool AreAllApart(int32_t first, int32_t last, uint64_t from_low, uint64_t to_high) {
    const uint64_t* const words = places_.tied();
    uint64_t tied = (words[first] & from_low & (from_low - 1)) | (words[last] & to_high);
    for (int32_t i = first + 1; i < last; ++i) tied |= words[i];
    return tied == 0;
  }

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

  // The search through ties, depth first and nearest first, for a cycle that lies within a word and is found without
  // a step back. Returns false, and has changed nothing, if there is none.
  template <bool kByAvx512>
  OPTPERM_INLINE bool SearchWord(uint32_t source) {
    const uint32_t index = source >> 6, base = source & ~uint32_t{63};
    const uint64_t rising = places_.rising()[index], starts = ~places_.tied()[index];
    const uint64_t source_bit = uint64_t{1} << (source & 63);
    uint64_t alive = places_.alive()[index], here = source_bit;
    int32_t path[64], length = 0;
    do {
      uint64_t next;
      if ((here & rising) != 0) {
        const uint64_t above = alive & ~(here | (here - 1)), ends = above & (~rising | source_bit);
        next = ends & (0 - ends);
        if (next == 0 || !reach_.Up(base + LowestBit(here), base + LowestBit(next))) return false;
        // The risers before it, too.
        for (uint64_t rest = above & (next - 1); rest != 0; rest &= rest - 1) path[length++] = base + LowestBit(rest);
        alive &= ~above | (0 - next);
      } else {
        const uint64_t from_start = starts & (here | (here - 1));
        if (from_start == 0) return false;
        const uint64_t below = alive & ((uint64_t{1} << HighestBit(from_start)) - 1);
        if (below == 0) return false;
        next = uint64_t{1} << HighestBit(below);
        if (!reach_.Down(base + LowestBit(here), base + LowestBit(next))) return false;
      }
      path[length++] = base + LowestBit(next);
      alive &= ~next | source_bit;
      here = next;
    } while (here != source_bit);
    places_.alive()[index] = alive & ~source_bit;
    for (int32_t i = 0, place = source; i < length; place = path[i++]) Take<kByAvx512>(place, path[i]);
    return true;
  }

  // The other cases: the end does not reach the source, places are tied, or rounding makes the two directions differ.
  template <bool kByAvx512>
  OPTPERM_RARE void SearchCarefully(int32_t source, int32_t end) {
    const Path path = careful_.Run(&places_, reach_, source, end);
    for (int32_t i = 1; i < path.length; ++i) Take<kByAvx512>(path.places[i - 1], path.places[i]);
    if (path.length > 0) Take<kByAvx512>(path.places[path.length - 1], path.places[0]);
  }

  // Marks entries that AVX-512 does not move within a word.
  template <bool kByAvx512>
  OPTPERM_INLINE void Take(int32_t place, int32_t from) {
    take_[place] = from;
    if (kByAvx512) far_[place >> 6] |= uint64_t{1} << (place & 63);
  }

  Reach<T> reach_;
  int32_t size_ = 0;
  Places places_;
  CarefulSearch<T> careful_;
  KeySorter<Bits<T>, static_cast<Bits<T>>(~kSignBit<T>)> sorter_;
  int32_t* take_ = nullptr;
  Buffer taken_buffer_, far_buffer_;
  uint8_t* taken_ = nullptr;  // for AVX-512: for each entry the place in its word whose weight it takes
  uint64_t* far_ = nullptr;   // which entries take_ holds already
  int32_t lowest_word_ = 0, highest_word_ = 0;  // beyond which no place is alive
};

}  // namespace optperm

#endif  // OPTPERM_SEARCH_H_
