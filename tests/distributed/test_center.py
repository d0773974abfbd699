"""The center out of a state, exact params of stacked replicas, and replicas that weigh differently."""

import itertools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm

pytestmark = pytest.mark.usefixtures("lenient")

SIZE, AXIS = 4, replicas.AXIS


def test_params_of_stacked_replicas_are_placed_outside_of_vmap():
    """They are those that are placed within it, for leaves of any shape."""
    params = {
        "a": jnp.linspace(0.1, 0.7, SIZE * 3).reshape(SIZE, 3),
        "b": jnp.ones((SIZE, SIZE, 2)),
    }
    params |= {"c": jnp.linspace(0.3, 0.9, SIZE)}
    for tx in (
        optperm.agn(optax.sgd(0.3), every=1, axis_name=AXIS),
        optperm.diloco(optax.sgd(0.3), every=optperm.distributed.Every(2, 2), axis_name=AXIS),
    ):
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf[0]] * SIZE), params)

        def update(p, s, target, tx=tx):
            updates, s = tx.update(jax.tree.map(lambda p: p - target, p), s, p)
            return updates, s, optperm.apply_updates(p, updates, s)

        step = jax.jit(jax.vmap(update, axis_name=AXIS))
        s = jax.vmap(tx.init)(stacked)
        for _ in range(2):
            updates, s, within = step(stacked, s, jnp.arange(1.0, 1 + SIZE))
            stacked = optperm.apply_updates(stacked, updates, s)
            support.assert_same_bits(stacked, within)


def test_the_center_has_what_is_not_trained():
    """Leaves that another transformation of a partition holds are taken from the params."""
    params = {"w": jnp.ones(2), "frozen": jnp.full(3, 7.0)}
    diloco = optperm.diloco(optax.sgd(0.1), optax.sgd(0.7), every=1)
    parts = {"train": diloco, "hold": optax.set_to_zero()}
    tx = optax.partition(parts, {"w": "train", "frozen": "hold"})
    _, opt_state = tx.update(params, tx.init(params), params)
    assert isinstance(optperm.distributed.center_params(opt_state)["frozen"], optax.MaskedNode)
    whole = optperm.distributed.center_params(opt_state, params)
    support.assert_same_bits(whole["frozen"], params["frozen"])
    np.testing.assert_allclose(whole["w"], 1 - 0.1 * 0.7, rtol=1e-6)


def test_a_final_center_holds_all_local_steps():
    """With any plan an explicit commit brings them in; without it `final=True` raises."""
    for plan in (optperm.distributed.Every(10, 2), optperm.distributed.Every(10, 5, 5)):
        tx = optperm.diloco(optax.sgd(0.1), optax.sgd(1.0), every=plan)
        params = [jnp.zeros(()) for _ in range(5)]
        update = jax.jit(
            lambda p, s, flag, tx=tx: tx.update([x - 2.5 for x in p], s, p, commit=flag),
            static_argnums=2,
        )
        opt_state = tx.init(params)
        for step in range(1, 21):
            if step == 20:
                with pytest.raises(ValueError, match="commit=True"):
                    optperm.distributed.center_params(opt_state, final=True)
            flag = plan.at(step) if step < 20 else True
            updates, opt_state = update(params, opt_state, flag)
            params = optperm.apply_updates(params, updates, opt_state)
        center = optperm.distributed.center_params(opt_state, final=True)
        support.assert_same_bits(center, params)
        if not plan.delay:  # which discards the local steps made meanwhile
            np.testing.assert_allclose(center, [2.5 * (1 - 0.9**20)] * 5, rtol=1e-5)


METHODS = {
    "agn mean": lambda **o: optperm.agn(optax.sgd(1.0), every=1, **o),
    "agn sum": lambda **o: optperm.agn(optax.sgd(1.0), every=1, combine="sum", **o),
    "agn sequential": lambda **o: optperm.agn(optax.sgd(1.0), every=1, combine="sequential", **o),
    "diloco": lambda **o: optperm.diloco(optax.sgd(1.0), optax.sgd(1.0), every=1, **o),
    "compressed": lambda **o: optperm.diloco(
        optax.sgd(1.0), optax.sgd(1.0), every=1, compress=optperm.distributed.Compression(1.0), **o
    ),
    "delayed": lambda **o: optperm.diloco(
        optax.sgd(1.0), optax.sgd(1.0), every=optperm.distributed.Every(2, 1, 1), **o
    ),
}


