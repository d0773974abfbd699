"""Step sizes against their formulas, and the life of the estimate; the chains are in test_chains.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm

N, S, D = 1000, 10, 3
PRECONDITIONERS = ("scalar", "diagonal", "full")


def batch_gradients(seed, scale=1.0):
    """The gradients of a batch's examples, (S, D), correlated."""
    mix = np.array([[1.0, 0.5, 0.0], [0.0, 0.7, 0.2], [0.0, 0.0, 0.3]])
    rows = np.random.default_rng(seed).normal(size=(S, D)) @ mix * scale + [0.3, -0.2, 0.1]
    return rows.astype(np.float32)


def by_noise(**options):
    """The transformation, burning in for one step."""
    return optperm.scale_by_gradient_noise(N, S, **{"burn_in": 1} | options)


@functools.cache
def compiled(tx):
    """Its update, from the gradients of examples."""
    zeros = jnp.zeros(D)
    return jax.jit(
        lambda grad, state, rows: tx.update(
            grad, state, zeros, per_example_grad_fn=lambda params: rows
        )
    )


def update(tx, state, rows, grad=None):
    """One step on the gradients of examples; the updates and the next state."""
    return compiled(tx)(rows.mean(axis=0) if grad is None else grad, state, rows)


def run(tx, *batches, grad=None):
    """The updates and the states of steps on batches, from the start."""
    state, trail = tx.init(jnp.zeros(D)), []
    for rows in batches:
        updates, state = update(tx, state, rows, grad)
        trail.append((updates, state))
    return trail


def matrix(state):
    """H, from what it makes of unit vectors."""
    return np.stack([state.preconditioned(row) for row in np.eye(D, dtype=np.float32)])


def expected_matrix(covariance, preconditioner):
    """H, from the formulas of the paper."""
    return {
        "scalar": 2 * S * D / (N * np.trace(covariance)) * np.eye(D),
        "diagonal": np.diag(2 * S / (N * np.diag(covariance))),
        "full": 2 * S / N * np.linalg.inv(covariance),
    }[preconditioner]


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_updates_are_the_preconditioned_gradient(preconditioner):
    batches = [batch_gradients(step) for step in range(4)]
    trail = run(by_noise(preconditioner=preconditioner, burn_in=2), *batches)
    covariances = [np.cov(rows.T) for rows in batches]
    for step, (rows, (updates, _)) in enumerate(zip(batches, trail, strict=True)):
        if step < 2:
            support.assert_same_bits(updates, jnp.zeros(D))
        else:  # by the plain mean of the estimates of the steps before
            h = expected_matrix(np.mean(covariances[:step], axis=0), preconditioner)
            np.testing.assert_allclose(updates, h @ rows.mean(axis=0), rtol=2e-4)
    weight = float(trail[-1][1].weight)
    assert abs(weight - (1 - np.prod([1 - 1 / (10 + t) for t in range(4)]))) < 1e-6


@pytest.mark.parametrize(("k_coef", "t0"), [(1.0, 10.0), (2.5, 10.0), (10.0, 10.0), (3.0, 1.0)])
def test_estimates_are_weighted_by_the_recurrence(k_coef, t0):
    """The recurrence from zero, over the total weight: nothing of the start is left."""
    batches = [batch_gradients(step, scale=1.0 + step) for step in range(6)]
    trail = run(optperm.scale_by_gradient_noise(N, S, k_coef=k_coef, t0=t0), *batches)
    plain, weight = np.zeros(D), 0.0
    for step, (rows, (_, state)) in enumerate(zip(batches, trail, strict=True)):
        kappa = min(1.0, k_coef / (t0 + step))
        plain = (1 - kappa) * plain + kappa * rows.var(axis=0, ddof=1)
        weight = (1 - kappa) * weight + kappa
        np.testing.assert_allclose(state.covariance, plain / weight, rtol=1e-5)


def test_the_very_first_step_only_estimates():
    first, second = run(by_noise(burn_in=0), batch_gradients(0), batch_gradients(1))
    support.assert_same_bits(first[0], jnp.zeros(D))
    assert np.all(second[0] != 0)


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_a_frozen_estimate_stays(preconditioner):
    tx = by_noise(preconditioner=preconditioner, freeze_after=3)
    batches = [batch_gradients(step) for step in range(6)]
    trail = run(tx, *batches, grad=np.ones(D, np.float32))
    history = [(state.covariance, state.factor) for _, state in trail]
    for frozen in history[3:]:
        support.assert_same_bits(frozen, history[2])
    assert not np.array_equal(history[1][0], history[2][0])
    h = expected_matrix(np.mean([np.cov(r.T) for r in batches[:3]], axis=0), preconditioner)
    np.testing.assert_allclose(trail[-1][0], h @ np.ones(D), rtol=2e-4)


