"""Control variates: the gradients of batches and of all examples, and the draws that need few steps."""

import contextlib
import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from kernels import kernel_for

import optperm
from optperm.bayes import _control_variates as module
from optperm.bayes._batch_order import judge_mean_gradient
from optperm.bayes._batches import batches_of_function, batches_of_rows
from optperm.bayes._control_variates import Anchor, correct_batch, find_anchors
from optperm.bayes._covariance import ESTIMATES, BatchGradients
from optperm.bayes._forms import FORMS
from optperm.bayes._prior import make_loss
from optperm.bayes._sample import _check_anchor
from optperm.core.states import find_states
from optperm.variance import SvrgState

N, D, S = 103, 3, 8


def make_data(num_data, dim=D):
    """Features, two of them correlated, and the labels of a logistic regression."""
    rng = np.random.default_rng(1)
    x = np.float32(rng.normal(size=(num_data, dim)))
    x[:, 1] = x[:, 0] + 0.3 * x[:, 1]
    y = np.float32(rng.random(num_data) < 1 / (1 + np.exp(-x @ rng.normal(size=dim))))
    return {"x": x, "y": y}


DATA, MANY = make_data(N), make_data(2000)


def loss_fn(params, batch):
    """The loss of a logistic regression."""
    z = batch["x"] @ params["w"]
    return jnp.mean(jax.nn.softplus(z) - batch["y"] * z)


def log_prior(params):
    return -jnp.sum(params["w"] ** 2) / 2


grad_of = jax.jit(jax.grad(loss_fn))


def params_of(number):
    return {"w": np.float32(np.random.default_rng(number).normal(size=D))}


MADE = kernel_for({"w": jnp.zeros(D)})
KERNEL = optperm.bayes.NoiseKernel.unknown({"w": jnp.zeros(D)}, "full")


class OnDisk:
    """Rows that are read by numbers, as of HDF5 or Zarr."""

    def __init__(self, rows):
        self.rows, self.shape, self.dtype = rows, rows.shape, rows.dtype

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, rows):
        return self.rows[rows]


def in_batches(data, sizes=(40, 0)):
    """All examples in a list of batches, one of them empty."""
    cuts = (0, *np.cumsum(sizes), len(data["y"]))
    return [
        jax.tree.map(lambda x, i=i: x[cuts[i] : cuts[i + 1]], data) for i in range(len(cuts) - 1)
    ]


def rows_of(key, data=DATA, size=S):
    rows = np.asarray(jax.random.randint(key, (size,), 0, len(data["y"])))
    return jax.tree.map(lambda x: x[rows], data)


def all_of(kind, data):
    return in_batches(data) if kind is in_batches else jax.tree.map(kind, data)


@pytest.mark.parametrize(
    ("kind", "rows"), support.in_turns([np.asarray, OnDisk, in_batches], [10, 4096, N])
)
def test_gradients_over_all_examples_are_means_over_parts_of_any_size(kind, rows, monkeypatch):
    """In memory, on disk, and in batches of a function's examples; with a last part that is shorter."""
    monkeypatch.setattr(module, "_ROWS", rows)
    if kind is in_batches:
        batches = batches_of_function(rows_of, N, S, num_apart=0, full_data=in_batches(DATA))
    else:
        batches = batches_of_rows(all_of(kind, DATA), None, S)
    stacked = jax.tree.map(lambda *x: np.stack(x), *map(params_of, range(2)))
    anchors = find_anchors(loss_fn, batches, stacked)
    chex.assert_trees_all_close(anchors.params, stacked, rtol=0)
    for index in range(2):
        found = jax.tree.map(lambda leaf, index=index: leaf[index], anchors.full_grad)
        chex.assert_trees_all_close(found, grad_of(params_of(index), DATA), rtol=1e-5, atol=1e-7)


# Given starts need no search
STARTS = {"w": jnp.asarray(np.stack([params_of(0)["w"]] * 2)), "none": jnp.zeros((2, 0, 2))}


