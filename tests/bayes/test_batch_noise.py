"""The noise of the batches at draws, compared with the noise of a kernel or of SGLD."""

import jax
import jax.numpy as jnp
import numpy as np
import support

import optperm
from optperm.bayes import _batch_noise
from optperm.bayes._batches import batches_of_rows
from optperm.bayes._report import measure_kernel_bias

N, S = 200, 8


def test_bias_of_a_kernel_is_judged_by_the_steps_of_all_draws():
    """Not by a last step at which the rate is small, for noise that is twice the kernel's."""
    w = {"a": np.zeros(3, np.float32), "b": np.ones(2, np.float32)}

    @jax.jit
    def step(w):
        kernel = optperm.bayes.NoiseKernel.unknown(w, "diagonal", control_variates=False)
        one = jax.tree.map(jnp.ones_like, kernel.noise)
        kernel = kernel._replace(
            noise=one, curvature=one, num_data=jnp.int32(N), batch_size=jnp.int32(S)
        )
        tx = optperm.constant_sgd(kernel)
        return tx.update(w, tx.init(w), w)[1]

    state = step(w)
    noise = jax.tree.map(lambda x: np.full_like(x, 2 / S), w)
    draws = jax.tree.map(lambda p: support.normal((2, 50, *p.shape)), w)
    last = jax.tree.map(lambda p: np.zeros((2, *p.shape), np.float32), w)
    samples = optperm.bayes.Samples(draws, last, state, 50, 1, batch_noise=noise)
    wanted = measure_kernel_bias([state], samples)
    numbers = [np.full((2, 50), number) for number in state.numbers()]
    last = state._replace(
        limit=np.float32(1e-3) * np.asarray(state.limit),
        temperature=np.float32(1e-3) * np.asarray(state.temperature),
    )
    known = samples._replace(step_sizes=numbers[0], temperatures=numbers[1])
    assert wanted > 0.1
    np.testing.assert_allclose(measure_kernel_bias([last], known), wanted, rtol=1e-4)


def test_noise_of_the_batches_of_sgld_is_measured():
    """The diagonal of R = C / S and its maximum eigenvalue, of 20 weights with a correlation of 0.9; not
    behind control variates, which change the noise."""
    rng = np.random.default_rng(0)
    x = np.sqrt(0.9) * rng.normal(size=(400, 1)) + np.sqrt(0.1) * rng.normal(size=(400, 20))
    x, w = jnp.float32((x - x.mean(axis=0)) / x.std(axis=0)), jnp.zeros(20)

    def loss_fn(w, x):
        return jnp.mean(jnp.sum((x - w[None]) ** 2, axis=-1)) / 2

    state = optperm.sgld(1e-5, 400).init(w)
    samples = optperm.bayes.Samples(jnp.zeros((2, 100, 20)), jnp.zeros((2, 20)), state, 100, 1)
    batches, tx = batches_of_rows(x, None, S), optperm.sgld(1e-5, 400)
    found = _batch_noise.measure_batch_noise(tx, loss_fn, batches, samples, jax.random.key(0))
    np.testing.assert_allclose(found.batch_noise, 1 / S, rtol=0.35)
    exact = np.linalg.eigvalsh(np.cov(x.T) / S)[-1]
    np.testing.assert_allclose(found.batch_noise_norm, exact, rtol=0.3)
    assert float(found.batch_noise_norm) > 10 * float(np.max(found.batch_noise))
    half = optperm.sghmc(1e-3, N, 0.5).init(w.astype(jnp.bfloat16))
    assert _batch_noise._is_langevin_alone(half)
    assert not _batch_noise._is_langevin_alone((state, w))
