// The kernel alone, without Python or XLA, compared with a slow implementation of the method's description: neighbor
// lists, and a depth-first search through them.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "avx512.h"
#include "columns.h"
#include "cycles.h"
#include "places.h"
#include "reorder.h"

namespace {

int64_t checks = 0;

void Check(bool holds, const std::string& what) {
  ++checks;
  if (holds) return;
  std::printf("FAILED: %s\n", what.c_str());
  std::exit(1);
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// A problem that owns its memory.
template <typename T>
struct Case {
  int64_t batch, rows, n;
  bool drop_remainder;
  std::vector<T> recommendation, weights, new_weights;
  std::vector<int32_t> ranks, new_ranks, partition_size, moved;
  std::vector<uint32_t> seeds;
  std::vector<float> aggressiveness;

  Case(int64_t batch, int64_t rows, int64_t n)
      : batch(batch),
        rows(rows),
        n(n),
        drop_remainder(false),
        recommendation(batch * n * rows),
        weights(batch * n * rows),
        new_weights(batch * n * rows),
        ranks(batch * n * rows),
        new_ranks(batch * n * rows),
        partition_size(batch * rows, static_cast<int32_t>(n)),
        moved(batch * rows),
        seeds(2 * batch * rows),
        aggressiveness(batch * rows, 0.1f) {}

  int64_t At(int64_t b, int64_t i, int64_t row) const { return (b * n + i) * rows + row; }

  void Rank() {
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t row = 0; row < rows; ++row) {
        std::vector<int32_t> order(n);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t j) {
          const T x = weights[At(b, i, row)], y = weights[At(b, j, row)];
          return !std::isnan(x) && (std::isnan(y) || x < y);
        });
        for (int32_t k = 0; k < n; ++k) ranks[At(b, order[k], row)] = k;
      }
    }
  }

  bool Run(const optperm::Threads& threads = optperm::OwnThreads()) {
    const optperm::Problem<T> problem{batch, rows, n, drop_remainder, recommendation.data(), weights.data(),
                                      ranks.data(), seeds.data(), aggressiveness.data(),
                                      partition_size.data(), new_weights.data(), new_ranks.data(),
                                      moved.data()};
    return optperm::PermuteRows(problem, threads);
  }
};