def test_replicas_count_by_their_weights():
    """A mean or a sum of w n, in which a weight of 0, NaN or less than 0 has no say."""
    grads = jnp.array([[1.0], [2.0], [4.0], [np.nan]])
    # Of the last one's NaN the local step makes zero; AGN's accumulator leaves it out.
    cases = {
        (1.0, 3.0, 0.0, 0.0): ([-1.75, -7.0, -7.0, -1.75], [0, 0, 0]),
        (1.0, np.nan, -1.0, 0.0): ([-1.0, -1.0, -1.0, -1.0], [0, 1, 1]),
        (0.0, 0.0, 0.0, 0.0): ([0.0, 0.0, 0.0, 0.0], [0, 0, 0]),
    }
    for name, make in METHODS.items():
        tx = make(axis_name=AXIS)

        def step(p, s, g, w, tx=tx, commit=True):
            updates, s = tx.update(g, s, p, commit=commit, weight=w)
            return optperm.apply_updates(p, updates, s), s

        step = jax.jit(jax.vmap(step, axis_name=AXIS))
        kind = {"agn sum": 1, "agn sequential": 2}.get(name, 0)
        for weights, (wanted, skipped) in cases.items():
            p = jnp.zeros((SIZE, 1))
            p, s = step(p, jax.vmap(tx.init)(p), grads, jnp.array(weights))
            np.testing.assert_allclose(p, [[wanted[kind]]] * SIZE, rtol=1e-6, err_msg=name)
            assert s.skipped.tolist()[:3] == skipped, name


def test_contributions_whose_weights_overflow_are_no_exchange():
    """The center stays, and all count it; a small sum, divided by infinity, would pass for zero."""
    for (factory, rule), size in itertools.product(
        ((optperm.agn, "mean"), (optperm.diloco, "mean"), (optperm.diloco, "pairs")), (1e-3, 1.0)
    ):
        tx = factory(optax.sgd(1.0), every=9, axis_name=AXIS, combine=rule)

        def step(p, s, tx=tx, size=size):
            return tx.update(jnp.full(1, size), s, p, commit=True, weight=jnp.float32(3e38))

        p = jnp.ones((SIZE, 1))
        updates, s = jax.jit(jax.vmap(step, axis_name=AXIS))(p, jax.vmap(tx.init)(p))
        np.testing.assert_array_equal(updates, np.zeros((SIZE, 1)))
        assert s.skipped.tolist() == [1] * SIZE


def test_weights_by_steps_are_federated_averaging():
    """Replicas that have made different numbers of steps, each weighed by its own."""
    tx = optperm.diloco(optax.sgd(1.0), optax.sgd(1.0), every=3, axis_name=AXIS)
    made, p = jnp.array([1, 2, 3, 0]), jnp.zeros((SIZE, 1))
    s = jax.vmap(tx.init)(p)

    def step(p, s, g, w, is_last):
        updates, s = tx.update(g, s, p, commit=is_last, weight=w)
        return optperm.apply_updates(p, updates, s), s

    for number in range(3):
        mapped = jax.vmap(lambda *each, n=number: step(*each, n == 2), axis_name=AXIS)
        grads = jnp.where(number < made, 1.0, 0.0)[:, None]
        p, s = mapped(p, s, grads, made.astype(jnp.float32))
    # (1 * 1 + 2 * 2 + 3 * 3) / 6 steps down.
    np.testing.assert_allclose(p, [[-14 / 6]] * SIZE, rtol=1e-6)


@pytest.mark.parametrize("factory", [optperm.agn, optperm.diloco])
def test_weights_of_float64_params_have_their_precision(factory):
    """The weighted mean of three replicas, to the rounding of float64."""
    with jax.enable_x64(True):
        theta, weights = np.array([0.0, 1.0, 5.0]), np.array([0.1, 0.2, 0.7])
        options = {} if factory is optperm.agn else {"outer": optax.sgd(1.0)}
        tx = factory(optax.sgd(1.0), every=9, axis_name=AXIS, **options)

        def center(target, weight):
            start = jnp.zeros([], jnp.float64)
            s = tx.update(-target, tx.init(start), start, commit=True, weight=weight)[1]
            return optperm.distributed.center_params(s)

        found = jax.vmap(center, axis_name=AXIS)(theta, weights)
        np.testing.assert_allclose(found, [np.average(theta, weights=weights)] * 3, rtol=1e-15)


