// Instructions of AVX-512 (and VBMI2: Intel since Ice Lake, AMD since Zen 4) that compilers do not find by themselves.
// Each function has a portable counterpart with the same results, next to its caller.
#ifndef OPTPERM_AVX512_H_
#define OPTPERM_AVX512_H_

#include <algorithm>
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__) && (defined(__GNUC__) || defined(__clang__))
#define OPTPERM_HAS_AVX512 1
#include <immintrin.h>
#else
#define OPTPERM_HAS_AVX512 0
#endif

namespace optperm {

#if OPTPERM_HAS_AVX512

// Marks functions that only these processors run. The mark does not apply to lambdas inside them.
#define OPTPERM_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,bmi,bmi2,lzcnt,popcnt")))

inline bool ProcessorHasAvx512() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("bmi2");
}

// Tests set it to false.
inline bool use_avx512 = ProcessorHasAvx512();

namespace avx512 {

constexpr int32_t kLanes = 16;  // of 32 bits

// A mask of the first lanes of a register.
OPTPERM_AVX512 inline __mmask16 First(int32_t count) {
  return static_cast<__mmask16>(_bzhi_u32(0xFFFF, std::min(count, kLanes)));
}

// ---- Sorting 32-bit items: partitions until the items fit into registers, then Batcher's bitonic network.

// These forms name all lanes: GCC 12 warns about undefined values in the plain forms.
OPTPERM_AVX512 inline __m512i Min(__m512i a, __m512i b) { return _mm512_maskz_min_epu32(0xFFFF, a, b); }
OPTPERM_AVX512 inline __m512i Max(__m512i a, __m512i b) { return _mm512_maskz_max_epu32(0xFFFF, a, b); }

// Lane i ^ kXor of each lane i.
template <int kXor>
OPTPERM_AVX512 inline __m512i Partner(__m512i v) {
  const __m512i lanes = _mm512_setr_epi32(0 ^ kXor, 1 ^ kXor, 2 ^ kXor, 3 ^ kXor, 4 ^ kXor, 5 ^ kXor, 6 ^ kXor,
                                          7 ^ kXor, 8 ^ kXor, 9 ^ kXor, 10 ^ kXor, 11 ^ kXor, 12 ^ kXor,
                                          13 ^ kXor, 14 ^ kXor, 15 ^ kXor);
  return _mm512_maskz_permutexvar_epi32(0xFFFF, lanes, v);
}

// Compares all items at once, item i with item i ^ kXor, and moves the smaller item to the lower index. Item i is in
// lane i / count of register i % count.
template <int count, int kXor>
OPTPERM_AVX512 inline void Exchange(__m512i* v) {
  constexpr int kRegister = kXor % count, kLane = kXor / count;
  if constexpr (kLane == 0) {
    for (int i = 0; i < count; ++i) {
      if (i > (i ^ kRegister)) continue;
      const __m512i a = v[i], b = v[i ^ kRegister];
      v[i] = Min(a, b);
      v[i ^ kRegister] = Max(a, b);
    }
  } else {
    constexpr __mmask16 kUpper = kLane >= 8 ? 0xFF00 : kLane >= 4 ? 0xF0F0 : kLane >= 2 ? 0xCCCC : 0xAAAA;
    __m512i other[count];
    for (int i = 0; i < count; ++i) other[i] = Partner<kLane>(v[i ^ kRegister]);
    for (int i = 0; i < count; ++i) v[i] = _mm512_mask_max_epu32(Min(v[i], other[i]), kUpper, v[i], other[i]);
  }
}

// Sorts each `length` items in a row that are bitonic: they rise and then fall, or begin anywhere on that round.
template <int count, int length>
OPTPERM_AVX512 inline void SortBitonic(__m512i* v) {
  if constexpr (length > 1) {
    Exchange<count, length / 2>(v);
    SortBitonic<count, length / 2>(v);
  }
}

// Batcher's network: sorts each `length` items in a row. Its two sorted halves are compared from the outside in,
// which leaves two bitonic ones, the smaller items in the first.
template <int count, int length>
OPTPERM_AVX512 inline void SortRegisters(__m512i* v) {
  if constexpr (length > 1) {
    SortRegisters<count, length / 2>(v);
    Exchange<count, length - 1>(v);
    SortBitonic<count, length / 2>(v);
  }
}

// The registers one after the other as one sequence: its first half and its second one, item by item in turns.
template <int count>
OPTPERM_AVX512 inline void Riffle(__m512i* v) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  __m512i riffled[count];
  for (int i = 0; i < count / 2; ++i) {
    riffled[2 * i] = _mm512_permutex2var_epi32(v[i], low, v[i + count / 2]);
    riffled[2 * i + 1] = _mm512_permutex2var_epi32(v[i], high, v[i + count / 2]);
  }
  for (int i = 0; i < count; ++i) v[i] = riffled[i];
}

