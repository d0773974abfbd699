"""Constant SGD from a kernel that a warm-up has handed over."""

import functools
import pickle

import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest
import support

import optperm
from optperm.bayes import _batch_noise
from optperm.bayes._report import measure_kernel_bias
from optperm.core import fresh_jit as compiling
from optperm.core.states import find_state, replace_state

# Draws that are few enough for tests are too few for figures
pytestmark = pytest.mark.filterwarnings(
    "ignore:The maximum split R-hat", "ignore:The minimum effective", "ignore:There are .* draws",
    "ignore:The length of the steps", "ignore:The noise of the batches",
)  # fmt: skip
N, S = 200, 8
X = np.float32(np.random.default_rng(0).normal(size=(N, 3)))
STATE = optperm.bayes.ConstantSgdState
ARGUMENTS = {"burn_in": 20, "freeze_after": 60, "momentum": 0.5}


def loss_fn(w, x):
    return jnp.mean(jnp.sum((x - w["a"][None]) ** 2, axis=-1)) / 2 + jnp.mean(w["b"] ** 2)


def start():
    return {"a": jnp.zeros(3), "b": jnp.ones(2)}


def run(tx, w, state, steps, first=0):
    """Params and state after so many steps."""

    def evaluate(w, t):
        rows = jax.random.randint(jax.random.fold_in(jax.random.key(0), t), (S,), 0, N)
        return loops.evaluation(loss_fn)(w, jnp.asarray(X)[rows])

    train = jax.jit(functools.partial(loops.carry, loops.make_step(tx, evaluate)))
    return train(w, state, first + jnp.arange(steps))


def draw(sampler, x=X, key=0, **options):
    """Few samples of the posterior of some data."""
    return optperm.bayes.sample(
        loss_fn, jnp.asarray(x), start(), key, batch_size=S, num_chains=2, num_draws=20, thinning=2,
        sampler=sampler, **options,
    )  # fmt: skip


@functools.cache
def warmed_up(form):
    tx = optperm.constant_sgd(N, S, preconditioner=form, **ARGUMENTS)
    w, state = run(tx, start(), tx.init(start()), 80)
    return tx, w, state, optperm.bayes.adapted_kernel(state)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["full", "diagonal"])
def test_steps_are_those_of_the_program_that_estimated_the_kernel(form):
    """From one state: the same count, key and velocity; also of a kernel that was saved, which has the
    form of one that is not ready."""
    tx, w, state, kernel = warmed_up(form)
    like = optperm.bayes.adapted_kernel(tx.init(w))
    assert support.signature(like) == support.signature(kernel)
    saved = pickle.loads(pickle.dumps(jax.device_get(kernel)))
    other = optperm.constant_sgd(N, S, kernel=saved, momentum=0.5)
    sampler = find_state(state, STATE, method="constant_sgd")._replace(window=())
    then = replace_state(other.init(w), STATE, sampler, method="constant_sgd")
    then = (then[0], state.then[1], then[2])
    one, _ = run(tx, w, state, 20, 80)
    two, last = run(other, w, then, 20, 80)
    support.assert_close(two, one, rtol=1e-5, atol=1e-6)
    assert int(last[0].steps) - int(sampler.steps) == 20
    support.assert_same_bits(optperm.bayes.adapted_kernel(last), kernel)


def test_sampling_from_a_kernel_takes_three_numbers_a_parameter_and_the_gradient():
    """Noise, curvature and velocity of the diagonal form; nothing of the warm-up."""
    _, w, _, kernel = warmed_up("diagonal")
    tx = optperm.constant_sgd(N, S, kernel=kernel, momentum=0.5)
    updates, state = jax.jit(tx.update)(w, tx.init(w), w)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(updates))
    sizes = [leaf.size for leaf in jax.tree.leaves(state) if leaf.shape in ((3,), (2,))]
    assert sum(sizes) == 3 * 5 + 2 + 2  # and the key and the correlation


def test_kernels_that_do_not_fit_are_refused_by_what_differs():
    """Those of other params, numbers and forms, of several chains, and dicts that were restored."""
    _, w, _, kernel = warmed_up("diagonal")
    stacked = jax.tree.map(lambda a: jnp.stack([a, a, a]), kernel)
    good = {"num_data": N, "batch_size": S, "kernel": kernel, "momentum": 0.5, "params": w}
    unready = optperm.bayes.adapted_kernel(optperm.constant_sgd(N, S).init(w))
    for change, message in (
        ({"params": {"a": jnp.zeros(4), "b": jnp.ones(2)}}, r"kernel.noise\['a'\] is float32\[3\]"),
        ({"params": jnp.zeros(6), "kernel": unready}, r"kernel.basis.w is .*\[5, 5\]"),
        ({"num_data": N + 1}, "kernel is for num_data=200, but num_data is 201"),
        ({"batch_size": S + 1}, "kernel is for batch_size=8, but batch_size is 9"),
        ({"momentum": 0.9}, "kernel is for momentum=0.5, but momentum is 0.9"),
        ({"preconditioner": "full"}, "kernel is diagonal, but preconditioner is 'full'"),
        ({"kernel": unready, "momentum": None}, "kernel is not ready"),
        ({"kernel": stacked}, r"axis of chains \(of length 3\).*jax.tree.map\(lambda a: a\[0\]"),
        ({"kernel": kernel._asdict()}, "must be a NoiseKernel, got dict"),
    ):
        given = good | change
        params = given.pop("params")
        with pytest.raises((ValueError, TypeError), match=message):
            optperm.constant_sgd(**given).init(params)
    # Params of 16 bits are sampled with remainders
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), w)
    optperm.constant_sgd(N, S, kernel=kernel, momentum=0.5).init(half)