BEGUN = {
    "agn": lambda **o: optperm.agn(optax.sgd(0.1, 0.9), every=2, **o),
    "diloco": lambda **o: optperm.diloco(optax.sgd(0.1), every=2, **o),
    "diloco pairs": lambda **o: optperm.diloco(optax.sgd(0.1), every=2, combine="pairs", **o),
    "fragments": lambda **o: optperm.diloco(
        optax.sgd(0.1), every=optperm.distributed.Every(2, 2), center_dtype="float32", **o
    ),
}
MAPPED = ["vmap", "pmap", "shard_map", "shard_map unchecked"]


def tricky(dtype):
    """Numbers whose bits a sum loses, or that a sum of four overflows."""
    return np.array([-0.0, 0.0, 1e-40, 1 / 3, 6e4, -6e4], np.float32).astype(dtype)


@pytest.mark.parametrize(
    ("method", "how"),
    support.every_night(
        itertools.product(BEGUN, MAPPED), {("agn", "shard_map"), ("fragments", "vmap")}
    ),
)
def test_replicas_that_are_alike_begin_from_a_center_of_their_bits(method, how):
    """An init where the axis is mapped keeps the params; they are not averaged."""
    params = {name: tricky(dtype) for name, dtype in support.DTYPES.items() if name != "float64"}
    tx = BEGUN[method](axis_name=AXIS)
    start = replicas.stack([params] * SIZE)
    state = replicas.MAPPINGS[how](tx.init, SIZE)(start)
    plain = replicas.stack([tx.init(params)] * SIZE)
    support.assert_same_bits(jax.device_get(state), plain)


@pytest.mark.parametrize(
    ("method", "how"),
    support.every_night(
        itertools.product(BEGUN, MAPPED), {("agn", "shard_map"), ("diloco pairs", "pmap")}
    ),
)
def test_replicas_that_are_apart_begin_from_the_mean(method, how):
    """One replica is not finite, and is left out; a mean of numbers near the largest is finite."""
    tx = BEGUN[method](axis_name=AXIS)
    start = {
        "w": np.float32([[3e38, 1.0], [3e38, 2.0], [np.nan, 7.0], [3e38, 6.0]]),
        "same": np.full((SIZE, 2), -0.0, np.float32),
    }
    state = replicas.MAPPINGS[how](tx.init, SIZE)(start)
    center = jax.device_get(state.center)
    np.testing.assert_allclose(center["w"], [[3e38, 3.0]] * SIZE, rtol=1e-6)
    support.assert_same_bits(center["same"], start["same"])


@pytest.mark.parametrize(
    ("method", "how"),
    support.every_night(
        itertools.product([m for m in BEGUN if "pairs" not in m], MAPPED),
        {("diloco", "shard_map"), ("fragments", "vmap")},
    ),
)
def test_after_a_switch_the_replicas_have_one_center(method, how):
    """SGD takes the replicas apart; from the switch on each commit ends with the same bits on all."""
    tx = optperm.switch_after(3, optax.sgd(0.1), BEGUN[method](axis_name=AXIS))
    batches = [np.float32(np.random.default_rng(i).normal(size=(SIZE, 3))) for i in range(9)]
    evaluate = loops.gradient(lambda p, t: jnp.sum((p - t) ** 2))
    trail = loops.train(tx, np.zeros(3, np.float32), batches, evaluate=evaluate, how=how, size=SIZE)
    assert not (trail[2][0] == trail[2][0][:1]).all()
    for _, state in trail[3:]:
        center = np.asarray(state.then.center)
        np.testing.assert_array_equal(center, center[:1].repeat(SIZE, axis=0))
    assert trail[-1][1].then.count.tolist() == [6] * SIZE


@pytest.mark.parametrize("method", support.every_night(BEGUN, ["agn", "fragments"]))
def test_a_run_under_strict_promotion(method):
    """From an init on the mapped axis to a commit alone, with weights: no types or ranks are mixed."""
    tx = BEGUN[method](axis_name=AXIS)

    def train(params, weight):
        state = tx.init(params)
        for flag in (False, True, False, "only"):
            updates, state = tx.update(params, state, params, commit=flag, weight=weight)
            params = optperm.apply_updates(params, updates, state)
        return params, state

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        weights = jnp.arange(1.0, 1.0 + SIZE)
        params, state = jax.vmap(train, axis_name=AXIS)(jnp.ones((SIZE, 3)), weights)
    assert state.since_commit.tolist() == [0] * SIZE
    np.testing.assert_allclose(params, state.center, rtol=1e-6)
