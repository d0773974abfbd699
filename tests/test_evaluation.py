"""`evaluate` against closed forms and against plain JAX, alone and averaged over devices."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import kernels
import numpy as np
import optax
import pytest
import replicas
import support
from jax.sharding import PartitionSpec as P

import optperm
from optperm import evaluation

PARAMS, OTHER = support.random_params(0), support.random_params(1)
BATCH = {"x": np.asarray(support.normal((8, 12), 1)), "y": np.asarray(support.normal((8, 5), 2))}


@jax.jit
def loss_fn(params, batch):
    """Mean squared error of a linear model with a bias."""
    prediction = batch["x"] @ params["kernel"] + params["bias"][None]
    return jnp.mean((prediction - batch["y"]) ** 2)


def with_aux(params, batch):
    return loss_fn(params, batch), {"size": batch["x"].shape[0]}


@pytest.mark.parametrize("has_aux", [False, True])
def test_values_and_gradients_are_those_of_jax(has_aux):
    """Value, gradient and the closures, there and at other params, agree with `jax.value_and_grad`."""
    value, grad = jax.value_and_grad(loss_fn)(PARAMS, BATCH)
    e = optperm.evaluate(with_aux if has_aux else loss_fn, PARAMS, BATCH, has_aux=has_aux)
    assert e.aux == ({"size": 8} if has_aux else None)
    assert e.value == value
    support.assert_same_bits(e.grad, grad)
    assert set(e.extra_args) == {"value", "grad", "value_fn", "grad_fn", "per_example_grad_fn"}
    assert e.extra_args["value"] is e.value
    assert e.extra_args["grad"] is e.grad
    for at in (PARAMS, OTHER):
        value, grad = jax.value_and_grad(loss_fn)(at, BATCH)
        assert e.extra_args["value_fn"](at) == value
        support.assert_same_bits(e.extra_args["grad_fn"](at), grad)
    assert value != e.value
    plain = optperm.evaluate(loss_fn, PARAMS, BATCH).extra_args["per_example_grad_fn"]
    support.assert_same_bits(e.extra_args["per_example_grad_fn"](PARAMS), plain(PARAMS))


def test_gradient_of_an_example_is_not_averaged_over_replicas():
    """Of (w - x)^2 / 2 it is w - x of each replica's own example, beside a mean over the batches."""

    def gradients(x):
        loss = lambda w, x: jnp.mean((w - x) ** 2) / 2  # noqa: E731
        w = jnp.float32(1.0)
        e = optperm.evaluate(loss, w, x[:1], example=x[1:], axis_name="replica")
        return e.grad, e.extra_args["example_grad_fn"](w)

    x = jnp.float32([[1.0, 2.0], [3.0, 6.0]])
    grad, own = jax.jit(jax.vmap(gradients, axis_name="replica"))(x)
    assert (grad.tolist(), own.tolist()) == ([-1.0, -1.0], [-1.0, -5.0])


def test_minus_the_gradient_of_complex_params_descends():
    """Of mean |w - x|^2 it is 2 (w - x), the conjugate of JAX's, in all examples and in each."""

    @jax.jit
    def gradients(w, x):
        e = optperm.evaluate(lambda w, x: jnp.mean(jnp.abs(w - x) ** 2), w, x)
        return e.grad, e.extra_args["grad_fn"](w), e.extra_args["per_example_grad_fn"](w)

    w, x = np.complex64(1 + 2j), np.complex64([0.5, 1j, 1 - 1j])
    grad, again, each = gradients(w, x)
    np.testing.assert_allclose([grad, again], [2 * (w - x.mean())] * 2, rtol=1e-6)
    np.testing.assert_allclose(each, 2 * (w - x), rtol=1e-6)


