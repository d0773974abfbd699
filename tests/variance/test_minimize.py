"""The minimum in one call, against closed forms, scikit-learn, and the same data in other forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.linear_model import ElasticNet, LogisticRegression

import optperm
from optperm.variance import minimize
from optperm.variance._chunks import make_chunks
from optperm.variance._curvature import factor_roots, inverse_root, multiply_roots

RNG = np.random.default_rng(0)
X = np.float32(RNG.normal(size=(4000, 12)))
Y = np.float32(X @ np.where(np.arange(12) % 3, 0.0, 1.0) + RNG.normal(size=4000))
CLASS = np.float32(RNG.random(4000) < 1 / (1 + np.exp(-Y)))
# Columns of very different scales, and two nearly equal ones.
RAW = np.float32(X * np.logspace(2, -2, 12) + 0.01 * X[:, :1])


def squares(w, batch, l2=0.0):
    return 0.5 * jnp.mean((batch[0] @ w - batch[1]) ** 2) + 0.5 * l2 * jnp.dot(w, w)


def logistic(w, batch, l2=1e-3):
    margin = batch[0] @ w
    return jnp.mean(jax.nn.softplus(margin) - batch[1] * margin) + 0.5 * l2 * jnp.dot(w, w)


def lasso(rate):
    return optperm.proximal(rate, l1=0.05)


def elastic(x, y, l1, l2):
    """The elastic net's params by coordinate descent."""
    model = ElasticNet(
        alpha=l1 + l2, l1_ratio=l1 / (l1 + l2), fit_intercept=False, tol=1e-12, max_iter=100_000
    )
    return model.fit(np.float64(x), np.float64(y)).coef_


def value_of(w, x, y, l1=0.0, l2=0.0):
    """The squares with penalties in float64."""
    w, x, y = map(np.float64, (w, x, y))
    return 0.5 * np.mean((x @ w - y) ** 2) + l1 * np.abs(w).sum() + 0.5 * l2 * w @ w


@pytest.mark.parametrize(
    "x", [pytest.param(X, marks=pytest.mark.exhaustive), RAW], ids=["scaled", "raw"]
)
def test_a_ridge_regression_ends_at_the_closed_form_within_its_bound(x):
    found = minimize(functools.partial(squares, l2=1e-3), (x, Y), jnp.zeros(12))
    double = np.float64(x)
    best = np.linalg.solve(double.T @ double / 4000 + 1e-3 * np.eye(12), double.T @ Y / 4000)
    lowest = value_of(best, x, Y, l2=1e-3)
    assert found.converged
    assert "preconditioned SVRG" in found.method
    assert value_of(found.params, x, Y, l2=1e-3) - lowest <= found.gap <= 1e-6
    # The Hessian of a quadratic is constant, so the bound at the start is exact before it is doubled.
    first = value_of(np.zeros(12), x, Y) - lowest
    np.testing.assert_allclose(found.history[0].gap, 2 * first, rtol=1e-2)


@pytest.mark.parametrize(
    ("x", "dense", "method"),
    [
        (X, 512, "proximal Newton"),
        pytest.param(RAW, 512, "proximal Newton", marks=pytest.mark.exhaustive),
        (X, 1, "proximal SVRG"),
    ],
    ids=["scaled", "raw", "many params"],
)
def test_zeros_of_an_elastic_net_are_those_of_coordinate_descent(x, dense, method, monkeypatch):
    monkeypatch.setattr("optperm.variance._minimize._DENSE", dense)

    def penalty(rate):
        return optperm.proximal(rate, l1=0.05, l2=0.01)

    with jax.enable_x64(x is RAW):
        data = (x, Y) if x is X else (np.float64(x), np.float64(Y))
        options = {"tol": 1e-8, "strong_convexity": 0.01}
        found = minimize(squares, data, jnp.zeros(12), proximal=penalty, **options)
    best = elastic(x, Y, 0.05, 0.01)
    assert found.converged
    assert method in found.method
    np.testing.assert_array_equal(np.asarray(found.params) == 0, best == 0)

    values = [value_of(w, x, Y, l1=0.05, l2=0.01) for w in (found.params, best)]
    assert values[0] - values[1] <= found.gap


