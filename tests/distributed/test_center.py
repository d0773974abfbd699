"""The center: where it begins, what moves it, whose say counts, and how to take it out of a state."""

import functools

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm
from optperm.distributed import Compression, Every, center_params

SIZE, AXIS = 4, replicas.AXIS
SGD = optax.sgd(1.0)


def test_known_centers_of_one_replica():
    """Keep the specification's figures for x - 1 and 2 (y + 1) from (0, .5), rate .1, period 4."""
    tx = optperm.agn(optax.sgd(0.1, momentum=0.9), every=4)
    evaluate = lambda p, _: (jnp.stack([p[0] - 1, 2 * (p[1] + 1)]), {})  # noqa: E731
    trail = loops.train(tx, jnp.float32([0.0, 0.5]), [()] * 8, evaluate=evaluate)
    for step, known in ((4, (0.07765, 0.32585)), (8, (0.189179, 0.1325065))):
        params, opt_state = trail[step - 1]
        np.testing.assert_allclose(params, known, rtol=0, atol=1e-6)
        support.assert_same_bits(params, center_params(opt_state))


def test_weight_decay_of_a_center_is_of_the_center():
    """Not of the params that local steps have led away from it."""
    decayed = optax.chain(optax.add_decayed_weights(0.5), SGD)
    for tx, center in (
        # Two local steps of 0.1, then c - (sum + 0.5 c) or c - (mean + 0.5 c).
        (optperm.diloco(SGD, decayed, every=2), 1 - (0.2 + 0.5)),
        (optperm.agn(SGD, decayed, every=2), 1 - (0.1 + 0.5)),
    ):
        trail = loops.train(tx, jnp.float32(1.0), [jnp.float32(0.1)] * 2)
        np.testing.assert_allclose(trail[-1][0], center, rtol=1e-6)


def test_the_center_has_what_is_not_trained():
    """Leaves that another transformation of a partition holds are taken from the params."""
    params = {"w": np.ones(2, np.float32), "frozen": np.full(3, 7.0, np.float32)}
    diloco = optperm.diloco(optax.sgd(0.1), optax.sgd(0.7), every=1)
    tx = optax.partition({"w": diloco, "frozen": optax.set_to_zero()}, {k: k for k in params})
    _, opt_state = jax.jit(lambda p: tx.update(p, tx.init(p), p))(params)
    assert isinstance(center_params(opt_state)["frozen"], optax.MaskedNode)
    whole = center_params(opt_state, params)
    support.assert_same_bits(whole["frozen"], params["frozen"])
    np.testing.assert_allclose(whole["w"], 1 - 0.1 * 0.7, rtol=1e-6)


def train_and_commit(tx, grad):
    """The params after eight steps and one with an explicit commit, which make the final center."""
    grads = [np.float32(grad)] * 2
    trail = loops.train(tx, [np.float32(0.0)] * 2, [grads] * 8)
    with pytest.raises(ValueError, match="commit=True"):
        center_params(trail[-1][1], final=True)
    step = jax.jit(loops.make_step(tx, lambda p, batch: (batch, {"commit": True})))
    params, opt_state = step(*trail[-1], grads)
    support.assert_same_bits(center_params(opt_state, final=True), params)
    return params


def test_a_final_center_of_agn_holds_the_sums_in_flight():
    """Of eight steps with gradient -1, each fragment has had all, in two or three center steps."""
    # Fragment 1 was sent at steps 2 and 7, and fragment 0 at step 5; the sum of step 7 is in flight.
    params = train_and_commit(optperm.agn(SGD, every=Every(5, 2, 3)), -1.0)
    np.testing.assert_allclose(params, [2.0, 3.0])


def test_a_final_center_holds_all_local_steps():
    """With any plan an explicit commit brings them in; without it `final=True` raises."""
    for plan in (Every(5, 2), Every(5, 2, 3)):
        params = train_and_commit(optperm.diloco(optax.sgd(0.1), SGD, every=plan), -2.5)
        if not plan.delay:  # which discards the local steps made meanwhile
            np.testing.assert_allclose(params, [9 * 0.25] * 2, rtol=1e-5)


