// Places in descending order of their keys, where most drop out before it is their turn.
#ifndef OPTPERM_KEY_BUCKETS_H_
#define OPTPERM_KEY_BUCKETS_H_

#include <algorithm>
#include <cstdint>

#include "entries.h"
#include "places.h"

namespace optperm {

// Places by the leading bits of their keys; the few of a bucket that are still alive are sorted when it is
// their turn. Keys are positive floating numbers, as bits under a mask.
template <typename Key, Key kMask>
class KeyBuckets {
 public:
  // Returns false where the keys are too uneven for it: sort them then.
  bool Fill(const Key* keys, int32_t size) {
    keys_ = keys;
    Key highest = 0;
    for (int32_t i = 0; i < size; ++i) highest = std::max(highest, Masked(keys[i]));
    int bits = kLeastBits;
    while (bits < kMostBits && size > 1 << (bits - 1)) ++bits;
    const int32_t last = (1 << bits) - 1;
    const int shift = kFraction + kBinades - bits;
    const Key offset = (highest >> shift) - last;  // may wrap around
    buckets_ = bucket_buffer_.template Reserve<uint16_t>(size);
    for (int32_t i = 0; i < size; ++i) {
      const int32_t bucket = static_cast<int32_t>((Masked(keys[i]) >> shift) - offset);
      buckets_[i] = static_cast<uint16_t>(std::max(bucket, 0));
    }
    uint32_t starts[1 << kMostBits];
    std::fill_n(starts, last + 1, 0);
    for (int32_t i = 0; i < size; ++i) ++starts[buckets_[i]];
    uint32_t sum = 0, largest = 0;
    const uint32_t smallest_keys = starts[0];
    for (int32_t bucket = 0; bucket <= last; ++bucket) {
      const uint32_t count = starts[bucket];
      starts[bucket] = sum;
      sum += count;
      if (bucket > 0) largest = std::max(largest, count);
    }
    if (largest > kMostInBucket || smallest_keys > static_cast<uint32_t>(size) / 8) return false;
    order_ = order_buffer_.template Reserve<int32_t>(size);
    for (int32_t i = 0; i < size; ++i) order_[starts[buckets_[i]]++] = i;
    return true;
  }

  // Finds the next ones of those whose bit is set, in ascending order of key, ties by place, and returns how many:
  // whole buckets down from `*end` among all places, which moves, and `least` of them at least.
  int32_t Next(int32_t* end, int32_t least, const uint64_t* alive, uint32_t* found) const {
    int32_t begin = std::max(0, *end - least);
    while (begin > 0 && buckets_[order_[begin - 1]] == buckets_[order_[begin]]) --begin;
    const int32_t count = Alive(order_ + begin, *end - begin, alive, found);
    *end = begin;
    for (int32_t i = 1; i < count; ++i) {
      const uint32_t place = found[i];
      const Key key = Masked(keys_[place]);
      int32_t j = i;
      for (; j > 0 && Masked(keys_[found[j - 1]]) > key; --j) found[j] = found[j - 1];
      found[j] = place;
    }
    return count;
  }

 private:
  // All numbers that are 2^-8 of the largest and smaller are in the first bucket.
  static constexpr int kFraction = sizeof(Key) == 4 ? 23 : 52, kBinades = 3;
  static constexpr int kLeastBits = 8, kMostBits = 12;
  static constexpr uint32_t kMostInBucket = 48;

  static Key Masked(Key key) { return key & kMask; }

  const Key* keys_ = nullptr;
  Buffer bucket_buffer_, order_buffer_;
  uint16_t* buckets_ = nullptr;
  int32_t* order_ = nullptr;
};

}  // namespace optperm

#endif  // OPTPERM_KEY_BUCKETS_H_
