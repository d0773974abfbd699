"""Snapshots in the optimizer state: which, in what order, and that keeping them copies nothing."""

import re

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax

import optperm


def record(steps, every, num_snapshots, **options):
    """Return the states after steps at which the params are 0, 1, 2, ..."""
    tx = optperm.record_trajectory(every, num_snapshots, **options)
    params = {"w": jnp.zeros((2, 3)), "b": jnp.float32(0.0)}
    ones = [jax.tree.map(jnp.ones_like, params)] * steps
    trail = loops.train(tx, params, ones, init="jit")
    for number, (after, _) in enumerate(trail, start=1):  # the updates pass unchanged
        assert np.all(after["w"] == number)
    return [state for _, state in trail]


def test_last_snapshots_come_oldest_first():
    """Keep params as they were passed at steps 0, every, 2 * every, ..., until newer ones come."""
    states = record(20, every=3, num_snapshots=4)
    full = (12, [0, 3, 6, 9]), (13, [3, 6, 9, 12]), (20, [9, 12, 15, 18])
    for steps, wanted in ((1, [0]), (3, [0]), (4, [0, 3]), *full):
        snapshots, count = jax.device_get(optperm.subspace.trajectory(states[steps - 1]))
        assert count == len(wanted)
        assert snapshots["w"].shape == (4, 2, 3)
        assert snapshots["b"][:count].tolist() == wanted
        assert snapshots["w"][:count, 1, 2].tolist() == wanted


def test_trajectory_of_mapped_states_has_their_leading_axes():
    """Sort rings of two times three trainings, which have turned over or are not yet full."""
    tx = optperm.record_trajectory(every=1, num_snapshots=4)

    @jax.jit
    def train(start, steps):
        def step(t, state):
            return tx.update(start, state, start + t)[1]

        return jax.lax.fori_loop(0, steps, step, tx.init(start))

    starts = np.arange(6, dtype=np.float32).reshape(2, 3, 1)
    steps = np.array([[3, 4, 5], [6, 7, 8]], np.int32)
    states = jax.jit(jax.vmap(jax.vmap(train)))(starts, steps)
    snapshots, count = jax.device_get(optperm.subspace.trajectory(states))
    for place in np.ndindex(2, 3):
        alone, number = jax.device_get(
            optperm.subspace.trajectory(train(starts[place], steps[place]))
        )
        assert count[place] == number == min(steps[place], 4)
        np.testing.assert_array_equal(snapshots[place], alone)
        assert alone[number - 1] == starts[place] + np.float32(steps[place] - 1)


def test_snapshots_of_every_dtype_are_float32_or_as_asked_for():
    with jax.enable_x64(True):
        params = {name: jnp.zeros(2, name) for name in ("bfloat16", "float32", "float64")}
        kept = optperm.record_trajectory(1, 2).init(params).snapshots
        assert [str(leaf.dtype) for leaf in kept.values()] == ["float32", "float32", "float64"]
        kept = optperm.record_trajectory(1, 2, dtype=jnp.bfloat16).init(params).snapshots
        assert {str(leaf.dtype) for leaf in kept.values()} == {"bfloat16"}
    snapshots, _ = optperm.subspace.trajectory(record(4, 1, 4, dtype=jnp.bfloat16)[-1])
    assert snapshots["b"].astype(jnp.float32).tolist() == [0, 1, 2, 3]


def test_donated_ring_is_not_copied():
    """Write one row in place, without a second ring."""
    tx = optax.chain(optax.sgd(0.1), optperm.record_trajectory(every=3, num_snapshots=16))
    params = jnp.zeros((300, 500))
    step = jax.jit(loops.make_step(tx), donate_argnums=(0, 1))
    compiled = step.lower(params, tx.init(params), params).compile()
    assert not re.search(r"f32\[16,300,500\]\S* (copy|select)\(", compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * params.nbytes
