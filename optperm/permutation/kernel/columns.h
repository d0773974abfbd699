// Copies of neighboring columns of a row-major matrix to separate buffers, and back.
#ifndef OPTPERM_COLUMNS_H_
#define OPTPERM_COLUMNS_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "threads.h"

namespace optperm {

#if defined(__clang__) || defined(__GNUC__)

// Four 32-bit values, transposed as blocks of four by four.
using Four = int32_t __attribute__((vector_size(16)));

#if defined(__clang__)
inline Four FirstHalves(Four a, Four b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline Four SecondHalves(Four a, Four b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
#else
inline Four FirstHalves(Four a, Four b) { return __builtin_shuffle(a, b, Four{0, 4, 1, 5}); }
inline Four SecondHalves(Four a, Four b) { return __builtin_shuffle(a, b, Four{2, 6, 3, 7}); }
#endif

// Transposes the block at `from`, whose lines are `from_stride` entries apart, to `to`.
inline void TransposeFour(const void* from, int64_t from_stride, void* to, int64_t to_stride) {
  Four a, b, c, d;
  const char* source = static_cast<const char*>(from);
  std::memcpy(&a, source, 16);
  std::memcpy(&b, source + 4 * from_stride, 16);
  std::memcpy(&c, source + 8 * from_stride, 16);
  std::memcpy(&d, source + 12 * from_stride, 16);
  const Four ac0 = FirstHalves(a, c), ac1 = SecondHalves(a, c);
  const Four bd0 = FirstHalves(b, d), bd1 = SecondHalves(b, d);
  a = FirstHalves(ac0, bd0);
  b = SecondHalves(ac0, bd0);
  c = FirstHalves(ac1, bd1);
  d = SecondHalves(ac1, bd1);
  char* target = static_cast<char*>(to);
  std::memcpy(target, &a, 16);
  std::memcpy(target + 4 * to_stride, &b, 16);
  std::memcpy(target + 8 * to_stride, &c, 16);
  std::memcpy(target + 12 * to_stride, &d, 16);
}

// Processors do not detect the pattern of lines that are far apart. Prefetches four lines, some lines after line i; the
// `width` entries of a line may be on two cache lines.
template <typename T>
void FetchAhead(const T* matrix, int64_t stride, int64_t i, int64_t lines, int64_t width) {
  constexpr int64_t kAhead = 16;
  for (int64_t line = i + kAhead; line < std::min(i + kAhead + 4, lines); ++line) {
    __builtin_prefetch(matrix + line * stride);
    __builtin_prefetch(matrix + line * stride + width - 1);
  }
}

constexpr bool kHasBlocks = true;
#else
inline void TransposeFour(const void*, int64_t, void*, int64_t) {}
inline void FetchAhead(const void*, int64_t, int64_t, int64_t, int64_t) {}
constexpr bool kHasBlocks = false;
#endif

// to[j * to_stride + i] = from[i * from_stride + j] for i < lines, j < width. Whole blocks come first, those of
// the shorter side together: tiles are as wide as the cache's lines.
template <typename T>
void Transpose(const T* from, int64_t from_stride, int64_t lines, int64_t width, T* to, int64_t to_stride) {
  constexpr bool kBlocks = kHasBlocks && sizeof(T) == 4;
  const bool has_blocks = kBlocks && lines >= 4 && width >= 4;
  const int64_t block_lines = has_blocks ? lines / 4 * 4 : 0, block_width = has_blocks ? width / 4 * 4 : 0;
  const auto transpose_four = [&](int64_t i, int64_t j) {
    TransposeFour(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
  };
  if (lines > width) {
    for (int64_t i = 0; i < block_lines; i += 4) {
      FetchAhead(from, from_stride, i, lines, width);
      for (int64_t j = 0; j < block_width; j += 4) transpose_four(i, j);
    }
  } else {
    for (int64_t j = 0; j < block_width; j += 4) {
      FetchAhead(to, to_stride, j, width, lines);
      for (int64_t i = 0; i < block_lines; i += 4) transpose_four(i, j);
    }
  }
  for (int64_t i = 0; i < lines; ++i) {
    for (int64_t j = i < block_lines ? block_width : 0; j < width; ++j) {
      to[j * to_stride + i] = from[i * from_stride + j];
    }
  }
}

// The number of neighboring columns in a tile of a thread: at most one cache line of 32-bit entries, so that reading
// touches each line once. Each thread gets at least two tiles, and, with enough columns, whole blocks of four.
inline int64_t TileWidth(int64_t columns, const Threads& threads) {
  const int64_t tiles = 2 * threads.count;
  const int64_t width = std::clamp<int64_t>((columns + tiles - 1) / tiles, 1, 16);
  return width > 4 ? (width + 3) / 4 * 4 : width;
}

}  // namespace optperm

#endif  // OPTPERM_COLUMNS_H_