def test_a_frozen_estimate_is_not_computed():
    calls = []

    def count(rows):
        calls.append(1)
        return rows

    def gradients(params):
        rows = jnp.asarray(batch_gradients(0))
        return jax.pure_callback(count, jax.ShapeDtypeStruct(rows.shape, rows.dtype), rows)

    tx = optperm.scale_by_gradient_noise(N, S, burn_in=1, freeze_after=2)
    step = jax.jit(lambda s: tx.update(jnp.ones(D), s, jnp.ones(D), per_example_grad_fn=gradients))
    state = tx.init(jnp.ones(D))
    for _ in range(5):
        _, state = step(state)
    jax.block_until_ready(state)
    assert len(calls) == 2


@functools.partial(jax.jit, static_argnums=0)
def limited(preconditioner, max_step, rows):
    """H after one step, with a limit that is traced."""
    tx, zeros = by_noise(preconditioner=preconditioner, max_step=max_step), jnp.zeros(D)
    extras = {"per_example_grad_fn": lambda params: rows}
    state = tx.update(jnp.mean(rows, axis=0), tx.init(zeros), zeros, **extras)[1]
    return jax.vmap(state.preconditioned)(jnp.eye(D))


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
@pytest.mark.parametrize("max_step", [0.01, 0.05, 10.0])
def test_no_eigenvalue_exceeds_the_largest_step(preconditioner, max_step):
    rows = batch_gradients(0)
    h = limited(preconditioner, max_step, rows)
    free = expected_matrix(np.cov(rows.T), preconditioner)
    assert np.linalg.eigvalsh(free).max() > 0.01  # so the smallest limit binds
    assert np.linalg.eigvalsh(h).max() <= max_step * (1 + 1e-5)
    if np.linalg.eigvalsh(free).max() < max_step:
        np.testing.assert_allclose(h, free, rtol=2e-4, atol=1e-6)
    elif preconditioner != "full":
        np.testing.assert_allclose(h, np.minimum(free, max_step), rtol=2e-4)