def test_gradients_of_examples_of_a_batch_on_an_explicit_mesh_are_those_of_one_device():
    """By products and sums: in JAX 0.10, the gradient of a matrix product needs an unsharded batch."""

    def of_sums(params, batch):
        outputs = jnp.sum(batch["x"][:, :, None] * params["kernel"][None], axis=1)
        return jnp.mean(jnp.sum((outputs + params["bias"][None] - batch["y"]) ** 2, axis=1))

    @jax.jit
    def gradients(batch):
        return optperm.evaluate(of_sums, PARAMS, batch).extra_args["per_example_grad_fn"](PARAMS)

    wanted = gradients(BATCH)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(BATCH, jax.sharding.NamedSharding(mesh, P("data")))
        chex.assert_trees_all_close(gradients(sharded), wanted, rtol=1e-5)


def test_gradients_of_examples_are_a_loop_over_the_batch():
    """Entry i is the gradient on example i alone, and a part of the batch has that of its examples; a
    number in the batch reaches every example whole."""

    def scaled(params, batch):
        return batch["scale"] * loss_fn(params, batch)

    def part(start, size):
        return {name: BATCH[name][start : start + size] for name in ("x", "y")} | scale

    @jax.jit
    def gradients(batch):
        fns = optperm.evaluate(scaled, PARAMS, batch).extra_args
        return fns["per_example_grad_fn"](PARAMS), fns["grad_fn"](PARAMS, start=3, size=2)

    scale = {"scale": np.float32(2.0)}
    each, found = jax.tree.map(np.asarray, gradients(BATCH | scale))
    grad = jax.jit(jax.grad(scaled))
    for i in range(8):
        chex.assert_trees_all_close(replicas.take(each, i), grad(PARAMS, part(i, 1)), rtol=1e-5)
    chex.assert_trees_all_close(found, grad(PARAMS, part(3, 2)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("start", "size"), [(5, 4), (-1, 2), (0, 9), (jnp.int32(7), 2)])
def test_a_part_that_the_batch_does_not_contain_is_refused(start, size):
    fns = optperm.evaluate(loss_fn, PARAMS, BATCH).extra_args
    for name in ("grad_fn", "per_example_grad_fn"):
        with pytest.raises(
            ValueError, match=rf"start={start} and size={size} do not fit .* of 8 ex"
        ):
            fns[name](PARAMS, start=start, size=size)


def test_leaves_of_different_lengths_have_no_examples():
    def sums(params, batch):
        return jnp.mean(batch["x"]) * jnp.sum(params["bias"]) + jnp.sum(batch["y"])

    batch = {"x": np.ones(3, np.float32), "y": np.ones(4, np.float32)}
    fns = optperm.evaluate(sums, PARAMS, batch).extra_args
    for call in (
        lambda: fns["per_example_grad_fn"](PARAMS),
        lambda: fns["grad_fn"](PARAMS, size=2),
    ):
        with pytest.raises(
            ValueError, match=r"batch must be arrays that agree .* \[\(3,\), \(4,\)\]"
        ):
            call()


@pytest.mark.parametrize("bound", [False, True])
def test_each_example_draws_from_a_key_of_its_own(bound):
    """Its dropout mask is that of the batch's key, or of one bound to the loss, and of its place in the
    batch, also where only a part of the batch is asked for."""

    def dropout(key, params, batch):
        key = key if bound else batch["key"]
        keep = jax.random.bernoulli(key, 0.5, batch["x"].shape).astype(jnp.float32)
        return jnp.mean((batch["x"] * keep) @ params["kernel"])

    key, grad = jax.random.key(3), jax.jit(jax.grad(dropout, argnums=1))
    batch = {"x": BATCH["x"]} | ({} if bound else {"key": key})

    @jax.jit
    def gradients(key, batch):
        e = optperm.evaluate(jax.tree_util.Partial(dropout, key), PARAMS, batch)
        grad_fn = e.extra_args["per_example_grad_fn"]
        return grad_fn(PARAMS)["kernel"], grad_fn(PARAMS, start=3, size=2)["kernel"]

    each, part = map(np.asarray, gradients(key, batch))
    for i in range(8):
        own = jax.random.fold_in(key, i)
        alone = grad(own, PARAMS, {"x": BATCH["x"][i : i + 1], "key": own})["kernel"]
        np.testing.assert_allclose(each[i], alone, rtol=1e-5)
    masks = each[:, :, 0] != 0.0
    assert len(np.unique(masks, axis=0)) == 8
    support.assert_same_bits(part, each[3:5])


def test_closures_take_masked_params_as_they_were_evaluated():
    """Masked params keep the values of the evaluation, and get no gradient."""
    e = optperm.evaluate(loss_fn, PARAMS, BATCH)
    masked, filled = OTHER | {"bias": optax.MaskedNode()}, OTHER | {"bias": PARAMS["bias"]}
    assert e.extra_args["value_fn"](masked) == e.extra_args["value_fn"](filled)
    for name in ("grad_fn", "per_example_grad_fn"):
        expected = e.extra_args[name](filled) | {"bias": optax.MaskedNode()}
        support.assert_same_bits(e.extra_args[name](masked), expected)


def test_loss_of_a_part_of_the_params_is_refused_with_the_way_out():
    """As a method inside `optax.masked` or `optax.partition` would ask for it."""
    masked, mask = PARAMS | {"bias": optax.MaskedNode()}, {"bias": False, "kernel": True}
    tx = optax.masked(optperm.with_loss(optax.sgd(0.1), loss_fn, BATCH), mask)
    for call in (
        lambda: jax.eval_shape(lambda p: optperm.evaluate(loss_fn, p, BATCH).grad, masked),
        lambda: optperm.variance.full_gradient(loss_fn, masked, [BATCH]),
        lambda: jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), PARAMS),
    ):
        with pytest.raises(
            ValueError, match=r'extra_args\["grad_fn"\], and put optperm.with_loss outside'
        ):
            call()


