"""Constant SGD from a kernel: its steps, its program, and the kernels that it refuses."""

import functools
import pathlib
import pickle
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import support

import optperm
from optperm.bayes._constant_sgd import ConstantSgdState
from optperm.bayes._control_variates import Anchor
from optperm.bayes._forms import Full
from optperm.bayes._remainders import wide_params
from optperm.core.states import find_states

N, S, D, T, MU = 1000, 8, 4, 1.7, 0.8
ROOT = np.random.default_rng(0).normal(size=(D, D)) + 2 * np.eye(D)
C = jnp.float32(ROOT @ ROOT.T)


def kernel_of(form, params=None, momentum=MU):
    """A kernel of the covariance C, or of unit noise for other params, with curvature."""
    params = jnp.zeros(D) if params is None else params
    kernel = optperm.bayes.NoiseKernel.unknown(params, form, control_variates=False)
    noise = jax.tree.map(jnp.ones_like, kernel.noise)
    if form == "full":
        # W^T C W = I
        w = jnp.float32(np.linalg.inv(np.linalg.cholesky(np.float64(C))).T)
        kernel = kernel._replace(basis=Full(w))
    return kernel._replace(
        noise=noise,
        curvature=jax.tree.map(lambda c: 5 * c, noise),
        noise_ratio=jnp.float32(2.0),
        max_stability=jnp.float32(0.2),
        num_data=jnp.int32(N),
        batch_size=jnp.int32(S),
        momentum=jnp.float32(momentum),
    )


@pytest.mark.parametrize(
    "form", support.every_night(["scalar", "diagonal", "full"], ["diagonal", "full"])
)
def test_steps_are_the_preconditioned_gradient_and_new_noise(form):
    """A gradient moves the params by -(1 - mu) H g, and each step by the mean of two successive
    W diag(h sqrt(b / S)) z, with z of 0 or sqrt(3), either way, for the scale s = 2 S T / N."""
    kernel, w = kernel_of(form), jnp.zeros(D)
    tx = optperm.constant_sgd(kernel, temperature=T)
    step, state = jax.jit(tx.update), tx.init(w)
    g, moves, s = jnp.float32([1.0, -2.0, 3.0, 0.5]), [], jnp.float32(2 * S * T / N)
    h = kernel.step_sizes(s)
    basis = np.asarray(kernel.basis.w) if form == "full" else np.eye(D)
    moved = step(g, state, w)[0] - step(0 * g, state, w)[0]
    wanted = -(1 - MU) * basis @ (np.asarray(h) * (basis.T @ g))
    np.testing.assert_allclose(moved, wanted, rtol=1e-3, atol=1e-5 * np.abs(wanted).max())
    for _ in range(9):
        move, state = step(0 * g, state, w)
        moves.append(move)
    deviations = np.asarray(h * jnp.sqrt(kernel.injected(h, s) / S))
    noise = (np.diff([np.zeros(D), *moves], axis=0) + (1 - MU) * np.stack([0 * w, *moves[:-1]])) / (
        1 - MU
    )
    z = np.linalg.solve(basis, noise.T).T / deviations
    for t in range(len(z)):
        z[t] = 2 * z[t] - (z[t - 1] if t else 0)
    points = np.round(z / np.sqrt(3))
    np.testing.assert_allclose(z, np.sqrt(3) * points, atol=5e-3)
    assert {*np.unique(points)} == {-1.0, 0.0, 1.0}
    assert len(np.unique(points, axis=0)) >= 4


CURVATURE = 3.0


