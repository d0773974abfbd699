"""`full_gradient` against the mean of the gradients of all examples."""

import importlib
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

import optperm

N, SIZE = 10, 4
full_gradient_module = importlib.import_module("optperm.variance.full_gradient")


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
    return {name: values[chosen] for name, values in data.items()}


def ragged(data, size=SIZE):
    return [rows(data, slice(i, i + size)) for i in range(0, len(data["y"]), size)]


def padded(data, size=SIZE, filling=np.nan):
    """Batches of one size, and 1 where there is an example, 0 where there is filling."""
    fill = -len(data["y"]) % size
    full = {
        k: np.concatenate([v, np.full((fill, *v.shape[1:]), filling, v.dtype)])
        for k, v in data.items()
    }
    weights = np.concatenate([np.ones(len(data["y"])), np.zeros(fill)]).astype(np.float32)
    return ragged(full, size), list(weights.reshape(-1, size))


grad_of_one = jax.jit(jax.grad(loss_fn))


def mean_of_single_gradients(params, data, weights=None):
    """In float64, one example at a time."""
    with jax.enable_x64(True):
        params, data = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, data))
        grads = [grad_of_one(params, rows(data, slice(i, i + 1))) for i in range(len(data["y"]))]
        return jax.tree.map(
            lambda *gs: np.average([np.asarray(g) for g in gs], axis=0, weights=weights), *grads
        )


def assert_rounds_to(got, exact):
    """Asserts results within a few units in the last place of the terms that are summed, around 1."""
    for g, e in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        np.testing.assert_allclose(g, e, rtol=0, atol=32 * np.finfo(g.dtype).eps)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [4, 3, 10, 1])
def test_ragged_batches_count_by_their_size(size, dtype):
    """It is the mean of the ten gradients, however they are cut into batches; twice the same bits."""
    with jax.enable_x64(dtype == np.float64):
        params, data = support.random_params(dtype=dtype), make_data()
        exact = mean_of_single_gradients(params, data)
        got = optperm.full_gradient(loss_fn, params, ragged(data, size))
        chex.assert_trees_all_equal_dtypes(got, params)
        assert_rounds_to(got, exact)
        again = optperm.full_gradient(loss_fn, params, ragged(data, size))
        support.assert_same_bits(again, got)
        means = [
            jax.grad(loss_fn)(params, batch) for batch in jax.tree.map(jnp.asarray, ragged(data))
        ]
        mean_of_means = np.mean([g["bias"] for g in means], axis=0)
        assert np.abs(mean_of_means - exact["bias"]).max() > 1e-3


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("filling", [0.0, 7.0, np.nan])
def test_padding_counts_for_nothing(filling):
    """With weights 1 and 0 padded batches give the mean of the ten, whatever the padding holds."""
    params, data = support.random_params(dtype=np.float64), make_data()
    batches, weights = padded(data, filling=filling)
    got = optperm.full_gradient(loss_fn, params, batches, weights=weights)
    assert_rounds_to(got, mean_of_single_gradients(params, data))
    # Two batches of nothing but padding change nothing, in front or at the end.
    empty = {name: np.full_like(values, filling) for name, values in batches[0].items()}
    more = optperm.full_gradient(
        loss_fn,
        params,
        [empty, *batches, empty],
        weights=[np.zeros(SIZE), *weights, np.zeros(SIZE)],
    )
    support.assert_same_bits(more, got)


def test_weights_may_be_fractions():
    """An example of weight 1/2 counts half; only their ratios matter."""
    params, data = support.random_params(), make_data()
    weights = np.linspace(0.1, 2.0, N).astype(np.float32)
    exact = mean_of_single_gradients(params, data, weights)
    for scale in (1.0, 1024.0):
        cut = [scale * weights[i : i + SIZE] for i in range(0, N, SIZE)]
        got = optperm.full_gradient(loss_fn, params, ragged(data), weights=cut)
        assert_rounds_to(got, exact)


def test_rounding_errors_do_not_add_up():
    """The sum over batches is exact where a plain float32 sum loses every term but the first."""
    batches = [np.float32([x]) for x in [2.0**30, *[1.0] * 1000, -(2.0**30)]]
    got = optperm.full_gradient(lambda w, batch: w * jnp.mean(batch), jnp.float32(0.0), batches)
    assert got == np.float32(1000 / 1002)


