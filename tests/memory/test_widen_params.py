"""Params of 16 bits with remainders: as good as float32, and nothing lost on the way."""

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.memory import lost_updates, narrow_params, wide_params, widen_params

pytestmark = pytest.mark.usefixtures("lenient")
BF16 = jnp.bfloat16


def quadratic(params):
    return sum(
        jnp.sum(jnp.square(leaf.astype(jnp.float32) - 0.3)) for leaf in jax.tree.leaves(params)
    )


def train(tx, params, steps=300, loss=quadratic, dtype=None):
    """Params and state after steps, compiled, with gradients in the dtype of the params."""

    def step(carry, _):
        params, state = carry
        grads = jax.grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), length=steps)[0])(params)


@pytest.mark.parametrize(("bits", "error"), [(16, 3e-5), (8, 5e-5), (0, 6e-4)])
@pytest.mark.parametrize("how", ["scan", "eager"])
def test_small_steps_add_up(bits, error, how):
    """1,000 steps of 1e-5 from 1.0 end at 0.99 in the mean; in bfloat16 alone they end at 1.0."""
    tx, steps = widen_params(optax.sgd(1.0), bits=bits), {"scan": 1000, "eager": 20}[how]
    start, grads = jnp.ones(4096, BF16), jnp.full((steps, 4096), 1e-5, jnp.float32)
    trail = loops.train(tx, start, grads, apply=loops.by_addition, how=how)
    params, state = trail[-1]
    wide = wide_params(params, state)
    assert params.dtype == BF16
    np.testing.assert_allclose(wide.mean(), 1 - 1e-5 * steps, rtol=0, atol=error)
    if bits and how == "scan":
        np.testing.assert_allclose(wide, 0.99, rtol=0, atol=1.2e-3 if bits == 8 else 3e-5)


@pytest.mark.parametrize(
    "inner",
    [
        optax.adamw(1e-2),
        optax.sgd(1e-2, 0.9),
        optax.chain(optperm.low_rank(optax.scale_by_adam(), 2), optax.scale(-1e-2)),
        optax.contrib.schedule_free_adamw(1e-2),
    ],
    ids=["adamw", "sgd", "low_rank", "schedule_free"],
)
def test_sixteen_more_bits_train_as_float32(inner):
    """With gradients in float32 of the joined params, all that differs is the place of the bits."""
    start = jax.tree.map(
        lambda x: x.astype(BF16), {"w": support.normal((8, 12)), "b": jnp.zeros(12)}
    )
    tx = widen_params(inner, bits=16)

    def step(carry, _):
        (p, state), (q, plain) = carry
        g = jax.grad(quadratic)(wide_params(p, state))
        updates, state = tx.update(g, state, p)
        u, plain = inner.update(jax.grad(quadratic)(q), plain, q)
        return ((optax.apply_updates(p, updates), state), (optax.apply_updates(q, u), plain)), None

    def run(p):
        q = jax.tree.map(lambda x: x.astype(jnp.float32), p)
        return jax.lax.scan(step, ((p, tx.init(p)), (q, inner.init(q))), length=300)[0]

    (p, state), (q, _) = jax.jit(run)(start)
    support.assert_close(wide_params(p, state), q, rtol=0, atol=2e-4)
    support.assert_close(p, jax.tree.map(lambda x: x.astype(BF16), q), rtol=2**-7, atol=1e-3)


def test_gradients_in_16_bits_make_steps_in_float32():
    """0.1 g of a bfloat16 g has more than 8 significant bits, and none of them is lost."""
    tx, p, g = (
        widen_params(optax.sgd(0.1), bits=16),
        jnp.full(3, 10.0, BF16),
        jnp.full(3, 3.0, BF16),
    )
    updates, state = tx.update(g, tx.init(p), p)
    wide = wide_params(optax.apply_updates(p, updates), state)
    np.testing.assert_allclose(wide, 10 - np.float32(0.1) * 3, rtol=1e-6)


def test_inner_optimizer_sees_params_with_their_remainders():
    """Half of each parameter is taken away, also of the bits that bfloat16 lacks."""
    halve = optax.stateless(lambda g, p: -0.5 * p)
    tx, wide = widen_params(halve, bits=16), jnp.array([1.001, -0.3])
    params, state = narrow_params(wide, tx.init(wide.astype(BF16)), BF16)
    updates, state = tx.update(jnp.zeros(2, BF16), state, params)
    halved = wide_params(optax.apply_updates(params, updates), state)
    np.testing.assert_allclose(halved, 0.5 * wide, rtol=1e-6)