def test_damping_is_the_least_noise():
    rows = batch_gradients(0)
    covariance = np.cov(rows.T)
    damping = float(np.median(np.diag(covariance)))
    for preconditioner, expected in [
        ("diagonal", np.diag(2 * S / (N * np.maximum(np.diag(covariance), damping)))),
        ("full", 2 * S / N * np.linalg.inv(covariance + damping * np.eye(D))),
    ]:
        ((_, state),) = run(by_noise(preconditioner=preconditioner, damping=damping), rows)
        np.testing.assert_allclose(matrix(state), expected, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize(("max_step", "expected"), [(None, 0.0), (0.25, 0.25)])
def test_an_entry_without_noise_takes_the_largest_step_or_none(max_step, expected):
    rows = batch_gradients(0)
    rows[:, 1] = 0.5
    _, (updates, _) = run(by_noise(max_step=max_step), rows, rows, grad=np.ones(D, np.float32))
    assert float(updates[1]) == expected
    assert np.all(np.isfinite(updates))
    assert updates[0] > 0


def test_a_full_preconditioner_waits_until_it_can_be_inverted():
    batches = np.zeros((S, D), np.float32), batch_gradients(1), batch_gradients(2)
    _, (waiting, _), (updates, _) = run(by_noise(preconditioner="full", burn_in=0), *batches)
    support.assert_same_bits(waiting, jnp.zeros(D))
    assert np.all(updates != 0)


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_what_is_not_finite_is_left_out(preconditioner):
    bad = batch_gradients(7)
    bad[3, 1] = np.nan
    # Not even as the first estimate.
    trail = run(by_noise(preconditioner=preconditioner), bad, batch_gradients(0), bad)
    support.assert_same_bits(trail[1][0], jnp.zeros(D))
    before, after = ((s.covariance, s.weight, s.factor) for _, s in trail[1:])
    support.assert_same_bits(after, before)
    updates = trail[2][0]
    # The entries whose gradient is finite move on, where each has a step of its own.
    assert np.all(np.isfinite(updates))
    assert updates[1] == 0
    assert np.all((np.asarray(updates)[[0, 2]] != 0) == (preconditioner != "full"))


def test_temperature_multiplies_the_steps():
    rows = batch_gradients(0)
    warm = {}
    for name, temperature in [("one", 1.0), ("four", 4.0), ("later", lambda t: jnp.where(t, 4, 1))]:
        _, (warm[name], _) = run(by_noise(temperature=temperature), rows, rows)
    np.testing.assert_allclose(warm["four"], 4 * warm["one"], rtol=1e-6)
    support.assert_same_bits(warm["later"], warm["four"])


def test_momentum_is_that_of_optax_with_shorter_steps():
    rows = [batch_gradients(seed) for seed in range(5)]
    tx = optperm.constant_sgd(N, S, fill=False, momentum=0.8, burn_in=1, learning_rate=0.5)
    velocity = np.zeros(D)
    for (updates, _), (h_g, _) in zip(run(tx, *rows), run(by_noise(), *rows), strict=True):
        velocity = 0.8 * velocity + h_g
        np.testing.assert_allclose(updates, -0.5 * (1 - 0.8) * velocity, rtol=1e-5)


def test_an_optimizer_may_burn_in():
    """It moves the params, and the noise is estimated along its way."""
    batches = [batch_gradients(step) for step in range(5)]
    trail = run(
        optperm.constant_sgd(N, S, fill=False, burn_in=3, burn_in_optimizer=optax.sgd(0.1)),
        *batches,
    )
    alone = run(optperm.constant_sgd(N, S, fill=False, burn_in=3), *batches)
    for step, rows in enumerate(batches):
        expected = -0.1 * rows.mean(axis=0) if step < 3 else alone[step][0]
        np.testing.assert_allclose(trail[step][0], expected, rtol=1e-6)
    support.assert_same_bits(*(optperm.noise_covariance(each[-1][1]) for each in (trail, alone)))


def test_trees_of_several_dtypes_keep_them():
    params = {"w": jnp.zeros((2, 2), jnp.bfloat16), "b": jnp.zeros((3,), jnp.float32)}
    rows = jax.tree.map(lambda p: support.random_like(jnp.zeros((S, *p.shape), p.dtype), 1), params)
    grads = jax.tree.map(lambda r: jnp.mean(r, axis=0), rows)
    for preconditioner in PRECONDITIONERS:
        tx = by_noise(preconditioner=preconditioner, damping=0.1)
        step = jax.jit(
            lambda s, tx=tx: tx.update(grads, s, params, per_example_grad_fn=lambda p: rows)
        )
        _, state = step(tx.init(params))
        updates, _ = step(state)
        assert jax.tree.map(lambda u: u.dtype, updates) == jax.tree.map(lambda p: p.dtype, params)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.covariance))
        assert all(np.all(np.asarray(leaf, np.float32) != 0) for leaf in jax.tree.leaves(updates))


def test_the_batch_size_may_be_an_array():
    """A concrete one that meets the trace is still compared as the number it is."""
    rows = batch_gradients(0)
    tx = optperm.scale_by_gradient_noise(jnp.array(N), jnp.array(S), burn_in=1)
    support.assert_same_bits(run(tx, rows), run(by_noise(), rows))
    with pytest.raises(ValueError, match="batch_size is 9"):
        run(optperm.scale_by_gradient_noise(N, jnp.array(9)), rows)


def test_full_waits_for_enough_estimates():
    """A hundred params and batches of ten: what factorizes first is far from the covariance."""
    d, tx = 100, optperm.scale_by_gradient_noise(N, S, preconditioner="full")

    @jax.jit
    def step(state, key):
        rows = jax.random.normal(key, (S, d))
        extras = {"per_example_grad_fn": lambda w: rows}
        return tx.update(jnp.mean(rows, axis=0), state, jnp.zeros(d), **extras)

    state = tx.init(jnp.zeros(d))
    for index in range(30):
        updates, state = step(state, jax.random.fold_in(jax.random.key(0), index))
        # 2 D estimates of S - 1 degrees of freedom each; then H is about 2 S / N and not a thousandfold.
        assert bool(jnp.any(updates != 0)) == (index * (S - 1) >= 2 * d)
        assert float(jnp.linalg.norm(updates)) < 30 * 2 * S / N * np.sqrt(d / S)


