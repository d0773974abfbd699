"""What would sample another posterior without a word: all of it is warned of, or refused."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replicas
import support

import optperm
from optperm.bayes import langevin
from optperm.contract.states import find_states

pytestmark = pytest.mark.usefixtures("lenient")
N, S, D = 200, 8, 3
SHORT = {"burn_in": 20, "freeze_after": 60}


@functools.cache
def data():
    """A linear regression with a noise of one."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, D))
    return np.float32(x), np.float32(x @ np.array([1.0, -1.0, 0.5]) + rng.normal(size=N))


def loss_fn(w, batch):
    x, y = batch
    return 0.5 * jnp.mean((x @ w - y) ** 2) + optperm.normal_prior(w, 1.0, N)


def stepper(tx, batch_size=S, loss_fn=loss_fn, data=data):
    def step(w, opt_state, key):
        rows = jax.random.randint(key, (batch_size + 1,), 0, N)
        batch, example = (
            tuple(jnp.asarray(leaf)[r] for leaf in data()) for r in (rows[:-1], rows[-1:])
        )
        e = optperm.evaluate(loss_fn, w, batch, example=example)
        extras = {"full_grad_fn": lambda w: jax.grad(loss_fn)(w, data()), **e.extra_args}
        updates, opt_state = tx.update(e.grad, opt_state, w, **extras)
        return optax.apply_updates(w, updates), opt_state

    return step


def said(tx, *, step=None, size=D, params=None, **options):
    """The warnings of `draw_samples`, and the draws."""
    w = jnp.zeros(size) if params is None else params
    options = {"num_chains": 2, "num_draws": 60, "thinning": 2, "warmup": 40} | options
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        samples = optperm.draw_samples(
            step or stepper(tx), w, tx.init(w), jax.random.key(0), **options
        )
    return " ".join(str(w.message) for w in caught), samples


def report_of(samples):
    """The warnings of `posterior_report`, and the report."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = optperm.posterior_report(samples)
    return " ".join(str(w.message) for w in caught), report


UNEVEN = "not the mean of those of its examples"


def each(w, batch):
    """What each example loses, and a weight of its own."""
    x, y = batch
    return 0.5 * (x @ w - y) ** 2, 1.0 + (x[:, 0] > 0)


def centered(w, batch):
    """A loss that mixes examples, as BatchNorm does."""
    x, y = batch
    return 0.5 * jnp.mean(((x - x.mean(0)) @ w - (y - y.mean())) ** 2)


def with_dropout(w, batch, key):
    """A mask for each example, drawn anew where they are taken by themselves."""
    x, y = batch
    return 0.5 * jnp.mean((x * jax.random.bernoulli(key, 0.5, x.shape) @ w - y) ** 2)


@pytest.mark.parametrize(
    ("loss", "is_uneven"),
    [
        (loss_fn, False),
        (lambda w, b: jnp.mean(jnp.multiply(*each(w, b))), False),
        (jax.tree_util.Partial(with_dropout, key=jax.random.key(0)), False),
        (lambda w, b: jnp.average(each(w, b)[0], weights=each(w, b)[1]), True),
        (lambda w, b: jnp.sum(each(w, b)[0]) + optperm.normal_prior(w, 1, N), True),
        (centered, True),
    ],
    ids=["mean", "mean with factors", "dropout", "weighted mean", "sum and prior", "centered"],
)
def test_constant_sgd_says_when_the_gradient_is_not_the_mean_of_the_examples(loss, is_uneven):
    """Else variances were up to a hundred times too large, or seven times too small."""
    step = stepper(tx := optperm.constant_sgd(N, S, **SHORT), loss_fn=loss)
    text, _ = said(tx, step=step)
    assert (UNEVEN in text) == is_uneven


def test_looks_at_the_noise_leave_steps_as_they_are():
    """Where C is constant, all that a step is made of stays, and how much noise there is is kept."""
    tx = optperm.constant_sgd(N, S, preconditioner="full", **SHORT)
    step, w = jax.jit(stepper(tx)), jnp.zeros(D)
    state, trail = tx.init(w), []
    for key in jax.random.split(jax.random.key(0), 480):
        w, state = step(w, state, key)
        trail.append(find_states(state, optperm.GradientNoiseState)[0])
    looks = [int(each.late_looks) for each in trail]
    assert looks[59:62] == [0, 1, 1]
    assert looks[-1] == 3  # before steps 60, 260 and 460
    changing = ("count", "steps", "late_looks", "late_noise", "late_square")
    kept = [each._replace(**dict.fromkeys(changing, 0)) for each in (trail[59], trail[-1])]
    support.assert_same_bits(*kept)
    # Of three looks the mean is what it should be only in its order.
    assert 0.1 < float(trail[-1].late_noise / trail[-1].largest_noise) < 10


@pytest.mark.parametrize("sampler", [optperm.sgld(1e-4, N), optperm.sghmc(1e-4, N, 0.1)])
@pytest.mark.parametrize(
    ("front", "name"),
    [
        (optax.scale_by_adam(), "ScaleByAdamState"),
        (optax.scale_by_rms(), "ScaleByRmsState"),
        (optax.trace(0.9), "TraceState"),
        (optperm.svrg(refresh_every=20), None),
    ],
)
def test_momentum_in_front_of_langevin_samplers_is_named(sampler, front, name):
    """But svrg may stand there, and what is behind or beside is another one's."""
    w = {"a": jnp.zeros(D), "b": jnp.zeros(D)}
    chained = optax.chain(front, sampler).init(w)
    apart = optax.partition({"s": sampler, "f": front}, {"a": "s", "b": "f"}).init(w)
    found = langevin.faults_in_front((optax.EmptyState(), chained))
    assert [text.split()[0] for text in found] == ([name] if name else [])
    assert not langevin.faults_in_front(apart)