@pytest.fixture(scope="module")
def of_arrays():
    """The minimum of the squares, and the starts of the batches of each pass."""
    module, starts = optperm.variance._minimize, []
    compiled = module.fresh_jit

    def note(function, **options):
        run = compiled(function, **options)

        def call(*args):
            if getattr(function, "__name__", "") == "steps":
                starts.append(np.sort(args[-1]))
            return run(*args)

        return call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "fresh_jit", note)
        return minimize(squares, (X, Y), jnp.zeros(12), tol=1e-9), starts


def test_chunks_end_where_arrays_end_and_an_iterator_is_refused(of_arrays):
    chunks = [(X[i : i + 1500], Y[i : i + 1500]) for i in range(0, 4000, 1500)]
    one, _ = of_arrays
    other = minimize(squares, chunks, jnp.zeros(12), tol=1e-9)
    assert one.converged
    assert other.converged
    np.testing.assert_allclose(one.params, other.params, atol=3e-5)
    with pytest.raises(TypeError, match="an iterator can be used only once"):
        minimize(squares, (chunk for chunk in chunks), jnp.zeros(12))


def test_few_examples_in_chunks_are_all_used():
    """L-BFGS, which arrays of 300 rows take, would see only the first chunk."""
    chunks = [(X[i : i + 100], Y[i : i + 100]) for i in range(0, 300, 100)]
    found = minimize(squares, chunks, jnp.zeros(12), tol=1e-9)
    best = np.linalg.lstsq(np.float64(X[:300]), np.float64(Y[:300]), rcond=None)[0]
    assert "SVRG" in found.method
    np.testing.assert_allclose(found.params, best, atol=1e-4)


def test_steps_of_a_pass_take_batches_without_common_examples(of_arrays):
    """41 batches of 96 of the 4,000 examples, which count as their fraction of a pass."""
    found, starts = of_arrays
    assert np.all(np.diff(starts[0]) >= 96)
    assert len(starts[0]) == 41
    passes = [found.history[index].passes for index in range(2)]
    np.testing.assert_allclose(passes, [1.0, 2.0 + 41 * 96 / 4000])


def test_arrays_are_shuffled_once_with_the_key():
    data = {"x": X, "y": jnp.arange(4000)}
    one, other = (make_chunks(data, key) for key in (0, 1))
    for chunks in (one, other):
        np.testing.assert_array_equal(chunks.first["y"], chunks.order)
        np.testing.assert_array_equal(chunks.first["x"], X[chunks.order])
        np.testing.assert_array_equal(np.sort(chunks.order), np.arange(4000))
    assert np.mean(one.order == other.order) < 0.1
    assert np.mean(one.order == np.arange(4000)) < 0.1


def test_tolerance_is_relative_to_a_loss_above_one():
    """The loss is about 5,000, and the bound of about 10 is within a hundredth of it: nothing moves."""
    y = 100 * Y
    best = np.linalg.lstsq(np.float64(X), np.float64(y), rcond=None)[0]
    start = jnp.float32(best + np.sqrt(10 / 12))
    found = minimize(squares, (X, y), start, tol=1e-2)
    assert found.converged
    assert 5 < found.gap < 20
    np.testing.assert_array_equal(found.params, start)


def test_equal_columns_have_no_bound():
    """A singular Hessian bounds nothing: the run stops by the gradient."""
    x = np.concatenate([X[:, :10], X[:, :2]], axis=1)
    found = minimize(squares, (x, Y), jnp.zeros(12), tol=1e-3)
    assert found.converged
    assert np.isnan(found.gap)
    assert all(np.isnan(row.gap) for row in found.history)


@pytest.mark.slow
def test_memory_maps_are_read_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr("optperm.variance._chunks._CHUNK_BYTES", 2**16)
    maps = []
    for name, leaf in (("x", X), ("y", Y)):
        np.save(tmp_path / f"{name}.npy", leaf)
        maps.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    found = minimize(squares, tuple(maps), jnp.zeros(12), tol=1e-9)
    best = np.linalg.lstsq(np.float64(X), np.float64(Y), rcond=None)[0]
    np.testing.assert_allclose(found.params, best, atol=3e-5)