def test_a_limit_of_full_changes_nothing_else():
    """Just below the largest eigenvalue of H, and well below: the other eigenvalues stay."""
    rows = batch_gradients(0)
    free = 2 * S / N * np.linalg.inv(np.cov(rows.T))
    values, vectors = np.linalg.eigh(free)
    for limit in (values[-1] * 0.999, values[-1] * 0.5, values[0] * 0.5):
        wanted = vectors * np.minimum(values, limit) @ vectors.T
        found = limited("full", float(limit), rows)
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("preconditioner", "chunk_size"), support.in_turns(PRECONDITIONERS, [None, 4])
)
def test_rows_of_weight_zero_are_no_examples(preconditioner, chunk_size):
    """A mean by weights makes 0 / 0 of a lone one: the estimate is that of the others."""
    x, weights = jnp.float32(batch_gradients(0)), jnp.ones(S).at[-3:].set(0.0)

    def loss_fn(w, batch):
        rows, weights = batch
        return jnp.sum(weights * (rows @ w)) / jnp.sum(weights)

    w = jnp.zeros(D)
    e = optperm.evaluate(loss_fn, w, (x, weights))
    tx = by_noise(preconditioner=preconditioner, chunk_size=chunk_size)
    state = jax.jit(lambda w: tx.update(e.grad, tx.init(w), w, **e.extra_args)[1])(w)
    exact = np.cov(np.asarray(x)[:-3].T)
    wanted = {"scalar": np.trace(exact) / D, "diagonal": np.diag(exact), "full": exact}
    np.testing.assert_allclose(state.covariance, wanted[preconditioner], rtol=1e-5, atol=1e-6)


def test_estimates_begin_and_recur_as_they_are_told():
    """From `estimate_after` on, each `estimate_every` steps: the plain mean of those alone."""
    batches = [batch_gradients(seed, scale=1.0 + seed) for seed in range(10)]
    tx = by_noise(burn_in=10, estimate_after=3, estimate_every=2, freeze_after=10)
    trail = run(tx, *batches)
    used = [rows.var(axis=0, ddof=1) for rows in batches[3::2]]
    np.testing.assert_allclose(trail[-1][1].covariance, np.mean(used, axis=0), rtol=1e-5)
    assert int(trail[-1][1].estimates) == len(used)
    assert not np.any(trail[2][1].covariance)


@pytest.mark.parametrize("name", ["burn_in", "estimate_after"])
def test_noise_is_not_frozen_before_it_is_used(name):
    options = {"burn_in": 1, "freeze_after": 5, name: 6}
    with pytest.raises(
        ValueError, match=f"freeze_after must be at least {name}, got freeze_after=5"
    ):
        optperm.scale_by_gradient_noise(N, S, **options)


def test_the_estimate_forgets_the_way_to_the_mode():
    """By the defaults for filled noise; one from the start is of the transient."""
    x = jax.random.normal(jax.random.key(0), (N, D))
    y = x @ jnp.array([30.0, -20.0, 10.0]) + jax.random.normal(jax.random.key(1), (N,))
    mode = np.linalg.lstsq(np.asarray(x), np.asarray(y))[0]
    exact = np.asarray((x @ mode - y)[:, None] * x).var(axis=0)

    def frozen(**options):
        options = {"burn_in": 400, "burn_in_optimizer": optax.sgd(0.02)} | options
        tx = optperm.constant_sgd(N, S, **options)

        def step(carry, key):
            w, state = carry
            rows = jax.random.randint(key, (S,), 0, N)
            e = optperm.evaluate(
                lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2) / 2, w, (x[rows], y[rows])
            )
            updates, state = tx.update(e.grad, state, w, **e.extra_args)
            return (optax.apply_updates(w, updates), state), None

        start = jnp.zeros(D), tx.init(jnp.zeros(D))
        keys = jax.random.split(jax.random.key(2), 1400)
        (_, state), _ = jax.lax.scan(step, start, keys)
        return np.median(np.asarray(optperm.noise_covariance(state)) / exact)

    # The way goes on after the burn-in.
    assert frozen(burn_in_optimizer=optax.sgd(0.008)) == pytest.approx(1, rel=0.15)
    assert frozen(estimate_after=0, fill=False, freeze_after=800) > 4
