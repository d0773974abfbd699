"""`full_gradient` against the mean of the gradients of all examples."""

import functools
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replicas
import support
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optperm.variance import full_gradient

N, SIZE = 10, 4


def loss_fn(params, batch):
    """A mean over examples that is not linear in the params."""
    error = jnp.tanh(batch["x"] @ params["kernel"] + params["bias"][None]) - batch["y"]
    return jnp.mean(jnp.sum(error**2, axis=-1))


def make_data(n=N):
    """Float32 numbers, in float64 where that is on."""
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(n, 12)), "y": rng.normal(size=(n, 5))}
    dtype = jnp.result_type(float)
    return {name: values.astype(np.float32).astype(dtype) for name, values in data.items()}


def rows(data, chosen):
    return jax.tree.map(lambda values: values[chosen], data)


def ragged(data, size=SIZE):
    return [rows(data, slice(i, i + size)) for i in range(0, len(data["y"]), size)]


def padded(data, size=SIZE):
    """Batches of one size, and 1 where there is an example, 0 where there is a filling of NaN."""
    n = len(data["y"])
    full = {k: np.pad(v, ((0, -n % size), (0, 0)), constant_values=np.nan) for k, v in data.items()}
    return ragged(full, size), list(np.float32(~np.isnan(full["y"][:, 0])).reshape(-1, size))


def single_gradients(params, data):
    """Return the gradient of each example, by hand in float64: of |tanh(W x + b) - y|^2."""
    params, data = jax.tree.map(np.float64, (params, data))
    values = np.tanh(data["x"] @ params["kernel"] + params["bias"])
    of_bias = 2 * (values - data["y"]) * (1 - values**2)
    return {"kernel": data["x"][:, :, None] * of_bias[:, None], "bias": of_bias}


def mean_of_single_gradients(params, data, weights=None):
    grads = single_gradients(params, data)
    return jax.tree.map(lambda each: np.average(each, axis=0, weights=weights), grads)


def assert_rounds_to(got, exact):
    """Asserts results within a few units in the last place of the terms that are summed, around 1."""
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(g, e, rtol=0, atol=32 * np.finfo(g.dtype).eps)


def test_batches_of_unequal_size_count_by_it():
    """It is the mean of the ten gradients for any batches; two calls give the same bits."""
    params, data = support.random_params(), make_data()
    exact = mean_of_single_gradients(params, data)
    whole, *both = (full_gradient(loss_fn, params, ragged(data, size)) for size in (10, 4, 4))
    for got in (whole, *both):
        assert support.signature(got) == support.signature(params)
        assert_rounds_to(got, exact)
    support.assert_same_bits(*both)
    means = [mean_of_single_gradients(params, batch)["bias"] for batch in ragged(data)]
    assert np.abs(np.mean(means, axis=0) - exact["bias"]).max() > 1e-3


@pytest.mark.usefixtures("x64")
def test_weights_of_zero_and_fractions_weigh_the_examples():
    """With weights 1 and 0 padded batches give the mean of the ten, whatever the padding holds; an
    example of weight 1/2 counts half, and only the ratios matter."""
    params, data = support.random_params(dtype=np.float64), make_data()
    batches, weights = padded(data)
    got = full_gradient(loss_fn, params, batches, weights=weights)
    assert_rounds_to(got, mean_of_single_gradients(params, data))
    # Two batches of nothing but padding change nothing, in front or at the end.
    empty, none = jax.tree.map(lambda v: np.full_like(v, np.nan), batches[0]), np.zeros(SIZE)
    batches, weights = [empty, *batches, empty], [none, *weights, none]
    more = full_gradient(loss_fn, params, batches, weights=weights)
    support.assert_same_bits(more, got)
    weights = np.linspace(0.1, 2.0, N).astype(np.float32)
    cut = [1024.0 * weights[i : i + SIZE] for i in range(0, N, SIZE)]
    got = full_gradient(loss_fn, params, ragged(data), weights=cut)
    assert_rounds_to(got, mean_of_single_gradients(params, data, weights))