def test_weights_are_repetitions():
    counts = np.random.default_rng(1).integers(0, 4, 4000)

    def weighted(w, batch):
        x, y, weight = batch
        return 0.5 * jnp.sum(weight * (x @ w - y) ** 2), jnp.sum(weight)

    found = minimize(weighted, (X, Y, np.float32(counts)), jnp.zeros(12), tol=1e-9)
    repeated = np.repeat(X, counts, axis=0), np.repeat(Y, counts)
    best = np.linalg.lstsq(np.float64(repeated[0]), np.float64(repeated[1]), rcond=None)[0]
    assert found.converged
    np.testing.assert_allclose(found.params, best, atol=3e-5)
    # The bound at the start is twice the distance of the mean losses.
    first = value_of(np.zeros(12), *repeated) - value_of(best, *repeated)
    np.testing.assert_allclose(found.history[0].gap, 2 * first, rtol=1e-3)


def test_an_intercept_has_no_penalty_and_a_state_keeps_its_form():
    class Model(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(np.zeros(11, np.float32))
            self.bias = nnx.Param(np.zeros((), np.float32))

    graph, start = nnx.split(Model())

    def loss_fn(params, batch):
        model = nnx.merge(graph, params)
        return squares(model.kernel[...], (batch[0], batch[1] - model.bias[...]))

    def penalty(rate):
        mask = nnx.State({"kernel": True, "bias": False})
        return optax.masked(optperm.proximal(rate, l1=0.3, l2=1e-2), mask)

    x = X[:, :11]
    found = minimize(loss_fn, (x, Y + 5), start, proximal=penalty, tol=1e-8)
    model = ElasticNet(alpha=0.31, l1_ratio=0.3 / 0.31, tol=1e-12, max_iter=100_000)
    model.fit(np.float64(x), np.float64(Y + 5))
    assert jax.tree.structure(found.params) == jax.tree.structure(start)
    np.testing.assert_allclose(found.params["bias"][...], model.intercept_, rtol=1e-4)
    np.testing.assert_allclose(found.params["kernel"][...], model.coef_, atol=1e-4)


@pytest.mark.slow
def test_a_softmax_regression_is_that_of_scikit_learn():
    labels = np.int32(np.digitize(Y, [-1.0, 1.0]))

    def softmax(w, batch):
        losses = optax.softmax_cross_entropy_with_integer_labels(batch[0] @ w, batch[1])
        return jnp.mean(losses) + 0.5e-2 * jnp.sum(w**2)

    found = minimize(softmax, (X, labels), jnp.zeros((12, 3)), tol=1e-8)
    model = LogisticRegression(C=1 / (4000 * 1e-2), fit_intercept=False, tol=1e-10, max_iter=10_000)
    best = model.fit(np.float64(X), labels).coef_.T
    assert found.converged
    np.testing.assert_allclose(found.params, best, atol=1e-3)


def test_the_history_prints_and_the_same_key_gives_the_same_bits(capsys, of_arrays):
    other, _ = of_arrays
    one = minimize(squares, (X, Y), jnp.zeros(12), callback=print, tol=1e-9, key=0)
    np.testing.assert_array_equal(one.params, other.params)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["passes", "seconds", "gap", "gradient"]
    assert str(one.history).splitlines() == printed[-1 - len(one.history) :]
    assert one.passes == one.history[-1].passes == other.passes
    assert one.history[0].gap > one.history[-1].gap == one.gap
    assert next(iter(one.history)).gradient == 1.0


def test_float64_reaches_what_float32_cannot():
    with pytest.warns(RuntimeWarning, match="float32 cannot: .* Enable x64"):
        found = minimize(squares, (X, Y), jnp.zeros(12), tol=1e-15)
    assert not found.converged
    with jax.enable_x64(True):
        data = np.float64(X), np.float64(Y)
        assert minimize(squares, data, jnp.zeros(12), tol=1e-15).converged


def test_a_bound_contains_the_rounding_of_proximal_steps():
    """A step of float32 for one column is less than the rounding of the param of another column."""
    with pytest.warns(RuntimeWarning, match="float32 cannot"):
        found = minimize(squares, (RAW, Y), jnp.zeros(12), proximal=lasso, tol=1e-9)
    best = elastic(RAW, Y, 0.05, 0.0)
    values = [value_of(w, RAW, Y, l1=0.05) for w in (found.params, best)]
    assert values[0] - values[1] <= found.gap < 1e-2


def test_what_is_wrong_is_said():
    data, zeros = (X, Y), jnp.zeros(12)
    with pytest.raises(ValueError, match="must be a mean over examples"):
        minimize(lambda w, batch: jnp.sum((batch[0] @ w - batch[1]) ** 2), data, zeros)
    with pytest.raises(TypeError, match=r"outside jax\.jit"):
        jax.eval_shape(lambda w: minimize(squares, data, w).params, zeros)
    bad = X.copy()
    bad[[7, 3000], 2] = np.nan
    with pytest.raises(ValueError, match=r"data\[0\] is not finite in 2 rows: 7, 3000\."):
        minimize(squares, (bad, Y), zeros)
    chunks = [(bad[i : i + 1750], Y[i : i + 1750]) for i in range(500, 4000, 1750)]
    with pytest.raises(ValueError, match=r"data\[0\] is not finite in 1 rows: 2500\."):
        minimize(squares, chunks, zeros)
    with pytest.raises(ValueError, match="must be a mean over examples"):
        minimize(lambda w, batch: squares(w, batch) + w @ w / len(batch[0]), data, zeros)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        double = np.float64(X), np.float64(Y)
        with pytest.raises(ValueError, match="dtype float32 of params, got float64"):
            minimize(squares, double, zeros)


@pytest.mark.parametrize(
    "products",
    [pytest.param(2**26, marks=pytest.mark.exhaustive), 0],
    ids=["all", "a sample"],
)
def test_a_lasso_with_a_few_large_rows_is_that_of_coordinate_descent(products, monkeypatch):
    monkeypatch.setattr("optperm.variance._minimize._PRODUCTS_OF_ALL", products)
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(10_000, 12)))
    x[:5] *= 100
    y = np.float32(x @ np.ones(12) + rng.normal(size=10_000))

    def penalty(rate):
        return optperm.proximal(rate, l1=0.01)

    found = minimize(squares, (x, y), jnp.zeros(12), proximal=penalty, max_passes=30)
    best = elastic(x, y, 0.01, 0.0)
    values = [value_of(w, x, y, l1=0.01) for w in (found.params, best)]
    assert found.converged
    assert values[0] - values[1] <= found.gap <= 1e-6


