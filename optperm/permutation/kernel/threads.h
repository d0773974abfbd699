// Work shared among threads.
#ifndef OPTPERM_THREADS_H_
#define OPTPERM_THREADS_H_

#include <algorithm>
#include <cstdint>
#include <functional>

namespace optperm {

// The number of threads that may share work, including the calling thread, and the way to call a function on another
// thread: at once, later or never.
struct Threads {
  int64_t count = 1;
  std::function<void(std::function<void()>)> schedule;
};

// The number of threads that one call may use. Python sets it when it loads the library.
extern int64_t max_threads;

// The library's own threads, for calls that do not come from XLA.
Threads OwnThreads();

// Gives the next task, and -1 when none is left.
using NextTask = std::function<int64_t()>;

// Calls work(next) on several threads at once, each of which takes tasks 0, ..., count - 1 until none is
// left. Returns when all are done. The calling thread takes part, so that this ends even if no other thread
// ever becomes free.
void Share(const Threads& threads, int64_t count, const std::function<void(const NextTask&)>& work);

// Calls work(begin, end) for pieces of 0, ..., size - 1.
template <typename Work>
void ShareRange(const Threads& threads, int64_t size, const Work& work) {
  if (threads.count == 1) return work(int64_t{0}, size);
  const int64_t pieces = 4 * threads.count, length = (size + pieces - 1) / pieces;
  Share(threads, pieces, [&](const NextTask& next) {
    for (int64_t piece = next(); piece >= 0; piece = next()) {
      const int64_t begin = std::min(size, piece * length);
      work(begin, std::min(size, begin + length));
    }
  });
}

}  // namespace optperm

#endif  // OPTPERM_THREADS_H_