def test_rounding_errors_of_many_batches_do_not_add_up():
    """The sum over batches is exact where a plain float32 sum loses every term but the largest."""
    batches = [np.float32([x]) for x in [1.0, 2.0**30, *[1.0] * 999, -(2.0**30)]]
    got = full_gradient(lambda w, batch: w * jnp.mean(batch), jnp.float32(0.0), batches)
    assert got == np.float32(1000 / 1002)


@pytest.mark.parametrize(
    "weights", [None, pytest.param([np.ones(3)] * 100, marks=pytest.mark.exhaustive)]
)
def test_sums_are_at_least_float32(weights):
    """bfloat16 params get a float32 mean, float64 params a float64 one, in one tree."""
    with jax.enable_x64(True):
        params = {"half": jnp.zeros(2, jnp.bfloat16), "double": jnp.zeros(2, jnp.float64)}
        x = np.random.default_rng(0).normal(size=(100, 3, 2))

        def loss(params, batch):
            return jnp.mean(batch @ (params["half"].astype(np.float64) + params["double"]))

        got = full_gradient(loss, params, x, weights=weights)
        assert (got["half"].dtype, got["double"].dtype) == (np.float32, np.float64)
        np.testing.assert_allclose(got["double"], x.mean(axis=(0, 1)), rtol=1e-13)
        # Each gradient, a sum with weights, was rounded to bfloat16; their sum was not.
        size = 3 if weights else 1
        rounded = np.float64((size * x.mean(1)).astype(jnp.bfloat16))
        np.testing.assert_allclose(got["half"], rounded.mean(0) / size, rtol=1e-6)


def test_auxiliary_values_of_a_loss_under_jit_are_left_out():
    x = support.normal((8, 3))

    @jax.jit
    def of_strength(strength):
        def loss(w, batch):
            return strength * jnp.mean(batch @ w), batch

        return full_gradient(loss, jnp.ones(3), [x[:5], x[5:]], has_aux=True)

    chex.assert_trees_all_close(of_strength(3.0), 3.0 * x.mean(axis=0), rtol=1e-5)


def test_a_loss_that_is_no_mean_is_noticed():
    """A loss with BatchNorm, or a sum: of an example by itself it is another loss."""
    params, data = support.random_params(), make_data(8)
    for wrong in (
        lambda p, batch: loss_fn(p, batch | {"x": batch["x"] - batch["x"].mean(0, keepdims=True)}),
        lambda p, batch: len(batch["y"]) * loss_fn(p, batch),
    ):
        with pytest.warns(UserWarning, match="is not the mean of their losses"):
            full_gradient(wrong, params, [data])
        with pytest.raises(ValueError, match="mean of the losses of single examples"):
            full_gradient(wrong, params, [data], weights=[np.ones(8)])


def sums_of_real(params, batch):
    """Return the sum of the losses that count, and their number."""
    error = jnp.tanh(batch["x"] @ params["kernel"] + params["bias"][None]) - batch["y"]
    return jnp.sum(batch["real"] * jnp.sum(error**2, axis=-1)), jnp.sum(batch["real"])


def test_padding_counts_nothing_with_sums_and_counts_and_is_noticed_without():
    """A loss that divides by its own weights gives a batch another weight than its length."""
    params, data = support.random_params(), make_data()
    batches, weights = padded(data)
    batches = [
        jax.tree.map(np.nan_to_num, batch) | {"real": real}
        for batch, real in zip(batches, weights, strict=True)
    ]
    empty = batches[0] | {"real": np.zeros(SIZE, np.float32)}
    got = full_gradient(sums_of_real, params, [*batches, empty])
    assert_rounds_to(got, mean_of_single_gradients(params, data))

    for at_least in (0.0, 1.0):

        def mean(params, batch, at_least=at_least):
            total, count = sums_of_real(params, batch)
            return total / jnp.maximum(count, at_least)

        found = r"it differs by [\d.]+" if at_least else "an example alone has no finite loss"
        with pytest.warns(UserWarning, match=rf"\({found}\).* return a pair \(sum, count\)"):
            full_gradient(mean, params, batches)
    with pytest.raises(ValueError, match="leave out weights="):
        full_gradient(sums_of_real, params, batches, weights=weights)
    with pytest.raises(ValueError, match=r"counts must be .* not all zero, got the sum 0\.0"):
        full_gradient(sums_of_real, params, [empty])


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, b: (jnp.mean((b["x"] @ w - b["y"]) ** 2), jnp.mean(b["x"] > 0.0)),
        lambda w, b: jnp.mean((b["x"] @ w - b["y"][:, None]) ** 2),
    ],
    ids=["loss and accuracy", "broadcast at params of zero"],
)
def test_a_loss_with_a_wrong_pair_or_mixed_examples_is_said(loss):
    batch = {"x": support.normal((16, 3)), "y": support.normal((16,), 1)}
    with (
        jax.numpy_rank_promotion("allow"),
        pytest.warns(UserWarning, match="only gradients, sums or counts"),
    ):
        full_gradient(loss, jnp.zeros(3), [batch])