def test_a_newton_step_that_raises_the_objective_is_undone(monkeypatch):
    """A tenth of the Hessian makes steps that are ten times too long."""
    measure = optperm.variance._minimize.hessian_matrix
    wrong = "optperm.variance._minimize.hessian_matrix"
    monkeypatch.setattr(wrong, lambda loss, w: 0.1 * measure(loss, w))
    with pytest.warns(RuntimeWarning, match="max_passes=6 are used up"):
        found = minimize(squares, (X, Y), jnp.zeros(12), proximal=lasso, max_passes=6)
    assert value_of(found.params, X, Y, l1=0.05) <= value_of(np.zeros(12), X, Y)


def test_a_newton_step_bounds_the_rise_of_the_penalty(monkeypatch):
    rises, is_worse = [], optperm.variance._minimize._is_worse

    def note(new, old, rise):
        rises.append(rise)
        return is_worse(new, old, rise)

    monkeypatch.setattr("optperm.variance._minimize._is_worse", note)
    found = minimize(squares, (X, Y), jnp.zeros(12), proximal=lasso)
    # The penalty rises from 0, and no step is undone.
    penalty = 0.05 * float(np.sum(np.abs(found.params)))
    assert penalty - 1e-5 <= sum(rises) <= 1.2 * penalty