def draws_of(sampler, data=DATA, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few draws
        return optperm.bayes.sample(
            loss_fn, data, jax.tree.map(lambda x: x[0], STARTS), 0, batch_size=S, num_chains=2,
            num_draws=20, thinning=1, burn_in=0, starts=STARTS, sampler=sampler, **options,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sgld", np.asarray),
        ("sghmc", OnDisk),
        pytest.param("sgld", None, marks=pytest.mark.exhaustive),
    ],
)
def test_control_variates_of_another_sampler_are_those_of_svrg_before_it(name, kind):
    """For rows in memory, rows on disk, and a function with all examples; a leaf of the params has no
    entries. Snapshots have the gradient over all examples."""
    make = {"sgld": lambda n: optperm.sgld(1e-3, n), "sghmc": lambda n: optperm.sghmc(1e-4, n, 0.1)}
    given = {"data": rows_of, "full_data": in_batches(DATA), "num_data": N}
    if kind is not None:
        given = {"data": jax.tree.map(kind, DATA)}
    found = draws_of(lambda n, s: make[name](n), control_variates=True, **given)
    wanted = draws_of(lambda n, s: optax.chain(optperm.svrg(), make[name](n)), **given)
    assert wanted.params["none"].shape == (2, 20, 0, 2)
    chex.assert_trees_all_close(found.params, wanted.params, rtol=1e-4, atol=1e-5)
    (state,) = find_states(wanted.last_opt_state, SvrgState)
    for index in range(2):
        at, full = (
            {"w": np.asarray(tree["w"][index])}
            for tree in (state.snapshot.params, state.snapshot.full_grad)
        )
        assert np.any(at["w"] != params_of(0)["w"])
        chex.assert_trees_all_close(full, grad_of(at, DATA), rtol=1e-5, atol=1e-7)


OF_FUNCTION = {
    "loss_fn": loss_fn, "data": functools.partial(rows_of, data=MANY, size=32),
    "params": {"w": jnp.zeros(D)}, "key": 0, "num_data": 2000, "log_prior": log_prior,
}  # fmt: skip