@pytest.mark.slow
def test_batches_on_an_explicit_mesh_give_the_mean():
    """With weights and with a sum and a count, where the rows of a batch are spread over devices."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    x, y = (np.asarray(support.normal(shape, seed)) for seed, shape in enumerate([(16, 3), (16,)]))
    real, w = np.float32(np.arange(16) > 5), support.normal((3,), 2)

    def pair(w, batch):
        x, y, real = batch
        return jnp.sum(real * (x @ w - y) ** 2), jnp.sum(real)

    exact = 2 * x.T @ (real * (x @ np.asarray(w) - y)) / real.sum()
    *batch, spread = jax.device_put((x, y, real), NamedSharding(mesh, P("data")))
    chex.assert_trees_all_close(full_gradient(pair, w, [(*batch, spread)]), exact, rtol=1e-6)

    def mean(w, batch):
        return jnp.mean((batch[0] @ w - batch[1]) ** 2)

    got = full_gradient(mean, w, [tuple(batch)], weights=[spread])
    chex.assert_trees_all_close(got, exact, rtol=1e-6)


class Tensor:
    """An array of another library: NumPy can convert it, and `jax.jit` does not take it."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values


def test_any_iterable_of_batches_is_taken():
    """Generators, also of another library's tensors, lists of device arrays; empty batches too."""
    params, data = support.random_params(), make_data(8)
    expected = full_gradient(loss_fn, params, ragged(data))
    nothing = rows(data, slice(0, 0))
    for batches in (
        (jax.tree.map(Tensor, batch) for batch in ragged(data)),
        jax.tree.map(jnp.asarray, ragged(data)),
        [nothing, *ragged(data), nothing],
    ):
        support.assert_same_bits(full_gradient(loss_fn, params, batches), expected)
    with pytest.raises(TypeError, match=r"which may be one batch: pass \[batch\]"):
        full_gradient(loss_fn, params, (data["x"], data["y"]))
    batches, weights = (map(functools.partial(jax.tree.map, Tensor), each) for each in padded(data))
    got = full_gradient(loss_fn, params, batches, weights=weights)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=3e-6)


@pytest.mark.slow
def test_weighted_examples_draw_dropout_masks_of_their_own():
    """From the batch's key, a leaf of rank 0, and its own place in the batch."""
    params, data, key = support.random_params(), make_data(), jax.random.key(3)

    def dropped(params, batch):
        keep = jax.random.bernoulli(batch["key"], 0.5, batch["x"].shape)
        return loss_fn(params, batch | {"x": jnp.where(keep, batch["x"], 0.0)})

    draw = lambda place: jax.random.bernoulli(jax.random.fold_in(key, place), 0.5, (12,))  # noqa: E731
    masks = np.asarray(jax.jit(jax.vmap(draw))(np.arange(SIZE)))
    assert len(np.unique(masks, axis=0)) == SIZE
    masked = data | {"x": data["x"] * masks[np.arange(N) % SIZE]}
    batches = [b | {"key": key} for b in ragged(data)]
    weights = [np.ones(len(b["y"])) for b in batches]
    got = full_gradient(dropped, params, batches, weights=weights)
    assert_rounds_to(got, mean_of_single_gradients(params, masked))