@pytest.mark.parametrize("with_weights", [False, True])
def test_sums_are_at_least_float32(with_weights):
    """bfloat16 params get a float32 mean, float64 params a float64 one, in one tree."""
    with jax.enable_x64(True):
        params = {"half": jnp.zeros(2, jnp.bfloat16), "double": jnp.zeros(2, jnp.float64)}
        x = np.random.default_rng(0).normal(size=(300, 2))

        def loss(params, batch):
            wide = params["half"].astype(np.float64) + params["double"]
            return jnp.mean(batch @ wide)

        got = optperm.full_gradient(
            loss, params, x.reshape(100, 3, 2), weights=[np.ones(3)] * 100 if with_weights else None
        )
        assert (got["half"].dtype, got["double"].dtype) == (np.float32, np.float64)
        np.testing.assert_allclose(got["double"], x.mean(axis=0), rtol=1e-13)
        # Each gradient was rounded to bfloat16, their sum was not.
        batch_means = x.reshape(100, 3, 2).sum(1) if with_weights else x.reshape(100, 3, 2).mean(1)
        rounded = np.asarray(jnp.asarray(batch_means, jnp.bfloat16), np.float64)
        expected = rounded.sum(0) / 300 if with_weights else rounded.mean(0)
        np.testing.assert_allclose(got["half"], expected, rtol=1e-6)


def test_each_batch_shape_is_compiled_once(monkeypatch):
    """Each call traces the loss once for each shape, and compiles what it has not compiled before."""
    traces = []

    def counted(params, batch):
        traces.append(batch["y"].shape)
        return loss_fn(params, batch)

    programs = {}
    monkeypatch.setattr(full_gradient_module, "_PROGRAMS", programs)
    params, data = support.random_params(), make_data()
    first = optperm.full_gradient(counted, params, ragged(data))
    assert sorted(set(traces)) == [(2, 5), (4, 5)]
    assert len(programs) == 2
    elsewhere = support.random_params(1)
    second = optperm.full_gradient(counted, elsewhere, iter(ragged(data)))
    assert len(programs) == 2
    assert np.abs(first["bias"] - second["bias"]).max() > 1e-3
    optperm.full_gradient(lambda p, b: 2.0 * loss_fn(p, b), params, ragged(data))
    assert len(programs) == 4


def test_what_the_loss_reads_is_what_it_is_now():
    """An attribute, a captured variable and bound batch statistics that change change the gradient."""

    class Ridge:
        l2 = 1.0

        def loss(self, w, batch):
            return jnp.mean((batch @ w - offset) ** 2) + 0.5 * self.l2 * jnp.sum(w**2)

    model, x, w = Ridge(), support.normal((8, 3)), jnp.ones(3)
    for model.l2, offset in [(1.0, 1.0), (0.1, 1.0), (0.1, jnp.float32(2.0)), (1.0, 1.0)]:  # noqa: B007
        got = optperm.full_gradient(model.loss, w, [x[:5], x[5:]])
        support.assert_close(got, jax.grad(model.loss)(w, x), rtol=1e-5)

    @jax.jit
    def of_strength(strength):
        return optperm.full_gradient(lambda w, b: strength * jnp.mean(b @ w), w, [x[:5], x[5:]])

    support.assert_close(of_strength(3.0), 3.0 * x.mean(axis=0), rtol=1e-5)


def test_weights_ask_for_a_mean_over_examples():
    """A loss with BatchNorm, or a sum, is refused: of an example by itself it is another loss."""
    params, data = support.random_params(), make_data(8)
    ones = [np.ones(8)]

    def normalized(params, batch):
        x = batch["x"] - batch["x"].mean(axis=0, keepdims=True)
        return loss_fn(params, {**batch, "x": x})

    def summed(params, batch):
        return len(batch["y"]) * loss_fn(params, batch)

    for wrong in (normalized, summed):
        optperm.full_gradient(wrong, params, [data])
        with pytest.raises(ValueError, match="mean of what each example loses"):
            optperm.full_gradient(wrong, params, [data], weights=ones)


