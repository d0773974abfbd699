"""The rate of SVRG against the eigenvalues that it is made of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

import optperm


@pytest.mark.parametrize(
    ("scale", "b"),
    support.every_night(
        [(1.0, 1), (1.0, 8), (1.0, 40), (1e-8, 1), (1e12, 1)], [(1.0, 8), (1e12, 1)]
    ),
)
def test_the_rate_is_one_over_the_expected_smoothness(scale, b):
    """Of ridge regression, which has the same curvature everywhere, of any size."""
    n, l2 = 40, 0.1
    x = np.random.default_rng(0).normal(size=(n, 5)) * np.array([1.0, 2.0, 30.0, 0.1, 5.0])
    whole = np.linalg.eigvalsh(x.T @ x / n + l2 * np.eye(5)).max()
    single = (x**2).sum(axis=1).max() + l2

    def loss_fn(w, batch):
        return 0.5 * jnp.mean((batch @ w - 1) ** 2) + 0.5 * l2 * scale**2 * jnp.dot(w, w)

    data = np.float32(scale * x)
    rate = optperm.variance.svrg_learning_rate(
        loss_fn, jnp.zeros(5), data, b, num_passes=0, chunk_size=16
    )
    expected = n * (b - 1) / (b * (n - 1)) * whole + (n - b) / (b * (n - 1)) * single
    np.testing.assert_allclose(1 / rate / scale**2, expected, rtol=2e-3)


def test_a_rate_is_doubled_while_the_loss_falls():
    """Raw features, on which the bound of the theory is far too small."""
    rng = np.random.default_rng(0)
    x = np.exp(rng.normal(size=(100, 4))) * [1.0, 10.0, 0.1, 3.0]
    data = np.float32(x), rng.random(100) < 0.5

    def loss(w, batch):
        margin = jnp.where(batch[1], 1.0, -1.0) * (batch[0] @ w)
        return jnp.mean(jnp.logaddexp(0.0, -margin)) + 0.5e-2 * jnp.dot(w, w)

    find = functools.partial(optperm.variance.svrg_learning_rate, loss, jnp.zeros(4), data, 10)
    ratio = find() / find(num_passes=0)
    assert ratio >= 4
    np.testing.assert_allclose(np.log2(ratio), np.rint(np.log2(ratio)), atol=1e-6)


def test_a_loss_that_is_not_convex_is_said():
    def hill(w, batch):
        return -jnp.sum(w**2) + 0 * jnp.mean(batch)

    with pytest.warns(RuntimeWarning, match="not convex"):
        rate = optperm.variance.svrg_learning_rate(hill, jnp.ones(2), jnp.ones(4), 2, num_passes=0)
    assert rate == pytest.approx(0.5)


@pytest.mark.slow
def test_a_rate_at_which_trials_diverge_is_halved_until_the_loss_falls():
    """Poisson regression: far from the optimum the curvature is much larger than at the start."""
    rng = np.random.default_rng(0)
    x = np.c_[rng.normal(size=(128, 5)), np.ones(128)].astype(np.float32)
    counts = rng.poisson(20.0, 128).astype(np.float32)

    def loss(w, batch):
        eta = batch[0] @ w
        return jnp.mean(jnp.exp(eta) - batch[1] * eta)

    data = x, counts
    find = functools.partial(optperm.variance.svrg_learning_rate, loss, jnp.zeros(6), data, 8)
    assert 0.001 < find() < find(num_passes=0) / 8
    counts[3] = np.nan
    with pytest.raises(ValueError, match="must be finite, got nan"):
        find()


def test_a_rate_is_found_outside_of_jit_alone():
    def find(w):
        return optperm.variance.svrg_learning_rate(lambda w, x: jnp.mean(x @ w), w, np.eye(5), 1)

    with pytest.raises(TypeError, match=r"outside (of )?jax\.jit"):
        jax.jit(find)(jnp.ones(5))


@pytest.mark.parametrize(
    ("batch_size", "num_passes"), support.every_night([(1, 0), (1, 1), (4, 1)], [(1, 0)])
)
def test_a_sum_is_refused_and_a_sum_with_its_count_is_the_mean(batch_size, num_passes):
    x = support.normal((32, 3))

    def total(w, batch):
        return jnp.sum((batch @ w - 1) ** 2)

    def find(loss_fn):
        return optperm.variance.svrg_learning_rate(
            loss_fn, jnp.zeros(3), x, batch_size, num_passes=num_passes
        )

    with pytest.raises(ValueError, match="must be a mean over examples"):
        find(total)
    counted = find(lambda w, batch: (total(w, batch), len(batch)))
    assert counted == pytest.approx(find(lambda w, batch: total(w, batch) / len(batch)), rel=1e-5)


@pytest.mark.slow
def test_data_on_an_explicit_mesh_give_the_same_rate():
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    data = support.normal((16, 3)), support.normal((16,), 1)
    spread = jax.device_put(data, jax.NamedSharding(mesh, jax.P("data")))

    def loss_fn(w, batch):
        return jnp.mean((batch[0] @ w - batch[1]) ** 2)

    find = functools.partial(optperm.variance.svrg_learning_rate, loss_fn, jnp.zeros(3))
    one, other = find(data, 4), find(spread, 4)
    assert one == pytest.approx(other, rel=1e-4)
