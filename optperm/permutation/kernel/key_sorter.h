// Sorting places by keys.
#ifndef OPTPERM_KEY_SORTER_H_
#define OPTPERM_KEY_SORTER_H_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "entries.h"

namespace optperm {

// Sorts places by the bits of their keys that a mask leaves, ties by place: by radix on as many leading bits
// as a 32- or 64-bit item holds beside the place, and by insertion where those bits are equal.
template <typename Key, Key kMask>
class KeySorter {
 public:
  // Places 0, ..., size - 1 in ascending order.
  const int32_t* Sort(const Key* keys, int32_t size) {
    Key low = Masked(keys[0]), high = low;
    for (int32_t i = 0; i < size; ++i) {
      low = std::min(low, Masked(keys[i]));
      high = std::max(high, Masked(keys[i]));
    }
    low_ = low;
    const uint64_t range = high - low;
    if (size <= kFew) {
      order_ = first_.Reserve<int32_t>(size);
      spare_ = second_.Reserve<int32_t>(size);
      Count(keys, size, range);
      return order_;
    }
    int place_bits = 1;
    while ((int64_t{1} << place_bits) < size) ++place_bits;
    const int digit_bits = std::min({std::max(place_bits - 1, 4), (32 - place_bits) / 2, 10});
    // Keys are made of floating numbers. If between two powers of two there are less different leading bits
    // than a quarter of the places, too many are equal.
    constexpr int kFraction = sizeof(Key) == 4 ? 23 : 52;
    if (place_bits <= 14 && Shift(range, 2 * digit_bits) + place_bits <= kFraction + 2) {
      Radix<uint32_t, 2>(keys, size, range, place_bits, digit_bits);
    } else {
      Radix<uint64_t, 3>(keys, size, range, place_bits, 11);
    }
    return order_;
  }

  // Room for an integer for each entry, which lasts as long as the order.
  int32_t* spare() { return spare_; }

 private:
  static constexpr int32_t kFew = 128;

  static Key Masked(Key key) { return key & kMask; }

  // How many low bits of numbers up to `range` are too many.
  static int Shift(uint64_t range, int bits) {
    int shift = 0;
    while (range >> shift >> bits != 0) ++shift;
    return shift;
  }

  // For few entries: the place of each in the order is the number of those that come before it, by leading
  // bits in 16-bit integers, of which processors compare many at once; by insertion where those are equal.
  void Count(const Key* keys, int32_t size, uint64_t range) {
    constexpr int32_t kBlock = 64;
    const int shift = Shift(range, 15);
    int16_t digits[kFew] = {}, before[kFew];
    uint8_t equal[kFew] = {};
    for (int32_t i = 0; i < size; ++i) digits[i] = static_cast<int16_t>((Masked(keys[i]) - low_) >> shift);
    for (int32_t begin = 0; begin < size; begin += kBlock) {
      int16_t block[kBlock], count[kBlock] = {};
      std::copy_n(digits + begin, kBlock, block);
      for (int32_t j = 0; j < size; ++j) {
        const int16_t other = digits[j];
        for (int32_t i = 0; i < kBlock; ++i) count[i] += other < block[i];
      }
      std::copy_n(count, kBlock, before + begin);
    }
    for (int32_t i = 0; i < size; ++i) order_[before[i] + equal[before[i]]++] = i;
    for (int32_t i = 0; i < size; ++i) {
      if (equal[i] > 1) Insert(keys, i, i + equal[i]);
    }
  }

  template <typename Item, int kDigits>
  void Radix(const Key* keys, int32_t size, uint64_t range, int place_bits, int digit_bits) {
    const int shift = Shift(range, kDigits * digit_bits);
    const Key low = low_;
    Item *from = first_.Reserve<Item>(size), *to = second_.Reserve<Item>(size);
    const Item mask = (Item{1} << digit_bits) - 1;
    uint32_t starts[kDigits][1 << 11];
    for (int d = 0; d < kDigits; ++d) std::fill_n(starts[d], mask + 1, 0);
    for (int32_t i = 0; i < size; ++i) {
      const Item digits = static_cast<Item>((Masked(keys[i]) - low) >> shift);
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
      for (int32_t i = 0; i < size; ++i) {
        const Item item = from[i];
        to[starts[d][item >> place_bits >> (d * digit_bits) & mask]++] = item;
      }
      std::swap(from, to);
    }
    const Item *sorted = from, place_mask = (Item{1} << place_bits) - 1;
    order_ = reinterpret_cast<int32_t*>(to);
    spare_ = reinterpret_cast<int32_t*>(from);
    for (int32_t i = 0; i < size; ++i) order_[i] = static_cast<int32_t>(sorted[i] & place_mask);
    for (int32_t i = 1; i < size; ++i) {
      if ((sorted[i] ^ sorted[i - 1]) > place_mask) continue;
      const int32_t begin = i - 1;
      while (i < size && (sorted[i] ^ sorted[begin]) <= place_mask) ++i;
      Insert(keys, begin, i);
    }
  }

  // Sorts a run of order_ whose places ascend.
  void Insert(const Key* keys, int32_t begin, int32_t end) {
    if (end - begin > 32) return InsertMany(keys, begin, end);
    for (int32_t i = begin + 1; i < end; ++i) {
      const int32_t place = order_[i];
      const Key size = Masked(keys[place]);
      int32_t j = i;
      for (; j > begin && Masked(keys[order_[j - 1]]) > size; --j) order_[j] = order_[j - 1];
      order_[j] = place;
    }
  }

  OPTPERM_RARE void InsertMany(const Key* keys, int32_t begin, int32_t end) {
    std::stable_sort(order_ + begin, order_ + end,
                     [&](int32_t a, int32_t b) { return Masked(keys[a]) < Masked(keys[b]); });
  }

  Key low_ = 0;
  Buffer first_, second_;
  int32_t *order_ = nullptr, *spare_ = nullptr;
};

}  // namespace optperm

#endif  // OPTPERM_KEY_SORTER_H_
