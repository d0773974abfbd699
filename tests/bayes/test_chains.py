"""Long chains of Mandt's method against the stationary distributions that are known."""

import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest

import optperm

N, S, D = 1000, 10, 3
HESSIAN = np.array([[2.0, 0.5, 0.0], [0.5, 1.0, 0.3], [0.0, 0.3, 0.5]])
NOISE = np.array([[1.0, 0.6, 0.0], [0.6, 2.0, 0.0], [0.0, 0.0, 0.1]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preconditioner", "momentum"),
    [
        ("diagonal", 0.0),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [("scalar", 0.0), ("full", 0.0), ("full", 0.9)]
        ),
    ],
)
def test_chains_have_the_known_stationary_distribution(preconditioner, momentum):
    hessian, root = jnp.float32(HESSIAN), jnp.float32(np.linalg.cholesky(NOISE))

    def evaluate(params, key):
        rows = (hessian @ params)[None] + jax.random.normal(key, (S, D)) @ root.T
        return jnp.mean(rows, axis=0), {"per_example_grad_fn": lambda params: rows}

    tx = optperm.mandt_sgd(
        N, S, preconditioner=preconditioner, momentum=momentum, burn_in=200, freeze_after=500
    )
    step, w = loops.make_step(tx, evaluate), jnp.zeros(D)
    counts = {"num_chains": 256, "num_draws": 30, "thinning": 90, "burn_in": 1000}
    samples = optperm.bayes.draw_samples(step, w, tx.init(w), 0, **counts)
    flat = np.asarray(samples.params, np.float64).reshape(-1, D)
    covariance, diagonal = np.cov(flat.T), np.diag(NOISE)
    h = (1 - momentum) * {
        "scalar": 2 * S * D / (N * diagonal.sum()) * np.eye(D),
        "diagonal": np.diag(2 * S / (N * diagonal)),
        "full": 2 * S / N * np.linalg.inv(NOISE),
    }[preconditioner]
    posterior = np.zeros(D), np.linalg.inv(N * HESSIAN)
    with jax.enable_x64(True):
        exact = optperm.bayes.stationary_covariance(h, HESSIAN, NOISE / S, momentum=momentum)
        known = float(optperm.bayes.gaussian_kl(np.zeros(D), exact, *posterior))
        found = float(optperm.bayes.gaussian_kl(flat.mean(axis=0), covariance, *posterior))
    # 7680 draws, nearly independent: each variance is known to 1.6 %, and C to 0.9 %.
    np.testing.assert_allclose(covariance, exact, atol=0.07 * np.diag(exact).max())
    assert abs(found - known) < 0.003 + 0.06 * known