class Tensor:
    """An array of another library: NumPy can convert it, and `jax.jit` does not take it."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values


class Loader:
    """A loader without a length that yields what such loaders yield."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return ({k: Tensor(v) for k, v in batch.items()} for batch in self.batches)


def test_any_iterable_of_batches():
    """Generators, loaders of foreign tensors, lists of device arrays; shared leaves of rank 0."""
    params, data = support.random_params(), make_data()
    expected = optperm.full_gradient(loss_fn, params, ragged(data))
    nothing = rows(data, slice(0, 0))
    for batches in (
        (batch for batch in ragged(data)),
        Loader(ragged(data)),
        jax.tree.map(jnp.asarray, ragged(data)),
        [nothing, *ragged(data), nothing],
    ):
        support.assert_same_bits(optperm.full_gradient(loss_fn, params, batches), expected)
    weights = (Tensor(w) for w in padded(data)[1])
    got = optperm.full_gradient(loss_fn, params, Loader(padded(data)[0]), weights=weights)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=3e-6)

    def scaled(params, batch):
        keep = jax.random.bernoulli(batch["key"], 0.5, (12,)).astype(jnp.float32)
        return batch["scale"] * loss_fn(params, {"x": batch["x"] * keep[None], "y": batch["y"]})

    with_key = [b | {"key": jax.random.key(3), "scale": 2.0} for b in ragged(data)]
    keep = jax.random.bernoulli(jax.random.key(3), 0.5, (12,))
    exact = mean_of_single_gradients(params, data | {"x": data["x"] * np.asarray(keep)[None]})
    got = optperm.full_gradient(scaled, params, with_key)
    assert_rounds_to(got, jax.tree.map(lambda g: 2.0 * g, exact))


@pytest.mark.parametrize("bound", [False, True])
def test_each_example_draws_its_own_dropout_mask_where_there_are_weights(bound):
    """From the batch's key and its own place in the batch; a key bound to the loss is no other."""
    params, data = support.random_params(), make_data()

    def scaled(key, params, batch):
        key, batch = (key, batch) if bound else (batch["key"], batch["data"])
        keep = jax.random.bernoulli(key, 0.5, batch["x"].shape).astype(jnp.float32)
        return loss_fn(params, batch | {"x": batch["x"] * keep})

    key = jax.random.key(3)
    loss = jax.tree_util.Partial(scaled, key)
    batches = ragged(data) if bound else [{"data": b, "key": key} for b in ragged(data)]
    got = optperm.full_gradient(
        loss, params, batches, weights=[np.ones(len(b["y"])) for b in ragged(data)]
    )
    keys = [jax.random.fold_in(key, i % SIZE) for i in range(N)]
    masks = np.stack([jax.random.bernoulli(k, 0.5, (1, 12))[0] for k in keys])
    assert len(np.unique(masks[:SIZE], axis=0)) == SIZE
    assert_rounds_to(got, mean_of_single_gradients(params, data | {"x": data["x"] * masks}))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("weighted", ["padded", "fractions"])
def test_weights_in_half_precision(dtype, weighted):
    """No sum over examples overflows, and weights are not rounded: the sum of a batch is, once."""
    n, rng = 4096, np.random.default_rng(0)
    x = rng.integers(50, 128, (n, 3))
    weights = np.float32(rng.random(n) < 0.9)
    if weighted == "fractions":
        weights *= np.float32(rng.uniform(0.1, 3.0, n))
    params = {"w": jnp.zeros(3, dtype), "b": jnp.zeros((), dtype)}

    def loss(params, batch):
        return jnp.mean(batch @ params["w"] + params["b"])

    for size in (n, 2):
        batches, cut = jnp.asarray(x, dtype)[:n].reshape(-1, size, 3), weights.reshape(-1, size)
        got = optperm.full_gradient(loss, params, batches[:9], weights=cut[:9])
        used = min(9 * size, n)
        exact = np.average(x[:used], axis=0, weights=weights[:used])
        once = float(jnp.finfo(dtype).eps) / 2
        np.testing.assert_allclose(got["w"], exact, rtol=1.01 * once)
        np.testing.assert_allclose(got["b"], 1.0, rtol=1.01 * once)


