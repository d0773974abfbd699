// What XLA calls: the kernel as a typed FFI handler, over XLA's own threads.
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "cycles.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

// The tiles of one call. Each thread takes the next tile until none is left; the calling thread takes
// part, so that the call ends even if no other thread ever becomes free.
template <typename T>
class SharedWork {
 public:
  explicit SharedWork(const optperm::Problem<T>& problem)
      : problem_(problem), tiles_(optperm::NumTiles(problem)) {}

  int64_t tiles() const { return tiles_; }

  void TakePart() {
    int64_t tile = next_.fetch_add(1);
    if (tile >= tiles_) return;
    optperm::TilePermuter<T> permuter(problem_);
    int64_t done = 0;
    for (; tile < tiles_; tile = next_.fetch_add(1), ++done) {
      if (!permuter.Permute(tile)) valid_ = false;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    done_ += done;
    if (done_ == tiles_) all_done_.notify_all();
  }

  // Waits for the tiles that other threads have taken. Returns whether all ranks were permutations.
  bool Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    all_done_.wait(lock, [this] { return done_ == tiles_; });
    return valid_;
  }

 private:
  const optperm::Problem<T> problem_;
  const int64_t tiles_;
  std::atomic<int64_t> next_{0};
  std::atomic<bool> valid_{true};
  std::mutex mutex_;
  std::condition_variable all_done_;
  int64_t done_ = 0;
};

template <typename Buffer>
bool HasShape(const Buffer& buffer, ffi::Span<const int64_t> leading, std::initializer_list<int64_t> last) {
  const auto dimensions = buffer.dimensions();
  if (dimensions.size() != leading.size() + last.size()) return false;
  return std::equal(leading.begin(), leading.end(), dimensions.begin()) &&
         std::equal(last.begin(), last.end(), dimensions.begin() + leading.size());
}

// Weights and the like are (batch..., rows, n) with rows minor in memory, what belongs to a row as a
// whole is (batch..., rows).
template <ffi::DataType dtype>
ffi::Error PermuteRows(ffi::ThreadPool threads, ffi::Buffer<dtype> recommendation, ffi::Buffer<dtype> weights,
                       ffi::Buffer<ffi::S32> ranks, ffi::Buffer<ffi::U32> seeds,
                       ffi::Buffer<ffi::F32> aggressiveness, ffi::Buffer<ffi::S32> partition_size,
                       ffi::ResultBuffer<dtype> new_weights, ffi::ResultBuffer<ffi::S32> new_ranks,
                       ffi::ResultBuffer<ffi::S32> moved, bool drop_remainder) {
  const auto shape = weights.dimensions();
  if (shape.size() < 2) return ffi::Error::InvalidArgument("weights must be of rank 2 or more");
  const auto leading = shape.first(shape.size() - 2);
  const int64_t rows = shape[shape.size() - 2], n = shape[shape.size() - 1];
  if (n > INT32_MAX || !HasShape(recommendation, leading, {rows, n}) || !HasShape(ranks, leading, {rows, n}) ||
      !HasShape(seeds, leading, {rows, 2}) || !HasShape(aggressiveness, leading, {rows}) ||
      !HasShape(partition_size, leading, {rows}) || !HasShape(*new_weights, leading, {rows, n}) ||
      !HasShape(*new_ranks, leading, {rows, n}) || !HasShape(*moved, leading, {rows})) {
    return ffi::Error::InvalidArgument("the operands' shapes do not match");
  }
  using T = ffi::NativeType<dtype>;
  int64_t batch = 1;
  for (int64_t size : leading) batch *= size;
  if (batch * rows * n == 0) return ffi::Error::Success();
  const optperm::Problem<T> problem{batch,
                                    rows,
                                    n,
                                    drop_remainder,
                                    recommendation.typed_data(),
                                    weights.typed_data(),
                                    ranks.typed_data(),
                                    seeds.typed_data(),
                                    aggressiveness.typed_data(),
                                    partition_size.typed_data(),
                                    new_weights->typed_data(),
                                    new_ranks->typed_data(),
                                    moved->typed_data()};
  const auto work = std::make_shared<SharedWork<T>>(problem);
  const int64_t helpers = std::min<int64_t>(threads.num_threads(), work->tiles()) - 1;
  for (int64_t i = 0; i < helpers; ++i) {
    threads.Schedule([work] { work->TakePart(); });
  }
  work->TakePart();
  if (!work->Wait()) {
    return ffi::Error::InvalidArgument(
        "the ranks in the state of optperm.sgperm are not permutations: the state is damaged");
  }
  return ffi::Error::Success();
}

template <ffi::DataType dtype>
auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .template Arg<ffi::Buffer<dtype>>()
      .template Arg<ffi::Buffer<dtype>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Arg<ffi::Buffer<ffi::U32>>()
      .template Arg<ffi::Buffer<ffi::F32>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Ret<ffi::Buffer<dtype>>()
      .template Ret<ffi::Buffer<ffi::S32>>()
      .template Ret<ffi::Buffer<ffi::S32>>()
      .template Attr<bool>("drop_remainder");
}

}  // namespace

#if !defined(_WIN32)
#pragma GCC visibility push(default)
#endif
XLA_FFI_DEFINE_HANDLER_SYMBOL(optperm_permute_rows_f32, PermuteRows<ffi::F32>, Binding<ffi::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(optperm_permute_rows_f64, PermuteRows<ffi::F64>, Binding<ffi::F64>());
#if !defined(_WIN32)
#pragma GCC visibility pop
#endif
