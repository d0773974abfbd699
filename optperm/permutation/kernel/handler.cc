// The function that XLA calls: the kernel as a typed FFI handler, on XLA's threads.
#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "cycles.h"
#include "reorder.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

template <typename Buffer>
bool HasShape(const Buffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dimensions = buffer.dimensions();
  return std::equal(dimensions.begin(), dimensions.end(), shape.begin(), shape.end());
}

// The kernel on XLA's threads.
optperm::Threads Shared(ffi::ThreadPool& threads) {
  const int64_t count = std::min<int64_t>(threads.num_threads(), optperm::max_threads);
  return {std::max<int64_t>(count, 1),
          [&](std::function<void()> function) { threads.Schedule(std::move(function)); }};
}

ffi::Error Result(bool is_valid, const std::string& method) {
  if (is_valid) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("the ranks in the state of optperm." + method +
                                     " are not permutations: the state is damaged");
}

template <ffi::DataType dtype>
ffi::Error PermuteRows(ffi::ThreadPool threads, ffi::Buffer<dtype> recommendation, ffi::Buffer<dtype> weights,
                       ffi::Buffer<ffi::S32> ranks, ffi::Buffer<ffi::U32> seeds,
                       ffi::Buffer<ffi::F32> aggressiveness, ffi::Buffer<ffi::S32> partition_size,
                       ffi::ResultBuffer<dtype> new_weights, ffi::ResultBuffer<ffi::S32> new_ranks,
                       ffi::ResultBuffer<ffi::S32> moved, bool drop_remainder) {
  const auto shape = weights.dimensions();
  if (shape.size() != 3) return ffi::Error::InvalidArgument("weights must be (batch, n, rows)");
  const int64_t batch = shape[0], n = shape[1], rows = shape[2];
  if (n > INT32_MAX || !HasShape(recommendation, {batch, n, rows}) || !HasShape(ranks, {batch, n, rows}) ||
      !HasShape(seeds, {batch, rows, 2}) || !HasShape(aggressiveness, {batch, rows}) ||
      !HasShape(partition_size, {batch, rows}) || !HasShape(*new_weights, {batch, n, rows}) ||
      !HasShape(*new_ranks, {batch, n, rows}) || !HasShape(*moved, {batch, rows})) {
    return ffi::Error::InvalidArgument("the operands' shapes do not match");
  }
  using T = ffi::NativeType<dtype>;
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
  return Result(optperm::PermuteRows(problem, Shared(threads)), "sgperm");
}

template <ffi::DataType dtype>
ffi::Error ReorderRows(ffi::ThreadPool threads, ffi::Buffer<dtype> keys, ffi::Buffer<ffi::S32> ranks,
                       ffi::ResultBuffer<ffi::S32> new_ranks, ffi::ResultBuffer<ffi::S32> sources) {
  const auto shape = keys.dimensions();
  if (shape.size() != 3) return ffi::Error::InvalidArgument("keys must be (batch, n, rows)");
  const int64_t batch = shape[0], n = shape[1], rows = shape[2];
  if (n > INT32_MAX || !HasShape(ranks, {batch, n, rows}) || !HasShape(*new_ranks, {batch, n, rows}) ||
      !HasShape(*sources, {batch, n, rows})) {
    return ffi::Error::InvalidArgument("the operands' shapes do not match");
  }
  const optperm::ReorderProblem<ffi::NativeType<dtype>> problem{
      batch, rows, n, keys.typed_data(), ranks.typed_data(), new_ranks->typed_data(), sources->typed_data()};
  return Result(optperm::ReorderRows(problem, Shared(threads)), "laperm");
}

template <ffi::DataType dtype>
auto ReorderBinding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .template Arg<ffi::Buffer<dtype>>()
      .template Arg<ffi::Buffer<ffi::S32>>()
      .template Ret<ffi::Buffer<ffi::S32>>()
      .template Ret<ffi::Buffer<ffi::S32>>();
}

template <ffi::DataType dtype>
auto PermuteBinding() {
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(optperm_permute_rows_float32, PermuteRows<ffi::F32>, PermuteBinding<ffi::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(optperm_permute_rows_float64, PermuteRows<ffi::F64>, PermuteBinding<ffi::F64>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(optperm_reorder_rows_int32, ReorderRows<ffi::S32>, ReorderBinding<ffi::S32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(optperm_reorder_rows_int64, ReorderRows<ffi::S64>, ReorderBinding<ffi::S64>());
#if !defined(_WIN32)
#pragma GCC visibility pop
#endif