def test_closures_cost_nothing_unless_called():
    """The loss is traced once for value and gradient; each closure called traces it once more."""
    traces = []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    e = optperm.evaluate(counted, PARAMS, BATCH)
    assert len(traces) == 1
    e.extra_args["value_fn"](PARAMS)
    assert len(traces) == 2


def everything(shared, batch, axis_name=replicas.AXIS):
    """All that is averaged, and the per-example gradients, which are not."""
    params, other = shared
    e = optperm.evaluate(loss_fn, params, batch, axis_name=axis_name)
    fns = e.extra_args
    slope = jax.grad(fns["value_fn"])(other)
    averaged = (e.value, e.grad, fns["value_fn"](other), fns["grad_fn"](other), slope)
    return averaged, fns["per_example_grad_fn"](params)


@functools.partial(jax.jit, static_argnums=0)
def of_whole(function, batch):
    """Call one of these functions without a mapped axis."""
    return function((PARAMS, OTHER), batch, axis_name=None)


def quarters(batch):
    """What each of four replicas has."""
    return jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)


@pytest.mark.parametrize("mapping", support.every_night(replicas.MAPPINGS, ["shard_map", "vmap"]))
def test_averages_over_a_mapped_axis_are_those_of_the_whole_batch(mapping):
    """On every replica value, grad, value_fn, its derivative and grad_fn are the whole batch's, not
    sums, and per-example gradients are those of the replica's own examples."""
    expected, each = of_whole(everything, BATCH)
    got, got_each = replicas.share(everything, mapping, 4)((PARAMS, OTHER), quarters(BATCH))
    chex.assert_trees_all_close(got, replicas.stack([expected] * 4), rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(got_each, quarters(each), rtol=1e-4, atol=1e-6)


# Three of eight examples are padding, and a replica of four has nothing else.
MASK = np.float32([1, 1, 1, 0, 1, 1, 0, 0])


def masked_sum(params, batch):
    """Squared errors of the examples that count, and a count that depends on the params as well."""
    prediction = batch["x"] @ params["kernel"] + params["bias"][None]
    weights = batch["mask"] * (1.0 + jnp.sum(params["bias"] ** 2))
    return jnp.sum(weights * jnp.mean((prediction - batch["y"]) ** 2, axis=1)), jnp.sum(weights)


def counted(shared, batch, axis_name=replicas.AXIS):
    """All that is averaged, and the per-example gradients and the number, which are not."""
    params, other = shared
    e = optperm.evaluate(masked_sum, params, batch, axis_name=axis_name)
    fns = e.extra_args
    slope = jax.grad(fns["value_fn"])(params)
    averaged = (e.value, e.grad, fns["value_fn"](other), fns["grad_fn"](other), slope, e.count)
    return averaged, fns["per_example_grad_fn"](other)


def test_a_sum_and_a_count_are_the_quotient_of_all_that_counts():
    """Padding has no weight: only the other examples determine value and gradients."""
    batch, few = BATCH | {"mask": MASK}, {name: leaf[MASK > 0] for name, leaf in BATCH.items()}
    whole, part = MASK.astype(bool), {"start": 2, "size": 2}
    at = jax.jit(jax.value_and_grad(lambda p, b: divided(masked_sum(p, b))))
    value, grad = at(PARAMS, batch)
    (got, grads, *_, count), each = jax.tree.map(np.asarray, of_whole(counted, batch))
    number = jax.jit(masked_sum)(PARAMS, batch)[1]
    np.testing.assert_allclose([got, count], [value, number], rtol=1e-5)
    chex.assert_trees_all_close(grads, grad, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(value, loss_fn(PARAMS, few), rtol=1e-5)
    # An example, or a part of the batch, has its own sum and count; padding has no gradient.
    for i in range(8):
        alone = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], batch)
        own = at(OTHER, alone)[1] if whole[i] else jax.tree.map(np.zeros_like, OTHER)
        chex.assert_trees_all_close(replicas.take(each, i), own, rtol=1e-4, atol=1e-6)
    two = jax.tree.map(lambda leaf: leaf[2:4], batch)

    @jax.jit
    def of_other(batch):
        e = optperm.evaluate(masked_sum, OTHER, batch)
        both = optperm.evaluate(lambda *of: (masked_sum(*of), "aux"), OTHER, batch, has_aux=True)
        assert both.aux == "aux"
        return e.extra_args["grad_fn"](OTHER, **part), e.extra_args["weight"], e.value, both.value

    grads, weight, value, with_aux = of_other(batch)
    chex.assert_trees_all_close(grads, at(OTHER, two)[1], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(weight, jax.jit(masked_sum)(OTHER, batch)[1], rtol=1e-6)
    np.testing.assert_allclose(value, with_aux, rtol=1e-6)


def divided(pair):
    return pair[0] / pair[1]


@pytest.mark.parametrize(
    "mapping", support.every_night(replicas.MAPPINGS, ["pmap", "shard_map unchecked"])
)
def test_sums_and_counts_over_a_mapped_axis_are_those_of_the_whole_batch(mapping):
    """Not means of means; the last replica has nothing that counts."""
    batch = BATCH | {"mask": MASK}
    expected, each = of_whole(counted, batch)
    got, got_each = replicas.share(counted, mapping, 4)((PARAMS, OTHER), quarters(batch))
    chex.assert_trees_all_close(got, replicas.stack([expected] * 4), rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(got_each, quarters(each), rtol=1e-4, atol=1e-6)


def test_where_nothing_counts_loss_and_gradient_are_zero():
    empty = BATCH | {"mask": 0 * MASK}
    (value, grad, *_, count), each = of_whole(counted, empty)
    assert value == count == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((grad, each)))
    # What is not a number is no count of zero.
    assert np.isnan(of_whole(counted, BATCH | {"mask": MASK * np.float32(np.nan)})[0][0])


@pytest.mark.parametrize(
    "out", [(1.0, {}), (1.0, None), (1.0, 1.0, 1.0), (np.ones(2), 1.0), (1, 1), [1.0, 1], None]
)
def test_what_is_neither_a_loss_nor_a_sum_and_a_count_is_refused(out):
    with pytest.raises(
        TypeError, match=r"a pair of scalars \(sum, count\), or a pair \(loss, aux\)"
    ):
        optperm.evaluate(lambda p, b: out, PARAMS, BATCH)


def test_sam_may_ask_for_the_gradient_of_each_inner_step():
    """Its opaque mode passes the number of the step too; every one sees the same batch."""
    grad_fn = optperm.evaluate(loss_fn, PARAMS, BATCH).extra_args["grad_fn"]
    grads = grad_fn(PARAMS)
    support.assert_same_bits(grad_fn(PARAMS, 3), grads)
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    tx = optax.contrib.sam(optax.sgd(1.0), ascent, opaque_mode=True)

    @jax.jit
    def step(grads):
        updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS, grad_fn=grad_fn)
        above = optax.tree.add_scale(PARAMS, 0.1 / optax.tree.norm(grads), grads)
        return updates, optax.tree.scale(-1.0, grad_fn(above))

    chex.assert_trees_all_close(*step(grads), rtol=1e-5)


