// What processors with AVX-512 (and VBMI2: Intel since Ice Lake, AMD since Zen 4) do better by instructions that
// no compiler finds by itself. Everything here has a portable counterpart with the same results beside its caller.
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

// Marks functions that only such processors run. Lambdas in them would not be marked.
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

// Sorting 32-bit items: by partitions down to what registers hold, and there by Batcher's bitonic network.
namespace network {

constexpr int32_t kRegisters = 8, kLanes = 16;

// With all lanes named: GCC 12 warns of the plain forms, in which it names something undefined.
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

// Compares all items at once, item i with item i ^ kXor: the smaller one becomes the one of the lower number. Item
// i is in lane i / count of register i % count.
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
    inside[i] = static_cast<__mmask16>(_bzhi_u32(0xFFFF, std::clamp(size - i * kLanes, 0, kLanes)));
    v[i] = _mm512_mask_loadu_epi32(_mm512_set1_epi32(-1), inside[i], from + i * kLanes);
  }
  SortRegisters<count, count * kLanes>(v);
  for (int riffles = 1; riffles < count; riffles *= 2) Riffle<count>(v);  // so that items stand by their numbers
  for (int i = 0; i < count; ++i) _mm512_mask_storeu_epi32(sorted + i * kLanes, inside[i], v[i]);
}

// Copies what is below the pivot to the front, and the rest to the back. Returns how many are below it.
OPTPERM_AVX512 inline int32_t Partition(const uint32_t* from, int32_t size, uint32_t pivot, uint32_t* to) {
  const __m512i pivots = _mm512_set1_epi32(static_cast<int32_t>(pivot));
  int32_t front = 0, back = size;
  for (int32_t i = 0; i < size; i += kLanes) {
    const uint32_t inside = _bzhi_u32(0xFFFF, std::min(size - i, kLanes));
    const __m512i v = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(inside), from + i);
    const uint32_t below = _mm512_mask_cmplt_epu32_mask(static_cast<__mmask16>(inside), v, pivots);
    const uint32_t above = inside & ~below;
    const int32_t num_below = __builtin_popcount(below), num_above = __builtin_popcount(above);
    back -= num_above;
    _mm512_mask_storeu_epi32(to + front, static_cast<__mmask16>(_bzhi_u32(0xFFFF, num_below)),
                             _mm512_maskz_compress_epi32(static_cast<__mmask16>(below), v));
    _mm512_mask_storeu_epi32(to + back, static_cast<__mmask16>(_bzhi_u32(0xFFFF, num_above)),
                             _mm512_maskz_compress_epi32(static_cast<__mmask16>(above), v));
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

}  // namespace network

#else
constexpr bool use_avx512 = false;
#endif

}  // namespace optperm

#endif  // OPTPERM_AVX512_H_
