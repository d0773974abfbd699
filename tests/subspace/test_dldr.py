"""Two phases in one optimizer: where it arrives, the switch, resuming, replicas, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import replicas
import support

import optperm

pytestmark = pytest.mark.usefixtures("lenient")

# Steps 2, 4, 6 and 8 are sampled; step 8 is the first in the subspace.
OPTIONS = {"start": 2, "sample_every": 2, "num_samples": 4, "n_components": 3}
SWITCH = 8


def valley(params, batch):
    x = jnp.concatenate([params["a"].ravel(), params["b"][None]])
    scales = jnp.asarray([1.0, 3.0, 10.0, 30.0, 100.0, 300.0])
    return 0.5 * jnp.mean(jnp.sum(scales * (x - batch) ** 2, axis=-1))


def start():
    return {"a": np.zeros((5, 1), np.float32), "b": np.float32(0.0)}


def batches(steps, size=1):
    rng = np.random.default_rng(0)
    return 1 + 0.3 * rng.normal(size=(steps, size, 2, 6)).astype(np.float32)


def step_of(tx, loss_fn=valley):
    def step(params, opt_state, batch):
        e = optperm.evaluate(loss_fn, params, batch)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    return step


def trail_of(tx, data, params=None, opt_state=None):
    params = start() if params is None else params
    opt_state = tx.init(params) if opt_state is None else opt_state
    step, trail = jax.jit(step_of(tx)), []
    for batch in data:
        params, opt_state = step(params, opt_state, batch)
        trail.append((params, opt_state))
    return trail


@pytest.mark.parametrize("phase", ["bfgs", "sgd"])
def test_it_is_the_parts_one_after_the_other(phase):
    """The optimizer, then what the other part gives with the samples' components, to rounding."""
    data = batches(16)[:, 0]
    first = optax.sgd(2e-3, momentum=0.5)
    options = {"max_search_steps": 15} if phase == "bfgs" else {"second_optimizer": optax.sgd(1e-3)}
    trail = trail_of(optperm.dldr(first, **OPTIONS, second_phase=phase, **options), data)
    alone = trail_of(first, data[:SWITCH])
    for (got, _), (wanted, _) in zip(trail, alone, strict=False):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, wanted)
    before = [start(), *(params for params, _ in alone)]
    samples = jax.tree.map(lambda *leaves: np.stack(leaves), *(before[i] for i in (2, 4, 6, 8)))
    basis = optperm.pca_basis(samples, 3)
    rows = trail[SWITCH][1].second.subspace.rows
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), rows, basis)
    if phase == "bfgs":
        tx = optperm.dim_reduce(n_components=3, **options)
        then = trail_of(
            tx, data[SWITCH:], before[SWITCH], optperm.set_basis(tx.init(start()), basis)
        )
        assert np.any([state.step_length > 0 for _, state in then])
    else:
        p = np.concatenate([np.asarray(r).reshape(3, -1) for r in jax.tree.leaves(basis)], axis=1)
        x = np.append(before[SWITCH]["a"], before[SWITCH]["b"])
        then = []
        for batch in data[SWITCH:]:
            tree = {"a": x[:5, None], "b": x[5]}
            g = jax.grad(valley)(tree, batch)
            x = x - 1e-3 * p.T @ (p @ np.append(g["a"], g["b"]))
            then.append(({"a": x[:5, None], "b": x[5]}, None))
    for (got, _), (wanted, _) in zip(trail[SWITCH:], then, strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, wanted
        )


def test_a_quadratic_in_ten_dimensions():
    """It reaches the optimum to 1e-6 where SGD at its best rate takes at least ten times the steps."""
    n, k = 200, 10
    q = np.linalg.qr(np.random.default_rng(0).normal(size=(n, k)))[0]
    eigenvalues = np.linspace(1, 1000, k)
    with jax.enable_x64(True):
        root = jnp.asarray(q * np.sqrt(eigenvalues))
        optimum = jnp.asarray(q @ np.ones(k))

        def loss_fn(x, batch):
            return 0.5 * jnp.sum((root.T @ (x - batch)) ** 2)

        rate = 2 / (eigenvalues[0] + eigenvalues[-1])  # the best for a quadratic

        def steps_to_optimum(tx, limit):
            def is_far(carry):
                x, _, count = carry
                return (jnp.max(jnp.abs(x - optimum)) > 1e-6) & (count < limit)

            def go(carry):
                x, opt_state, count = carry
                return *step_of(tx, loss_fn)(x, opt_state, optimum), count + 1

            x = jnp.zeros(n)
            return int(jax.jit(lambda c: jax.lax.while_loop(is_far, go, c))((x, tx.init(x), 0))[2])

        tx = optperm.dldr(
            optax.sgd(rate),
            sample_every=1,
            num_samples=k + 1,
            n_components=k,
            max_search_steps=30,
        )
        ours = steps_to_optimum(tx, 10_000)
        plain = steps_to_optimum(optax.sgd(rate), 100_000)
    assert 10 * ours <= plain < 100_000, (ours, plain)