uint64_t SplitMix64(uint64_t start, uint64_t index) {
  uint64_t z = start + index * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

std::vector<int> SearchCycles(const std::vector<double>& w, const std::vector<double>& m, double epsilon) {
  const int s = static_cast<int>(w.size());
  std::vector<std::vector<int>> neighbors(s);
  for (int i = 0; i < s; ++i) {
    if (m[i] < 0) {
      for (int j = i + 1; j < s; ++j) {
        if (w[j] < w[i] + epsilon) neighbors[i].push_back(j);
      }
    } else {
      for (int j = i - 1; j >= 0; --j) {
        if (w[j] < w[i] && w[j] >= w[i] - epsilon) neighbors[i].push_back(j);
      }
    }
  }
  std::vector<int> sources(s), take(s);
  std::iota(sources.begin(), sources.end(), 0);
  std::iota(take.begin(), take.end(), 0);
  std::sort(sources.begin(), sources.end(), [&](int a, int b) {
    return std::fabs(m[a]) != std::fabs(m[b]) ? std::fabs(m[a]) > std::fabs(m[b]) : a > b;
  });
  std::vector<char> memorized(s);
  for (int source : sources) {
    if (memorized[source]) continue;
    std::vector<int> path{source};
    std::vector<size_t> cursors{0};
    std::vector<char> visited(s);
    visited[source] = true;
    bool found = false;
    while (!path.empty() && !found) {
      const std::vector<int>& options = neighbors[path.back()];
      bool deeper = false;
      while (cursors.back() < options.size() && !deeper && !found) {
        const int next = options[cursors.back()++];
        if (next == source) {
          found = true;
        } else if (!memorized[next] && !visited[next]) {
          visited[next] = true;
          path.push_back(next);
          cursors.push_back(0);
          deeper = true;
        }
      }
      if (!deeper && !found) {
        path.pop_back();
        cursors.pop_back();
      }
    }
    if (!found) path = {source};
    for (size_t i = 0; i < path.size(); ++i) {
      take[path[i]] = path[(i + 1) % path.size()];
      memorized[path[i]] = true;
    }
  }
  return take;
}

template <typename T>
void Expect(const Case<T>& c, std::vector<T>* weights, std::vector<int32_t>* ranks, std::vector<int32_t>* moved) {
  *weights = c.weights;
  *ranks = c.ranks;
  moved->assign(c.batch * c.rows, 0);
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t row = 0; row < c.rows; ++row) {
      const int64_t which = b * c.rows + row;
      const int64_t size = std::min<int64_t>(c.partition_size[which], c.n);
      std::vector<int64_t> labels(c.n);
      const uint64_t seed = uint64_t{c.seeds[2 * which + 1]} << 32 | c.seeds[2 * which];
      for (int64_t i = 0; i < c.n; ++i) {
        // floor(draw * (i + 1) / 2^64), in parts of 32 bits
        const uint64_t draw = SplitMix64(seed, i + 1), bound = i + 1;
        const uint64_t pick =
            size == c.n ? i : ((draw >> 32) * bound + ((draw & 0xFFFFFFFFu) * bound >> 32)) >> 32;
        labels[i] = labels[pick];
        labels[pick] = i / size;
      }
      std::vector<int64_t> by_rank(c.n);
      double low = std::numeric_limits<double>::infinity(), high = -low;
      for (int64_t i = 0; i < c.n; ++i) {
        by_rank[c.ranks[c.At(b, i, row)]] = i;
        const double w = c.weights[c.At(b, i, row)];
        if (std::isfinite(w)) {
          low = std::min(low, w);
          high = std::max(high, w);
        }
      }
      for (int64_t label = 0; label <= (c.n - 1) / size; ++label) {
        if (c.drop_remainder && (label + 1) * size > c.n) continue;
        std::vector<int64_t> subset;
        for (int64_t r = 0; r < c.n; ++r) {
          const int64_t at = c.At(b, by_rank[r], row);
          const bool takes_part = std::isfinite(c.weights[at]) && std::isfinite(c.recommendation[at]) &&
                                  c.recommendation[at] != 0;
          if (labels[r] == label && takes_part) subset.push_back(by_rank[r]);
        }
        if (subset.size() < 2) continue;
        std::sort(subset.begin(), subset.end(), [&](int64_t i, int64_t j) {
          const T x = c.weights[c.At(b, i, row)], y = c.weights[c.At(b, j, row)];
          return x != y ? x < y : i < j;
        });
        std::vector<double> w, m;
        for (int64_t i : subset) {
          w.push_back(c.weights[c.At(b, i, row)]);
          m.push_back(c.recommendation[c.At(b, i, row)]);
        }
        const double epsilon =
            (high - low) * (static_cast<double>(c.aggressiveness[which]) + 1.0 / static_cast<double>(w.size()));
        const std::vector<int> take = SearchCycles(w, m, epsilon);
        for (size_t k = 0; k < subset.size(); ++k) {
          const int64_t to = c.At(b, subset[k], row), from = c.At(b, subset[take[k]], row);
          (*weights)[to] = c.weights[from];
          (*ranks)[to] = c.ranks[from];
          (*moved)[which] += to != from;
        }
      }
    }
  }
}