def test_several_samplers_of_one_model_are_named():
    """Neither sees how its gradients' noise goes with that of the other one's."""
    one = optperm.constant_sgd(N, S, **SHORT)
    tx = optax.partition({"one": one, "two": one}, {"a": "one", "b": "two"})

    def loss(w, batch):
        return loss_fn(jnp.concatenate([w["a"], w["b"]]), batch)

    w = {"a": jnp.zeros(1), "b": jnp.zeros(D - 1)}
    text, _ = said(tx, step=stepper(tx, loss_fn=loss), params=w)
    assert "There are 2 samplers, each of a part" in text


def test_chains_that_go_on_say_how():
    """Without `stacked` by an error that names it; and with it without a word of a burn-in long past."""
    tx = optperm.constant_sgd(N, S, **SHORT)
    _, first = said(tx, warmup=100)
    given = first.last_params, first.last_opt_state, jax.random.key(1)
    with pytest.raises(ValueError, match="pass stacked=True"):
        optperm.draw_samples(stepper(tx), *given, num_chains=2, num_draws=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optperm.draw_samples(stepper(tx), *given, num_chains=2, num_draws=3, stacked=True)
    assert "did not sample" not in " ".join(str(w.message) for w in caught)


def test_a_report_says_when_there_are_too_few_draws():
    """Three, of which there is no split R-hat."""
    _, samples = said(optperm.constant_sgd(N, S, **SHORT), num_draws=3)
    text, report = report_of(samples)
    assert "There are 3 draws a chain" in text
    assert np.isnan(report.r_hat)


FOREIGN, ALTERED = "not the one of the extra arguments", "scaled or clipped on their way"
TIGHT = 0.05  # far below what gradients are long


@pytest.mark.parametrize(
    ("front", "is_foreign", "fill"),
    [
        (lambda: optax.clip_by_global_norm(TIGHT), True, True),
        (lambda: optax.clip_by_global_norm(1e6), False, False),
        (lambda: optperm.svrg(refresh_every=20), True, False),
        (lambda: optax.add_decayed_weights(1.0), True, False),
    ],
)
def test_constant_sgd_says_when_the_gradient_is_another_one(front, is_foreign, fill):
    tx = optax.chain(front(), optperm.constant_sgd(N, S, fill=fill, max_step=1e-2, **SHORT))
    text, samples = said(tx)
    assert (FOREIGN in text) == is_foreign
    given, report = report_of(samples)
    assert (FOREIGN in given) == is_foreign
    assert given == " ".join(report.warnings)
    assert ((report.altered_gradients or 0.0) > 0.5) == is_foreign


SAMPLERS = [optperm.sgld, functools.partial(optperm.sghmc, friction=0.2)]
FRONTS = [
    (lambda: optax.clip_by_global_norm(TIGHT), True),
    (lambda: optax.clip_by_global_norm(1e6), False),
    (lambda: optperm.svrg(0.1, refresh_every=20), False),
    (lambda: optax.clip(TIGHT), True),
]


@pytest.mark.parametrize(("build", "front"), support.in_turns(SAMPLERS, FRONTS))
def test_langevin_dynamics_take_control_variates_and_no_clipping(build, front):
    front, is_altered = front
    tx = optax.chain(front(), build(1e-5, N))
    text, samples = said(tx)
    assert (ALTERED in text) == is_altered
    given, report = report_of(samples)
    assert given == " ".join(report.warnings)
    assert (ALTERED in given) == is_altered
    assert bool(report.altered_gradients) == is_altered


@pytest.mark.parametrize("mapping", ["vmap", "pmap", "shard_map"])
def test_replicas_compare_the_gradient_of_the_whole_batch(mapping):
    """Which has been averaged already, or has not been."""

    def foreign(x, y, limit):
        w, found = jnp.zeros(D), []
        tx = optax.chain(
            optax.clip_by_global_norm(limit),
            optperm.constant_sgd(N, S, fill=False, burn_in=1, axis_name=replicas.AXIS),
        )
        for evaluate_over in (replicas.AXIS, None):
            e = optperm.evaluate(loss_fn, w, (x, y), axis_name=evaluate_over)
            grad = e.grad if evaluate_over else jax.lax.pmean(e.grad, replicas.AXIS)
            found.append(tx.update(grad, tx.init(w), w, **e.extra_args)[1][1][0].foreign)
        return jnp.stack(found)

    parts = [leaf[:S].reshape(4, S // 4, *leaf.shape[1:]) for leaf in data()]
    run = replicas.MAPPINGS[mapping](foreign, 4)
    for limit, is_foreign in ((TIGHT, True), (1e6, False)):
        found = run(*parts, jnp.full(4, limit))
        assert replicas.take(found, 0).tolist() == [is_foreign] * 2


def test_an_eager_update_says_so_too():
    tx = optax.chain(optax.clip(TIGHT), optperm.sgld(1e-5, N))
    w = jnp.ones(D)
    e = optperm.evaluate(loss_fn, w, tuple(leaf[:S] for leaf in data()))
    state = jax.jit(  # whose count of them is as far as to tell
        lambda state: jax.lax.fori_loop(
            0, 30, lambda _, state: tx.update(e.grad, state, w, **e.extra_args)[1], state
        )
    )(tx.init(w))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tx.update(e.grad, state, w, **e.extra_args)
    assert ALTERED in str(caught[-1].message)
    tx = optax.chain(optax.clip(TIGHT), optperm.constant_sgd(N, S, burn_in=0))
    state = tx.init(w)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for clipped in (True, False):
            front = e.grad * jnp.float32(1 if clipped else TIGHT / 100)
            extras = e.extra_args if clipped else e.extra_args | {"grad": front}
            state = tx.update(front, state, w, **extras)[1]
    # In all of the estimates, and in half of them: in one text, which Python gives once.
    foreign = [str(w.message) for w in caught if FOREIGN in str(w.message)]
    assert len(foreign) == 2
    assert len(set(foreign)) == 1


def test_microbatches_are_refused_or_warned_of():
    """Inside of `optax.MultiSteps` the examples are those of the last part."""
    tx = optperm.constant_sgd(N, 2 * S, estimator="single_example", **SHORT)
    with pytest.raises(
        ValueError, match=r"batch_size is 16, but grad_fn is .* 8 .*MultiSteps.*chunk_size="
    ):
        said(optax.MultiSteps(tx, 2))
    tx = optperm.constant_sgd(N, S, estimator="single_example", **SHORT)
    assert FOREIGN in said(optax.MultiSteps(tx, 2), num_draws=100)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_never_moves_is_said_to_be_so(temperature):
    """And not to have mixed badly: at temperature 0, or where no gradient is finite."""
    spoiled = jnp.nan if temperature else 1.0

    def step(w, opt_state, key, tx=None):
        rows = spoiled * jax.random.normal(key, (S, D))
        extras = {"per_example_grad_fn": lambda w: rows, "grad_fn": lambda w: w}
        updates, opt_state = tx.update(jnp.mean(rows, axis=0), opt_state, w, **extras)
        return optax.apply_updates(w, updates), opt_state

    tx = optperm.constant_sgd(N, S, temperature=temperature, **SHORT)
    text, _ = said(tx, step=functools.partial(step, tx=tx))
    assert "R-hat" not in text
    assert text.startswith(
        "Some draws are of steps that did not" if temperature else "The temperat"
    )
    if temperature:
        tx = optperm.sgld(1e-5, N)
        text, _ = said(tx, step=functools.partial(step, tx=tx))
        assert text.startswith("No parameter has moved")


def test_the_code_that_an_error_shows_makes_what_is_missing():
    w = jnp.ones(D)
    tx = optperm.constant_sgd(N, S, estimator="single_example")
    with pytest.raises(ValueError, match=r"example_grad_fn.*batch, example=one_example\), then"):
        tx.update(w, tx.init(w), w, grad_fn=lambda w: w)
    tx = optperm.constant_sgd(N, S)
    with pytest.raises(ValueError, match=r"per_example_grad_fn.*params, batch\), then"):
        tx.update(w, tx.init(w), w, grad_fn=lambda w: w)


@pytest.mark.parametrize("estimator", ["single_example", "two_batches"])
@pytest.mark.parametrize("given", [3, 12])
def test_batches_of_another_size_are_refused(estimator, given):
    tx = optperm.constant_sgd(N, S, estimator=estimator, **SHORT)
    with pytest.raises(ValueError, match=rf"batch_size is 8, but grad_fn is that .* {given} "):
        said(tx, step=stepper(tx, given))


def test_a_full_batch_has_no_noise():
    with pytest.warns(UserWarning, match=r"batch_size is num_data, 200: .*no noise.*sgld"):
        optperm.constant_sgd(N, N)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optperm.constant_sgd(N, N - 1)


def test_steps_that_are_chosen_too_long_are_named_by_what_chose_them():
    for options in ({"learning_rate": 1000.0}, {"stability": 2.0}):
        with pytest.raises(ValueError, match="stability times learning_rate must be below 2"):
            optperm.constant_sgd(N, S, **options)
    optperm.constant_sgd(N, S, learning_rate=1000.0, fill=False)
    text, _ = said(optperm.constant_sgd(N, S, stability=1.5, preconditioner="full", **SHORT))
    assert "Lower stability or learning_rate" in text
    assert "fill=True" not in text
    rate = optax.constant_schedule(1000.0)
    with pytest.raises(ValueError, match=r"they diverge.*Lower stability or learning_rate"):
        said(optperm.constant_sgd(N, S, learning_rate=rate, preconditioner="full", **SHORT))


def test_rows_without_a_finite_loss_do_not_spoil_the_chain():
    """The default burn-in leaves their gradients out, as the steps that sample do."""

    def spoiled():
        x, y = data()
        return x, np.where(np.arange(N) == 7, np.nan, y)

    tx = optperm.constant_sgd(N, S, burn_in=400, preconditioner="full")
    step = stepper(tx, data=spoiled)
    text, samples = said(tx, step=step, warmup=400, num_draws=300, thinning=10)
    assert "not finite" not in text
    x, y = (np.delete(leaf, 7, axis=0) for leaf in data())
    exact = np.linalg.solve(x.T @ x + np.eye(D), x.T @ y)
    flat = np.asarray(samples.params).reshape(-1, D)
    np.testing.assert_allclose(flat.mean(axis=0), exact, atol=0.05)
    np.testing.assert_allclose(flat.std(axis=0), 1 / np.sqrt(N), rtol=0.25)


@pytest.mark.parametrize(
    "preconditioner", [pytest.param("scalar", marks=pytest.mark.exhaustive), "diagonal", "full"]
)
def test_correlated_noise_is_named_by_how_much_it_is(preconditioner):
    """Of ten gradients that are nearly one the variance along it is nearly twice the posterior's."""
    size = 10
    root = jnp.float32(np.linalg.cholesky(0.05 * np.eye(size) + 0.95 * np.ones((size, size))))
    hessian = root @ root.T

    def step(w, opt_state, key, tx=None):
        rows = jax.random.normal(key, (S, size)) @ root.T + (hessian @ w)[None]
        extras = {"per_example_grad_fn": lambda w: rows, "grad_fn": lambda w: hessian @ w}
        updates, opt_state = tx.update(jnp.mean(rows, axis=0), opt_state, w, **extras)
        return optax.apply_updates(w, updates), opt_state

    # Steps so short that the second bound is the one that counts.
    options = {"momentum": 0.0, "stability": 0.1, "burn_in": 500, "num_data": 1000}
    tx = optperm.constant_sgd(batch_size=S, preconditioner=preconditioner, **options)
    run = {"num_chains": 8, "warmup": 1000, "num_draws": 300, "thinning": 20}
    text, samples = said(tx, step=functools.partial(step, tx=tx), size=size, **run)
    along = np.asarray(samples.params, np.float64) @ np.ones(size) / np.sqrt(size)
    ratio = along.var() * 1000 * (0.05 + 0.95 * size)
    excess = report_of(samples)[1].noise_excess
    assert ("correlated" in text) == (preconditioner != "full")
    if preconditioner == "full":
        assert excess == pytest.approx(1.0, rel=0.15)
        assert ratio == pytest.approx(1.0, rel=0.15)
    else:
        assert excess > 1.3
        assert ratio == pytest.approx(excess, rel=0.15)


@pytest.mark.parametrize(("friction", "epsilon"), [(None, 4e-3), (0.5, 4e-3), (None, 1e-4)])
def test_the_length_of_langevin_steps_is_reported(friction, epsilon):
    """On Gaussians of one curvature the bias is known; small steps are not warned of."""
    hessian = jnp.array([1.0, 0.5])

    def step(w, opt_state, key, tx=None):
        del key
        updates, opt_state = tx.update(hessian * w, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    n, temperature = 100, 1.5
    sampler = (
        optperm.sgld(epsilon, n, temperature)
        if friction is None
        else optperm.sghmc(epsilon, n, friction, temperature)
    )
    length = epsilon * n / 2 if friction is None else epsilon * n / (2 - friction)
    text, samples = said(
        sampler,
        step=functools.partial(step, tx=sampler),
        size=2,
        num_chains=16,
        warmup=500,
        num_draws=500,
        thinning=20,
    )
    ratio = np.asarray(samples.params[..., 0], np.float64).var() * n / temperature
    exact = 1 / (1 - length / 2)
    bias = report_of(samples)[1].step_bias
    # To first order: measured against a variance that has the bias in it already.
    assert bias == pytest.approx(length / 2 / exact, rel=0.1)
    assert ("length of the steps" in text) == (bias > 0.03)
    if friction is None and bias > 0.03:
        assert ratio == pytest.approx(exact, rel=0.05)


def test_a_singular_estimate_that_leaves_the_chain_where_it_is_is_named():
    """Without filled noise a feature that is always zero has no noise, and no step."""

    def with_a_zero():
        x, y = data()
        return x * np.float32([1, 1, 0]), y

    tx = optperm.constant_sgd(N, S, preconditioner="full", fill=False, **SHORT)
    text, samples = said(tx, step=stepper(tx, data=with_a_zero))
    assert np.ptp(np.asarray(samples.params)) == 0
    assert "did not sample" in text
    assert "use fill=True" in text


def test_friction_is_needed():
    with pytest.raises(ValueError, match=r"friction must be above 0, got 0\.0"):
        optperm.sghmc(1e-3, N, 0.0)
