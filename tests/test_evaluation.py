"""`evaluate` against closed forms and against plain JAX, alone and averaged over devices."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optperm


def loss_fn(params, batch):
    """Mean squared error of a linear model with a bias."""
    prediction = batch["x"] @ params["kernel"] + params["bias"][None]
    return jnp.mean((prediction - batch["y"]) ** 2)


def make_batch(size=8):
    return {
        "x": jax.random.normal(jax.random.key(1), (size, 12)),
        "y": jax.random.normal(jax.random.key(2), (size, 5)),
    }


def test_value_and_gradient_are_those_of_jax():
    """Value, gradient and the closures at these params agree with `jax.value_and_grad`."""
    params, batch = support.random_params(), make_batch()
    value, grad = jax.value_and_grad(loss_fn)(params, batch)
    e = optperm.evaluate(loss_fn, params, batch)
    assert e.aux is None
    assert e.value == value
    support.assert_same_bits(e.grad, grad)
    assert set(e.extra_args) == {"value", "grad", "value_fn", "grad_fn", "per_example_grad_fn"}
    assert e.extra_args["value"] is e.value
    assert e.extra_args["grad"] is e.grad
    assert e.extra_args["value_fn"](params) == value
    support.assert_same_bits(e.extra_args["grad_fn"](params), grad)


def test_closures_evaluate_elsewhere_on_the_same_batch():
    """At other params the closures give the loss and gradient there, not here."""
    params, other, batch = support.random_params(0), support.random_params(1), make_batch()
    e = optperm.evaluate(loss_fn, params, batch)
    value, grad = jax.value_and_grad(loss_fn)(other, batch)
    assert e.extra_args["value_fn"](other) == value != e.value
    support.assert_same_bits(e.extra_args["grad_fn"](other), grad)


def test_per_example_gradients_are_a_loop_over_the_batch():
    """Entry i is the gradient on example i alone, and their mean is the gradient."""
    params, batch = support.random_params(), make_batch()
    e = optperm.evaluate(loss_fn, params, batch)
    each = e.extra_args["per_example_grad_fn"](params)
    for i in range(8):
        alone = jax.grad(loss_fn)(params, jax.tree.map(lambda x, i=i: x[i : i + 1], batch))
        chex.assert_trees_all_close(jax.tree.map(lambda g, i=i: g[i], each), alone, rtol=1e-5)
    mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), each)
    chex.assert_trees_all_close(mean, e.grad, rtol=1e-4, atol=1e-6)


def test_leaves_of_rank_zero_are_shared_by_all_examples():
    """A random key or a number in the batch reaches every example whole."""

    def noisy(params, batch):
        keep = jax.random.bernoulli(batch["key"], 0.5, (12,)).astype(jnp.float32)
        return batch["scale"] * jnp.mean((batch["x"] * keep[None]) @ params["kernel"])

    params = support.random_params()
    batch = {"x": make_batch()["x"], "key": jax.random.key(3), "scale": jnp.float32(2.0)}
    e = optperm.evaluate(noisy, params, batch)
    each = e.extra_args["per_example_grad_fn"](params)
    assert each["kernel"].shape == (8, 12, 5)
    mean = jax.tree.map(lambda g: jnp.mean(g, axis=0), each)
    chex.assert_trees_all_close(mean, e.grad, rtol=1e-4, atol=1e-6)


def test_closures_take_masked_params_as_they_were_evaluated():
    """Where the params are masked they are those of the evaluation, and get no gradient."""
    params, other, batch = support.random_params(0), support.random_params(1), make_batch()
    e = optperm.evaluate(loss_fn, params, batch)
    masked = other | {"bias": optax.MaskedNode()}
    filled = other | {"bias": params["bias"]}
    assert e.extra_args["value_fn"](masked) == e.extra_args["value_fn"](filled)
    for name in ("grad_fn", "per_example_grad_fn"):
        got, expected = e.extra_args[name](masked), e.extra_args[name](filled)
        assert isinstance(got["bias"], optax.MaskedNode)
        support.assert_same_bits(got["kernel"], expected["kernel"])


def test_aux_comes_out():
    """With has_aux the second output is handed on, and the closures ignore it."""
    params, batch = support.random_params(), make_batch()

    def with_aux(params, batch):
        return loss_fn(params, batch), {"size": batch["x"].shape[0]}

    e = optperm.evaluate(with_aux, params, batch, has_aux=True)
    plain = optperm.evaluate(loss_fn, params, batch)
    assert e.aux == {"size": 8}
    for name in ("value_fn", "grad_fn", "per_example_grad_fn"):
        support.assert_same_bits(e.extra_args[name](params), plain.extra_args[name](params))


def test_closures_cost_nothing_unless_called():
    """The loss is traced once for value and gradient; each closure called traces it once more."""
    traces = 0

    def counted(params, batch):
        nonlocal traces
        traces += 1
        return loss_fn(params, batch)

    e = optperm.evaluate(counted, support.random_params(), make_batch())
    assert traces == 1
    e.extra_args["value_fn"](support.random_params())
    assert traces == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda p, b: p["bias"], r"real scalar.* got float32\[5\]"),
        (lambda p, b: jnp.sum(p["bias"]).astype(jnp.complex64), r"real scalar.* got complex64\[\]"),
        (lambda p, b: jnp.int32(1), r"real scalar.* got int32\[\]"),
        (lambda p, b: (jnp.sum(p["bias"]), {}), "got tuple.* pass has_aux=True"),
    ],
)
def test_losses_that_are_no_real_scalar_are_refused(bad, message):
    """A vector, a complex number, an integer or a forgotten has_aux raises a TypeError."""
    with pytest.raises(TypeError, match=message):
        optperm.evaluate(bad, support.random_params(), make_batch())


@pytest.mark.parametrize("bad", [loss_fn, lambda p, b: (loss_fn(p, b), 1, 2)])
def test_has_aux_wants_a_pair(bad):
    """has_aux=True with something other than (loss, aux) raises a TypeError."""
    with pytest.raises(TypeError, match=r"pair \(loss, aux\)"):
        optperm.evaluate(bad, support.random_params(), make_batch(), has_aux=True)


def everything(params, other, batch, axis_name):
    """All that is averaged, and the per-example gradients, which are not."""
    e = optperm.evaluate(loss_fn, params, batch, axis_name=axis_name)
    fns = e.extra_args
    slope = jax.grad(fns["value_fn"])(other)
    averaged = (e.value, e.grad, fns["value_fn"](other), fns["grad_fn"](other), slope)
    return averaged, fns["per_example_grad_fn"](params)


def mapped(how, batch):
    """`everything` with the batch spread over four devices or lanes, which lead its outputs."""
    params, other = support.random_params(0), support.random_params(1)
    shards = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), batch)
    if how in ("pmap", "vmap"):
        by = {"pmap": functools.partial(jax.pmap, devices=jax.devices()[:4]), "vmap": jax.vmap}[how]
        run = functools.partial(everything, axis_name="data")
        return by(run, axis_name="data", in_axes=(None, None, 0))(params, other, shards)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("data")),
        out_specs=((P(), P("data")) if how == "checked" else P("data")),
        check_vma=how == "checked",
    )
    def run(params, other, shard):
        averaged, each = everything(params, other, shard, "data")
        if how == "unchecked":
            averaged = jax.tree.map(lambda x: x[None], averaged)
        return averaged, jax.tree.map(lambda x: x[None], each)

    averaged, each = jax.jit(run)(params, other, batch)
    if how == "checked":  # Replicated by its type; say so to the test by repeating it.
        averaged = jax.tree.map(lambda x: jnp.stack([x] * 4), averaged)
    return averaged, each


@pytest.mark.parametrize("how", ["pmap", "vmap", "checked", "unchecked"])
def test_averages_over_a_mapped_axis_are_those_of_the_whole_batch(how):
    """On every replica value, grad, value_fn, its derivative and grad_fn are the whole batch's, not
    sums, and per-example gradients are those of the replica's own examples."""
    batch = make_batch()
    params, other = support.random_params(0), support.random_params(1)
    expected, each = everything(params, other, batch, None)
    got, got_each = mapped(how, batch)
    for replica in range(4):
        chex.assert_trees_all_close(
            jax.tree.map(lambda x, r=replica: x[r], got), expected, rtol=1e-4, atol=1e-6
        )
    own = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), each)
    chex.assert_trees_all_close(got_each, own, rtol=1e-4, atol=1e-6)