WEIGHED = {
    "agn mean": functools.partial(optperm.agn, SGD, every=1),
    "agn sequential": functools.partial(optperm.agn, SGD, every=1, combine="sequential"),
    "diloco": functools.partial(optperm.diloco, SGD, SGD, every=1),
    "diloco sum": functools.partial(optperm.diloco, SGD, SGD, every=1, combine="sum"),
    "compressed": functools.partial(optperm.diloco, SGD, SGD, every=1, compress=Compression(1.0)),
    "agn compressed": functools.partial(optperm.agn, SGD, every=1, compress=Compression(1.0)),
}


@pytest.mark.parametrize(
    "name", support.every_night(WEIGHED, ["agn mean", "agn sequential", "diloco sum"])
)
def test_replicas_count_by_their_weights(name):
    """A mean or a sum of w n ignores weights that are 0, NaN or negative."""
    tx, start = WEIGHED[name](axis_name=AXIS), np.zeros((SIZE, 1), np.float32)
    step = loops.make_step(tx, lambda p, batch: (batch[:1], {"weight": batch[1]}))
    step, opt_state = replicas.MAPPINGS["vmap"](step, SIZE), jax.jit(jax.vmap(tx.init))(start)
    for weights, mean, in_turn, skipped in (
        ((1.0, 3.0, 0.0, 0.0), -1.75, -7.0, [0, 0, 0]),
        ((1.0, np.nan, -1.0, 0.0), -1.0, -1.0, [0, 1, 1]),
        ((0.0, 0.0, 0.0, 0.0), 0.0, 0.0, [0, 0, 0]),
    ):
        # Of the last one's NaN the local step makes zero; AGN's accumulator leaves it out.
        batch = np.stack([np.float32([1.0, 2.0, 4.0, np.nan]), np.float32(weights)], axis=1)
        p, s = step(start, opt_state, batch)
        wanted = in_turn if name in ("agn sequential", "diloco sum") else mean
        np.testing.assert_allclose(p, [[wanted]] * SIZE, rtol=1e-6)
        assert s.skipped.tolist()[:3] == skipped


@pytest.mark.parametrize("factory", [optperm.agn, optperm.diloco])
def test_replicas_that_take_fewer_steps_count_by_their_steps(factory):
    """The commit, which all make, is of the mean over all steps (AGN) or of weighted displacements."""
    tx = factory(optax.sgd(0.1), SGD, every=1000, axis_name=AXIS)
    rates, numbers = np.float32([[1.0], [4.0]]), np.float32([5.0, 2.0])

    def update(p, s, g, weight, commit):
        updates, s = tx.update(g, s, p, commit=commit, weight=weight)
        return optperm.apply_updates(p, updates, s), s

    local, last = (
        replicas.MAPPINGS["shard_map"](functools.partial(update, commit=commit), 2)
        for commit in (False, "only")
    )
    start = np.zeros((2, 1), np.float32)
    trees = start, jax.jit(jax.vmap(tx.init))(start)
    for number in range(5):
        new = jax.device_get(local(*trees, rates, numbers))
        # The second machine does not call the program again
        keep = lambda new, old: np.stack([new[0], old[1]])  # noqa: E731
        trees = new if number < 2 else jax.tree.map(keep, new, trees)
    p, s = last(*trees, rates, np.float32(trees[1].since_commit))
    mean = (5 * 1 + 2 * 4) / 7 if factory is optperm.agn else 0.1 * (5 * 5 * 1 + 2 * 2 * 4) / 7
    np.testing.assert_allclose(p, [[-mean]] * 2, rtol=1e-6)
    np.testing.assert_array_equal(center_params(s), p)
    assert s.count.tolist() == [5, 2]