template <typename T>
void Fill(Case<T>* c, std::mt19937_64* rng) {
  const auto draw = [&](int below) { return static_cast<int>((*rng)() % below); };
  std::normal_distribution<double> normal;
  const int of_weights = draw(9), of_wishes = draw(8), levels = 1 + draw(20);
  const T infinity = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
  for (T& w : c->weights) {
    w = static_cast<T>(normal(*rng));
    if (of_weights == 1) w = static_cast<T>(std::round(w * levels));
    if (of_weights == 2) w = draw(2) ? w : (draw(2) ? T{0} : -T{0});
    if (of_weights == 3) w = 1;
    if (of_weights == 4 && draw(8) == 0) w = draw(3) == 0 ? nan : (draw(2) ? infinity : -infinity);
    if (of_weights == 5) w *= std::numeric_limits<T>::denorm_min() * 1000;
    if (of_weights >= 7) w = static_cast<T>(std::round(w * levels * (of_weights == 7 ? 0.3 : 5)));  // few or many ties
    if (of_weights == 6) w = static_cast<T>(1e6) + static_cast<T>(draw(64)) * static_cast<T>(0.0625);
  }
  for (size_t i = 0; i < c->recommendation.size(); ++i) {
    T& m = c->recommendation[i];
    m = static_cast<T>(normal(*rng));
    if (of_wishes == 1) m = draw(2) ? T{0} : m;
    if (of_wishes == 2 && draw(8) == 0) m = draw(3) == 0 ? nan : (draw(2) ? infinity : -infinity);
    if (of_wishes == 3) m = draw(2) ? T{1} : T{-1};
    if (of_wishes == 4) m = std::fabs(m);
    if (of_wishes == 5) m = -std::fabs(m);
    if (of_wishes == 6) m = static_cast<T>(m * std::pow(10.0, draw(60) - 30));
    if (of_wishes == 7) m = c->weights[i] < 0 ? -std::fabs(m) : std::fabs(m);
  }
  const float choices[] = {0.0f, 0.01f, 0.1f, 0.25f, 0.5f, 3.0f, 1e30f};
  for (float& a : c->aggressiveness) a = choices[draw(7)];
  for (int32_t& p : c->partition_size) p = draw(3) == 0 ? static_cast<int32_t>(c->n) : 1 + draw(c->n + 4);
  for (uint32_t& s : c->seeds) s = static_cast<uint32_t>((*rng)());
  c->drop_remainder = draw(2);
}

template <typename T>
void TestAgainstDescription(const char* type) {
  const int64_t sizes[] = {1, 2, 3, 9, 24, 40, 63, 64, 65, 100, 127, 128, 129, 130, 200, 257, 400};
  for (uint64_t seed = 0; seed < SEEDS; ++seed) {
    std::mt19937_64 rng(seed);
    Case<T> c(1 + rng() % 2, 1 + rng() % 20, sizes[rng() % 17]);
    Fill(&c, &rng);
    c.Rank();
    for (int step = 0; step < 3; ++step) {
      const std::string what = std::string(type) + " case " + std::to_string(seed) + " step " + std::to_string(step);
      Check(c.Run(), what + ": ranks refused");
      std::vector<T> weights;
      std::vector<int32_t> ranks, moved;
      Expect(c, &weights, &ranks, &moved);
      Check(SameBits(c.new_weights, weights), what + ": weights differ");
      Check(SameBits(c.new_ranks, ranks), what + ": ranks differ");
      Check(c.moved == moved, what + ": counts differ");
      c.weights = c.new_weights;
      c.ranks = c.new_ranks;
      std::shuffle(c.recommendation.begin(), c.recommendation.end(), rng);
    }
  }
  std::printf("the method's description, %s: ok\n", type);
}

