// The entries of a subset that are not memorized yet, as bits in ascending order of weight.
#ifndef OPTPERM_PLACES_H_
#define OPTPERM_PLACES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "entries.h"

namespace optperm {

inline int LowestBit(uint64_t word) { return __builtin_ctzll(word); }
inline int HighestBit(uint64_t word) { return 63 - __builtin_clzll(word); }

// Places 0, ..., size - 1. Each place is alive or not, and should rise or fall.
//
// Two trees of 64-bit words, one over the risers and one over the fallers, find the nearest alive place
// of a kind up or down. A bit of a level says that a word of the level below may have bits set; it is
// cleared when a search finds that it has none. So to remove places, clear their bits in
// `alive()`.
class Places {
 public:
  enum Kind { kFallers = 0, kRisers = 1 };
  static constexpr int32_t kNone = -1;

  // Room for `size` places. The caller then fills the words of alive(), rising() and, where there are ties, tied(),
  // and calls Summarize.
  void Reset(int32_t size) {
    size_ = size;
    depth_ = 0;
    for (int32_t words = Words(size);; words = Words(words)) {
      level_words_[depth_++] = words;
      if (words <= 1) break;
    }
    const size_t words = level_words_[0];
    if (alive_.size() < words) {
      alive_.resize(words);
      rising_.resize(words);
      tied_.resize(words);
      first_tied_.resize(words);
      last_tied_.resize(words);
    }
  }

  int32_t size() const { return size_; }
  uint64_t* alive() { return alive_.data(); }
  uint64_t* rising() { return rising_.data(); }
  // Whether a place has the same weight as the place below it.
  uint64_t* tied() { return tied_.data(); }

  // Without ties, these words are not read.
  void Summarize(bool has_ties) {
    const int32_t words = level_words_[0];
    for (int32_t i = 0; has_ties && i < words; ++i) {
      first_tied_[i] = (tied_[i] & 1) != 0 ? FirstTied(64 * i - 1) : 64 * i;
    }
    for (int32_t i = words - 1; has_ties && i >= 0; --i) {
      const bool is_cut = i + 1 < words && (tied_[i + 1] & 1) != 0;
      last_tied_[i] = is_cut ? LastTied(64 * i + 64) : std::min(64 * i + 64, size_) - 1;
    }
    for (int kind = 0; kind < 2; ++kind) {
      for (int level = 1; level < depth_; ++level) {
        std::vector<uint64_t>& summary = summary_[kind][level];
        summary.assign(level_words_[level], 0);
        for (int32_t i = 0; i < level_words_[level - 1]; ++i) {
          summary[i >> 6] |= static_cast<uint64_t>(Word(kind, level - 1, i) != 0) << (i & 63);
        }
      }
    }
  }

  bool IsAlive(int32_t place) const { return alive_[place >> 6] >> (place & 63) & 1; }
  bool Rises(int32_t place) const { return rising_[place >> 6] >> (place & 63) & 1; }

  void Remove(int32_t place) { alive_[place >> 6] &= ~(uint64_t{1} << (place & 63)); }

  // Makes places of a word alive again.
  void Restore(int32_t word, uint64_t bits) {
    alive_[word] |= bits;
    for (const int kind : {kFallers, kRisers}) {
      if ((bits & (kind == kRisers ? rising_[word] : ~rising_[word])) == 0) continue;
      for (int32_t level = 1, place = word; level < depth_; ++level, place >>= 6) {
        summary_[kind][level][place >> 6] |= uint64_t{1} << (place & 63);
      }
    }
  }

  // The first alive place of a kind at or above `place`.
  int32_t Up(int kind, int32_t place) {
    int64_t index = place;
    for (int level = 0; level < depth_;) {
      const int64_t word = index >> 6;
      if (word >= level_words_[level]) return kNone;
      const uint64_t bits = Word(kind, level, word) >> (index & 63);
      if (bits == 0) {
        index = word + 1;
        ++level;
        continue;
      }
      index += LowestBit(bits);
      if (level == 0) return static_cast<int32_t>(index);
      // Down again, to the first place under that bit; if there is none, the search comes back up.
      index <<= 6;
      --level;
      if (Word(kind, level, index >> 6) == 0) {
        ClearSummary(kind, level + 1, index >> 6);
        index = (index >> 6) + 1;
        ++level;
      }
    }
    return kNone;
  }

