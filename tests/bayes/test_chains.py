"""Long chains of the transformation itself, against the stationary distributions that are known."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest

import optperm

N, S = 1000, 10
HESSIAN = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 0.5]])
NOISE = np.array([[1.0, 0.6, 0.0], [0.6, 2.0, 0.0], [0.0, 0.0, 0.1]])
# KL(stationary || posterior) for continuous time and for steps, of the specification of the problem.
KNOWN = {"scalar": 0.660328, "diagonal": 0.055051, "full": 0.000830}
CHAINS = 256


def chains(tx, gradients, start, key, *, warmup, draws, thinning):
    """The params of many chains, (CHAINS, draws, D): `gradients(params, key)` are those of a batch."""

    def evaluate(params, key):
        rows = gradients(params, key)
        return jnp.mean(rows, axis=0), {"per_example_grad_fn": lambda params: rows}

    step = loops.make_step(tx, evaluate)

    def some(carry, key, steps):
        return loops.carry(step, *carry, jax.random.split(key, steps))

    @jax.jit
    @jax.vmap
    def run(key):
        carry = some((start, tx.init(start)), jax.random.fold_in(key, 0), warmup)

        def draw(carry, index):
            carry = some(carry, jax.random.fold_in(key, index), thinning)
            return carry, carry[0]

        return jax.lax.scan(draw, carry, jnp.arange(1, draws + 1))[1]

    return np.asarray(run(jax.random.split(key, CHAINS)), np.float64)


def moments(samples):
    """Mean and covariance over all chains and draws."""
    flat = samples.reshape(-1, samples.shape[-1])
    return flat.mean(axis=0), np.cov(flat.T)


@functools.cache
def quadratic_samples(preconditioner, seed, momentum=None):
    root = np.linalg.cholesky(NOISE)

    def gradients(params, key):
        noise = jax.random.normal(key, (S, 3)) @ jnp.asarray(root.T, jnp.float32)
        return (jnp.asarray(HESSIAN, jnp.float32) @ params)[None] + noise

    tx = optperm.constant_sgd(
        N, S, preconditioner=preconditioner, momentum=momentum, burn_in=200, freeze_after=500
    )
    return chains(
        tx, gradients, jnp.zeros(3), jax.random.key(seed), warmup=1500, draws=30, thinning=150
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("preconditioner", list(KNOWN))
def test_chains_have_the_known_stationary_distribution(preconditioner, seed):
    mean, covariance = moments(quadratic_samples(preconditioner, seed))
    posterior = np.linalg.inv(N * HESSIAN)
    with jax.enable_x64(True):
        found = float(optperm.gaussian_kl(mean, covariance, np.zeros(3), posterior))
        diagonal = np.diag(NOISE)
        h = {
            "scalar": 2 * S * 3 / (N * diagonal.sum()) * np.eye(3),
            "diagonal": np.diag(2 * S / (N * diagonal)),
            "full": 2 * S / N * np.linalg.inv(NOISE),
        }[preconditioner]
        exact = np.asarray(optperm.stationary_covariance(h, HESSIAN, NOISE / S))
    # 7680 draws, nearly independent: each variance is known to 1.6 %, and C to 0.9 %.
    np.testing.assert_allclose(
        covariance, exact, atol=0.07 * np.sqrt(np.outer(np.diag(exact), np.diag(exact))).max()
    )
    assert abs(found - KNOWN[preconditioner]) < 0.003 + 0.06 * KNOWN[preconditioner]


@pytest.mark.slow
def test_momentum_keeps_the_stationary_distribution():
    mean, covariance = moments(quadratic_samples("full", 3, momentum=0.9))
    posterior = np.linalg.inv(N * HESSIAN)
    with jax.enable_x64(True):
        found = float(optperm.gaussian_kl(mean, covariance, np.zeros(3), posterior))
        h = 2 * S / N * np.linalg.inv(NOISE) * (1 - 0.9)
        exact = optperm.stationary_covariance(h, HESSIAN, NOISE / S, momentum=0.9)
        known = float(optperm.gaussian_kl(np.zeros(3), exact, np.zeros(3), posterior))
    assert abs(found - known) < 0.003
    assert known < 0.02


@pytest.mark.slow
def test_regression_with_heteroscedastic_noise():
    """The model takes the noise to be one and the same: C is not the Hessian, which full knows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, 5)) @ (np.eye(5) + 0.3 * rng.normal(size=(5, 5)))
    spread = np.exp(0.7 * x[:, 0] - 0.25)
    y = x @ rng.normal(size=5) + spread * rng.normal(size=N)
    hessian = x.T @ x / N
    optimum = np.linalg.solve(x.T @ x, x.T @ y)
    x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)

    def gradients(params, key):
        rows = jax.random.randint(key, (S,), 0, N)
        return (x[rows] @ params - y[rows])[:, None] * x[rows]

    found = {}
    for preconditioner in KNOWN:
        tx = optperm.constant_sgd(
            N, S, preconditioner=preconditioner, burn_in=300, freeze_after=800
        )
        samples = chains(
            tx,
            gradients,
            jnp.asarray(optimum, jnp.float32),
            jax.random.key(0),
            warmup=1200,
            draws=30,
            thinning=100,
        )
        mean, covariance = moments(samples)
        with jax.enable_x64(True):
            found[preconditioner] = float(
                optperm.gaussian_kl(mean, covariance, optimum, np.linalg.inv(N * hessian))
            )
    assert found["full"] < 0.01
    assert min(found["scalar"], found["diagonal"]) > 0.03
