"""Variance reduction on many devices: as on one, for one model, or for one on each device."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
from least_squares import RATE, evaluation, loss_fn, make_data, part, start, to_dtype

import optperm

COIN = {"probability": 0.4, "key": 7}
METHODS = {
    "svrg": functools.partial(optperm.svrg, 0.9),
    "svrg, every 3": functools.partial(optperm.svrg, 0.9, every=3),
    "svrg, loopless": functools.partial(optperm.svrg, 0.9, **COIN),
    "katyusha": functools.partial(optperm.katyusha, RATE, 0.5, **COIN),
    "storm": functools.partial(optperm.recursive_gradient, 0.3),
    "sarah": functools.partial(optperm.recursive_gradient, 0.0, every=3),
    "page": functools.partial(optperm.recursive_gradient, 0.2, **COIN),
    "mars": functools.partial(optperm.mars, 0.2, 0.8, 5.0),
    "mars, exact": functools.partial(optperm.mars, 0.2, 0.8, 5.0, exact=True),
}
MAPPINGS = ["shard_map", "shard_map unchecked", "pmap"]
STEPS = 6


def batches_of(data):
    return replicas.stack([part(data, t) for t in range(STEPS)])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("method", "mapping"), support.in_turns(METHODS, MAPPINGS))
def test_four_devices_train_as_one(method, mapping):
    """Snapshot, training in a scan, and snapshots inside it give the numbers of a single device; all
    draw the same coin, and hold the same bits."""
    tx = METHODS[method]()
    tx = tx if method == "katyusha" else optax.chain(tx, optax.sgd(RATE))
    data = to_dtype(make_data(), np.float64)

    def train(params, own, axis_name=replicas.AXIS):
        data, batches = own
        opt_state = tx.init(params)
        if method == "svrg":
            full_grad = optperm.variance.full_gradient(loss_fn, params, [data], axis_name=axis_name)
            opt_state = optperm.variance.take_snapshot(opt_state, params, full_grad)
        step = loops.make_step(tx, evaluation(data, axis_name=axis_name))
        return loops.carry(step, params, opt_state, batches), ()

    # Each device holds a quarter of the data and of each batch.
    split = jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), data)
    batches = jax.tree.map(
        lambda x: jnp.moveaxis(x.reshape(STEPS, 4, 1, *x.shape[2:]), 1, 0), batches_of(data)
    )
    params = start(np.float64)
    got, _ = replicas.share(train, mapping, 4)(params, (split, batches))
    alone = jax.jit(functools.partial(train, axis_name=None))
    expected, _ = alone(params, (data, batches_of(data)))
    for index in range(4):
        mine = replicas.take(got, index)
        support.assert_same_bits(mine[0], replicas.take(got[0], 0))
        support.assert_close(mine, expected, rtol=1e-12, atol=1e-13)


def nearby_starts():
    """Params of four models."""
    return replicas.stack([jax.tree.map(lambda p, i=i: p + 0.1 * i, start()) for i in range(4)])


@pytest.mark.parametrize(
    ("method", "mapping"),
    support.in_turns(["svrg, loopless", "svrg, every 3", "page"], MAPPINGS[:2]),
)
def test_model_of_each_device_has_its_own_snapshot(method, mapping):
    """Params that vary over the mapped axis are corrected each by a snapshot of their own."""
    tx = optax.chain(METHODS[method](), optax.sgd(RATE))
    data = to_dtype(make_data(), np.float32)
    batches = batches_of(data)

    def train(params):
        step = loops.make_step(tx, evaluation(data))
        return loops.carry(step, params, tx.init(params), batches)[0]

    got = replicas.MAPPINGS[mapping](train, 4)(nearby_starts())
    support.assert_close(got, jax.jit(jax.vmap(train))(nearby_starts()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"every": 1}])
def test_params_that_leave_a_snapshot_that_devices_share_are_corrected(options):
    """In checked shard_map a replicated state serves params that differ from device to device."""
    tx, data = optperm.svrg(**options), to_dtype(make_data(), np.float32)
    opt_state = optperm.variance.take_snapshot(
        tx.init(start()), start(), jax.grad(loss_fn)(start(), data)
    )

    def update(params):
        grads, extra_args = evaluation(data)(params, part(data, 0))
        return tx.update(grads, opt_state, params, **extra_args)

    got = replicas.MAPPINGS["shard_map"](update, 4)(nearby_starts())
    expected = jax.jit(jax.vmap(update))(nearby_starts())
    support.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_states_of_replicas_take_a_snapshot_at_once():
    """A state with a leading axis of replicas, as pmap keeps it, takes params with the same axis."""
    fresh = optperm.svrg().init(start())
    three = (replicas.stack([tree] * 3) for tree in (fresh, start(), start()))
    one = optperm.variance.take_snapshot(fresh, start(), start())
    support.assert_same_bits(
        optperm.variance.take_snapshot(*three), jax.tree.map(jnp.asarray, replicas.stack([one] * 3))
    )
