// Sorting places by keys.
#ifndef OPTPERM_KEY_SORTER_H_
#define OPTPERM_KEY_SORTER_H_

#include <algorithm>
#include <cstdint>
#include <utility>

#include "avx512.h"
#include "entries.h"

namespace optperm {

// Sorts places by the masked bits of their keys, and ties by place. An item of 32 or 64 bits holds the place and as
// many leading bits of the key as fit; insertion sorts items whose leading bits are equal. AVX-512 sorts items if
// the processor has it, and a radix sort otherwise; few keys are all compared with each other.
template <typename Key, Key kMask>
class KeySorter {
 public:
  // Places 0, ..., size - 1 in ascending order.
  const int32_t* Sort(const Key* keys, int32_t size) {
    const Key first = Masked(keys[0]);
    Key low = first, high = first, different = 0;
    for (int32_t i = 0; i < size; ++i) {
      const Key key = Masked(keys[i]);
      low = std::min(low, key);
      high = std::max(high, key);
      different |= key ^ first;
    }
    // Low bits that all keys have in common are left out, because keys may come from numbers with fewer bits.
    common_bits_ = different == 0 ? 0 : __builtin_ctzll(different);
    low_ = low;
    const uint64_t range = static_cast<uint64_t>(high - low) >> common_bits_;
    const int place_bits = std::max(BitLength(static_cast<uint64_t>(size) - 1), 1);
#if OPTPERM_HAS_AVX512
    if (use_avx512 && AreEnough(32 - place_bits, range, place_bits)) {
      SortByNetwork(keys, size, range, place_bits);
      return order_;
    }
#endif
    if (size <= kFew) {
      order_ = first_.Reserve<int32_t>(size);
      spare_ = second_.Reserve<int32_t>(size);
      Count(keys, size, range);
      return order_;
    }
    const int digit_bits = std::min({std::max(place_bits - 1, 4), (32 - place_bits) / 2, 10});
    if (AreEnough(2 * digit_bits, range, place_bits)) {
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

  // Whether this number of leading bits, in an item of 32 bits, distinguishes most keys. Keys come from floating-point
  // numbers: if the leading bits have fewer values between two powers of two than a quarter of the places, too many
  // keys are equal, unless the leading bits are all the bits in which keys differ.
  bool AreEnough(int bits, uint64_t range, int place_bits) const {
    constexpr int kFraction = sizeof(Key) == 4 ? 23 : 52;
    const int shift = Shift(range, bits);
    return place_bits <= 14 && (shift == 0 || common_bits_ + shift + place_bits <= kFraction + 2);
  }

  // Keeps this number of leading bits of keys. Returns the number of dropped low bits.
  int LeaveOnly(int bits, uint64_t range) {
    const int shift = Shift(range, bits);
    tells_all_ = shift == 0;
    return common_bits_ + shift;
  }

  static int BitLength(uint64_t number) { return number == 0 ? 0 : 64 - __builtin_clzll(number); }

  // The number of low bits to drop from numbers up to `range`.
  static int Shift(uint64_t range, int bits) { return std::max(BitLength(range) - bits, 0); }

  // For few entries: the index of an entry in the order is the number of entries before it. Compares leading bits as
  // 16-bit integers, many at once, and sorts equal leading bits by insertion.
  void Count(const Key* keys, int32_t size, uint64_t range) {
    constexpr int32_t kBlock = 64;
    const int shift = LeaveOnly(15, range);
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
    if (tells_all_) return;
    for (int32_t i = 0; i < size; ++i) {
      if (equal[i] > 1) Insert(keys, i, i + equal[i]);
    }
  }

#if OPTPERM_HAS_AVX512
  void SortByNetwork(const Key* keys, int32_t size, uint64_t range, int place_bits) {
    const int shift = LeaveOnly(32 - place_bits, range);
    const Key low = low_;
    uint32_t *items = first_.Reserve<uint32_t>(size), *spare = second_.Reserve<uint32_t>(size);
    for (int32_t i = 0; i < size; ++i) {
      items[i] = static_cast<uint32_t>((Masked(keys[i]) - low) >> shift) << place_bits | static_cast<uint32_t>(i);
    }
    avx512::Sort(items, spare, size, items, 2 * place_bits);
    Unpack(keys, size, items, spare, place_bits);
  }
#endif

  template <typename Item, int kDigits>
  void Radix(const Key* keys, int32_t size, uint64_t range, int place_bits, int digit_bits) {
    const int shift = LeaveOnly(kDigits * digit_bits, range);
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
    Unpack(keys, size, from, to, place_bits);
  }

  // The places of sorted items, into a buffer that they no longer need.
  template <typename Item>
  void Unpack(const Key* keys, int32_t size, Item* sorted, Item* spare, int place_bits) {
    const Item place_mask = (Item{1} << place_bits) - 1;
    order_ = reinterpret_cast<int32_t*>(spare);
    spare_ = reinterpret_cast<int32_t*>(sorted);
    for (int32_t i = 0; i < size; ++i) order_[i] = static_cast<int32_t>(sorted[i] & place_mask);
    if (tells_all_) return;
    const auto is_equal = [&](int32_t i, int32_t begin) { return (sorted[i] ^ sorted[begin]) <= place_mask; };
    for (int32_t i = 1; i < size;) {
      const int32_t end = std::min(size, i + 64);
      int any = 0;  // most blocks have none
      for (int32_t j = i; j < end; ++j) any |= is_equal(j, j - 1);
      if (any == 0) i = end;
      for (; i < end; ++i) {
        if (!is_equal(i, i - 1)) continue;
        const int32_t begin = i - 1;
        while (i < size && is_equal(i, begin)) ++i;
        Insert(keys, begin, i);
      }
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
  int common_bits_ = 0;     // the low bits in which no keys differ
  bool tells_all_ = false;  // whether the remaining bits distinguish all different keys
  Buffer first_, second_;
  int32_t *order_ = nullptr, *spare_ = nullptr;
};

}  // namespace optperm

#endif  // OPTPERM_KEY_SORTER_H_
