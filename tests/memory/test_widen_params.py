"""Params of 16 bits with remainders: as good as float32, and nothing lost on the way."""

import chex
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


ERRORS = (16, 3e-5), (8, 5e-5), (0, 6e-4)


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


@pytest.mark.parametrize(
    ("bits", "error", "how"),
    support.every_night(
        [(*case, how) for case in ERRORS for how in ("scan", "eager")],
        [(*case, "scan") for case in ERRORS],
    ),
)
def test_small_steps_add_up(bits, error, how):
    """1,000 steps of 1e-5 from 1.0 end at 0.99 in the mean; in bfloat16 alone they end at 1.0."""
    tx, steps = widen_params(optax.sgd(1.0), bits=bits), {"scan": 1000, "eager": 20}[how]
    start, grads = np.ones(4096, BF16), np.full((steps, 4096), 1e-5, np.float32)
    if how == "scan":

        @jax.jit
        def run(start, grads):
            step = loops.make_step(tx, apply=loops.by_addition)
            params, state = loops.carry(step, start, tx.init(start), grads)
            return params, wide_params(params, state)

        params, wide = run(start, grads)
    else:
        start = jnp.asarray(start)
        params, state = loops.train(tx, start, grads, apply=loops.by_addition, how=how)[-1]
        wide = wide_params(params, state)
    assert params.dtype == BF16
    wide = np.asarray(wide)
    np.testing.assert_allclose(wide.mean(), 1 - 1e-5 * steps, rtol=0, atol=error)
    if bits and how == "scan":
        np.testing.assert_allclose(wide, 0.99, rtol=0, atol=1.2e-3 if bits == 8 else 3e-5)


INNERS = {
    "adamw": optax.adamw(1e-2),
    "sgd": optax.sgd(1e-2, 0.9),
    "low_rank": optax.chain(optperm.low_rank(optax.scale_by_adam(), 2), optax.scale(-1e-2)),
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
}


@pytest.mark.parametrize("name", support.every_night(INNERS, ["adamw", "schedule_free"]))
def test_sixteen_more_bits_train_as_float32(name):
    """With gradients in float32 of the joined params, all that differs is the place of the bits."""
    inner = INNERS[name]
    w = np.random.default_rng(0).normal(size=(8, 12)).astype(BF16)
    start = {"w": w, "b": np.zeros(12, BF16)}
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

    @jax.jit
    def run_and_join(p):
        (p, state), (q, _) = run(p)
        return jax.tree.map(lambda x: x.astype(jnp.float32), p), wide_params(p, state), q

    narrow, wide, q = jax.tree.map(np.asarray, run_and_join(start))
    chex.assert_trees_all_close(wide, q, rtol=0, atol=2e-4)
    rounded = jax.tree.map(lambda x: x.astype(BF16).astype(np.float32), q)
    chex.assert_trees_all_close(narrow, rounded, rtol=2**-7, atol=1e-3)


def test_gradients_in_16_bits_make_steps_in_float32():
    """0.1 g of a bfloat16 g has more than 8 significant bits, and none of them is lost."""
    tx = widen_params(optax.sgd(0.1), bits=16)

    @jax.jit
    def step(p, g):
        updates, state = tx.update(g, tx.init(p), p)
        return wide_params(optax.apply_updates(p, updates), state)

    wide = step(np.full(3, 10.0, BF16), np.full(3, 3.0, BF16))
    np.testing.assert_allclose(wide, 10 - np.float32(0.1) * 3, rtol=1e-6)


def test_inner_optimizer_sees_params_with_their_remainders():
    """Half of each parameter is taken away, also of the bits that bfloat16 lacks."""
    halve = optax.stateless(lambda g, p: -0.5 * p)
    tx, wide = widen_params(halve, bits=16), np.float32([1.001, -0.3])

    @jax.jit
    def step(wide):
        params, state = narrow_params(wide, tx.init(wide.astype(BF16)), BF16)
        updates, state = tx.update(jnp.zeros(2, BF16), state, params)
        return wide_params(optax.apply_updates(params, updates), state)

    np.testing.assert_allclose(step(wide), np.float32(0.5) * wide, rtol=1e-6)


def test_wider_leaves_are_those_of_the_inner_optimizer():
    params = {"w": np.ones(4, BF16), "norm": np.ones(4, np.float32), "scalar": np.float32(2.0)}
    grads = jax.tree.map(lambda p: np.full_like(p, 0.3), params)
    tx, plain = widen_params(optax.adam(1e-3)), optax.adam(1e-3)

    @jax.jit
    def step(grads, params):
        wanted = plain.update(grads, plain.init(params), params)[0]
        return *tx.update(grads, tx.init(params), params), wanted

    updates, state, wanted = step(grads, params)
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
    p, changed = np.ones(4, BF16), np.array([0.0, np.inf, np.nan, 1.0], BF16)

    @jax.jit
    def step(p, changed):
        _, state = tx.update(jnp.full(4, 0.001, BF16), tx.init(p), p)
        return state.remainder, wide_params(changed, state)

    remainder, wide = map(np.asarray, step(p, changed))
    assert np.all(remainder != 0)
    np.testing.assert_array_equal(wide[:3], [0.0, np.inf, np.nan])
    assert abs(wide[3] - 0.999) < 1e-4
    pruned = optperm.prune_gradually(optax.sgd(0.1), 0.5, ramp=1.0, every=1, include=True)
    tx = widen_params(pruned)
    w = np.random.default_rng(0).normal(size=(6, 8)).astype(BF16)
    w, state = train(tx, w, steps=5)
    wide, mask = (np.asarray(x) for x in (jax.jit(wide_params)(w, state), state.inner_state.mask))
    assert 0 < np.mean(np.asarray(w) == 0) <= 0.5
    np.testing.assert_array_equal(wide[~mask], 0.0)


