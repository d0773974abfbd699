"""Gossip between pairs of replicas, against plain loops, and what its programs send."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optperm
from optperm.distributed import _pairs as pairs

pytestmark = pytest.mark.usefixtures("lenient")

AXIS, STEPS, PERIOD = replicas.AXIS, 18, 3
SHAPES = {"a": (3, 2), "b": (4,)}
RATE, OUTER_RATE, MOMENTUM = 0.1, 0.7, 0.5
EVALUATE = lambda p, target: (jax.tree.map(jnp.subtract, p, target), {})  # noqa: E731


def draw(rng, *lead):
    return {name: rng.normal(size=(*lead, *shape)) for name, shape in SHAPES.items()}


@functools.cache
def partners(size, count):
    """The partner of each replica in the step after so many."""
    return np.asarray(_draw(np.arange(size, dtype=np.int32), np.int32(count)))


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, None), axis_name=AXIS)
def _draw(index, count):
    return pairs.map_with_partner(lambda _, theirs: theirs, index, axis_name=AXIS, count=count)


def test_all_are_paired_and_in_time_with_many():
    """Each is its partner's partner, of an even number none its own; nobody is always with the same."""
    for size in (1, 2, 4, 5):
        seen = {int(i): set() for i in range(size)}
        for count in range(20):
            other = partners(size, count)
            assert (other[other] == np.arange(size)).all()
            assert (other == np.arange(size)).sum() == size % 2
            for i, j in enumerate(other):
                seen[i].add(int(j))
        assert all(len(each) == (size if size % 2 else size // 2) for each in seen.values())


def simulate(start, targets, size, plan, alpha, weights):
    """NoLoCo's loop: momentum of pulls towards a pair's mean params, a fragment (a leaf) in turn."""
    theta = [{k: v.copy() for k, v in start.items()} for _ in range(size)]
    center = [{k: v.copy() for k, v in start.items()} for _ in range(size)]
    trace = [dict.fromkeys(start, 0.0) for _ in range(size)]
    sent = {}
    for step, target in enumerate(targets, start=1):
        for i, own in enumerate(theta):
            for k in own:
                own[k] = own[k] - RATE * (own[k] - target[k][i])
        other = partners(size, step - 1)
        exchange = plan.at(step)
        for p, names in enumerate("ab" if plan.fragments > 1 else ["ab"]):
            for k in names:
                if p in exchange.send:
                    for i, j in enumerate(other):
                        w, v = weights[i], weights[j]
                        mean = (w * theta[i][k] + v * theta[j][k]) / (w + v)
                        sent[i, k] = mean - center[i][k]
                if p in exchange.receive and (0, k) in sent:
                    for i in range(size):
                        trace[i][k] = MOMENTUM * trace[i][k] + OUTER_RATE * sent[i, k]
                        center[i][k] = center[i][k] + trace[i][k]
                        theta[i][k] = alpha * theta[i][k] + (1 - alpha) * center[i][k]
        yield [dict(own) for own in theta], [dict(own) for own in center]


@pytest.mark.parametrize(
    ("size", "plan", "alpha"),
    [
        (4, optperm.distributed.Every(PERIOD), 0.0),
        (3, optperm.distributed.Every(PERIOD, 2, 2), 0.5),
    ],
)
def test_diloco_equals_nolocos_loop(size, plan, alpha):
    """Weighted, every step of every replica and its center, to 1e-12 in float64."""
    rng = np.random.default_rng(0)
    start, weights = draw(rng), np.arange(1.0, size + 1)
    targets = [draw(rng, size) for _ in range(STEPS)]
    with jax.enable_x64(True):
        tx = optperm.diloco(
            optax.sgd(RATE),
            optax.sgd(OUTER_RATE, momentum=MOMENTUM),
            every=plan,
            axis_name=AXIS,
            combine="pairs",
            mixing=alpha,
            fragment_of={"a": 0, "b": 1} if plan.fragments > 1 else None,
        )

        def evaluate(p, batch):
            return jax.tree.map(jnp.subtract, p, batch["target"]), {"weight": batch["weight"]}

        given = [{"target": target, "weight": weights} for target in targets]
        trail = loops.train(tx, start, given, evaluate=evaluate, how="vmap", size=size)
        wanted = simulate(start, targets, size, plan, alpha, weights)
        for (params, opt_state), (theta, center) in zip(trail, wanted, strict=True):
            support.assert_close(params, replicas.stack(theta), atol=1e-12)
            support.assert_close(
                optperm.distributed.center_params(opt_state), replicas.stack(center), atol=1e-12
            )


@pytest.mark.parametrize("how", ["vmap in shard_map", "pmap"])
def test_a_permutation_in_a_conditional_is_all_that_crosses(how):
    """Of counted steps; each of its branches sends the params once."""
    size = 4
    tx = optperm.diloco(optax.adam(0.1), every=PERIOD, axis_name=AXIS, combine="pairs")
    params = {"a": jnp.ones((32, 8)), "b": jnp.ones(64)}
    step = loops.make_step(tx, EVALUATE)
    stacked = [replicas.stack([tree] * size) for tree in (params, tx.init(params), params)]
    if how == "pmap":
        mapped = jax.pmap(step, axis_name=AXIS, devices=jax.devices()[:size])
    else:
        mesh = jax.make_mesh((size,), (AXIS,), axis_types=(AxisType.Auto,))
        block = jax.vmap(step)
        mapped = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
    found = replicas.collectives(mapped.lower(*stacked).compile().as_text())
    assert {each.operation for each in found} == {"collective-permute"}
    assert all(each.is_conditional for each in found)
    branches, sent = size // 2, 4 * (32 * 8 + 64)
    assert sum(each.bytes for each in found) == branches * (sent + 4)


def test_replicas_without_a_say_follow_their_partner():
    """Weight zero, or params that are not finite; of two without a say each keeps its center."""
    make = functools.partial(optperm.diloco, optax.sgd(1.0), every=PERIOD)
    tx, start = make(axis_name=AXIS, combine="pairs"), np.zeros(1, np.float32)
    alone = loops.train(make(), start, [np.ones(1, np.float32)] * PERIOD)[-1][0]
    for weights in ([1.0, 0.0], [1.0, np.nan], [0.0, 0.0]):
        evaluate = lambda p, batch: (batch[:1], {"weight": batch[1]})  # noqa: E731
        data = [np.float32([[1.0, weights[0]], [5.0, weights[1]]])] * PERIOD
        trail = loops.train(tx, start, data, evaluate=evaluate, how="vmap", size=2)
        params, opt_state = trail[-1]
        wanted = 0.0 if weights == [0.0, 0.0] else float(alone[0])
        np.testing.assert_allclose(params, [[wanted]] * 2, atol=1e-6)
        assert opt_state.skipped.tolist() == [0, int(np.isnan(weights[1]))]


def test_centers_come_together():
    """Of eight replicas with targets of their own; without pairs each would stay at its own."""
    tx = optperm.diloco(optax.sgd(0.3), every=PERIOD, axis_name=AXIS, combine="pairs")
    targets = np.float32(np.arange(8.0)[:, None])
    step = jax.vmap(loops.make_step(tx, EVALUATE), axis_name=AXIS)

    @jax.jit
    def run(params, opt_state):
        body = lambda carry, _: (step(*carry, targets), ())  # noqa: E731
        return jax.lax.scan(body, (params, opt_state), length=150)[0]

    center = optperm.distributed.center_params(
        run(jnp.zeros((8, 1)), jax.vmap(tx.init)(jnp.zeros((8, 1))))[1]
    )
    assert abs(float(center.mean()) - 3.5) < 0.5
    assert float(center.std()) < 0.75 * targets.std()


def test_centers_meet_to_the_rounding_of_their_dtype():
    """Of replicas that stand still, at any scale: what is left is no part of the method."""
    start = 1 + 0.1 * np.random.default_rng(0).normal(size=(4, 16))
    for dtype, scale in ((jnp.bfloat16, 1.0), (jnp.bfloat16, 16.0), (jnp.float32, 1.0)):
        tx = optperm.diloco(
            optax.sgd(0.1), every=1, axis_name=AXIS, combine="pairs", center_dtype=dtype
        )
        step = jax.vmap(loops.make_step(tx, lambda p, _: (jnp.zeros_like(p), {})), axis_name=AXIS)
        params = jnp.asarray(scale * start, jnp.float32)

        @jax.jit
        def run(params, opt_state, step=step):
            body = lambda carry, _: (step(*carry, params), ())  # noqa: E731
            return jax.lax.scan(body, (params, opt_state), length=200)[0]

        center = optperm.distributed.center_params(run(params, jax.vmap(tx.init)(params))[1])
        apart = np.ptp(np.asarray(center, np.float32), axis=0).max() / scale
        assert np.ptp(start, axis=0).max() > 0.2 > 4 * jnp.finfo(dtype).eps >= apart


def test_pairs_under_a_vmap_without_a_name_are_refused():
    tx = optperm.diloco(optax.sgd(0.1), every=PERIOD, axis_name=AXIS, combine="pairs")
    opt_state = jax.vmap(jax.vmap(tx.init))(jnp.ones((2, 2, 1)))
    update = jax.vmap(lambda p, s: tx.update(p, s, p)[0], axis_name=AXIS)
    with pytest.raises(ValueError, match="would exchange in every step"):
        jax.vmap(update)(jnp.ones((2, 2, 1)), opt_state)