def test_a_bound_holds_if_the_curvature_is_that_of_a_few_large_rows():
    rng = np.random.default_rng(0)
    x = np.float32(rng.normal(size=(4000, 12)))
    x[:5] *= 1000
    y = np.float32(rng.random(4000) < 0.5 + 0.5 * np.tanh(np.float64(x[:, 0]) / 6))
    found = minimize(functools.partial(logistic, l2=0.0), (x, y), jnp.zeros(12), tol=1e-3)
    lowest, value = newton(np.float64(x), np.float64(y), 0.0, is_logistic=True)
    assert found.converged
    assert value(np.float64(found.params)) - lowest <= found.gap <= 1e-3


@pytest.mark.parametrize(
    ("largest", "dense", "mu"), [(3.0, 512, 3.0), (1.0, 1, 5.0)], ids=["matrix", "products"]
)
def test_a_strong_convexity_above_the_curvature_is_refused(largest, dense, mu, monkeypatch):
    """Only a matrix shows its lowest eigenvalue, here about 1 of 1 to 9."""
    monkeypatch.setattr("optperm.variance._minimize._DENSE", dense)
    x = X * np.linspace(1, largest, 12, dtype=np.float32)
    with pytest.raises(
        ValueError, match=f"at most the lowest eigenvalue of the Hessian, got {mu:g}"
    ):
        minimize(squares, (x, Y), jnp.zeros(12), strong_convexity=mu)


class Changing:
    """Batches that are other batches in each pass."""

    def __init__(self, batches_of):
        self.batches_of, self.number = batches_of, 0

    def __iter__(self):
        self.number += 1
        return iter(self.batches_of(self.number))


def test_data_that_change_between_passes_are_noticed():
    chunks = [(X[i : i + 1000], Y[i : i + 1000]) for i in range(0, 4000, 1000)]
    fewer = Changing(lambda number: chunks[: 3 + number % 2])
    with pytest.raises(ValueError, match=r"in each pass, got \d000 examples, and then \d000"):
        minimize(squares, fewer, jnp.zeros(12))
    other = Changing(lambda number: chunks[1:] if number % 2 else chunks[:-1])
    with pytest.warns(RuntimeWarning, match="the data changed between passes"):
        found = minimize(squares, other, jnp.zeros(12), max_passes=5)
    assert not found.converged
    assert np.isnan(found.gap)


def test_a_saddle_has_not_converged():
    def saddle(w, batch):
        return jnp.mean((w[0] * w[1] - batch[1]) ** 2)

    with pytest.warns(RuntimeWarning, match="not convex: the Hessian has a negative eigenvalue"):
        found = minimize(saddle, (X, Y), jnp.zeros(12))
    assert not found.converged


def test_bounds_do_not_depend_on_the_rate():
    def bounds(rate):
        return optperm.proximal(rate, lower=0.0, upper=0.5)

    found = minimize(squares, (X, Y), jnp.zeros(12), proximal=bounds, tol=1e-8)
    w = np.asarray(found.params)
    grad = X.T @ (X @ w - Y) / 4000
    assert found.converged
    # The conditions of Karush, Kuhn and Tucker
    assert np.all(grad[w == 0] > 0)
    assert np.all(grad[w == 0.5] < 0)
    np.testing.assert_allclose(grad[(w > 0) & (w < 0.5)], 0.0, atol=1e-3)


def test_initial_params_within_the_tolerance_of_a_small_loss_are_named():
    with pytest.warns(UserWarning, match=r"within tol=1e-06\. The loss is only .*e-07"):
        found = minimize(squares, (X, np.float32(5e-4 * Y)), jnp.zeros(12))
    np.testing.assert_array_equal(found.params, 0.0)


def test_line_searches_stop_at_the_maximum_of_passes():
    scales = np.float32(np.logspace(0, 3, 12))
    with pytest.warns(RuntimeWarning, match="max_passes=3 are used up"):
        found = minimize(
            logistic, (X[:100] * scales, CLASS[:100]), jnp.zeros(12), max_passes=3, tol=1e-9
        )
    assert found.method.startswith("preconditioned L-BFGS")
    assert found.passes <= 6