def test_wider_leaves_are_those_of_the_inner_optimizer():
    params = {"w": jnp.ones(4, BF16), "norm": jnp.ones(4), "scalar": jnp.float32(2.0)}
    grads = jax.tree.map(lambda p: jnp.full_like(p, 0.3), params)
    tx, plain = widen_params(optax.adam(1e-3)), optax.adam(1e-3)
    updates, state = tx.update(grads, tx.init(params), params)
    wanted, _ = plain.update(grads, plain.init(params), params)
    support.assert_same_bits(updates["norm"], wanted["norm"])
    support.assert_same_bits(updates["scalar"], wanted["scalar"])
    assert jax.tree.map(lambda r: (str(r.dtype), r.shape), state.remainder) == {
        "w": ("int8", (4,)),
        "norm": ("float32", ()),
        "scalar": ("float32", ()),
    }


def test_zeros_stay_zeros_and_what_is_not_finite_has_no_remainder():
    """A pruned entry joins to exactly 0, for any remainder."""
    tx = widen_params(optax.sgd(1.0))
    p = jnp.array([1.0, 1.0, 1.0, 1.0], BF16)
    _, state = tx.update(jnp.full(4, 0.001, BF16), tx.init(p), p)
    assert np.all(state.remainder != 0)
    changed = jnp.array([0.0, jnp.inf, jnp.nan, 1.0], BF16)
    wide = wide_params(changed, state)
    np.testing.assert_array_equal(wide[:3], [0.0, np.inf, np.nan])
    assert abs(wide[3] - 0.999) < 1e-4
    pruned = optperm.prune_gradually(optax.sgd(0.1), 0.5, ramp=1.0, every=1, include=True)
    tx = widen_params(pruned)
    w = support.normal((6, 8)).astype(BF16)
    w, state = train(tx, w, steps=5)
    mask = state.inner_state.mask
    assert 0 < np.mean(np.asarray(w) == 0) <= 0.5
    np.testing.assert_array_equal(np.asarray(wide_params(w, state))[~mask], 0.0)


