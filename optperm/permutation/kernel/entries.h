// The entries of a weight vector, in the form that the search uses.
#ifndef OPTPERM_ENTRIES_H_
#define OPTPERM_ENTRIES_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

namespace optperm {

// Compiled for any x86-64 processor, for those of the last ten years, and for those with AVX-512; the loader
// chooses.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define OPTPERM_FOR_EACH_PROCESSOR \
  __attribute__((flatten, target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define OPTPERM_FOR_EACH_PROCESSOR
#endif

// Not inlined into the functions above: inlining takes long to compile, and saves no time in code that runs rarely.
#define OPTPERM_RARE __attribute__((noinline))

#define OPTPERM_INLINE __attribute__((always_inline)) inline

template <typename T>
using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

template <typename T>
constexpr Bits<T> kSignBit = Bits<T>{1} << (8 * sizeof(T) - 1);

template <typename T>
inline Bits<T> ToBits(T value) {
  Bits<T> bits;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

// A buffer that grows if necessary, and is reused.
class Buffer {
 public:
  template <typename Item>
  Item* Reserve(int64_t count) {
    const int64_t bytes = count * static_cast<int64_t>(sizeof(Item));
    if (size_ < bytes) {
      bytes_.reset();
      bytes_.reset(new std::byte[bytes]);
      size_ = bytes;
    }
    return reinterpret_cast<Item*>(bytes_.get());
  }

  void Release() {
    bytes_.reset();
    size_ = 0;
  }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  int64_t size_ = 0;
};

// The place of a weight, and its rank, which moves with the weight.
struct alignas(8) Home {
  int32_t location;
  int32_t rank;
};

// Entries of a weight vector in ascending order of weight, ties by location.
template <typename T>
struct Entries {
  int32_t size = 0;
  Home* home = nullptr;
  T* weight = nullptr;
  Bits<T>* wish = nullptr;  // the bits of the recommendation

  void Copy(int32_t i, const Entries& to, int32_t j) const {
    to.home[j] = home[i];
    to.weight[j] = weight[i];
    to.wish[j] = wish[i];
  }
};

}  // namespace optperm

#endif  // OPTPERM_ENTRIES_H_