@pytest.mark.slow
def test_a_loss_that_was_not_convex_at_the_start_is_said():
    def saddle(w, batch):
        return squares(w, batch) + w[0] ** 4 - 2 * w[0] ** 2

    with pytest.warns(RuntimeWarning, match="not convex: the Hessian has a negative eigenvalue"):
        minimize(saddle, (X, Y), jnp.full(12, 0.1), tol=0.1)


def test_used_up_passes_name_the_scales_of_columns():
    scales = np.sqrt(np.mean(RAW**2, axis=0))
    ratio = f"{scales.max() / scales.min():.2g}".replace("+", r"\+")
    with pytest.warns(RuntimeWarning, match=rf"max_passes=2 are used up.*data\[0\] .* {ratio}"):
        found = minimize(squares, (RAW, Y), jnp.zeros(12), proximal=lasso, max_passes=2)
    assert not found.converged


@pytest.mark.slow
def test_poisson_regression_with_a_large_mean_undoes_steps_that_overshoot():
    counts = np.float32(np.random.default_rng(2).poisson(np.exp(3 + 0.2 * Y)))

    def poisson(w, batch):
        eta = batch[0] @ w[1:] + w[0]
        return jnp.mean(jnp.exp(eta) - batch[1] * eta)

    for proximal in (None, lambda rate: optperm.proximal(rate, l2=1e-9)):
        found = minimize(poisson, (X, counts), jnp.zeros(13), proximal=proximal)
        grad = jax.grad(poisson)(found.params, (X, counts))
        assert found.converged
        np.testing.assert_allclose(grad, 0, atol=0.05)


@pytest.mark.parametrize(
    ("l2", "method"),
    [
        pytest.param(0.3, "SVRG", marks=pytest.mark.exhaustive),
        (1e-3, "Katyusha"),
        pytest.param(1e-5, "preconditioned L-BFGS", marks=pytest.mark.slow),
    ],
)
def test_many_params_take_the_method_of_their_condition_number(l2, method, monkeypatch):
    monkeypatch.setattr("optperm.variance._minimize._DENSE", 1)
    loss_fn = functools.partial(logistic, l2=l2)
    found = minimize(loss_fn, (X, CLASS), jnp.zeros(12), strong_convexity=l2, tol=1e-5)
    assert found.converged
    assert found.method.startswith(f"{method} (")
    w = np.float64(found.params)
    grad = X.T @ (1 / (1 + np.exp(-X @ w)) - CLASS) / 4000 + l2 * w
    assert grad @ grad / (2 * l2) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_sharded_data_end_where_other_data_end(kind):
    mesh = jax.make_mesh((4,), ("data",), (kind,), devices=jax.devices()[:4])
    spread = jax.device_put((X, Y), jax.NamedSharding(mesh, jax.P("data")))
    for proximal in (None, lasso):
        one = minimize(squares, (X, Y), jnp.zeros(12), proximal=proximal, tol=1e-9)
        other = minimize(squares, spread, jnp.zeros(12), proximal=proximal, tol=1e-9)
        assert other.converged
        np.testing.assert_allclose(one.params, other.params, atol=3e-5)


def newton(x, y, l2, is_logistic):
    """The minimum of a problem in float64, and its function, by Newton's method with halved steps."""

    def value(w):
        z = x @ w
        losses = np.logaddexp(0, z) - y * z if is_logistic else 0.5 * (z - y) ** 2
        return losses.mean() + 0.5 * l2 * w @ w

    w = np.zeros(x.shape[1])
    for _ in range(100):
        z = x @ w
        p = 0.5 + 0.5 * np.tanh(z / 2) if is_logistic else z
        curvature = p * (1 - p) if is_logistic else np.ones_like(z)
        h = (x.T * curvature) @ x / len(x) + l2 * np.eye(len(w))
        move, step = np.linalg.solve(h, x.T @ (p - y) / len(x) + l2 * w), 1.0
        while value(w - step * move) > value(w) and step > 1e-9:
            step /= 2
        w = w - step * move
    return value(w), value


