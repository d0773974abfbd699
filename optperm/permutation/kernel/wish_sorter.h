// Sorting a subset by recommendation.
#ifndef OPTPERM_WISH_SORTER_H_
#define OPTPERM_WISH_SORTER_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>

#include "entries.h"

namespace optperm {

// Sorts entries by the size of their wish, ties by place: by radix on as many leading bits as a 32- or
// 64-bit item holds beside the place, and by insertion where those bits are equal.
template <typename T>
class WishSorter {
 public:
  // Places 0, ..., entries.size - 1 in ascending order.
  const int32_t* Sort(const Entries<T>& entries) {
    const int32_t size = entries.size;
    if (size <= kFew) {
      order_ = first_.Reserve<int32_t>(size);
      spare_ = second_.Reserve<int32_t>(size);
      Count(entries.wish, size);
      return order_;
    }
    int place_bits = 1;
    while ((int64_t{1} << place_bits) < size) ++place_bits;
    if (place_bits <= 14) {
      const int digit_bits = std::min(std::max(place_bits - 1, 4), (32 - place_bits) / 2);
      Radix<uint32_t, 2>(entries, place_bits, std::min(digit_bits, 10));
    } else {
      Radix<uint64_t, 3>(entries, place_bits, 11);
    }
    return order_;
  }

  // Room for an integer for each entry, which lasts as long as the order.
  int32_t* spare() { return spare_; }

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

    Item *from = first_.Reserve<Item>(size), *to = second_.Reserve<Item>(size);
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
    std::stable_sort(order_ + begin, order_ + end,
                     [&](int32_t a, int32_t b) { return Size(wish[a]) < Size(wish[b]); });
  }

  Buffer first_, second_;
  int32_t *order_ = nullptr, *spare_ = nullptr;
};

}  // namespace optperm

#endif  // OPTPERM_WISH_SORTER_H_