@pytest.mark.parametrize(("dtype", "weight"), [("float16", 4097 / 4096), ("bfloat16", 257 / 256)])
def test_weights_lose_no_digits_in_half_precision(dtype, weight):
    """Equal ones that the dtype of the loss would round give the plain mean, not a part of it."""
    params, x = jnp.zeros((), dtype), jnp.asarray([[1.0, 3.0], [2.0, 6.0]], dtype)
    weights = np.full((2, 2), weight, np.float32)
    got = optperm.full_gradient(lambda p, batch: jnp.mean(p * batch), params, x, weights=weights)
    np.testing.assert_allclose(got, 3.0, rtol=1e-6)


# Many devices.


@pytest.mark.parametrize("mapping", ["pmap", "shard_map", "shard_map unchecked"])
def test_devices_with_data_of_their_own_sum_over_the_axis(mapping):
    """Four devices, of which the last has only padding in its last batch: the mean of all, once."""
    params, data = support.random_params(), make_data(13)

    def run(params, own):
        batches, weights = own
        summed = optperm.full_gradient(
            loss_fn, params, batches, weights=weights, axis_name=replicas.AXIS
        )
        return summed, ()

    # Two batches of 8: two examples a device, then 5 and 3.
    got, _ = replicas.share(run, mapping, 4)(params, quarters(padded(data, size=8)))
    exact = mean_of_single_gradients(params, data)
    for replica in range(4):
        assert_rounds_to(replicas.take(got, replica), exact)


def quarters(tree):
    """What each of four devices has."""
    return jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), tree)


@pytest.mark.parametrize("mapping", ["shard_map", "shard_map unchecked"])
def test_without_an_axis_name_each_device_keeps_its_own_mean(mapping):
    """No sum over devices slips in, not even where JAX would sum gradients of replicated params."""
    params, data = support.random_params(), make_data(16)

    def run(params, batch):
        return (), optperm.full_gradient(loss_fn, params, [batch, batch])

    _, got = replicas.share(run, mapping, 4)(params, quarters(data))
    for device in range(4):
        own = mean_of_single_gradients(params, rows(data, slice(4 * device, 4 * device + 4)))
        assert_rounds_to(replicas.take(got, device), own)


def test_batches_that_every_device_has_are_counted_once():
    """In checked shard_map, params and batches that do not vary give their own mean."""
    params, data = support.random_params(), make_data()

    def run(shared, _):
        return optperm.full_gradient(loss_fn, *shared, axis_name=replicas.AXIS), ()

    got, _ = replicas.share(run, "shard_map", 4)((params, ragged(data)), np.zeros(4))
    assert_rounds_to(replicas.take(got, 0), mean_of_single_gradients(params, data))


@pytest.mark.parametrize("with_weights", [False, True])
def test_batches_sharded_over_a_mesh(with_weights, monkeypatch):
    """Under jit nothing has to be said: eight devices give the mean, compiled once, in place."""
    programs = {}
    monkeypatch.setattr(full_gradient_module, "_PROGRAMS", programs)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    params, data = support.random_params(), make_data(32)
    exact = mean_of_single_gradients(params, data)
    replicated = jax.device_put(params, NamedSharding(mesh, P()))
    batches, weights = padded(data, size=16)
    placed = jax.device_put((batches, weights), NamedSharding(mesh, P("data")))
    got = optperm.full_gradient(
        loss_fn, replicated, placed[0], weights=placed[1] if with_weights else None
    )
    assert_rounds_to(got, exact)
    assert len(programs) == 1 + with_weights
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(got))


def test_progress_bar(capsys, monkeypatch):
    """It goes over all batches, with or without a length; without rich the extra is named."""
    params, data = support.random_params(), make_data()
    expected = optperm.full_gradient(loss_fn, params, ragged(data))
    for batches in (ragged(data), iter(ragged(data))):
        got = optperm.full_gradient(loss_fn, params, batches, progress=True)
        support.assert_same_bits(got, expected)
        assert "full gradient" in capsys.readouterr().out
    importlib.invalidate_caches()
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match=r"pip install 'optperm\[progress\]'"):
        optperm.full_gradient(loss_fn, params, ragged(data), progress=True)
    support.assert_same_bits(optperm.full_gradient(loss_fn, params, ragged(data)), expected)