def learn(full_data):
    """Return a kernel for batches of a function with control variates, and what is said."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        kernel, _ = optperm.bayes.learn_kernel(**OF_FUNCTION, full_data=full_data, steps=1600)
    return kernel, [str(each.message) for each in found]


@pytest.fixture(scope="module")
def learned():
    return learn(in_batches(MANY))


@pytest.mark.exhaustive
def test_all_examples_whose_mean_gradient_is_not_the_mean_of_the_batches_are_warned_of():
    _, said = learn(in_batches(MANY | {"y": 1 - MANY["y"]}))
    assert any("differs from the gradient over full_data" in text for text in said)


def test_all_examples_of_a_function_give_the_gradient_of_the_anchor(learned):
    kernel, said = learned
    assert not said
    assert int(kernel.batch_size) == 32
    assert int(kernel.num_data) == 2000
    at, found = kernel.anchor
    wanted = jax.tree.map(lambda g, w: g + w / 2000, grad_of(at, MANY), at)
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [np.asarray, OnDisk, in_batches])
def test_all_examples_of_a_function_are_compared_with_those_of_a_kernel(kind, learned):
    """As a tree in memory, as rows on disk, and in batches."""
    kernel, loss = learned[0], make_loss(
        loss_fn, OF_FUNCTION["params"], MANY, num_data=2000, log_prior=log_prior
    )  # fmt: skip
    batches = batches_of_function(
        OF_FUNCTION["data"], 2000, 32, num_apart=0, full_data=all_of(kind, MANY)
    )
    _check_anchor(kernel, loss, batches)
    other = all_of(kind, jax.tree.map(lambda x: 100 * x, MANY))
    with pytest.raises(ValueError, match="belong to other data, another loss or another prior"):
        optperm.bayes.sample(**OF_FUNCTION, kernel=kernel, full_data=other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [np.asarray, OnDisk, in_batches])
@pytest.mark.filterwarnings("ignore:.*")
def test_batches_of_a_function_are_sampled_with_a_kernel(kind, learned):
    samples = optperm.bayes.sample(
        **OF_FUNCTION, kernel=learned[0], full_data=all_of(kind, MANY), num_draws=20, thinning=1
    )
    assert np.all(np.isfinite(samples.params["w"]))


def test_all_examples_that_do_not_fit_are_refused():
    """Padding rows, a missing batch, what can be read once, and arrays that need no others."""
    padded = jax.tree.map(lambda x: np.concatenate([x, x[:1]]), DATA)
    given = {"loss_fn": loss_fn, "data": rows_of, "params": params_of(0), "key": 0, "num_data": N}
    for full_data, error, message in (
        (padded, ValueError, "num_data must be the number of rows of full_data, 104, got 103"),
        (in_batches(padded), ValueError, "full_data has 104 examples, but num_data is 103"),
        (in_batches(DATA)[:1], ValueError, "full_data has 40 examples"),
        (iter(in_batches(DATA)), TypeError, "got an iterator, which can be read only once"),
        (3, TypeError, "or an iterable of batches that starts again, such as a list, got 3"),
        (tuple(DATA.values()), ValueError, "must have examples like those of the batches"),
        (list(DATA.values()), ValueError, "A list is read as batches: put arrays"),
        (DATA | {"y": DATA["y"][:, None]}, ValueError, "must have examples like those"),
    ):
        with pytest.raises(error, match=message):
            optperm.bayes.learn_kernel(**given, full_data=full_data, steps=16)
    with pytest.raises(ValueError, match="full_data is for a function data"):
        optperm.bayes.learn_kernel(loss_fn, DATA, params_of(0), 0, full_data=DATA)


def test_mean_gradients_are_judged_in_standard_errors():
    """Equal means are named in at most 2 of 1,000 series of 400 steps, and a distance of 10 errors in
    100 of 100; projections without noise are compared up to rounding."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 400, 1, 64))
    full = np.zeros((1, 64))
    assert sum(bool(judge_mean_gradient(one, full)) for one in x) <= 2
    shifted = full + np.eye(1, 64) * 10 / np.sqrt(400)
    assert all(judge_mean_gradient(one, shifted) for one in x[:100])
    same = np.ones((400, 1, 64))
    assert not judge_mean_gradient(same, full + 1 + 1e-5)
    assert judge_mean_gradient(same, full + 1.1)
    assert not judge_mean_gradient(0 * same, full)


@pytest.mark.parametrize("form", ["full", "diagonal", "scalar"])
def test_steps_at_the_size_of_the_noise_are_the_longest(form):
    """With r S examples, h = c / a in all directions, and with 0.99 r S examples, not in all."""
    kernel = kernel_for(jnp.zeros(D), form, batch_size=10)
    factors = jnp.arange(1.0, kernel.noise.size + 1).reshape(kernel.noise.shape)
    kernel = kernel._replace(noise=kernel.noise * factors)
    r = float(kernel.noise_over_stability(kernel.scale(), kernel.max_stability))
    longest = np.asarray(kernel.max_stability / kernel.curvature)
    for factor, is_longest in ((1.01, True), (0.99, False)):
        h = np.asarray(kernel.step_sizes(kernel.scale() * factor * r))
        assert np.allclose(h, longest, rtol=1e-5) == is_longest


def regression(num_data, dim):
    """Linear regression with the features N(0, I), whose Hessians are x x^T."""
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(num_data, dim)))
    y = np.float32(x @ rng.normal(size=dim) + rng.normal(size=num_data))
    return (x, y), lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2) / 2