def dropped(params, batch, key):
    keep = jax.random.bernoulli(key, 0.9, batch["x"].shape)
    return loss_fn(params, batch | {"x": jnp.where(keep, batch["x"] / 0.9, 0.0)})


def normalized(params, batch):
    """As with BatchNorm, examples are mixed."""
    x = batch["x"] - jnp.mean(batch["x"], axis=0, keepdims=True)
    return loss_fn(params, batch | {"x": x / jnp.std(batch["x"], axis=0, keepdims=True)})


def weighted(params, batch):
    weights = jnp.exp(batch["y"][:, 0])
    errors = (batch["x"] @ params["kernel"] - batch["y"]) ** 2
    return jnp.sum(weights * jnp.mean(errors, axis=1)) / jnp.sum(weights)


def masked(params, batch):
    mask = jnp.float32(batch["y"][:, 0] > 0.0)
    errors = jnp.mean((batch["x"] @ params["kernel"] - batch["y"]) ** 2, axis=1)
    return jnp.sum(mask * errors), jnp.sum(mask)


KEY = jax.random.key(3)
# (loss, whether it is a mean over examples)
LOSSES = {
    "mean": (loss_fn, True),
    "mean and penalty": (lambda p, b: loss_fn(p, b) + jnp.sum(p["kernel"] ** 2), True),
    "mean near zero": (lambda p, b: loss_fn(p, b) - loss_fn(PARAMS, BATCH), True),
    "dropout": (jax.tree_util.Partial(dropped, key=KEY), True),
    "key in the batch": (lambda p, b: dropped(p, {k: b[k] for k in "xy"}, b["key"]), True),
    "zero": (lambda p, b: 0.0 * loss_fn(p, b), True),
    "infinite": (lambda p, b: jnp.inf * loss_fn(p, b), True),
    "sum": (lambda p, b: len(b["x"]) * loss_fn(p, b), False),
    "sum and penalty": (lambda p, b: jnp.sum(b["y"] ** 2) + 100.0, False),
    "sum of few": (lambda p, b: loss_fn(p, b) * len(b["x"]) / (len(b["x"]) - 1), False),
    "sum with dropout": (lambda p, b: len(b["x"]) * LOSSES["key in the batch"][0](p, b), False),
    "mean and a constant": (lambda p, b: (loss_fn(p, b), 16.0), False),
    "mixed": (normalized, False),
    "weighted": (weighted, False),
    "broadcast": (lambda p, b: jnp.mean((b["x"][None, :, 0] - b["y"][:, :1]) ** 2), False),
    "broadcast of zeros": (
        lambda p, b: jnp.mean((_zeros(p, b)[:, :1] - b["y"][:, 0][None]) ** 2),
        False,
    ),
    "mean of zeros": (lambda p, b: jnp.mean((_zeros(p, b) - b["y"]) ** 2), True),
    "sum and count": (lambda p, b: (len(b["x"]) * loss_fn(p, b), len(b["x"])), True),
    "masked sum and count": (masked, True),
    "loss and accuracy": (lambda p, b: (loss_fn(p, b), jnp.mean(b["x"] > 0.0)), False),
    "mean and count": (lambda p, b: (loss_fn(p, b), len(b["x"])), False),
    "sum and constant": (lambda p, b: (len(b["x"]) * loss_fn(p, b), 3.0), False),
}