@pytest.mark.parametrize("phase", ["bfgs", "sgd"])
def test_a_scan_goes_through_the_switch(phase):
    """One scan over both phases gives the steps one by one."""
    tx = optperm.dldr(optax.adam(0.05), **OPTIONS, second_phase=phase)
    data = batches(14)[:, 0]
    wanted, _ = trail_of(tx, data)[-1]
    run = jax.jit(
        lambda carry, data: jax.lax.scan(lambda c, x: (step_of(tx)(*c, x), None), carry, data)[0]
    )
    params, opt_state = run((start(), tx.init(start())), data)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), params, wanted
    )
    assert opt_state.second.subspace.is_set


def test_resumed_on_either_side_of_the_switch_and_at_it(tmp_path):
    """Bit-identical from a checkpoint before, at and after the step that computes the basis."""
    tx = optperm.dldr(optax.adam(0.05), **OPTIONS, max_search_steps=8)
    data = batches(14)[:, 0]
    trail = trail_of(tx, data)
    for taken in (SWITCH - 1, SWITCH, SWITCH + 1, SWITCH + 3):
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / str(taken), trail[taken - 1])
            checkpointer.wait_until_finished()
            template = jax.tree.map(jnp.zeros_like, trail[0])
            restored = checkpointer.restore(tmp_path / str(taken), template)
        assert int(restored[1].count) == taken
        assert bool(restored[1].second.subspace.is_set) == (taken > SWITCH)
        resumed = trail_of(tx, data[taken:], *restored)
        for got, wanted in zip(resumed, trail[taken:], strict=True):
            support.assert_same_bits(got, wanted)


@pytest.mark.parametrize("phase", ["bfgs", "sgd"])
@pytest.mark.parametrize(("size", "mapping"), [(2, "pmap"), (4, "shard_map")])
def test_on_many_devices_as_on_one(phase, size, mapping):
    """Each has its share of the batch and of the rows, in both phases and through the switch."""
    data = batches(12, 4)
    options = OPTIONS | {"second_phase": phase}
    alone = trail_of(optperm.dldr(optax.sgd(2e-3), **options), data.reshape(len(data), -1, 6))
    tx = optperm.dldr(optax.sgd(2e-3), **options, axis_name=replicas.AXIS)
    mapped = replicas.MAPPINGS[mapping]
    params = replicas.stack([start()] * size)
    opt_state, step = mapped(tx.init, size)(params), mapped(step_of(tx), size)
    for batch, (wanted, _) in zip(data, alone, strict=True):
        params, opt_state = step(params, opt_state, batch.reshape(size, -1, 6))
        for index in range(size):
            chosen = replicas.take(params, index)
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), chosen, wanted
            )
    assert opt_state.second.subspace.rows["b"].shape == (size, -(-3 // size))


@pytest.mark.parametrize("phase", ["bfgs", "sgd"])
def test_a_gradient_that_is_not_finite_skips_a_step_in_either_phase(phase):
    """Nothing but the count and what was sampled changes."""
    tx = optperm.dldr(optax.adam(0.05), **OPTIONS, second_phase=phase)
    trail, step = trail_of(tx, batches(12)[:, 0]), jax.jit(step_of(tx))
    for taken in (3, 11):
        params, opt_state = trail[taken - 1]
        after, state_after = step(params, opt_state, np.full((2, 6), np.nan, np.float32))
        support.assert_same_bits(after, params)
        support.assert_same_bits(state_after.optimizer_state, opt_state.optimizer_state)
        if phase == "sgd":
            support.assert_same_bits(state_after.second, opt_state.second)
        assert state_after.count == taken + 1
