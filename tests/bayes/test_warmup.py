"""The warm-up: when it learns, what it learns against exact figures, and that it arrives."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm
from optperm.bayes._covariance import batch_gradients
from optperm.bayes._schedule import make_schedule
from optperm.bayes._warmup import begin, hand_over, probe_lengths, probing_steps
from optperm.bayes._window import curvature_bound, learn
from optperm.core.states import find_state

pytestmark = pytest.mark.usefixtures("lenient")
N, S, D = 500, 8, 3
NUMBERS = {"noise_ratio": 10.0, "stability": 0.2, "num_data": N, "batch_size": S, "momentum": 0.0}
HESSIAN = np.array([[4.0, 1.0, 0.0], [1.0, 2.0, 0.3], [0.0, 0.3, 0.5]])
NOISE = np.array([[1.0, 0.6, 0.0], [0.6, 2.0, 0.0], [0.0, 0.0, 0.1]])
# What a warm-up hands over of a window: from a kernel, the window, steps, their scale and the rate.
handed_over = jax.jit(functools.partial(hand_over, limit=jnp.float32(0.2), noise_ratio=10.0))


def run(tx, steps, sizes=None, parts=1):
    """Params and states after each part of the steps on a quadratic whose batches' gradients have the
    covariance NOISE, or independent entries of some sizes."""
    root = jnp.float32(np.linalg.cholesky(NOISE)) if sizes is None else jnp.diag(sizes)
    hessian = jnp.float32(HESSIAN)

    def evaluate(w, key):
        rows = jax.random.normal(key, (S, D)) @ root.T + (hessian @ w)[None]
        extras = {"per_example_grad_fn": lambda w: rows, "grad_fn": lambda w: hessian @ w}
        return rows.mean(0), extras

    train = jax.jit(functools.partial(loops.carry, loops.make_step(tx, evaluate)))
    w, state, trail = jnp.zeros(D), tx.init(jnp.zeros(D)), []
    for keys in jax.random.split(jax.random.key(0), steps).reshape(parts, -1):
        w, state = train(w, state, keys)
        sampler = find_state(state, optperm.bayes.ConstantSgdState, method="constant_sgd")
        trail.append((w, sampler))
    return trail


def test_windows_of_the_schedule():
    """Five, from the middle of the burn-in; defaults leave a thousand steps, and end at 8,000."""
    due = make_schedule(100, 180, 8, "per_example", "diagonal")
    assert [int(end) for end in due.ends()] == [50, 75, 100, 120, 140, 180]
    counts = jnp.arange(300)
    np.testing.assert_array_equal(np.flatnonzero(jax.vmap(due.is_open)(counts)), np.arange(50, 180))
    ends = np.flatnonzero(jax.vmap(due.ends_window)(counts))
    np.testing.assert_array_equal(ends, [74, 99, 119, 139, 179])
    for burn_in, last in ((0, 1000), (500, 1500), (1000, 2000), (4000, 8000)):
        assert make_schedule(burn_in, None, 8, "per_example", None).freeze_after == last
    for size, every in ((2, 1), (4, 2), (32, 8)):
        assert make_schedule(4000, None, size, "per_example", "diagonal").every == every


@pytest.mark.slow
@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_entries_with_hardly_any_noise_have_steps_by_their_curvature(form):
    """As in a network that fits its data: h is 1e29 before curvature is seen, of one entry or of all."""
    tx = optperm.constant_sgd(N, S, preconditioner=form, burn_in=0, freeze_after=16)
    sizes = jnp.array([[1.0, 1e-15, 0.0], [1e-15, 1e-15, 1e-15]])
    ((w, state),) = jax.vmap(lambda sizes: run(tx, 24, sizes))(sizes)
    assert np.all(state.kernel.is_ready)
    assert np.all(np.isfinite(w))
    assert np.all(w != 0)
    for index in range(2):
        one = replicas.take(state, index)
        h = np.stack([one.preconditioned(row) for row in np.eye(D, dtype=np.float32)])
        assert np.linalg.eigvals(h @ HESSIAN).real.max() < 2


def test_probe_of_an_entry_without_noise_has_the_geometric_mean_of_the_lengths():
    """So it is neither lost among the others nor hides them, in any units."""
    kernel, seen = begin(jnp.zeros(D), "diagonal", **NUMBERS)
    kernel = kernel._replace(estimates=jnp.int32(9))
    for h, probes in (([4e-20, 0.0, 9e-20], [4e-20, 6e-20, 9e-20]), ([0.0] * D, [1.0] * D)):
        typical, longest = probe_lengths(kernel, jnp.float32(h))
        seen = seen._replace(typical=typical, longest=longest)
        np.testing.assert_allclose(probing_steps(seen, kernel, jnp.float32(h)), probes, rtol=1e-5)


def test_statistics_of_a_window_are_means_over_its_batches():
    """The deviations of batch t are t times those of the first, so C^ grows as t^2.

    Products of the noise of two successive batches are 4 and 36 times the square of the first, and
    their mean, over two pairs, is weighted with C h.
    """
    rows, a = np.random.default_rng(0).normal(size=(S, D)), jnp.float32([4.0, 2.0, 0.5])
    w, h, scale = jnp.zeros(D), jnp.float32([0.1, 0.2, 0.4]), jnp.float32(0.05)
    kernel, seen = begin(w, "diagonal", **NUMBERS)
    kernel = kernel._replace(noise=jnp.float32([1.0, 2.0, 3.0]))

    @jax.jit
    def step(seen, rows, number):
        extras = {"per_example_grad_fn": lambda w: rows, "grad_fn": lambda w: a * w}
        batch = batch_gradients(rows.mean(0), w, extras, S, None, None)
        key = jnp.zeros(2, jnp.uint32)
        return learn(seen, kernel, batch, "per_example", h, scale, key, number)[0]

    for t in range(3):
        seen = step(seen, jnp.float32((t + 1) * rows), jnp.int32(t))
    c, share, noise = rows.var(axis=0, ddof=1), np.asarray(h / scale), np.asarray(kernel.noise)
    np.testing.assert_allclose(seen.covariance, 14 / 3 * c, rtol=1e-5)
    weighted = np.average(20 * (c * share) ** 2, weights=noise * share)
    assert float(seen.repeated) == pytest.approx(weighted, rel=1e-5)
    np.testing.assert_allclose(seen.curvature, h * a, rtol=1e-5)


def test_curvature_is_that_of_the_new_directions():
    """In the coordinates of W it is the diagonal of W^T A W, for a diagonal A and steps h."""
    a, h = np.array([4.0, 2.0, 0.5]), np.float32([0.1, 0.2, 0.4])
    kernel, seen = begin(jnp.zeros(D), "full", **NUMBERS)
    seen = seen._replace(
        estimates=jnp.int32(9), covariance=(jnp.float32(NOISE), jnp.float32(np.diag(NOISE))),
        curvature=jnp.float32(h * a), root_square=jnp.float32(h * a),
    )  # fmt: skip
    new, _ = handed_over(kernel, seen, h, jnp.float32(1), rate=jnp.float32(1))
    w = np.asarray(new.basis.w, np.float64)
    np.testing.assert_allclose(w.T @ NOISE @ w, np.eye(D), atol=1e-5)
    np.testing.assert_allclose(new.curvature, np.diag(w.T @ np.diag(a) @ w), rtol=1e-4)


def test_curvature_includes_the_spread_of_the_batches_curvatures():
    """With E q = -3, a deviation of 4 and 16 estimates h a = (3 + 2) / 2 + 16 / (2 * 5)."""
    _, seen = begin(jnp.zeros(D), "diagonal", **NUMBERS)
    mean, root, h = jnp.full(D, -3.0), jnp.full(D, 5.0), jnp.float32([1.0, 0.1, 0.0])
    seen = seen._replace(estimates=jnp.int32(16), curvature=mean, root_square=root)
    found = curvature_bound(seen, h, jnp.float32(0.5))
    np.testing.assert_allclose(found, [4.1, 41.0, 0.0], rtol=1e-5)


def test_steps_are_shortened_until_their_stability_is_the_limit_times_the_rate():
    """All curvatures are multiplied by 0.8 / (0.2 * 0.5), here 8, where 0.8 is what the window saw."""
    kernel, seen = begin(jnp.zeros(D), "diagonal", **NUMBERS)
    one = jnp.ones(D)
    kernel = kernel._replace(noise=one, is_ready=jnp.array(True))
    seen = seen._replace(
        estimates=jnp.int32(9), covariance=one, curvature=one, root_square=one,
        stability=jnp.float32(0.8),
    )  # fmt: skip
    new, _ = handed_over(kernel, seen, one, one[0], rate=jnp.float32(0.5))
    np.testing.assert_allclose([new.excess, new.stability], [8.0, 0.1], rtol=1e-6)


def test_variance_of_the_noise_over_places_lowers_its_fraction():
    """rho / (1 + rho) is a tenth of the old fraction over the standard deviation, here 1 / 2."""
    kernel, seen = begin(jnp.zeros(D), "diagonal", **NUMBERS)
    one = jnp.ones(D)
    seen = seen._replace(
        estimates=jnp.int32(9), covariance=one, repeated=jnp.float32(1.25), curvature=one,
        root_square=one,
    )  # fmt: skip
    new, _ = handed_over(kernel._replace(noise=one), seen, one, one[0], rate=one[0])
    fraction = new.noise_ratio / (1 + new.noise_ratio)
    np.testing.assert_allclose(fraction, 10 / 11 * 0.1 / 0.5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_noise_and_curvature_are_those_of_the_problem(form):
    """Lambda = W^T C W within the error of 300 estimates or 600, a_i at least w_i^T A w_i, and
    lambda_max(H A) at most c."""
    counts = {"burn_in": 400, "freeze_after": 1600}
    tx = optperm.constant_sgd(N, S, preconditioner=form, momentum=0.0, **counts)
    ((_, state),) = run(tx, 1700)
    kernel = state.kernel
    basis = np.eye(D) if form == "diagonal" else np.asarray(kernel.basis.w, np.float64)
    np.testing.assert_allclose(kernel.noise, np.diag(basis.T @ NOISE @ basis), rtol=0.15)
    exact = np.diag(basis.T @ HESSIAN @ basis)
    a = np.asarray(kernel.curvature) / float(kernel.excess)
    assert np.all(a > 0.95 * exact)
    assert np.all(a < 2.5 * exact)
    h = np.stack([state.preconditioned(row) for row in np.eye(D, dtype=np.float32)])
    largest = np.linalg.eigvals(h @ HESSIAN).real.max()
    assert 0.02 < largest <= 0.2 * 1.05
    assert float(kernel.estimates) == (300 if form == "diagonal" else 600)
    assert float(kernel.drift) == pytest.approx(1, abs=0.15)


@pytest.mark.slow
def test_nothing_changes_after_the_warm_up():
    tx = optperm.constant_sgd(N, S, burn_in=20, freeze_after=60)
    first, second, third = (state.kernel for _, state in run(tx, 90, parts=3))
    support.assert_same_bits(third, second)
    assert bool(second.is_ready)
    assert not np.array_equal(first.basis.w, second.basis.w)


def test_arguments_that_do_not_fit_are_refused():
    for options, message in (
        ({"learning_rate": 1000.0}, "stability times learning_rate must be below 2"),
        ({"momentum": 1.0}, r"momentum must be in \[0, 1\) in float32, got 1.0"),
        ({"burn_in": 100, "freeze_after": 100}, "freeze_after must be above burn_in"),
        # One window for the noise, one for the curvature
        ({"burn_in": 0, "freeze_after": 1}, "at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            optperm.constant_sgd(N, S, **options)
    with pytest.warns(UserWarning, match=r"batch_size is num_data, 500: .*no noise.*sgld"):
        optperm.constant_sgd(N, N)


def test_updates_that_are_not_the_gradient_of_the_batch_are_warned_of():
    w, rows = jnp.zeros(D), jnp.ones((S, D))
    extras = {"per_example_grad_fn": lambda w: rows, "grad_fn": lambda w: w, "grad": w}
    tx = optperm.constant_sgd(N, S)
    with pytest.warns(UserWarning, match=r"gradient in the extra arguments.* and MultiSteps"):
        jax.eval_shape(lambda g: tx.update(2 * g, tx.init(w), w, **extras), w)


@pytest.mark.slow
def test_a_summed_loss_is_counted():
    """Its gradient is S times the mean of the examples', in each estimate of a step that samples."""
    x = jax.random.normal(jax.random.key(0), (S, D)) + 2.0
    tx, w = optperm.constant_sgd(N, S, burn_in=4, freeze_after=8), jnp.ones(D)
    for reduce, uneven in ((jnp.mean, 0), (jnp.sum, 4)):
        e = optperm.evaluate(lambda w, x, r=reduce: r((x @ w) ** 2), w, x)
        step = jax.jit(lambda state, e=e: tx.update(e.grad, state, w, **e.extra_args)[1])
        state = tx.init(w)
        for _ in range(8):
            state = step(state)
        assert int(optax.tree.get(state, "uneven")) == uneven