  // The first alive place of a kind at or below `place`, which may be -1.
  int32_t Down(int kind, int32_t place) {
    int64_t index = place;
    for (int level = 0; level < depth_;) {
      if (index < 0) return kNone;
      const int64_t word = index >> 6;
      const uint64_t bits = Word(kind, level, word) << (63 - (index & 63));
      if (bits == 0) {
        index = word - 1;
        ++level;
        continue;
      }
      index -= 63 - HighestBit(bits);
      if (level == 0) return static_cast<int32_t>(index);
      index = (index << 6) + 63;
      --level;
      if (Word(kind, level, index >> 6) == 0) {
        ClearSummary(kind, level + 1, index >> 6);
        index = (index >> 6) - 1;
        ++level;
      }
    }
    return kNone;
  }

  // The first alive place of either kind at or above, or at or below, `place`. It is usually near.
  int32_t AnyUp(int32_t place) {
    int32_t word = place >> 6;
    if (word >= level_words_[0]) return kNone;
    uint64_t bits = alive_[word] >> (place & 63) << (place & 63);
    for (const int32_t last = std::min(word + kNear, level_words_[0] - 1); bits == 0 && word < last;) bits = alive_[++word];
    return bits != 0 ? (word << 6) + LowestBit(bits) : AnyFarUp((word + 1) << 6);
  }
  int32_t AnyDown(int32_t place) {
    if (place < 0) return kNone;
    int32_t word = place >> 6;
    uint64_t bits = alive_[word] & ~uint64_t{0} >> (63 - (place & 63));
    for (const int32_t last = std::max(word - kNear, 0); bits == 0 && word > last;) bits = alive_[--word];
    return bits != 0 ? (word << 6) + HighestBit(bits) : AnyFarDown((word << 6) - 1);
  }

  // The lowest and the highest place that have the same weight as `place`.
  int32_t FirstTied(int32_t place) const {
    const uint64_t different = ~tied_[place >> 6] << (63 - (place & 63));
    return different != 0 ? place - (63 - HighestBit(different)) : first_tied_[place >> 6];
  }
  int32_t LastTied(int32_t place) const {
    const uint64_t different = ~tied_[place >> 6] >> (place & 63) & ~uint64_t{1};
    return different != 0 ? place + LowestBit(different) - 1 : last_tied_[place >> 6];
  }

 private:
  static constexpr int kMaxDepth = 7;
  static constexpr int32_t kNear = 8;

  OPTPERM_RARE int32_t AnyFarUp(int32_t place) {
    const int32_t faller = Up(kFallers, place), riser = Up(kRisers, place);
    if (faller == kNone || riser == kNone) return std::max(faller, riser);
    return std::min(faller, riser);
  }
  OPTPERM_RARE int32_t AnyFarDown(int32_t place) { return std::max(Down(kFallers, place), Down(kRisers, place)); }

  static int32_t Words(int32_t bits) { return (bits + 63) / 64; }

  uint64_t Word(int kind, int level, int64_t index) const {
    if (level > 0) return summary_[kind][level][index];
    return alive_[index] & (kind == kRisers ? rising_[index] : ~rising_[index]);
  }

  void ClearSummary(int kind, int level, int64_t index) {
    summary_[kind][level][index >> 6] &= ~(uint64_t{1} << (index & 63));
  }

  int32_t size_ = 0;
  int depth_ = 0;
  int32_t level_words_[kMaxDepth] = {};
  std::vector<uint64_t> alive_, rising_, tied_;
  std::vector<int32_t> first_tied_, last_tied_;  // of the first and the last place of each word
  std::vector<uint64_t> summary_[2][kMaxDepth];
};

}  // namespace optperm

#endif  // OPTPERM_PLACES_H_