@pytest.mark.exhaustive
def test_agn_with_sgd_is_diloco_with_an_outer_sgd_of_one_over_the_period():
    """The sum of T gradients times the rate is the displacement, to rounding."""
    rate, period = 0.25, 4
    grads = [np.float32(each) for each in np.random.default_rng(0).normal(size=(12, SIZE, 5))]
    start, trails = np.ones(5, np.float32), []
    agn = optperm.agn(optax.sgd(rate), every=period, axis_name=AXIS)
    diloco = optperm.diloco(optax.sgd(rate), optax.sgd(1 / period), every=period, axis_name=AXIS)
    for tx in (agn, diloco):
        trail = loops.train(tx, start, grads, how="vmap", size=SIZE)
        trails.append([center_params(state) for _, state in trail])
    assert not (trails[0][-1][0] == start).any()
    chex.assert_trees_all_close(*trails, atol=1e-6, rtol=0)


def scheduled(count):
    return 0.1 / (1.0 + jnp.asarray(count, jnp.float32))


SCHEDULED = {
    "sgd": optax.sgd(scheduled),
    "adamw": optax.chain(optax.clip(1.0), optax.adamw(scheduled)),
    "decay": optax.adamw(0.1, weight_decay=scheduled),
    "masked": optax.masked(optax.sgd(scheduled), {"w": True, "b": False}),
    "injected": optax.inject_hyperparams(optax.adam)(scheduled),
    "low_rank": optperm.low_rank(optax.adam(scheduled), 1),
}


@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.usefixtures("lenient")
def test_agn_without_outer_refuses_an_inner_with_a_schedule(name):
    """Its schedule would count commits at the center; the line to write passes."""
    inner, start = SCHEDULED[name], {"w": np.ones((3, 2), np.float32), "b": np.ones(3, np.float32)}
    with pytest.raises(ValueError, match=r"pass outer=.*outer=optax\.adam\(lambda commits"):
        jax.eval_shape(optperm.agn(inner).init, start)
    outer = optax.adam(lambda commits: scheduled(commits * 10))
    for tx in (optperm.agn(inner, outer), optperm.diloco(inner, every=10)):
        jax.eval_shape(tx.init, start)


@pytest.mark.parametrize(
    "inner",
    [
        optax.adam(0.1),
        optax.inject_hyperparams(optax.adam)(0.1),
        optax.apply_if_finite(optax.sgd(0.1), 3),
        optax.partition({"all": optax.sgd(0.1), "none": optax.adam(0.1)}, lambda p: "all"),
        optperm.low_rank(optax.adam(0.1), 1),
    ],
)
@pytest.mark.usefixtures("lenient")
def test_agn_without_outer_takes_an_inner_without_a_schedule(inner):
    """Counts of moments, of skipped steps and of refreshes are no schedules."""
    jax.eval_shape(optperm.agn(inner).init, np.ones((3, 2), np.float32))


def test_schedules_of_an_outer_optimizer_count_its_own_steps():
    fall = optax.linear_schedule(1.0, 0.0, 6)
    tx = optperm.agn(optax.sgd(0.1), every=2, outer=optax.sgd(fall))
    trail = loops.train(tx, jnp.zeros(2), [jnp.ones(2)] * 8)
    centers = [state.center[0] for _, state in trail[1::2]]
    np.testing.assert_allclose(centers, np.cumsum([-1.0, -5 / 6, -4 / 6, -3 / 6]), atol=1e-6)


def test_gradients_that_count_as_zero_are_counted():
    """On the replica that had them, in each local step, unless the inner optimizer skips the step."""
    batches = [np.float32([[1.0], [bad]]) for bad in (np.nan, 1.0, np.inf, 1.0)]
    for inner, wanted in ((SGD, [0, 2]), (optax.apply_if_finite(SGD, 10), [0, 0])):
        tx = optperm.diloco(inner, SGD, every=3, axis_name=AXIS)
        step = loops.make_step(tx, lambda p, batch: (batch, {}))
        step = replicas.MAPPINGS["vmap"](step, 2)
        p, s = (
            np.zeros((2, 1), np.float32),
            jax.jit(jax.vmap(tx.init))(np.zeros((2, 1), np.float32)),
        )
        for batch in batches:
            p, s = step(p, s, batch)
        assert s.zeroed.tolist() == wanted
        assert np.isfinite(p).all()