// Too long for the slow implementation: each move has the right direction, and is not too long.
template <typename T>
void TestLongVector(const char* type, int64_t n, int kind) {
  std::mt19937_64 rng(kind);
  Case<T> c(1, 1, n);
  std::normal_distribution<double> normal;
  for (T& w : c.weights) w = static_cast<T>(normal(rng));
  if (kind == 1) {
    for (T& w : c.weights) w = static_cast<T>(std::round(w * 8));
  }
  for (T& m : c.recommendation) m = static_cast<T>(normal(rng) * (kind == 2 ? std::pow(10.0, normal(rng) * 8) : 1));
  c.Rank();
  Check(c.Run(), "a long vector's ranks refused");
  std::vector<T> before = c.weights, after = c.new_weights;
  const auto range = std::minmax_element(before.begin(), before.end());
  const double epsilon = (static_cast<double>(*range.second) - static_cast<double>(*range.first)) *
                         (static_cast<double>(c.aggressiveness[0]) + 1.0 / static_cast<double>(n));
  int64_t moved = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double w = before[i], v = after[i];
    const bool stays = c.ranks[i] == c.new_ranks[i];
    moved += !stays;
    const bool allowed = c.recommendation[i] < 0 ? v >= w && v < w + epsilon : v < w && v >= w - epsilon;
    Check(stays ? v == w : allowed, "a long vector's weight moved where it may not");
  }
  Check(moved == c.moved[0] && moved > n / 2, "a long vector's count");
  const auto by_bits = [](T a, T b) { return std::memcmp(&a, &b, sizeof(T)) < 0; };
  std::sort(before.begin(), before.end(), by_bits);
  std::sort(after.begin(), after.end(), by_bits);
  Check(SameBits(before, after), "a long vector's values");
  std::printf("a vector of %lld, %s, kind %d: ok\n", static_cast<long long>(n), type, kind);
}

// Several threads or one thread for each weight vector give the same bits.
template <typename T>
void TestThreads(const char* type) {
  constexpr int64_t n = 40000;
  for (int64_t rows : {1, 3}) {
    for (int kind = 0; kind < 3; ++kind) {
      std::mt19937_64 rng(kind + rows);
      Case<T> c(1, rows, n);
      Fill(&c, &rng);
      c.Rank();
      // A tenth of the entries, all of them, or a few a subset.
      std::fill(c.partition_size.begin(), c.partition_size.end(), kind == 0 ? n / 10 : kind == 1 ? n : 11);
      Check(c.Run(optperm::Threads{}), "ranks refused by one thread");
      const std::vector<T> weights = c.new_weights;
      const std::vector<int32_t> ranks = c.new_ranks, moved = c.moved;
      Check(c.Run(), "ranks refused by several threads");
      Check(SameBits(c.new_weights, weights) && SameBits(c.new_ranks, ranks) && c.moved == moved,
            "one thread and several, kind " + std::to_string(kind));
      c.ranks[c.At(0, 7, 0)] = c.ranks[c.At(0, n - 7, 0)];
      Check(!c.Run(), "damaged ranks accepted by several threads");
    }
  }
  std::printf("several threads, %s: ok\n", type);
}

void TestDamagedRanks() {
  for (int kind = 0; kind < 4; ++kind) {
    Case<float> c(1, 3, 70);
    std::iota(c.weights.begin(), c.weights.end(), 0.0f);
    std::fill(c.recommendation.begin(), c.recommendation.end(), 1.0f);
    c.Rank();
    const int32_t bad[] = {c.ranks[c.At(0, 3, 1)], 70, -1, std::numeric_limits<int32_t>::min()};
    c.ranks[c.At(0, 5, 1)] = bad[kind];
    Check(!c.Run(), "damaged ranks accepted, kind " + std::to_string(kind));
  }
  std::printf("damaged ranks: ok\n");
}