@jax.jit
def partials_of(kernel):
    """Return the derivatives of a step on a quadratic with respect to theta, v, z and the noise."""
    tx, w = optperm.constant_sgd(kernel, temperature=T), jnp.zeros(1)
    first = tx.init(w)

    def step(theta, v, z, epsilon):
        state = first._replace(velocity=jnp.array([v]), noise=jnp.array([z]))
        theta = jnp.array([theta])
        updates, state = tx.update(CURVATURE * theta + epsilon, state, theta)
        return jnp.concatenate([theta + updates, state.velocity, state.noise])

    return jax.jacfwd(step, (0, 1, 2, 3))(0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("phi", [0.0, 0.5])
@pytest.mark.parametrize("momentum", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("c", [0.2, 1.0, 1.9])
def test_variance_on_a_quadratic_is_the_posteriors_but_for_the_noise_of_the_batches(
    c, momentum, phi
):
    """The discrete Lyapunov equation of (theta, v, z) gives T / (N A) (1 + phi (c / 2) / (1 - c / 2)),
    where phi = h Lambda / s is the fraction of the batches: exactly T / (N A) without their noise.

    The step of the transformation itself gives the matrices: it is linear in theta, v, z and the noise
    of the gradient.
    """
    with jax.enable_x64(True):
        s = 2 * S * T / N
        corrected = CURVATURE * (1 - momentum) / (1 + momentum)
        noise = phi * s * corrected / c
        kernel = kernel_of("diagonal", jnp.zeros(1), momentum)._replace(
            noise=np.full(1, noise),
            curvature=np.full(1, corrected),
            max_stability=np.float32(c),
            noise_ratio=np.float32(1e6),
        )
        partials = np.stack(partials_of(kernel), axis=1)
    transition, by_batch = partials[:, :3], partials[:, 3:]
    # The new z enters as the last z does, and is kept
    by_noise = transition[:, 2:] + np.array([[0.0], [0.0], [1.0]])
    forcing = by_noise @ by_noise.T + noise / S * by_batch @ by_batch.T
    found = np.linalg.solve(
        np.eye(9) - np.kron(transition, transition), forcing.reshape(-1)
    ).reshape(3, 3)
    ratio = found[0, 0] * N * CURVATURE / T
    assert ratio == pytest.approx(1 + phi * (c / 2) / (1 - c / 2), rel=1e-4)


@pytest.mark.parametrize(
    "form", support.every_night(["scalar", "diagonal", "full"], ["diagonal", "full"])
)
def test_steps_with_an_anchor_are_steps_with_the_corrected_gradient(form):
    """The gradient is replaced by g_B(theta) - g_B(theta*) + grad L(theta*)."""
    params = {"a": jnp.float32([1.0, -2.0, 3.0]), "b": jnp.float32(0.5)}
    kernel = kernel_of(form, params)
    at, full = jax.tree.map(lambda p: p / 3, params), jax.tree.map(lambda p: p**2, params)
    grad_fn = lambda p: jax.tree.map(jnp.exp, p)  # noqa: E731
    g = jax.jit(grad_fn)(params)
    corrected = jax.tree.map(lambda g, p, mu: g - np.exp(p) + mu, *jax.device_get((g, at, full)))
    tx = optperm.constant_sgd(kernel)
    wanted, _ = jax.jit(tx.update)(corrected, tx.init(params), params)
    tx = optperm.constant_sgd(kernel._replace(anchor=Anchor(at, full)))
    state = tx.init(params)
    found, _ = jax.jit(functools.partial(tx.update, grad_fn=grad_fn))(g, state, params)
    chex.assert_trees_all_close(found, wanted, rtol=1e-5)
    with pytest.raises(ValueError, match="grad_fn"):
        tx.update(g, state, params)
    with pytest.raises(ValueError, match=r"kernel.anchor.params\['b'\]"):
        optperm.constant_sgd(kernel._replace(anchor=Anchor(at | {"b": jnp.zeros(2)}, full))).init(
            params
        )


@pytest.mark.parametrize(
    "form", support.every_night(["scalar", "diagonal", "full"], ["diagonal", "full"])
)
def test_a_temperature_scales_all_draws_if_the_noise_is_that_which_control_variates_leave(form):
    """With gradients A_B theta, noise and curvature together are linear in theta: at T, the chain from
    the optimum is sqrt(T) times the chain at 1, whether noise or curvature limits a step."""
    size = jnp.float32(5.0) if form == "scalar" else 5 * jnp.arange(D, dtype=jnp.float32)
    kernel = kernel_of(form, momentum=0.5)._replace(
        noise=size, anchor=Anchor(jnp.zeros(D), jnp.zeros(D))
    )
    matrices = jnp.float32(np.random.default_rng(0).normal(size=(40, D, D)) / 10 + np.eye(D))

    def chain(t):
        tx = optperm.constant_sgd(kernel, temperature=t)

        def step(carry, matrix):
            w, state = carry
            updates, state = tx.update(matrix @ w, state, w, grad_fn=lambda p: matrix @ p)
            return (w + updates, state), w + updates

        return jax.lax.scan(step, (jnp.zeros(D), tx.init(jnp.zeros(D))), matrices)[1]

    at_1 = chain(1.0)
    assert np.all(np.abs(at_1[-1]) > 0)
    for t in (0.25, 4.0):
        np.testing.assert_allclose(chain(t), t**0.5 * at_1, rtol=1e-3, atol=1e-4 * np.max(at_1))


def test_updates_that_are_not_the_gradient_of_the_batch_are_counted_with_control_variates():
    """The gradients at the anchor belong to one batch, and so must the updates: after accumulation or
    clipping, the control variates would be of another batch or size."""
    w, anchor = jnp.ones(D), Anchor(jnp.zeros(D), jnp.zeros(D))
    loss = lambda w, batch: jnp.mean((batch @ w) ** 2)  # noqa: E731
    batches = np.random.default_rng(0).normal(size=(4, S, D)).astype(np.float32)

    def states_after(make, kernel, value=0.0):
        tx = make(optperm.constant_sgd(kernel))

        @jax.jit
        def train(batches):
            def step(state, batch):
                e = optperm.evaluate(loss, w, batch)
                return tx.update(e.grad, state, w, **e.extra_args)[1], None

            return jax.lax.scan(step, tx.init(w), batches)[0]

        with jax.numpy_dtype_promotion("standard"):  # of Optax's accumulation
            return find_states(train(batches + np.float32(value)), ConstantSgdState)[0]

    kernel = kernel_of("diagonal")
    accumulate = lambda tx: optax.MultiSteps(tx, 2)  # noqa: E731
    clip = lambda tx: optax.chain(optax.clip(1e-3), tx)  # noqa: E731
    for make, given, value, count in (
        (lambda tx: tx, kernel._replace(anchor=anchor), 0.0, 0),
        (lambda tx: tx, kernel._replace(anchor=anchor), np.nan, 0),
        (clip, kernel._replace(anchor=anchor), 0.0, 4),
        (accumulate, kernel._replace(anchor=anchor), 0.0, 2),
        (accumulate, kernel, 0.0, 0),
    ):
        state = states_after(make, given, value)
        assert int(state.altered) == count
        said = f"In {count} of the steps of a chain, the updates that constant_sgd got were not"
        assert any(said in text for text in state.warnings()) == (count > 0)


def test_preconditioned_gradients_have_the_steps_at_the_temperature_1():
    """Whatever the temperature and the rate of the last step."""
    kernel, g = kernel_of("full"), jnp.float32([1.0, -2.0, 3.0, 0.5])
    tx = optperm.constant_sgd(kernel, temperature=0.0, learning_rate=0.5)
    _, state = jax.jit(tx.update)(g, tx.init(g), g)
    h = np.asarray(kernel.step_sizes(jnp.float32(2 * S / N)))
    w = np.asarray(kernel.basis.w)
    found = jax.jit(ConstantSgdState.preconditioned)(state, g)
    np.testing.assert_allclose(found, w @ (h * (w.T @ np.asarray(g))), rtol=1e-4)


def test_rates_and_temperatures_of_schedules_are_those_of_the_step():
    kernel, w = kernel_of("diagonal", momentum=0.0), jnp.zeros(D)
    rate = lambda t: 0.5 ** t.astype(jnp.float32)  # noqa: E731
    tx = optperm.constant_sgd(kernel, temperature=lambda t: jnp.float32(1 + t), learning_rate=rate)
    state, update = tx.init(w), jax.jit(tx.update)
    for t in range(3):
        _, state = update(w, state, w)
        limit, temperature = state.numbers()
        assert float(limit) == pytest.approx(0.2 * 0.5**t)
        assert float(temperature) == pytest.approx(1.0 + t)


def test_a_temperature_of_0_is_named_and_takes_no_steps():
    w = jnp.ones(D)
    for temperature, count in ((0.0, 1), (1e-6, 0)):
        tx = optperm.constant_sgd(kernel_of("diagonal"), temperature=temperature)
        updates, state = jax.jit(tx.update)(w, tx.init(w), w)
        assert sum("The temperature is 0" in text for text in state.warnings()) == count
        assert np.any(updates) == (count == 0)


def test_entries_without_a_finite_gradient_are_left_out_of_a_step():
    """With W = I, other entries move, these along their velocity alone, and the step is counted."""
    tx, w = optperm.constant_sgd(kernel_of("diagonal")), jnp.ones(D)
    bad, update = np.float32([1, np.nan, 1, 1]), jax.jit(tx.update)
    updates, _ = update(bad, tx.init(w)._replace(velocity=w), w)
    assert float(updates[1]) == pytest.approx(-(1 - MU) * MU)
    updates, state = update(bad, tx.init(w), w)
    assert float(updates[1]) == 0
    assert np.all(np.asarray(updates)[[0, 2, 3]] != 0)
    assert int(state.left_out) == 1
    updates, state = update(w, state, w)
    assert np.all(np.isfinite(updates))
    assert int(state.left_out) == 1


def test_state_has_four_numbers_per_parameter_and_no_conditional_is_in_a_step():
    """Noise, curvature, velocity and the last random numbers of the diagonal form."""
    w = {"a": jnp.zeros(13), "b": jnp.zeros((3, 5))}
    tx = optperm.constant_sgd(kernel_of("diagonal", w))
    state = tx.init(w)
    sizes = [leaf.size for leaf in jax.tree.leaves(state) if leaf.shape in ((13,), (3, 5))]
    assert sum(sizes) == 4 * (13 + 15)
    for form in ("scalar", "diagonal"):
        tx = optperm.constant_sgd(kernel_of(form, w))
        program = str(jax.make_jaxpr(tx.update)(w, tx.init(w), w))
        assert not any(f" {name}[" in program for name in ("cond", "while", "scan"))


def test_a_kernel_of_float32_for_params_of_float64_is_refused():
    w = {"a": jnp.zeros(3), "b": jnp.ones(2)}
    kernel = kernel_of("diagonal", w)
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"kernel.noise.* is float32"):
        optperm.constant_sgd(kernel).init(jax.tree.map(lambda x: x.astype(jnp.float64), w))


def test_small_steps_of_16_bit_params_are_kept():
    """With remainders, the mean step over many steps is -(1 - mu) H g, below the spacing at 1."""
    kernel, w = kernel_of("diagonal", jnp.ones(64), momentum=0.0), jnp.ones(64, jnp.bfloat16)
    tx = optperm.constant_sgd(kernel, temperature=1e-3)

    @jax.jit
    def train(w, g):
        def step(carry, _):
            w, state = carry
            updates, state = tx.update(g, state, w)
            return (optax.apply_updates(w, updates), state), None

        last, _ = jax.lax.scan(step, (w, tx.init(w)), length=2000)
        return jnp.mean(wide_params(*last))

    h = float(kernel.step_sizes(kernel.scale(1e-3))[0])
    assert 2000 * h * 0.1 > 1e-3
    moved = float(train(w, jnp.full(64, 0.1, jnp.bfloat16))) - 1
    assert moved == pytest.approx(-2000 * h * 0.1, rel=0.1)


@pytest.mark.parametrize(("form", "variates"), [("diagonal", True), ("full", False)])
def test_kernels_go_through_pickle_and_orbax_into_another_process(form, variates, tmp_path):
    """The other process makes the same step to the bit."""
    kernel, g = kernel_of(form), jnp.float32([1.0, -2.0, 3.0, 0.5])
    if variates:
        kernel = kernel._replace(anchor=Anchor(g / 3, g / 7))
    tx = optperm.constant_sgd(kernel)
    wanted = np.asarray(tx.update(g, tx.init(g), g, grad_fn=jnp.sin)[0])
    (tmp_path / "kernel.pickle").write_bytes(pickle.dumps(jax.device_get(kernel)))
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "orbax", kernel)
    program = f"""
import pickle, sys, jax.numpy as jnp, numpy as np, optperm, orbax.checkpoint as ocp
like = {{"control_variates": {variates}}}
target = optperm.bayes.NoiseKernel.unknown(jnp.zeros({D}), "{form}", **like)
with ocp.StandardCheckpointer() as saver:
    restored = saver.restore(r"{tmp_path / "orbax"}", target)
g = jnp.float32([1.0, -2.0, 3.0, 0.5])
for kernel in (restored, pickle.load(open(r"{tmp_path / "kernel.pickle"}", "rb"))):
    tx = optperm.constant_sgd(kernel)
    print(np.asarray(tx.update(g, tx.init(g), g, grad_fn=jnp.sin)[0]).tobytes().hex())
"""
    root = pathlib.Path(optperm.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=root, check=True
    )
    assert found.stdout.split() == [wanted.tobytes().hex()] * 2


def test_chains_with_their_own_kernels_and_keys_take_their_own_steps():
    """The state contains all that a step needs, so the transformation of one kernel updates all."""
    kernels = [kernel_of("diagonal")._replace(noise=jnp.full(D, c)) for c in (1.0, 4.0)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *kernels)
    g = jnp.ones((2, D))

    def init(kernel, params, key):
        return optperm.constant_sgd(kernel, key=key).init(params)

    keys = jax.random.split(jax.random.key(3), 2)
    update = jax.jit(optperm.constant_sgd(kernels[0]).update)
    states = jax.jit(jax.vmap(init))(stacked, g, keys)
    updates, _ = jax.jit(jax.vmap(update))(g, states, g)
    for index, kernel in enumerate(kernels):
        alone, _ = update(g[index], jax.jit(init)(kernel, g[index], keys[index]), g[index])
        chex.assert_trees_all_close(updates[index], alone, rtol=1e-6)