@pytest.mark.slow
@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("factory", [optperm.agn, optperm.diloco])
def test_replicas_draw_their_own_noise_from_their_own_keys(factory):
    def make(key):
        noisy = optax.chain(optax.add_noise(1.0, 0.0, key), SGD)
        return factory(noisy, SGD, every=10, axis_name=AXIS)

    def init(params):
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index(AXIS))
        return make(key).init(params)

    tx = make(jax.random.key(0))

    @jax.jit
    @functools.partial(jax.vmap, axis_name=AXIS)
    def step(p):
        return [tx.update(p, s, p)[0] for s in (tx.init(p), init(p))]

    same, own = map(np.asarray, step(np.zeros((2, 3), np.float32)))
    np.testing.assert_array_equal(same[0], same[1])
    assert (np.abs(own[0] - own[1]) > 1e-3).all()


# The gradients and the weights of some exchanges. Only the last exchange does not overflow. A small
# sum, divided by infinity, would pass for zero.
WEIGHTS = [(1e-3, 3e38), (1.0, 3e38), (1.0, 1.0)]
SUMS = {d: [(x * float(jnp.finfo(d).max), 1.0) for x in (0.4, 0.2)] for d in ("float16", "float32")}
PRODUCTS = [(1e38, 10.0), (1.0, 1.0)]


@pytest.mark.parametrize(
    ("factory", "rule", "dtype", "exchanges"),
    [
        pytest.param(optperm.agn, "mean", "float32", WEIGHTS, marks=pytest.mark.exhaustive),
        (optperm.diloco, "pairs", "float32", WEIGHTS),
        (optperm.agn, "sum", "float32", SUMS["float32"]),
        (optperm.agn, "sequential", "float32", PRODUCTS),
        pytest.param(
            *(optperm.agn, "sum", "float16", SUMS["float16"]),
            marks=[support.needs_float16, pytest.mark.exhaustive],
        ),
    ],
)
def test_contributions_that_overflow_together_are_no_exchange(factory, rule, dtype, exchanges):
    """Each is finite: the center stays, and all replicas count it, and take part in the next."""
    tx, start = factory(SGD, every=1, axis_name=AXIS, combine=rule), np.ones((SIZE, 2), dtype)
    step = loops.make_step(tx, lambda p, batch: (batch[0], {"weight": batch[1]}))
    step = replicas.MAPPINGS["vmap"](step, SIZE)
    params, opt_state = start, jax.jit(jax.vmap(tx.init))(start)
    for number, (size, weight) in enumerate(exchanges, start=1):
        batch = np.full_like(start, size), np.full(SIZE, weight, np.float32)
        params, opt_state = step(params, opt_state, batch)
        assert opt_state.skipped.tolist() == [min(number, len(exchanges) - 1)] * SIZE
        is_same = np.asarray(center_params(opt_state)) == start
        assert (is_same == (number < len(exchanges))).all()


@support.needs_float16
def test_a_displacement_that_overflows_in_the_dtype_of_the_center_is_left_out():
    """Two steps take a replica from 40,000 to -40,000; 80,000 is finite in float32 only."""
    tx = optperm.diloco(SGD, SGD, every=2, axis_name=AXIS)
    grads = [np.float16([[32.0], [40_000.0]])] * 2
    start = np.full((2, 1), 40_000.0, np.float16)
    options = {"how": "vmap", "size": 2, "opt_state": jax.jit(jax.vmap(tx.init))(start)}
    _, (params, opt_state) = loops.train(tx, start, grads, **options)
    np.testing.assert_array_equal(params, np.full((2, 1), 40_000.0 - 64.0))
    assert opt_state.skipped.tolist() == [0, 1]


@pytest.mark.parametrize("mixing", support.every_night([0.0, 0.5], [0.5]))
def test_a_replica_whose_params_are_not_finite_is_put_on_the_center(mixing):
    """It skips one exchange, in which the other replicas move the center, and joins the next."""
    tx = optperm.diloco(optax.sgd(0.1), SGD, every=2, axis_name=AXIS, mixing=mixing)
    params, grads = np.zeros((2, 2), np.float32), [np.ones((2, 2), np.float32)] * 4
    options = {"how": "vmap", "size": 2, "opt_state": jax.jit(jax.vmap(tx.init))(params)}
    params[1, 0] = np.nan
    _, (_, second), _, (params, last) = loops.train(tx, params, grads, **options)
    np.testing.assert_allclose(center_params(second), np.full((2, 2), -0.2), rtol=1e-6)
    assert jnp.isfinite(params).all()
    assert last.skipped.tolist() == [0, 1]


