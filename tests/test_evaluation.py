"""`evaluate` against closed forms and against plain JAX, alone and averaged over devices."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replicas
import support

import optperm


@jax.jit
def loss_fn(params, batch):
    """Mean squared error of a linear model with a bias."""
    prediction = batch["x"] @ params["kernel"] + params["bias"][None]
    return jnp.mean((prediction - batch["y"]) ** 2)


def make_batch(size=8):
    return {"x": support.normal((size, 12), 1), "y": support.normal((size, 5), 2)}


def test_values_and_gradients_are_those_of_jax():
    """Value, gradient and the closures, there and at other params, agree with `jax.value_and_grad`."""
    params, other, batch = support.random_params(0), support.random_params(1), make_batch()
    value, grad = jax.value_and_grad(loss_fn)(params, batch)
    e = optperm.evaluate(loss_fn, params, batch)
    assert e.aux is None
    assert e.value == value
    support.assert_same_bits(e.grad, grad)
    assert set(e.extra_args) == {"value", "grad", "value_fn", "grad_fn", "per_example_grad_fn"}
    assert e.extra_args["value"] is e.value
    assert e.extra_args["grad"] is e.grad
    for at in (params, other):
        value, grad = jax.value_and_grad(loss_fn)(at, batch)
        assert e.extra_args["value_fn"](at) == value
        support.assert_same_bits(e.extra_args["grad_fn"](at), grad)
    assert value != e.value


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


def test_gradients_of_examples_are_a_loop_over_the_batch():
    """Entry i is the gradient on example i alone, and a part of the batch has that of its examples; a
    number in the batch reaches every example whole."""

    def scaled(params, batch):
        return batch["scale"] * loss_fn(params, batch)

    def part(start, size):
        return {name: batch[name][start : start + size] for name in ("x", "y")} | scale

    scale = {"scale": jnp.float32(2.0)}
    params, batch = support.random_params(), make_batch() | scale
    fns = optperm.evaluate(scaled, params, batch).extra_args
    each = fns["per_example_grad_fn"](params)
    for i in range(8):
        alone = jax.grad(scaled)(params, part(i, 1))
        chex.assert_trees_all_close(replicas.take(each, i), alone, rtol=1e-5)
    expected = jax.grad(scaled)(params, part(3, 2))
    found = fns["grad_fn"](params, start=3, size=2)
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bound", [False, True])
def test_each_example_draws_from_a_key_of_its_own(bound):
    """Its dropout mask is that of the batch's key, or of one bound to the loss, and of its place in the
    batch, also where only a part of the batch is asked for."""

    def dropout(key, params, batch):
        key = key if bound else batch["key"]
        keep = jax.random.bernoulli(key, 0.5, batch["x"].shape).astype(jnp.float32)
        return jnp.mean((batch["x"] * keep) @ params["kernel"])

    params, key = support.random_params(), jax.random.key(3)
    batch = {"x": make_batch()["x"]} | ({} if bound else {"key": key})
    grad_fn = optperm.evaluate(jax.tree_util.Partial(dropout, key), params, batch).extra_args[
        "per_example_grad_fn"
    ]
    each = grad_fn(params)["kernel"]
    for i in range(8):
        own = jax.random.fold_in(key, i)
        example = {"x": batch["x"][i : i + 1], "key": own}
        alone = jax.grad(dropout, argnums=1)(own, params, example)["kernel"]
        np.testing.assert_allclose(each[i], alone, rtol=1e-5)
    masks = np.asarray(each[:, :, 0] != 0.0)
    assert len(np.unique(masks, axis=0)) == 8
    support.assert_same_bits(grad_fn(params, start=3, size=2)["kernel"], each[3:5])


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


@pytest.mark.parametrize("name", ["evaluate", "full_gradient", "with_loss"])
def test_loss_of_a_part_of_the_params_is_refused_with_the_way_out(name):
    """As a method inside `optax.masked` or `optax.partition` would ask for it."""
    params, batch = support.random_params(), make_batch()
    masked, mask = params | {"bias": optax.MaskedNode()}, {"bias": False, "kernel": True}
    tx = optax.masked(optperm.with_loss(optax.sgd(0.1), loss_fn, batch), mask)
    calls = {
        "evaluate": lambda: optperm.evaluate(loss_fn, masked, batch),
        "full_gradient": lambda: optperm.variance.full_gradient(loss_fn, masked, [batch]),
        "with_loss": lambda: tx.update(params, tx.init(params), params),
    }
    with pytest.raises(
        ValueError, match=r'extra_args\["grad_fn"\], and put optperm.with_loss outside'
    ):
        calls[name]()


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


def everything(shared, batch, axis_name=replicas.AXIS):
    """All that is averaged, and the per-example gradients, which are not."""
    params, other = shared
    e = optperm.evaluate(loss_fn, params, batch, axis_name=axis_name)
    fns = e.extra_args
    slope = jax.grad(fns["value_fn"])(other)
    averaged = (e.value, e.grad, fns["value_fn"](other), fns["grad_fn"](other), slope)
    return averaged, fns["per_example_grad_fn"](params)


def quarters(batch):
    """What each of four replicas has."""
    return jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), batch)


@pytest.mark.parametrize("mapping", replicas.MAPPINGS)
def test_averages_over_a_mapped_axis_are_those_of_the_whole_batch(mapping):
    """On every replica value, grad, value_fn, its derivative and grad_fn are the whole batch's, not
    sums, and per-example gradients are those of the replica's own examples."""
    batch, shared = make_batch(), (support.random_params(0), support.random_params(1))
    expected, each = everything(shared, batch, axis_name=None)
    got, got_each = replicas.share(everything, mapping, 4)(shared, quarters(batch))
    for replica in range(4):
        chex.assert_trees_all_close(replicas.take(got, replica), expected, rtol=1e-4, atol=1e-6)
    chex.assert_trees_all_close(got_each, quarters(each), rtol=1e-4, atol=1e-6)


def test_sam_may_ask_for_the_gradient_of_each_inner_step():
    """Its opaque mode passes the number of the step too; every one sees the same batch."""
    params, batch = {"w": jnp.array([1.0, -2.0])}, {"x": support.normal((4, 2), 0)}

    def squares(params, batch):
        return jnp.mean((batch["x"] @ params["w"]) ** 2)

    grad_fn = optperm.evaluate(squares, params, batch).extra_args["grad_fn"]
    support.assert_same_bits(grad_fn(params, 3), grad_fn(params))
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
    tx = optax.contrib.sam(optax.sgd(1.0), ascent, opaque_mode=True)
    updates, _ = tx.update(grad_fn(params), tx.init(params), params, grad_fn=grad_fn)
    grads = grad_fn(params)
    above = optax.tree.add_scale(params, 0.1 / optax.tree.norm(grads), grads)
    chex.assert_trees_all_close(updates, optax.tree.scale(-1.0, grad_fn(above)), rtol=1e-5)