def _zeros(params, batch):
    """Return predictions that are zero at PARAMS, as of a model that is initialized with zeros."""
    return batch["x"] @ (params["kernel"] - PARAMS["kernel"])


# A half of 8 examples has a half of all that counts.
AT_EIGHT = {"mean and a constant", "loss and accuracy"}
# Another loss finds the same in the same way.
FURTHER = {
    *("mean and penalty", "zero", "sum and penalty", "sum with dropout", "broadcast"),
    *("sum and count", "mean and count", "sum and constant", "infinite"),
    *("dropout", "loss and accuracy", "sum of few"),
}


@pytest.mark.parametrize(
    ("name", "size"),
    support.every_night(
        itertools.product(LOSSES, (8, 7)),
        [
            (name, 8 if name in AT_EIGHT or i % 2 == 0 else 7)
            for i, name in enumerate(LOSSES)
            if name not in FURTHER
        ],
    ),
)
def test_losses_that_are_no_means_over_examples_are_found(name, size):
    loss, is_mean = LOSSES[name]
    batch = {name: leaf[:size] for name, leaf in BATCH.items()} | {"key": KEY}
    assert evaluation.is_mean(loss, PARAMS, batch) == is_mean


SAMPLERS = (
    optperm.sgld(1e-3, 8), optperm.sghmc(1e-3, 8, 0.1), kernels.constant_sgd(),
    optperm.mandt_sgd(80, 8), optperm.ivon(0.1, 8.0),
    optax.partition({"a": optperm.sgld(1e-3, 8), "b": optax.sgd(0.1)}, {"kernel": "a", "bias": "b"}),
)  # fmt: skip