// For at most 16 * count items.
template <int count>
OPTPERM_AVX512 inline void SortFew(const uint32_t* from, int32_t size, uint32_t* sorted) {
  __m512i v[count];
  __mmask16 inside[count];
  for (int i = 0; i < count; ++i) {
    inside[i] = First(std::max(size - i * kLanes, 0));
    v[i] = _mm512_mask_loadu_epi32(_mm512_set1_epi32(-1), inside[i], from + i * kLanes);
  }
  SortRegisters<count, count * kLanes>(v);
  for (int riffles = 1; riffles < count; riffles *= 2) Riffle<count>(v);  // so that items are in order of their indices
  for (int i = 0; i < count; ++i) _mm512_mask_storeu_epi32(sorted + i * kLanes, inside[i], v[i]);
}

// Copies items below the pivot to the front, and the other items to the back. Returns the number of items below it.
OPTPERM_AVX512 inline int32_t Partition(const uint32_t* from, int32_t size, uint32_t pivot, uint32_t* to) {
  const __m512i pivots = _mm512_set1_epi32(static_cast<int32_t>(pivot));
  int32_t front = 0, back = size;
  for (int32_t i = 0; i < size; i += kLanes) {
    const __mmask16 inside = First(size - i);
    const __m512i v = _mm512_maskz_loadu_epi32(inside, from + i);
    const __mmask16 below = _mm512_mask_cmplt_epu32_mask(inside, v, pivots), above = inside ^ below;
    const int32_t num_below = __builtin_popcount(below), num_above = __builtin_popcount(above);
    back -= num_above;
    _mm512_mask_storeu_epi32(to + front, First(num_below), _mm512_maskz_compress_epi32(below, v));
    _mm512_mask_storeu_epi32(to + back, First(num_above), _mm512_maskz_compress_epi32(above, v));
    front += num_below;
  }
  return front;
}

// Sorts items into `sorted`, which may be `from` or `spare`; both are used up.
OPTPERM_AVX512 inline void Sort(uint32_t* from, uint32_t* spare, int32_t size, uint32_t* sorted,
                                int32_t most_partitions) {
  if (size <= 2 * kLanes) return SortFew<2>(from, size, sorted);
  if (size <= 4 * kLanes) return SortFew<4>(from, size, sorted);
  if (size <= 8 * kLanes) return SortFew<8>(from, size, sorted);
  if (most_partitions == 0) {
    std::sort(from, from + size);
    std::copy_n(from, size, sorted);
    return;
  }
  // The pivot is the median of a sample.
  uint32_t sample[kLanes];
  for (int32_t i = 0; i < kLanes; ++i) sample[i] = from[size / kLanes * i];
  __m512i v = _mm512_loadu_si512(sample);
  SortRegisters<1, kLanes>(&v);
  _mm512_storeu_si512(sample, v);
  const int32_t below = Partition(from, size, sample[kLanes / 2], spare);
  Sort(spare, from, below, sorted, most_partitions - 1);
  Sort(spare + below, from + below, size - below, sorted + below, most_partitions - 1);
}

// ---- The search: operations on words of 64 places.

alignas(64) constexpr uint8_t kPlaces[64] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