@pytest.mark.slow
def test_default_batches_are_as_large_as_the_noise_of_the_hessians_asks_for():
    """In linear regression with D features N(0, I), control variates leave the noise (D + 1) / N in each
    direction. The bound on the curvature of batches of S_0 = 128 examples is 1/3 for the momentum, and
    (D + 1) / (2 S_0) for the spread. Hence S = (c / 2) (1 + 1 / rho) (D + 1) / a = 181 for D = 110, c =
    0.5 and rho = 0.25, and 256 is the next power of two. Draws have the exact deviations."""
    data, loss = regression(5000, 110)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel, start = optperm.bayes.learn_kernel(loss, data, jnp.zeros(110), 0, steps=3200)
        samples = optperm.bayes.sample(
            loss, data, start, 0, kernel=kernel, num_draws=1000, thinning=2, burn_in=200
        )
    assert int(kernel.batch_size) == 256
    a = 1 / 3 + 111 / (2 * 256)
    np.testing.assert_allclose(
        np.mean(kernel.noise / kernel.curvature) * 5000 * a / 111, 1, atol=0.2
    )
    exact = np.sqrt(np.diag(np.linalg.inv(np.float64(data[0].T @ data[0]))))
    deviations = np.asarray(samples.params).std(axis=(0, 1))
    np.testing.assert_allclose(deviations / exact, 1, atol=0.07)


@functools.partial(jax.jit, static_argnames="estimator")
def estimate(theta, anchor, rows, other, weight, estimator):
    """Return an estimate of C with control variates, whether it is uneven, and the gradient."""
    e = optperm.evaluate(loss_fn, theta, rows, example=other)
    batch = BatchGradients(theta, e.grad, e.extra_args, S, None, None)
    corrected = correct_batch(batch, anchor, weight)
    (found, _), is_uneven = ESTIMATES[estimator](corrected, FORMS["full"].like(theta).covariance)
    return found, is_uneven, corrected.grad["w"]


@pytest.mark.parametrize("estimator", ["per_example", "single_example"])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_noise_is_that_of_the_differences_between_params_and_anchor(weight, estimator):
    """C is estimated from g_n(theta) - g_n(theta*), or with a weight of 0, from g_n(theta)."""
    theta, at = params_of(0), params_of(1)
    rows, other = (jax.tree.map(lambda x, s=s: x[s], DATA) for s in (slice(S), slice(S, S + 1)))
    full = grad_of(at, DATA)
    found, is_uneven, mean = estimate(theta, Anchor(at, full), rows, other, weight, estimator)

    def examples(params):
        z = DATA["x"][: S + 1] @ params["w"]
        return (1 / (1 + np.exp(-z)) - DATA["y"][: S + 1])[:, None] * DATA["x"][: S + 1]

    g = examples(theta) - weight * examples(at)
    wanted = np.cov(g[:S].T)
    if estimator == "single_example":
        d = g[S] - g[:S].mean(axis=0)
        wanted = np.outer(d, d) / (1 + 1 / S)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)
    assert not is_uneven
    wanted = g[:S].mean(axis=0) + weight * np.asarray(full["w"])
    np.testing.assert_allclose(mean, wanted, rtol=1e-4, atol=1e-6)


def laplace(data):
    """Return the mode of the posterior, and the covariance there."""
    x, y = data["x"], data["y"]
    mode = np.zeros(x.shape[1])
    for _ in range(20):
        p = 1 / (1 + np.exp(-x @ mode))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(mode))
        mode -= np.linalg.solve(hessian, x.T @ (p - y) + mode)
    return mode, np.linalg.inv(hessian)