void TestPlaces() {
  for (int32_t size : {1, 63, 64, 65, 129, 5000, 300000}) {
    std::mt19937_64 rng(size);
    optperm::Places places;
    places.Reset(size);
    std::set<int32_t> members[2];
    for (int32_t i = 0; i < size; i += 64) {
      const int32_t length = std::min(64, size - i);
      places.alive()[i / 64] = ~uint64_t{0} >> (64 - length);
      places.rising()[i / 64] = rng();
      places.tied()[i / 64] = rng() % 3 == 0 ? ~uint64_t{0} : rng();
      if (i == 0) places.tied()[0] &= ~uint64_t{1};
      if (length < 64) places.tied()[i / 64] &= (uint64_t{1} << length) - 1;
      for (int32_t j = i; j < i + length; ++j) members[places.Rises(j)].insert(j);
    }
    places.Summarize(true);
    for (int step = 0; step < 3000; ++step) {
      const int32_t place = static_cast<int32_t>(rng() % size);
      const int kind = places.Rises(place);
      if (step % 3 == 0) {
        // Whole stretches, so that words and their summaries become empty.
        const int32_t end = std::min(size, place + 1 + static_cast<int32_t>(rng() % (1 + size / 50)));
        for (int32_t i = place; i < end; ++i) {
          places.Remove(i);
          members[places.Rises(i)].erase(i);
        }
      } else if (step % 17 == 1) {
        // Some neighbors in its word, of both kinds.
        const int32_t base = place & ~63, length = std::min(64, size - base);
        const uint64_t bits = (rng() | uint64_t{1} << (place & 63)) & ~uint64_t{0} >> (64 - length);
        places.Restore(place >> 6, bits);
        for (int32_t i = 0; i < length; ++i) {
          if (bits >> i & 1) members[places.Rises(base + i)].insert(base + i);
        }
      }
      int32_t nearest_up = -1, nearest_down = -1;
      for (int k = 0; k < 2; ++k) {
        const auto up = members[k].lower_bound(place);
        const int32_t above = up == members[k].end() ? -1 : *up;
        auto down = members[k].upper_bound(place);
        const int32_t below = down == members[k].begin() ? -1 : *--down;
        Check(places.Up(k, place) == above, "Places::Up");
        Check(places.Down(k, place) == below, "Places::Down");
        if (above >= 0 && (nearest_up < 0 || above < nearest_up)) nearest_up = above;
        nearest_down = std::max(nearest_down, below);
      }
      Check(places.AnyUp(place) == nearest_up && places.AnyDown(place) == nearest_down, "Places::Any");
      Check(places.IsAlive(place) == (members[kind].count(place) > 0), "Places::IsAlive");
      const auto is_tied = [&](int32_t i) { return i < size && (places.tied()[i / 64] >> (i % 64) & 1) != 0; };
      int32_t first = place, last = place;
      while (is_tied(first)) --first;
      while (is_tied(last + 1)) ++last;
      Check(places.FirstTied(place) == first, "Places::FirstTied");
      Check(places.LastTied(place) == last, "Places::LastTied");
    }
    Check(places.Down(0, -1) == -1 && places.Up(0, size) == -1, "beyond the ends");
  }
  std::printf("places: ok\n");
}

template <typename T>
void TestTranspose() {
  for (int64_t lines : {1, 3, 4, 9, 16, 33}) {
    for (int64_t width : {1, 2, 4, 7, 12, 16}) {
      std::vector<T> from(lines * (width + 3)), to(width * (lines + 5), T{-1});
      std::iota(from.begin(), from.end(), T{0});
      optperm::Transpose(from.data(), width + 3, lines, width, to.data(), lines + 5);
      for (int64_t i = 0; i < lines + 5; ++i) {
        for (int64_t j = 0; j < width; ++j) {
          const T expected = i < lines ? from[i * (width + 3) + j] : T{-1};
          Check(to[j * (lines + 5) + i] == expected, "Transpose");
        }
      }
    }
  }
}