def test_states_of_other_arguments_are_refused():
    """Those by which a state is shaped: its form and the numbers of its noise."""
    w, (a, b) = start(), (optperm.constant_sgd, optperm.mandt_sgd)
    for make, other, name in (
        (a, {"preconditioner": "diagonal"}, "preconditioner"),
        (a, {"num_data": N + 1}, "num_data"),
        (a, {"batch_size": S + 1, "momentum": 0.5}, "batch_size"),
        (a, {"momentum": 0.9}, "momentum"),
        (b, {"preconditioner": "full"}, "preconditioner"),
    ):
        given = {"num_data": N, "batch_size": S, "momentum": 0.5, "preconditioner": None}
        given |= {"preconditioner": "diagonal"} if make is b else {}
        e = loops.evaluation(loss_fn)(w, jnp.asarray(X)[:S])
        state = make(**given).init(w)
        make(**given).update(e[0], state, w, **e[1])
        with pytest.raises(ValueError, match=f"made with another {name}="):
            make(**given | other).update(e[0], state, w, **e[1])


@pytest.mark.slow
def test_bias_of_a_kernel_is_judged_by_the_steps_of_all_draws():
    """Not by a last step at which the rate is small, for noise that is twice the kernel's."""
    kernel = warmed_up("diagonal")[3]
    tx = optperm.constant_sgd(N, S, kernel=kernel, momentum=0.5)
    noise = jax.tree.map(lambda x: 2 * x / S, kernel.noise)
    draws = jax.tree.map(lambda p: support.normal((2, 50, *p.shape)), start())
    state = find_state(
        tx.update(start(), tx.init(start()), start())[1], STATE, method="constant_sgd"
    )
    samples = optperm.bayes.Samples(draws, jax.tree.map(lambda x: x[:, -1], draws), state, 50, 1)
    samples = samples._replace(batch_noise=noise)
    wanted = measure_kernel_bias([state], samples)
    numbers = [jnp.full((2, 50), number) for number in state.numbers()]
    last = state._replace(limit=1e-3 * state.limit, scale=1e-3 * state.scale)
    known = samples._replace(step_sizes=numbers[0], temperatures=numbers[1])
    assert wanted > 0.1
    np.testing.assert_allclose(measure_kernel_bias([last], known), wanted, rtol=1e-4)


@pytest.mark.slow
def test_kernel_of_other_data_is_warned_of():
    """Data three times as wide have nine times the noise, and as much of it too much in the draws."""
    kernel = warmed_up("full")[3]
    for scale in (1.0, 3.0):
        samples = draw(
            lambda n, s: optperm.constant_sgd(n, s, kernel=kernel, momentum=0.5), scale * X,
            burn_in=20, starts=jax.tree.map(lambda p: jnp.stack([p, p]), start()),
        )  # fmt: skip
        report = optperm.bayes.posterior_report(samples)
        found = [text for text in report.warnings if "differs from the kernel's" in text]
        assert len(found) == int(scale > 1)
        matched = "matches the curvature of this loss on these data."
        assert any(line.endswith(matched) for line in report.not_checked)
    assert "too large" in found[0]
    report = optperm.bayes.posterior_report(samples._replace(batch_noise=None))
    assert "noise and curvature of this loss on these data" in " ".join(report.not_checked)


@pytest.mark.slow
def test_sample_takes_a_second_program_and_none_for_another_key(monkeypatch):
    """Where the sampler takes `kernel=`; the report of its draws speaks of the whole warm-up."""
    programs = {}
    monkeypatch.setattr(compiling, "_PROGRAMS", programs)
    sampler = functools.partial(optperm.constant_sgd, **ARGUMENTS)
    samples = draw(sampler)
    state = find_state(samples.last_opt_state, STATE, method="constant_sgd")
    assert state.window == ()
    assert np.all(np.asarray(state.count) == int(samples.next_step))
    assert samples.batch_noise is None  # the kernel knows it
    report = optperm.bayes.posterior_report(samples)
    assert not any("warm-up was still learning" in text for text in report.warnings)
    first = len(programs)
    draw(sampler, key=1)
    assert len(programs) == first
    takes_none = lambda n, s: optperm.constant_sgd(n, s, **ARGUMENTS)  # noqa: E731
    for other in (takes_none, lambda n, s, **options: takes_none(n, s)):
        assert find_state(draw(other).last_opt_state, STATE, method="constant_sgd").window


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
    covariance_fn = functools.partial(_batch_noise.batch_covariance, loss_fn, x, 400, S)
    found = _batch_noise.measure_batch_noise(
        covariance_fn, covariance_fn, samples, S, jax.random.key(0)
    )
    np.testing.assert_allclose(found.batch_noise, 1 / S, rtol=0.35)
    exact = np.linalg.eigvalsh(np.cov(x.T) / S)[-1]
    np.testing.assert_allclose(found.batch_noise_norm, exact, rtol=0.3)
    assert float(found.batch_noise_norm) > 10 * float(np.max(found.batch_noise))
    half = optperm.sghmc(1e-3, N, 0.5).init(w.astype(jnp.bfloat16))
    assert _batch_noise._is_langevin_alone(half)
    assert not _batch_noise._is_langevin_alone((state, w))
