// What XLA calls: the kernel as a typed FFI handler, over XLA's own threads.
#include <algorithm>
#include <functional>
#include <utility>

#include "cycles.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

template <typename Buffer>
bool HasShape(const Buffer& buffer, std::initializer_list<int64_t> shape) {
  const auto dimensions = buffer.dimensions();
  return std::equal(dimensions.begin(), dimensions.end(), shape.begin(), shape.end());
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
  const auto schedule = [&](std::function<void()> function) { threads.Schedule(std::move(function)); };
  const int64_t count = std::min<int64_t>(threads.num_threads(), optperm::max_threads);
  if (!optperm::PermuteRows(problem, {std::max<int64_t>(count, 1), schedule})) {
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(optperm_permute_rows_float32, PermuteRows<ffi::F32>, Binding<ffi::F32>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(optperm_permute_rows_float64, PermuteRows<ffi::F64>, Binding<ffi::F64>());
#if !defined(_WIN32)
#pragma GCC visibility pop
#endif