def test_loss_of_one_example_passes_as_a_mean():
    one = {name: leaf[:1] for name, leaf in BATCH.items()}
    assert evaluation.is_mean(LOSSES["sum"][0], PARAMS, one)


@pytest.mark.filterwarnings(
    "ignore:The updates are not the gradient", "ignore:svrg has no snapshot"
)
@pytest.mark.parametrize(
    ("before", "scale", "found", "samplers"),
    [
        ([], 1.0, True, SAMPLERS),
        ([optperm.svrg()], 1.0, True, SAMPLERS[:1]),
        ([optperm.svrg(every=2)], 1.0, True, SAMPLERS[:1]),
        ([optperm.svrg(probability=0.5)], 1e3, True, SAMPLERS[:1]),
        ([optax.scale_by_rss()], 1.0, False, SAMPLERS[:1]),
        ([optax.clip_by_global_norm(1.0)], 1e3, False, SAMPLERS),
        ([optax.add_decayed_weights(0.1)], 1e-3, False, SAMPLERS[:1]),
        ([optax.trace(0.9), optax.scale(0.1)], 1.0, False, SAMPLERS[:1]),
    ],
)
def test_transformations_that_change_the_gradient_of_a_sampler_are_found(
    before, scale, found, samplers
):
    """For every method that looks, also in a part of the params."""

    @jax.jit
    def look(params):
        e = optperm.evaluate(lambda p, b: scale * loss_fn(p, b), params, BATCH)
        extras = {"full_grad_fn": e.extra_args["grad_fn"], "draw": OTHER}
        chains = (optax.chain(*before, each) for each in (*samplers, optax.sgd(0.1)))
        return [
            evaluation.gets_gradient(tx, tx.init(params), params, e, **extras)[0]
            for tx in map(optax.with_extra_args_support, chains)
        ]

    *gets, of_other = look(PARAMS)
    assert [bool(each) for each in gets] == [found] * len(samplers)
    assert of_other is None