@pytest.mark.parametrize(
    ("dtype", "heavier"),
    [
        pytest.param("float16", 4097 / 4096, marks=[support.needs_float16, pytest.mark.exhaustive]),
        ("bfloat16", 257 / 256),
    ],
)
def test_weights_in_half_precision_are_not_rounded(dtype, heavier):
    """No sum over examples overflows, and weights are not rounded: the sum of a batch is, once; equal
    weights that the dtype of the loss would round give the plain mean."""
    rng, loss = np.random.default_rng(0), lambda params, batch: jnp.mean(batch @ params)
    x, weights = rng.integers(50, 128, (9, 512, 3)), rng.random((9, 512)).astype(np.float32)
    weights = np.where(weights < 0.1, 0.0, 3 * weights)
    batches = jnp.asarray(x, dtype)
    got = full_gradient(loss, jnp.zeros(3, dtype), batches, weights=weights)
    exact = np.average(x.reshape(-1, 3), axis=0, weights=weights.reshape(-1))
    np.testing.assert_allclose(got, exact, rtol=1.01 * float(jnp.finfo(dtype).eps) / 2)
    pairs = jnp.asarray([[[1.0], [3.0]], [[2.0], [6.0]]], dtype)
    equal = np.full((2, 2), heavier, np.float32)
    got = full_gradient(loss, jnp.zeros(1, dtype), pairs, weights=equal)
    np.testing.assert_allclose(got, 3.0, rtol=1e-6)


@pytest.mark.parametrize("mapping", support.every_night(["pmap", "shard_map"], ["shard_map"]))
def test_devices_with_data_of_their_own_sum_over_a_named_axis_alone(mapping):
    """Four devices, of which the last has only padding in its last batch: the mean of all, once, also of
    a batch that every device has; without an axis name each keeps its own mean."""
    params, data, more = support.random_params(), make_data(13), make_data(16)

    def run(shared, own):
        params, everywhere = shared
        batches, weights, batch = own
        of_axis = functools.partial(full_gradient, loss_fn, params, axis_name=replicas.AXIS)
        alike = of_axis(batches, weights=weights), of_axis([everywhere])
        return alike, full_gradient(loss_fn, params, [batch, batch])

    # Two batches of 8: two examples a device, then 5 and 3.
    parts = (*padded(data, size=8), more)
    parts = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), parts)
    alike, alone = replicas.share(run, mapping, 4)((params, data), parts)
    exact = mean_of_single_gradients(params, data)
    for device in range(4):
        for mean in alike:
            assert_rounds_to(replicas.take(mean, device), exact)
        own = mean_of_single_gradients(params, rows(more, slice(4 * device, 4 * device + 4)))
        assert_rounds_to(replicas.take(alone, device), own)


@pytest.mark.parametrize("is_weighted", support.every_night([True, False], [True]))
def test_batches_sharded_over_a_mesh_give_the_mean(is_weighted):
    """Under jit nothing has to be said: further batches compile nothing, with weights and without."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    params, data = support.random_params(), make_data(32)
    exact = mean_of_single_gradients(params, data)
    replicated = jax.device_put(params, NamedSharding(mesh, P()))
    batches, weights = jax.device_put(padded(data, size=16), NamedSharding(mesh, P("data")))
    traces = []

    def traced_loss(params, batch):
        traces.append(batch)
        return loss_fn(params, batch)

    got = full_gradient(traced_loss, replicated, batches, weights=weights if is_weighted else None)
    assert_rounds_to(got, exact)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(got))
    once, more = len(traces), [*weights, *weights] if is_weighted else None
    full_gradient(traced_loss, replicated, [*batches, *batches], weights=more)
    assert len(traces) == 2 * once


def test_progress_bar_goes_over_all_batches(capsys, monkeypatch):
    """With or without a length; without rich it is named."""
    params, data = support.random_params(), make_data(8)
    expected = full_gradient(loss_fn, params, ragged(data))
    for batches in (ragged(data), iter(ragged(data))):
        got = full_gradient(loss_fn, params, batches, progress=True)
        support.assert_same_bits(got, expected)
        assert "full gradient" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match="pip install 'rich'"):
        full_gradient(loss_fn, params, ragged(data), progress=True)
