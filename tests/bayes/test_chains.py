"""Long chains of the transformation itself, against the stationary distributions that are known."""

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


def chains(tx, gradients, start, seed, *, burn_in, thinning, number=256):
    """Mean and covariance of 30 draws of each chain: `gradients(params, key)` are those of a batch."""

    def evaluate(params, key):
        rows = gradients(params, key)
        return jnp.mean(rows, axis=0), {"per_example_grad_fn": lambda params: rows}

    step = loops.make_step(tx, evaluate)

    def some(carry, key, steps):
        return loops.carry(step, *carry, jax.random.split(key, steps))

    @jax.jit
    @jax.vmap
    def run(key):
        carry = some((start, tx.init(start)), jax.random.fold_in(key, 0), burn_in)

        def draw(carry, index):
            carry = some(carry, jax.random.fold_in(key, index), thinning)
            return carry, carry[0]

        return jax.lax.scan(draw, carry, jnp.arange(1, 31))[1]

    samples = run(jax.random.split(jax.random.key(seed), number))
    flat = np.asarray(samples, np.float64).reshape(-1, len(start))
    return flat.mean(axis=0), np.cov(flat.T)


def divergence(mean, covariance, optimum, hessian):
    """That of draws from the posterior."""
    with jax.enable_x64(True):
        return float(
            optperm.bayes.gaussian_kl(mean, covariance, optimum, np.linalg.inv(N * hessian))
        )


def on_a_quadratic(preconditioner, seed, momentum=0.0):
    """Mean and covariance of the chains, and the covariance that they must have."""
    root = np.linalg.cholesky(NOISE)

    def gradients(params, key):
        noise = jax.random.normal(key, (S, 3)) @ jnp.asarray(root.T, jnp.float32)
        return (jnp.asarray(HESSIAN, jnp.float32) @ params)[None] + noise

    tx = optperm.mandt_sgd(
        N, S, preconditioner=preconditioner, momentum=momentum, burn_in=200, freeze_after=500
    )
    mean, covariance = chains(tx, gradients, jnp.zeros(3), seed, burn_in=1000, thinning=90)
    diagonal = np.diag(NOISE)
    h = {
        "scalar": 2 * S * 3 / (N * diagonal.sum()) * np.eye(3),
        "diagonal": np.diag(2 * S / (N * diagonal)),
        "full": 2 * S / N * np.linalg.inv(NOISE),
    }[preconditioner]
    mu = momentum
    with jax.enable_x64(True):
        exact = optperm.bayes.stationary_covariance(h * (1 - mu), HESSIAN, NOISE / S, momentum=mu)
    return mean, covariance, np.asarray(exact)


@pytest.mark.chains
@pytest.mark.parametrize(
    ("preconditioner", "seed"),
    [
        ("diagonal", 1),
        *(pytest.param(*p, marks=pytest.mark.exhaustive) for p in [("scalar", 0), ("full", 2)]),
    ],
)
def test_chains_have_the_known_stationary_distribution(preconditioner, seed):
    mean, covariance, exact = on_a_quadratic(preconditioner, seed)
    # 7680 draws, nearly independent: each variance is known to 1.6 %, and C to 0.9 %.
    np.testing.assert_allclose(
        covariance, exact, atol=0.07 * np.sqrt(np.outer(np.diag(exact), np.diag(exact))).max()
    )
    found = divergence(mean, covariance, np.zeros(3), HESSIAN)
    assert abs(found - KNOWN[preconditioner]) < 0.003 + 0.06 * KNOWN[preconditioner]


@pytest.mark.exhaustive
def test_momentum_keeps_the_stationary_distribution():
    mean, covariance, exact = on_a_quadratic("full", 3, momentum=0.9)
    known = divergence(np.zeros(3), exact, np.zeros(3), HESSIAN)
    assert abs(divergence(mean, covariance, np.zeros(3), HESSIAN) - known) < 0.003
    assert known < 0.02


@pytest.mark.exhaustive
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

    found, start = {}, jnp.asarray(optimum, jnp.float32)
    # The first two are fifty times as far off as they must be: a few draws tell.
    for preconditioner, number in [("scalar", 32), ("diagonal", 32), ("full", 256)]:
        tx = optperm.mandt_sgd(N, S, preconditioner=preconditioner, burn_in=300, freeze_after=800)
        drawn = chains(tx, gradients, start, 0, burn_in=1200, thinning=100, number=number)
        found[preconditioner] = divergence(*drawn, optimum, hessian)
    assert found["full"] < 0.01
    assert min(found["scalar"], found["diagonal"]) > 0.03