// The sign bits of keys, 64 in a word.
OPTPERM_AVX512 inline void Signs(const uint32_t* keys, int32_t size, uint64_t* words) {
  std::fill_n(words, (size + 63) / 64, 0);
  for (int32_t i = 0; i < size; i += kLanes) {
    const __m512i some = _mm512_maskz_loadu_epi32(First(size - i), keys + i);
    words[i >> 6] |= uint64_t{_mm512_movepi32_mask(some)} << (i & 63);
  }
}

OPTPERM_AVX512 inline void Signs(const uint64_t* keys, int32_t size, uint64_t* words) {
  std::fill_n(words, (size + 63) / 64, 0);
  for (int32_t i = 0; i < size; i += kLanes / 2) {
    const __m512i some = _mm512_maskz_loadu_epi64(static_cast<__mmask8>(First(size - i)), keys + i);
    words[i >> 6] |= uint64_t{_mm512_movepi64_mask(some)} << (i & 63);
  }
}

// Writes the alive places to a buffer with room for one more register. Returns their number.
OPTPERM_AVX512 inline int32_t Alive(const int32_t* places, int32_t size, const uint64_t* alive, uint32_t* found) {
  const __m512i ones = _mm512_set1_epi32(1), low_bits = _mm512_set1_epi32(31);
  int32_t count = 0;
  for (int32_t i = 0; i < size; i += kLanes) {
    const __mmask16 inside = First(size - i);
    const __m512i place = _mm512_maskz_loadu_epi32(inside, places + i);
    const __m512i half_word = _mm512_maskz_srli_epi32(inside, place, 5);
    const __m512i bits = _mm512_mask_i32gather_epi32(ones, inside, half_word, alive, 4);
    const __m512i bit = _mm512_maskz_sllv_epi32(inside, ones, _mm512_and_si512(place, low_bits));
    const __mmask16 is_alive = _mm512_mask_test_epi32_mask(inside, bits, bit);
    _mm512_storeu_si512(found + count, _mm512_maskz_compress_epi32(is_alive, place));
    count += __builtin_popcount(is_alive);
  }
  return count;
}

// Each entry of a word takes its own.
OPTPERM_AVX512 inline void Stay(uint8_t* taken) { _mm512_storeu_si512(taken, _mm512_load_si512(kPlaces)); }

// The entries of a word that `to` marks take those that `from` marks, one after the other.
OPTPERM_AVX512 inline void Move(uint8_t* taken, uint64_t from, uint64_t to) {
  const __m512i places = _mm512_maskz_compress_epi8(from, _mm512_load_si512(kPlaces));
  _mm512_storeu_si512(taken, _mm512_mask_expand_epi8(_mm512_loadu_si512(taken), to, places));
}

// The entries of a cycle but its end take the next ones, which are all but the source; the end takes the source.
OPTPERM_AVX512 inline void MoveCycle(uint8_t* taken, uint64_t cycle, uint64_t end, int source) {
  const uint64_t others = cycle & ~(uint64_t{1} << source);
  const __m512i next = _mm512_maskz_compress_epi8(others, _mm512_load_si512(kPlaces));
  const __m512i moved = _mm512_mask_expand_epi8(_mm512_loadu_si512(taken), cycle ^ end, next);
  _mm512_storeu_si512(taken, _mm512_mask_set1_epi8(moved, end, static_cast<char>(source)));
}

// take[i] = the place in its word that entry i takes, as a place among all, but for those marked in `far`.
OPTPERM_AVX512 inline void Unpack(const uint8_t* taken, const uint64_t* far, int32_t size, int32_t* take) {
  for (int32_t i = 0; i < size; i += kLanes) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(taken + i));
    const __m512i places = _mm512_add_epi32(_mm512_maskz_cvtepu8_epi32(0xFFFF, bytes), _mm512_set1_epi32(i & ~63));
    const uint32_t is_far = static_cast<uint32_t>(far[i >> 6] >> (i & 63));
    _mm512_mask_storeu_epi32(take + i, static_cast<__mmask16>(First(size - i) & ~is_far), places);
  }
}

}  // namespace avx512

#else
constexpr bool use_avx512 = false;
#endif

}  // namespace optperm

#endif  // OPTPERM_AVX512_H_