@pytest.mark.parametrize("bits", [0, 8, 16])
def test_a_float32_checkpoint_becomes_16_bits_and_back(bits):
    wide = {"w": support.normal((64, 32)), "norm": jnp.ones(32)}
    params = {"w": wide["w"].astype(BF16), "norm": wide["norm"]}
    tx = optax.chain(optax.clip_by_global_norm(1.0), widen_params(optax.adam(1e-3), bits=bits))
    params, state = narrow_params(wide, tx.init(params), BF16)
    assert params["w"].dtype == BF16
    assert params["norm"].dtype == jnp.float32
    nearest = wide["w"].astype(BF16)
    assert np.mean(np.asarray(params["w"] == nearest)) > 0.99  # all but ties, and roundings to ties
    again = wide_params(params, state)
    unit = {16: 0.0, 8: 2.0**-16, 0: 2.0**-8}[bits]
    support.assert_close(again, wide, rtol=unit, atol=0)
    # Training continues from there.
    updates, state = tx.update(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_the_state_of_a_stack_of_models_is_a_stack():
    tx = widen_params(optax.adam(1e-2), key=3)
    start = support.normal((3, 5, 4)).astype(BF16)
    params, state = jax.vmap(lambda p: train(tx, p, steps=20))(start)
    for index in range(3):
        own, own_state = train(tx, start[index], steps=20)
        support.assert_same_bits(params[index], own)
        support.assert_same_bits(state.remainder[index], own_state.remainder)
    assert wide_params(params, state).shape == (3, 5, 4)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_a_sharded_run_is_the_same_bit_for_bit(kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    tx, start = widen_params(optax.sgd(1e-2, 0.9)), support.normal((8, 12)).astype(BF16)
    grads = 0.1 * support.normal((5, 8, 12), 1)
    wanted, wanted_state = loops.train(tx, start, grads)[-1]
    with jax.set_mesh(mesh):
        place = NamedSharding(mesh, P("x", None))
        sharded = jax.device_put(start, place)
        params, state = loops.train(
            tx, sharded, jax.device_put(grads, NamedSharding(mesh, P(None, "x")))
        )[-1]
        assert state.remainder.sharding.is_equivalent_to(place, 2)
        support.assert_same_bits(np.asarray(params), np.asarray(wanted))
        support.assert_same_bits(np.asarray(state.remainder), np.asarray(wanted_state.remainder))


def test_random_numbers_differ_between_leaves_steps_and_keys():
    params = {"a": jnp.ones(2000, BF16), "b": jnp.ones(2000, BF16)}
    grads = jax.tree.map(lambda p: jnp.full_like(p, 0.001, jnp.float32), params)

    def remainders(key, steps):
        tx = widen_params(optax.sgd(1.0), bits=8, key=key)
        state, found = tx.init(params), []
        for _ in range(steps):
            _, state = tx.update(grads, state, params)
            found.append(state.remainder)
            state = state._replace(remainder=jax.tree.map(jnp.zeros_like, state.remainder))
        return found

    first, second = remainders(0, 2)
    (other,) = remainders(1, 1)
    trees = [first["a"], first["b"], second["a"], other["a"]]
    for i, one in enumerate(trees):
        for two in trees[:i]:
            assert np.mean(np.asarray(one) != np.asarray(two)) > 0.05
    (again,) = remainders(0, 1)
    support.assert_same_bits(first, again)


def test_lost_updates_are_those_that_change_nothing():
    """For params of 16 and of 32 bits, against sums in NumPy."""
    for dtype in (BF16, jnp.float32):
        p = support.normal((1000,)).astype(dtype)
        u = (10.0 ** -np.random.default_rng(0).uniform(0, 9, 1000)).astype(np.float32)
        u[::10] = 0
        u = jnp.asarray(u).astype(dtype)
        wanted = np.mean((np.asarray(u) != 0) & (np.asarray(p) + np.asarray(u) == np.asarray(p)))
        for function in (lost_updates, jax.jit(lost_updates)):
            np.testing.assert_allclose(function({"w": p}, {"w": u}), wanted, rtol=1e-6)
        assert 0.1 < wanted < 0.9


def test_widened_adamw_takes_seven_bytes_per_param():
    """Params and gradients in bfloat16, and the state, by the shapes of the compiled arguments."""
    params = {"w": jax.ShapeDtypeStruct((1024, 2048), BF16)}
    tx = widen_params(optperm.quantize_state(optax.adamw(1e-3)))
    state = jax.eval_shape(tx.init, params)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((params, params, state))]
    assert sum(sizes) / (1024 * 2048) < 7.1


@pytest.mark.parametrize("bits", [0, 8, 16])
def test_scalars_have_remainders_and_stand_still_without_steps(bits):
    """Of a single number, as of any param per seed under `jax.vmap`."""
    wide = {"s": jnp.float32(0.3)}
    tx = widen_params(optax.sgd(0.0), bits=bits)
    state = tx.init(jax.tree.map(lambda x: x.astype(BF16), wide))
    params, state = narrow_params(wide, state, BF16)
    joined = wide_params(params, state)["s"]
    np.testing.assert_allclose(joined, wide["s"], rtol={0: 2**-8, 8: 2**-16, 16: 0}[bits])
    for _ in range(20):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
    support.assert_same_bits(wide_params(params, state)["s"], joined)


def test_infinite_params_without_gradients_stay():
    tx, mask = widen_params(optax.adam(0.1)), jnp.array([0.0, -jnp.inf, jnp.inf], BF16)
    updates, state = tx.update(jnp.zeros(3, BF16), tx.init(mask), mask)
    np.testing.assert_array_equal(optax.apply_updates(mask, updates), mask)
    np.testing.assert_array_equal(wide_params(mask, state), mask.astype(jnp.float32))


WRONG = {
    "other bits": (
        lambda: jax.jit(widen_params(optax.sgd(0.1), bits=16).update)(
            jnp.ones(2, BF16),
            widen_params(optax.sgd(0.1)).init(jnp.ones(2, BF16)),
            jnp.ones(2, BF16),
        ),
        "other bits",
    ),
    "plain state": (
        lambda: widen_params(optax.sgd(0.1, 0.9)).update(
            jnp.ones(2, BF16), optax.sgd(0.1, 0.9).init(jnp.ones(2)), jnp.ones(2, BF16)
        ),
        r"tx\.init\(params\)\._replace\(inner_state=opt_state\)",
    ),
}


@pytest.mark.parametrize(("call", "says"), WRONG.values(), ids=WRONG)
def test_a_state_of_other_bits_or_of_the_optimizer_alone_is_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