def test_skipped_counts_the_exchanges_of_all_fragments():
    """The second replica misses one exchange of the second fragment, whose params are not finite."""
    tx = optperm.diloco(optax.sgd(0.1), SGD, every=Every(2, 2), axis_name=AXIS)
    params, grads = [np.zeros((2, 3), np.float32)] * 2, [[np.ones((2, 3), np.float32)] * 2] * 4
    options = {"how": "vmap", "size": 2, "opt_state": jax.jit(jax.vmap(tx.init))(params)}
    params = [params[0], np.float32([[0.0] * 3, [np.nan] * 3])]
    params, last = loops.train(tx, params, grads, **options)[-1]
    assert np.all(np.isfinite(params))
    assert last.skipped.tolist() == [0, 1]


def test_small_gradients_of_a_long_period_are_not_lost_in_bfloat16():
    """The accumulator is float32: 512 gradients of 1 in bfloat16 would stop adding up at 256."""
    tx = optperm.agn(SGD, every=512)
    params, grads = jnp.zeros(2, jnp.bfloat16), jnp.ones((512, 2), jnp.bfloat16)
    params, opt_state = loops.carry(loops.make_step(tx), params, tx.init(params), grads)
    assert opt_state.accumulator.dtype == jnp.float32
    assert params.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize(
    ("factory", "options", "how"),
    [
        (optperm.agn, {"every": 2}, "shard_map"),
        (optperm.diloco, {"every": 2, "combine": "pairs"}, "pmap"),
        pytest.param(
            *(optperm.diloco, {"every": Every(2, 2), "center_dtype": "float32"}, "vmap"),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_center_begins_at_the_bits_that_replicas_have_alike_or_at_their_mean(
    factory, options, how
):
    """One replica is not finite, and is left out; a mean of numbers near the largest is finite."""
    # Numbers whose bits a sum loses, or that a sum of four overflows.
    tricky = np.array([-0.0, 0.0, 1e-40, 1 / 3, 6e4, -6e4], np.float32)
    dtypes = [dtype for each, dtype in support.DTYPES.items() if each != "float64"]
    alike = replicas.stack([[tricky.astype(dtype) for dtype in dtypes]] * SIZE)
    apart = np.float32([[3e38, 1.0], [3e38, 2.0], [np.nan, 7.0], [3e38, 6.0]])
    tx = factory(optax.sgd(0.1, 0.9), axis_name=AXIS, **options)
    state = jax.device_get(replicas.MAPPINGS[how](tx.init, SIZE)([*alike, apart]))
    np.testing.assert_allclose(state.center[-1], [[3e38, 3.0]] * SIZE, rtol=1e-6)
    for leaf, found in zip(alike, state.center[:-1], strict=True):
        support.assert_same_bits(found, leaf.astype(found.dtype))


@pytest.mark.slow
def test_after_a_switch_the_replicas_have_one_center():
    """SGD takes the replicas apart; from the switch on each commit ends with the same bits on all."""
    diloco = optperm.diloco(SGD, every=Every(2, 2), axis_name=AXIS, center_dtype="float32")
    tx, targets = optperm.switch_after(2, optax.sgd(0.1), diloco), support.normal((5, SIZE, 3))
    options = {"evaluate": lambda p, t: (p - t, {}), "how": "shard_map", "size": SIZE}
    trail = loops.train(tx, np.zeros(3, np.float32), list(targets), **options)
    assert not (trail[1][0] == trail[1][0][:1]).all()
    for _, state in trail[2:]:
        center = np.asarray(state.then.center)
        np.testing.assert_array_equal(center, center[:1].repeat(SIZE, axis=0))
    assert trail[-1][1].then.count.tolist() == [3] * SIZE