@pytest.mark.parametrize("bits", [0, 8, 16])
def test_a_float32_checkpoint_becomes_16_bits_and_back(bits):
    normal = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    wide = {"w": normal, "norm": np.ones(32, np.float32)}
    nearest = wide["w"].astype(BF16)
    tx = optax.chain(optax.clip_by_global_norm(1.0), widen_params(optax.adam(1e-3), bits=bits))

    @jax.jit
    def convert(wide):
        state = tx.init({"w": wide["w"].astype(BF16), "norm": wide["norm"]})
        params, state = narrow_params(wide, state, BF16)
        return params, state, wide_params(params, state)

    params, state, again = convert(wide)
    assert params["w"].dtype == BF16
    assert params["norm"].dtype == jnp.float32
    # All but ties, and roundings to ties
    assert np.mean(np.asarray(params["w"]) == nearest) > 0.99
    unit = {16: 0.0, 8: 2.0**-16, 0: 2.0**-8}[bits]
    chex.assert_trees_all_close(again, wide, rtol=unit, atol=0)
    # Training continues from there.
    updates, _ = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)


def test_the_state_of_a_stack_of_models_is_a_stack():
    tx = widen_params(optax.adam(1e-2), key=3)
    start = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(BF16)
    alone = jax.jit(lambda p: train(tx, p, steps=20))
    params, state = jax.jit(jax.vmap(alone))(start)
    stacked = np.asarray(params), np.asarray(state.remainder)
    for index in range(3):
        own, own_state = alone(start[index])
        support.assert_same_bits([x[index] for x in stacked], [own, own_state.remainder])
    assert jax.eval_shape(wide_params, params, state).shape == (3, 5, 4)


@pytest.mark.parametrize(
    "kind", support.every_night((AxisType.Explicit, AxisType.Auto), [AxisType.Explicit])
)
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
    params = {"a": np.ones(2000, BF16), "b": np.ones(2000, BF16)}
    grads = {name: np.full(2000, 0.001, np.float32) for name in params}

    def remainders(key, steps):
        tx = widen_params(optax.sgd(1.0), bits=8, key=key)
        state, found, update = jax.jit(tx.init)(params), [], jax.jit(tx.update)
        for _ in range(steps):
            _, state = update(grads, state, params)
            found.append(jax.tree.map(np.asarray, state.remainder))
            state = state._replace(remainder=jax.tree.map(np.zeros_like, found[-1]))
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
    for dtype in map(np.dtype, (BF16, jnp.float32)):
        p = np.random.default_rng(1).normal(size=1000).astype(dtype)
        u = (10.0 ** -np.random.default_rng(0).uniform(0, 9, 1000)).astype(np.float32)
        u[::10] = 0
        u = u.astype(dtype)
        wanted = np.mean((u != 0) & (p + u == p))
        for function in (lost_updates, jax.jit(lost_updates)):
            found = function({"w": jnp.asarray(p)}, {"w": jnp.asarray(u)})
            np.testing.assert_allclose(found, wanted, rtol=1e-6)
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
    wide = {"s": np.float32(0.3)}
    tx = widen_params(optax.sgd(0.0), bits=bits)

    @jax.jit
    def run(wide):
        def step(_, carried):
            params, state = carried
            updates, state = tx.update(params, state, params)
            return optax.apply_updates(params, updates), state

        state = tx.init(jax.tree.map(lambda x: x.astype(BF16), wide))
        start = narrow_params(wide, state, BF16)
        return wide_params(*start)["s"], wide_params(*jax.lax.fori_loop(0, 20, step, start))["s"]

    joined, after = run(wide)
    np.testing.assert_allclose(joined, wide["s"], rtol={0: 2**-8, 8: 2**-16, 16: 0}[bits])
    support.assert_same_bits(after, joined)


def test_infinite_params_without_gradients_stay():
    tx, mask = widen_params(optax.adam(0.1)), np.array([0.0, -np.inf, np.inf], BF16)

    @jax.jit
    def step(mask):
        updates, state = tx.update(jnp.zeros(3, BF16), tx.init(mask), mask)
        return optax.apply_updates(mask, updates), wide_params(mask, state)

    after, wide = step(mask)
    np.testing.assert_array_equal(after, mask)
    np.testing.assert_array_equal(wide, mask.astype(np.float32))


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
