"""Learning a kernel: exact noise and curvature, kinds of data, and refused arguments."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

import optperm
from optperm.bayes import _batches
from optperm.bayes._batch_order import judge_order
from optperm.bayes._control_variates import Anchor
from optperm.bayes._learn_kernel import _search

N, S, D = 2000, 8, 3
HESSIAN = np.array([[4.0, 1.0, 0.0], [1.0, 2.0, 0.3], [0.0, 0.3, 0.5]])
NOISE = np.array([[1.0, 0.6, 0.0], [0.6, 2.0, 0.0], [0.0, 0.0, 0.1]])


def examples(num_data=N):
    """Gradients of examples at 0 with the covariance NOISE, exactly, and the mean 0."""
    z = np.random.default_rng(0).normal(size=(num_data, D))
    z = (z - z.mean(axis=0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(z.T))).T
    return np.float32(z @ np.linalg.cholesky(NOISE).T)


def data_of(x, unit=1.0, hessian=HESSIAN):
    """Return rows for `loss_fn` with a Hessian, in a unit of the params."""
    rows = len(x)
    return {
        "x": x,
        "unit": np.full(rows, unit, np.float32),
        "hessian": np.tile(np.float32(hessian), (rows, 1, 1)),
    }


def loss_fn(w, batch):
    w = w / jnp.mean(batch["unit"])
    return jnp.mean(batch["x"] @ w) + w @ jnp.mean(batch["hessian"], axis=0) @ w / 2


def learn(data=None, w=None, **options):
    given = {"batch_size": S, "momentum": 0.0, "steps": 800} | options
    data = data_of(examples()) if data is None else data
    return optperm.bayes.learn_kernel(loss_fn, data, jnp.ones(D) if w is None else w, 0, **given)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The noise of the gradients is correlated")
@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_noise_and_curvature_are_those_of_the_problem(form):
    """Lambda = W^T C W within the error of 300 estimates or 600, a_i at least w_i^T A w_i, and
    lambda_max(H A) at most c."""
    kernel, w = learn(preconditioner=form, steps=2400, control_variates=False)
    basis = np.eye(D) if form == "diagonal" else np.asarray(kernel.basis.w, np.float64)
    np.testing.assert_allclose(kernel.noise, np.diag(basis.T @ NOISE @ basis), rtol=0.15)
    exact = np.diag(basis.T @ HESSIAN @ basis)
    a = np.asarray(kernel.curvature) / float(kernel.excess)
    assert np.all(a > 0.95 * exact)
    assert np.all(a < 2.5 * exact)
    h = kernel.step_sizes(kernel.scale())
    h = np.stack([kernel.precondition(row, h) for row in np.eye(D, dtype=np.float32)])
    largest = np.linalg.eigvals(h @ HESSIAN).real.max()
    assert 0.01 < largest <= 0.2 * 1.05
    assert float(kernel.estimates) == (300 if form == "diagonal" else 600)
    assert float(kernel.drift) == pytest.approx(1, abs=0.15)
    assert np.abs(w).max() < 0.2  # the optimum is 0, and the posterior's sd at most 0.04


@pytest.mark.slow
@pytest.mark.parametrize("unit", support.every_night([1e-3, 1e3], [1e-3]))
def test_entry_with_hardly_any_noise_changes_no_other_entry_in_any_units(unit):
    """The noise of the last entry is 1e-12 of the others, and its curvature of the prior remains: its
    step is as long as c allows. The params are in several units, u w."""
    hessian = np.diag([4.0, 2.0, 0.5])
    data = data_of(examples() * np.float32([1, 1, 1e-6]), unit, hessian)
    kernel, _ = learn(data, unit * jnp.ones(D), preconditioner="diagonal", control_variates=False)
    np.testing.assert_allclose(kernel.noise[:2] * unit**2, np.diag(NOISE)[:2], rtol=0.3)
    assert 0 <= kernel.noise[2] * unit**2 < 1e-9
    a = np.asarray(kernel.curvature) / float(kernel.excess) * unit**2
    assert np.all(a > 0.95 * np.diag(hessian))
    assert np.all(a < 2.5 * np.diag(hessian))
    h = np.asarray(kernel.step_sizes(kernel.scale())) / unit**2
    np.testing.assert_allclose(h[2] * float(kernel.excess) * a[2], 0.2, rtol=1e-3)


# Rows of functions: an epoch has 50 batches
FEW = examples(400)


def log_prior(w):
    return jnp.where(w[0] > -1, 0.0, -jnp.inf)


def learn_from(draw, hessian=HESSIAN, **options):
    """Return the kernel for batches of a function of a key that returns rows, and what is said."""
    given = {"w": jnp.zeros(D), "num_data": 400, "steps": 1600, "log_prior": log_prior}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        kernel, _ = learn(lambda key: data_of(draw(key), hessian=hessian), **given | options)
    return kernel, [str(each.message) for each in found]


def random_rows(key, x=FEW):
    return x[np.asarray(jax.random.randint(key, (S,), 0, len(x)))]


@pytest.fixture(scope="module")
def outside():
    """A kernel without control variates, of an example with NaN and outside the bounds of a prior, whose
    optimum is at -2 in the first entry."""
    x = FEW + np.float32(HESSIAN @ [2.0, 0.0, 0.0])
    x[3] = np.nan
    return learn_from(lambda key: random_rows(key, x), momentum=None)


def test_nonfinite_examples_and_bounds_of_a_prior_are_warned_of(outside):
    for says in (
        "of the steps of learn_kernel, some entries of the grad",
        "log prior at the params that learn_kernel returns is inf",
    ):
        assert any(says in text for text in outside[1])


def test_default_numbers_depend_on_control_variates(outside, read_in_parts):
    """The momentum, the stability c, and the maximum ratio of noises."""
    for kernel, numbers in (
        (read_in_parts[0], [0.5, 0.5, 0.25]),
        (outside[0], [7 / 9, 0.2, 10.0]),
    ):
        found = kernel.momentum, kernel.max_stability, kernel.max_noise_ratio
        np.testing.assert_allclose(found, numbers, rtol=1e-6)


@pytest.mark.parametrize("is_searched", [False, True])
def test_search_has_anchors_in_its_last_third_and_from_an_optimum_before(is_searched):
    """Each part of the search has its own batches, and an anchor where the part before ended."""
    seen = []

    def run(carry, kernels, phase, length):
        (anchors, weights), (params, states) = kernels, carry
        seen.append((phase, length, float(weights[0]), float(anchors.params[0, 0])))
        return params + 1, states

    def find(params):
        return Anchor(params, jnp.zeros_like(params))

    params, anchors = _search(run, find, jnp.zeros((1, D)), 10, is_searched)
    (first, *_), (second, *_) = seen
    assert [each[1:] for each in seen] == [(40, float(is_searched), 0.0), (20, 1.0, 1.0)]
    assert first != second
    np.testing.assert_array_equal(params, 2)
    np.testing.assert_array_equal(anchors.params, 2)


def check_noise(kernel):
    """Check that the noise is diagonal in the directions of the kernel, and as large as it says."""
    w, root = np.asarray(kernel.basis.w, np.float64), np.sqrt(kernel.noise)
    found = w.T @ NOISE @ w / np.outer(root, root)
    np.testing.assert_allclose(found, np.eye(D), atol=0.25)


class Counting(np.ndarray):
    """An array that counts the rows of each read."""

    reads: list[int]
    rows: set[bytes]

    def __getitem__(self, rows):
        self.reads.append(len(rows))
        self.rows.add(np.asarray(rows).tobytes())
        return np.asarray(self)[rows]


def counting(array):
    found = array.view(Counting)
    found.reads, found.rows = [], set()
    return found


@pytest.mark.parametrize(("size", "apart"), [(1, 1), (3, 0)])
def test_a_function_is_called_once_before_its_batches_are_read(size, apart):
    """The call tells their size; batches of one example need another one, to show the noise."""
    keys = []

    def data(key):
        keys.append(key)
        return np.zeros((size, 2), np.float32)

    batches = _batches.batches_of_function(data, 10, None, num_apart=None, full_data=None)
    assert len(keys) == 1
    assert (batches.batch_size, batches.num_apart) == (size, apart)
    read = batches.read(jnp.stack([jax.random.key(0)] * 2)[:, None])
    assert read.shape == (2, 1, size + apart, 2)
    assert batches.num_bytes == read[0].nbytes


DATA = data_of(examples())
# The bytes of 40 batches
PART = 40 * S * sum(leaf[0].nbytes for leaf in DATA.values())


def learn_in_parts(x):
    """Learn a kernel with control variates from rows that are read in parts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_batches, "MOST_BYTES", PART)
        return learn(DATA | {"x": x}, momentum=None)[0]