def test_a_kernel_with_control_variates_serves_its_own_data_and_refuses_others(learned):
    """The same data need no further learning, and the report finds the kernel's noise; with other data,
    the gradient at the anchor is not the kernel's."""
    mode, covariance = laplace(MANY)
    given = {"log_prior": log_prior, "kernel": learned[0], "starts": {"w": jnp.zeros((4, D))}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = optperm.bayes.sample(
            loss_fn, MANY, {"w": jnp.zeros(D)}, 0, num_draws=500, thinning=5, **given
        )
    report = optperm.bayes.posterior_report(samples)
    assert 0 < report.noise_left < 0.1
    assert report.distance < 1
    sd = np.sqrt(np.diag(covariance))
    draws = np.asarray(samples.params["w"]).reshape(-1, D)
    np.testing.assert_allclose(draws.std(axis=0) / sd, 1, atol=0.1)
    np.testing.assert_allclose(draws.mean(axis=0), mode, atol=0.2 * sd.min())
    other = MANY | {"y": 1 - MANY["y"]}
    with pytest.raises(ValueError, match="belong to other data, another loss or another prior"):
        optperm.bayes.sample(loss_fn, other, {"w": jnp.zeros(D)}, 0, **given)


def test_control_variates_are_refused_where_there_is_no_gradient_over_all_examples():
    """For functions, losses that mix examples, other samplers, and kernels that are known already."""
    one, on_disk = {"batch_size": S, "control_variates": True}, {"data": all_of(OnDisk, DATA)}
    for call, given, message in (
        ("learn_kernel", {"data": rows_of, "num_data": N}, "pass full_data, or data as"),
        ("learn_kernel", on_disk | {"estimator": "two_batches"}, "two_batches. is for losses"),
        ("sample", {"data": rows_of, "num_data": N}, "pass full_data, or data as"),
        (
            "sample",
            {"sampler": optperm.mandt_sgd},
            "with which mandt_sgd samples",
        ),
        ("sample", {"sampler": lambda n, s: optperm.constant_sgd(MADE)}, "pass kernel= instead of"),
        (
            "sample",
            {"sampler": lambda n, s: optax.chain(optperm.svrg(), optperm.sgld(1e-4, n))},
            "leave out either",
        ),
        ("sample", {"kernel": KERNEL}, "pass it to learn_kernel instead"),
    ):
        usual = {"data": DATA, "params": {"w": jnp.zeros(D)}, "key": 0} | one
        with pytest.raises(ValueError, match=message):
            getattr(optperm.bayes, call)(loss_fn, **usual | given)


@pytest.mark.slow
@pytest.mark.parametrize(("form", "most"), [("full", 1000), ("diagonal", 400)])
def test_effective_draws_cost_few_batches_of_many_examples(form, most):
    """With 20,000 examples and batches of 32, the worst parameter makes hundreds of effective draws of
    the posterior in 10,000 steps, and without control variates a tenth of them at most. The diagonal
    form takes shorter steps, because two features are correlated."""
    data = make_data(20_000, 4)
    mode, covariance = laplace(data)
    sd, least = np.sqrt(np.diag(covariance)), []
    for has_variates in (None, False):
        said = pytest.warns(UserWarning, match="R-hat|effective sample size")
        with contextlib.nullcontext() if has_variates is None else said:
            samples = optperm.bayes.sample(
                loss_fn, data, {"w": jnp.zeros(4)}, 0, log_prior=log_prior, preconditioner=form,
                num_draws=500, control_variates=has_variates,
            )  # fmt: skip
        draws = np.asarray(samples.params["w"]).reshape(-1, 4)
        least.append(optperm.bayes.posterior_report(samples).ess_bulk)
        if has_variates is None:
            np.testing.assert_allclose(draws.std(axis=0) / sd, 1, atol=0.06)
            np.testing.assert_allclose(draws.mean(axis=0), mode, atol=0.15 * sd.min())
            kernel = samples.last_opt_state.kernel
            assert np.all(kernel.noise_left < 0.01)
            anchors = np.asarray(kernel.anchor.params["w"])
            np.testing.assert_allclose(anchors - mode, 0, atol=0.1 * sd.min())
    assert least[0] > most
    assert least[0] > 10 * least[1]