// A stable sort of the keys, and the inverse of the ranks.
template <typename Key>
void TestReorder(const char* type) {
  for (int64_t n : {1, 2, 100, 128, 129, 1000, 5000, 40000}) {
    for (int kind = 0; kind < 4; ++kind) {
      std::mt19937_64 rng(n + kind);
      const int64_t batch = n < 5000 ? 2 : 1, rows = n < 5000 ? 21 : 3;
      std::vector<Key> keys(batch * n * rows);
      std::vector<int32_t> ranks(keys.size()), new_ranks(keys.size()), sources(keys.size());
      for (Key& key : keys) {
        key = static_cast<Key>(rng());
        if (kind == 1) key = static_cast<Key>(rng() % 5) - 2;
        if (kind == 2) key = rng() % 2 ? std::numeric_limits<Key>::max() : std::numeric_limits<Key>::min();
        if (kind == 3) key >>= 12;
      }
      const auto at = [&](int64_t b, int64_t i, int64_t row) { return (b * n + i) * rows + row; };
      std::vector<int32_t> order(n), old(n);
      const auto shuffle = [&] {
        std::iota(old.begin(), old.end(), 0);
        std::shuffle(old.begin(), old.end(), rng);
      };
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t row = 0; row < rows; ++row) {
          shuffle();
          for (int64_t i = 0; i < n; ++i) ranks[at(b, i, row)] = old[i];
        }
      }
      const optperm::ReorderProblem<Key> problem{batch,        rows,         n,
                                                 keys.data(),  ranks.data(), new_ranks.data(),
                                                 sources.data()};
      Check(optperm::ReorderRows(problem, optperm::OwnThreads()), "reorder: ranks refused");
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t row = 0; row < rows; ++row) {
          std::iota(order.begin(), order.end(), 0);
          std::stable_sort(order.begin(), order.end(),
                           [&](int32_t i, int32_t j) { return keys[at(b, i, row)] < keys[at(b, j, row)]; });
          bool right = true;
          for (int32_t k = 0; k < n; ++k) {
            const int64_t place = at(b, order[k], row);
            right &= new_ranks[place] == k && ranks[at(b, sources[place], row)] == k;
          }
          Check(right, std::string("reorder: a rank or a source, ") + type);
        }
      }
      if (n == 1) continue;
      ranks[at(0, 0, 0)] = ranks[at(0, n - 1, 0)];
      Check(!optperm::ReorderRows(problem, optperm::OwnThreads()), "reorder: a rank that stands twice");
      ranks[at(0, 0, 0)] = -1;
      Check(!optperm::ReorderRows(problem, optperm::OwnThreads()), "reorder: a rank below 0");
    }
  }
  std::printf("reordering by %s: ok\n", type);
}

#if OPTPERM_HAS_AVX512
// Of each size that partitions leave, and with all partitions used up.
void TestNetwork() {
  std::mt19937_64 rng(0);
  for (int32_t size = 1; size < 700; ++size) {
    for (int most_partitions : {0, 1, 30}) {
      std::vector<uint32_t> items(size), spare(size), sorted(size);
      for (uint32_t& item : items) item = static_cast<uint32_t>(rng()) | (rng() % 64 == 0 ? 0xFFFFFF00u : 0);
      std::vector<uint32_t> expected = items;
      std::sort(expected.begin(), expected.end());
      optperm::avx512::Sort(items.data(), spare.data(), size, sorted.data(), most_partitions);
      Check(sorted == expected, "the network of " + std::to_string(size));
    }
  }
  std::printf("the network: ok\n");
}
#endif

void TestKernel() {
  TestAgainstDescription<float>("float");
  TestAgainstDescription<double>("double");
  TestReorder<int32_t>("int32");
  TestReorder<int64_t>("int64");
  TestThreads<float>("float");
  TestThreads<double>("double");
  for (int kind = 0; kind < 3; ++kind) {
    TestLongVector<float>("float", 5000, kind);
    TestLongVector<float>("float", 20000, kind);
    TestLongVector<double>("double", 20000, kind);
  }
}

}  // namespace

int main() {
  optperm::max_threads = 4;
  TestTranspose<float>();
  TestTranspose<double>();
  TestPlaces();
  TestDamagedRanks();
  TestKernel();
#if OPTPERM_HAS_AVX512
  if (optperm::use_avx512) {
    TestNetwork();
    std::printf("and without AVX-512:\n");
    optperm::use_avx512 = false;
    TestKernel();
  }
#endif
  std::printf("%lld checks passed\n", static_cast<long long>(checks));
  return 0;
}