@pytest.fixture(scope="module")
def read_in_parts():
    """A kernel, and the rows from which it was learned."""
    rows = counting(DATA["x"])
    return learn_in_parts(rows), rows


def test_rows_on_disk_are_the_rows_of_arrays_and_read_in_parts(
    monkeypatch, tmp_path, read_in_parts
):
    """The same batches; no read has more than the allowed bytes, while a kernel is learned."""
    monkeypatch.setattr(_batches, "MOST_BYTES", PART)
    x = DATA["x"]
    np.save(tmp_path / "rows.npy", x)
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    keys = jax.random.split(jax.random.key(5), 1)
    there, here = (_batches.batches_of_rows(rows, None, S) for rows in (mapped, x))
    ((_, _, part),) = here.parts(keys, 50, 30)
    batch_of = jax.jit(here.batch)
    for first, count, read in there.parts(keys, 50, 30):
        for step in range(first, first + count):
            wanted = batch_of(part, keys, np.int32(0), np.int32(step))
            np.testing.assert_array_equal(read[step - first], wanted)
    # Equal Hessians of all examples leave no noise, after three passes over the rows
    kernel, rows = read_in_parts
    assert np.all(kernel.noise_left < 1e-6)
    assert max(rows.reads) <= 40 * S < N
    assert sum(rows.reads) >= 800 * S + 3 * N - 2 * S
    # All parts, also the passes of a window at rest, have batches of their own: the two later passes
    # over the rows repeat the first
    assert len(rows.reads) - len(rows.rows) == 2 * -(-N // (40 * S))


def test_function_that_draws_rows_gives_a_kernel_with_the_numbers_of_the_call():
    """Batches that are drawn with replacement are not warned of."""
    kernel, said = learn_from(random_rows, stability=0.1, noise_ratio=3.0, momentum=0.25)
    assert not said
    check_noise(kernel)
    numbers = kernel.num_data, kernel.batch_size, kernel.max_stability, kernel.max_noise_ratio
    np.testing.assert_allclose(numbers, [400, S, 0.1, 3.0], rtol=1e-6)
    assert float(kernel.momentum) == pytest.approx(0.25)
    assert float(kernel.noise_ratio) <= 3.0 + 1e-6
    with pytest.raises(ValueError, match="num_data must be given if data is a function"):
        learn(random_rows)
    with pytest.raises(ValueError, match="must return batches of batch_size=8 examples, got 7"):
        learn(lambda key: data_of(random_rows(key)[:7]), num_data=400)


def epochs(x, size, key=0):
    rng = np.random.default_rng(key)
    while True:
        order = rng.permutation(len(x))
        for start in range(0, len(x) - size + 1, size):
            yield x[order[start : start + size]]


def chunks(x, size):
    x, start = x[np.argsort(x[:, 0])], 0
    while True:
        yield np.take(x, np.arange(start, start + size), axis=0, mode="wrap")
        start += size


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chunks", "Successive batches are alike, as if chunks .* times as much"),
        pytest.param(
            *("epochs", "complement each other, as in shuffled epochs: .* only 0"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            *("same", "data returns the same batch for each key"), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_order_of_a_functions_batches_is_named(name, said):
    stream = {"chunks": chunks, "epochs": epochs}.get(name, lambda x, size: None)(FEW, S)
    _, texts = learn_from(lambda key: FEW[:S] if name == "same" else next(stream))
    named = [
        text for text in texts if ("batch" in text and "replacement" in text) or "same" in text
    ]
    assert len(named) == 1
    assert re.search(said, named[0])


def test_variance_of_blocks_shows_correlations_and_passes_independent_batches():
    """Moving averages of lag 8 and differences, in 40 dimensions; in 3 of 3,000 series at most."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(1000, 2, 64))
    mean = np.cumsum(z, axis=0)
    averages = (mean[8:] - mean[:-8]) / np.sqrt(8)
    ones = np.full(2, 64.0)
    assert judge_order(z, ones) == []
    assert "alike" in judge_order(averages, ones)[0]
    assert "complement" in judge_order(np.diff(z, axis=0) / np.sqrt(2), ones)[0]
    assert "the mean gradient of a batch varies 9 times" in judge_order(3 * z, ones)[0]
    assert "the same batch for each key" in judge_order(np.repeat(z[:1], 50, axis=0), ones)[0]
    wrong = sum(
        len(judge_order(rng.normal(size=(200, 1, 3)), np.full(1, 3.0))) for _ in range(1000)
    )
    assert wrong <= 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize("estimator", ["single_example", "two_batches"])
def test_other_estimators_learn_the_noise(estimator):
    """Within the errors of 600 estimates of one number each, of a law with heavy tails."""
    kernel, _ = learn(
        estimator=estimator, preconditioner="diagonal", steps=2400, control_variates=False
    )
    np.testing.assert_allclose(kernel.noise, np.diag(NOISE), rtol=0.3)


@pytest.mark.slow
def test_params_of_several_dtypes_and_16_bits_learn_the_same_noise():
    """Leaves of different dtypes are worked on one by one."""
    x = examples()

    w = {"a": jnp.zeros(2, jnp.bfloat16), "b": jnp.zeros(1)}

    def loss(w, batch):
        return loss_fn(jnp.concatenate([w["a"].astype(jnp.float32), w["b"]]), batch)

    kernel, last = optperm.bayes.learn_kernel(
        loss,
        data_of(x),
        w,
        0,
        batch_size=S,
        preconditioner="diagonal",
        steps=800,
        control_variates=False,
    )
    assert last["a"].dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.concatenate([kernel.noise["a"], kernel.noise["b"]]), np.diag(NOISE), rtol=0.3
    )


@pytest.mark.filterwarnings("ignore:.*")
def test_losses_without_curvature_or_without_finite_gradients_are_refused():
    with pytest.raises(ValueError, match="no batch has shown finite gradients and a curvature"):
        learn_from(random_rows, hessian=0 * HESSIAN)
    x = examples()
    x[3] = np.nan
    with pytest.raises(ValueError, match="gradient over all examples is not finite"):
        learn_in_parts(counting(x))


def test_a_summed_loss_is_warned_of_before_the_first_step():
    """The warning is raised as an error, which ends the call."""
    with pytest.raises(UserWarning, match="is not the mean of the losses of its halves"):
        optperm.bayes.learn_kernel(
            lambda w, x: jnp.sum(x @ w) + w @ w, examples(), jnp.ones(D), 0, batch_size=S
        )
