#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace optperm {
namespace {

// Tasks that several threads take, one at a time. A thread that comes when all tasks are taken accesses nothing else.
class Tasks {
 public:
  Tasks(int64_t count, const std::function<void(const NextTask&)>& work) : count_(count), work_(work) {}

  void TakePart() {
    const int64_t first = next_.fetch_add(1);
    if (first >= count_) return;
    int64_t taken = 0;
    work_([&]() -> int64_t {
      const int64_t task = taken == 0 ? first : next_.fetch_add(1);
      if (task >= count_) return -1;
      ++taken;
      return task;
    });
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ += taken;
    if (done_ == count_) all_done_.notify_all();
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [this] { return done_ == count_; });
  }

 private:
  const int64_t count_;
  const std::function<void(const NextTask&)>& work_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_done_;
  int64_t done_ = 0;
};

// Threads that wait for functions to call. They end with the process.
class Pool {
 public:
  void Schedule(std::function<void()> function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // A forked process has no threads of the pool: functions are then dropped, and callers work alone.
    if (static_cast<int64_t>(waiting_.size()) >= kMostWaiting) return;
    waiting_.push_back(std::move(function));
    if (idle_ < static_cast<int64_t>(waiting_.size()) && started_ < max_threads - 1) {
      ++started_;
      std::thread([this] { Work(); }).detach();
    }
    ready_.notify_one();
  }

 private:
  static constexpr int64_t kMostWaiting = 4096;

  void Work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      ready_.wait(lock, [this] { return !waiting_.empty(); });
      --idle_;
      const std::function<void()> function = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      function();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<std::function<void()>> waiting_;
  int64_t idle_ = 0, started_ = 0;
};

}  // namespace

int64_t max_threads = 1;

Threads OwnThreads() {
  static Pool* const pool = new Pool;  // its threads may outlive static objects
  return {max_threads, [](std::function<void()> function) { pool->Schedule(std::move(function)); }};
}

void Share(const Threads& threads, int64_t count, const std::function<void(const NextTask&)>& work) {
  if (count == 0) return;
  const auto tasks = std::make_shared<Tasks>(count, work);
  const int64_t helpers = std::min(threads.count, count) - 1;
  for (int64_t i = 0; i < helpers; ++i) threads.schedule([tasks] { tasks->TakePart(); });
  tasks->TakePart();
  tasks->Wait();
}

}  // namespace optperm