@pytest.mark.slow
def test_converged_is_never_true_far_from_the_minimum():
    """200 problems of random sizes, scales, strengths and tolerances, against Newton's method."""
    rng, converged = np.random.default_rng(4), 0

    def with_strength(loss):
        def loss_fn(w, batch):
            return loss(w, batch[:2], l2=0.0) + 0.5 * jnp.mean(batch[2]) * jnp.dot(w, w)

        return loss_fn

    for number in range(200):
        n, d = (int(rng.choice(choices)) for choices in ([64, 512, 2048], [2, 8]))
        x = rng.normal(size=(n, d)) @ rng.normal(size=(d, d)) * np.logspace(0, -rng.integers(3), d)
        y = x @ rng.normal(size=d) + rng.normal(size=n) > 0
        l2, tol = float(rng.choice([1e-1, 1e-3, 1e-5])), float(rng.choice([1e-2, 1e-4, 1e-6]))
        data = tuple(map(np.float32, (x, y, np.full(n, l2))))
        loss_fn = with_strength(logistic if number % 2 else squares)
        found = minimize(loss_fn, data, jnp.zeros(d), tol=tol, key=number)
        lowest, value = newton(*map(np.float64, data[:2]), l2, is_logistic=bool(number % 2))
        above = value(np.float64(found.params)) - lowest
        limit = 10 * tol * max(1.0, abs(lowest))
        assert not found.converged or above <= limit, (number, n, d, l2, tol, above)
        converged += found.converged
    assert converged == 200


def test_an_inverse_root_does_not_depend_on_scales():
    scales = np.logspace(-6, 6, 5)
    a = np.random.default_rng(5).normal(size=(20, 5))
    h = np.float32(a.T @ a)
    root, lowest = jax.jit(inverse_root)(h * np.float32(np.outer(scales, scales)))
    np.testing.assert_allclose(
        (root * scales[:, None]) @ (root * scales[:, None]).T,
        np.linalg.inv(h),
        rtol=1e-3,
        atol=1e-5,
    )
    unit = h / np.sqrt(np.outer(np.diag(h), np.diag(h)))
    eigenvalues = np.linalg.eigvalsh(unit)
    np.testing.assert_allclose(lowest, eigenvalues[0] / eigenvalues[-1], rtol=1e-3)


def test_factors_of_gradients_whiten_their_inputs():
    x = np.float32(np.random.default_rng(6).normal(size=(5000, 4)) * [1.0, 10.0, 100.0, 1000.0])
    errors = np.float32(np.random.default_rng(7).normal(size=(5000, 3)))
    grads = {"w": x[:, :, None] * errors[:, None], "b": errors}
    roots = jax.jit(factor_roots)(grads)
    a = x.T @ x / 5000
    ridge = 0.1 * np.trace(a) / 4 * np.eye(4)
    np.testing.assert_allclose(roots["w"] @ (a + ridge) @ roots["w"], np.eye(4), atol=0.1)
    np.testing.assert_allclose(roots["b"], 1.0, rtol=0.05)
    ones = {"w": np.ones((4, 3), np.float32), "b": np.ones(3, np.float32)}
    product = jax.jit(multiply_roots)(roots, ones)
    np.testing.assert_allclose(product["w"], np.asarray(roots["w"]) @ np.ones((4, 3)), rtol=1e-5)


@pytest.mark.slow
def test_many_params_are_minimized_in_float64(monkeypatch):
    """More params than a dense Hessian is for: L-BFGS, whose counts have other dtypes in this mode."""
    monkeypatch.setattr("optperm.variance._minimize._DENSE", 1)
    x, y = np.float64(X[:300] * np.logspace(0, 1, 12)), np.float64(Y[:300])
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = minimize(squares, (x, y), jnp.zeros(12), tol=1e-10, max_passes=300)
    exact = np.linalg.lstsq(x, y, rcond=None)[0]
    assert "L-BFGS" in found.method
    assert found.params.dtype == jnp.float64
    np.testing.assert_allclose(found.params, exact, atol=1e-4)