def test_an_axis_that_is_not_bound_is_an_error():
    """axis_name outside any mapping is refused by its name."""
    with pytest.raises(ValueError, match="axis_name 'data' is not bound here"):
        optperm.evaluate(loss_fn, support.random_params(), make_batch(), axis_name="data")


def test_without_an_axis_name_nothing_is_averaged():
    """Under pmap without axis_name each replica keeps its own gradient."""
    batch = jax.tree.map(lambda x: x.reshape(4, 2, *x.shape[1:]), make_batch())
    params = support.random_params()

    def grad(batch):
        return optperm.evaluate(loss_fn, params, batch).grad

    got = jax.pmap(grad, devices=jax.devices()[:4])(batch)
    assert not np.allclose(got["kernel"][0], got["kernel"][1])


@pytest.mark.usefixtures("lenient")
def test_extra_args_serve_optax_line_search():
    """`optax.lbfgs`, which asks for value, grad and value_fn, takes extra_args as they are."""
    batch, params = make_batch(40), support.random_params()
    tx = optax.lbfgs()
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state):
        e = optperm.evaluate(loss_fn, params, batch)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optax.apply_updates(params, updates), opt_state

    for _ in range(20):
        params, opt_state = step(params, opt_state)
    ones = np.ones((40, 1))
    design = np.concatenate([np.asarray(batch["x"]), ones], axis=1)
    _, residuals, *_ = np.linalg.lstsq(design, np.asarray(batch["y"]), rcond=None)
    np.testing.assert_allclose(loss_fn(params, batch), residuals.sum() / 200, rtol=1e-3)
