"""Filled noise: the exact law of its steps, and chains that sample where Mandt's steps do not."""

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
from optperm.bayes.noise_plan import plan
from optperm.contract.states import find_state

pytestmark = pytest.mark.usefixtures("lenient")
PRECONDITIONERS = ("scalar", "diagonal", "full")
N, S, D = 1000, 8, 4


@functools.cache
def regression():
    """A linear regression whose posterior is exact, with collinear features of several sizes."""
    rng = np.random.default_rng(0)
    mix = np.eye(D) + 0.5 * np.triu(rng.normal(size=(D, D)), 1)
    x = rng.normal(size=(N, D)) @ mix * np.array([1.0, 0.7, 1.5, 0.5])
    y = x @ rng.normal(size=D) + rng.normal(size=N)
    hessian = (x.T @ x + np.eye(D)) / N
    covariance = np.linalg.inv(N * hessian)
    return jnp.float32(x), jnp.float32(y), hessian, covariance @ x.T @ y, covariance


def loss_fn(w, batch):
    x, y = batch
    return 0.5 * jnp.mean((x @ w - y) ** 2) + optperm.normal_prior(w, 1.0, N)


def stepper(tx, batch_size=S, loss_fn=loss_fn):
    x, y, *_ = regression()

    def step(w, opt_state, key):
        rows = jax.random.randint(key, (batch_size + 1,), 0, N)
        batch, example = ((x[r], y[r]) for r in (rows[:-1], rows[-1:]))
        e = optperm.evaluate(loss_fn, w, batch, example=example)
        updates, opt_state = tx.update(e.grad, opt_state, w, **e.extra_args)
        return optax.apply_updates(w, updates), opt_state

    return step


def draw(tx, start=None, *, batch_size=S, step=None, **options):
    w = jnp.zeros(D) if start is None else jax.tree.map(jnp.asarray, start)
    options = {"num_chains": 4, "num_draws": 500, "thinning": 10} | options
    step = stepper(tx, batch_size) if step is None else step
    return optperm.draw_samples(step, w, tx.init(w), jax.random.key(0), **options)


def ratios_and_errors(draws):
    *_, mean, covariance = regression()
    flat, sd = np.asarray(draws, np.float64).reshape(-1, D), np.sqrt(np.diag(covariance))
    return flat.std(axis=0) / sd, np.abs(flat.mean(axis=0) - mean) / sd


@functools.cache
def warm(preconditioner, **options):
    """A state with all estimates, made at the mode."""
    options = {"burn_in": 50, "freeze_after": 100, "momentum": 0.0} | options
    options = {"burn_in_optimizer": optax.set_to_zero()} | options
    tx = optperm.constant_sgd(N, S, preconditioner=preconditioner, **options)
    step, w = stepper(tx), jnp.float32(regression()[3])

    @jax.jit
    def run(keys):
        return jax.lax.scan(lambda state, key: (step(w, state, key)[1], None), tx.init(w), keys)[0]

    return tx, run(jax.random.split(jax.random.key(0), options["freeze_after"])), w


TEMPERATURE = 1.7


def long_warm(preconditioner):
    """After so many steps that power iteration has found the eigenvalues; at another temperature."""
    return warm(preconditioner, temperature=TEMPERATURE, burn_in=1000, freeze_after=2000)


def is_noise(node):
    return isinstance(node, optperm.GradientNoiseState)


def noise_state(opt_state):
    """The one of the sampler."""
    (state,) = filter(is_noise, jax.tree.leaves(opt_state, is_leaf=is_noise))
    return state


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_each_step_has_the_noise_that_its_size_asks_for(preconditioner):
    """With the gradient's own noise of covariance C / S the updates' is (2 T / N) H, whatever b; here
    C is the one that the state holds."""
    tx, state, w = long_warm(preconditioner)
    noise = noise_state(state)
    h = np.stack([noise.preconditioned(row) for row in np.eye(D, dtype=np.float32)])
    c = {
        "scalar": lambda: float(noise.covariance) * np.eye(D),
        "diagonal": lambda: np.diag(noise.covariance),
        "full": lambda: np.asarray(noise.covariance),
    }[preconditioner]()
    b = float(noise.filling)
    np.testing.assert_allclose(
        h, 2 * S * TEMPERATURE / N * np.linalg.inv(c + b * np.eye(D)), rtol=1e-3, atol=1e-6
    )
    extras = {"per_example_grad_fn": lambda p: jnp.zeros((S, D)), "grad_fn": lambda p: p}

    @jax.jit
    @jax.vmap
    def updates(number):
        # The state is frozen; each step has noise of its own.
        at = jax.tree.map(
            lambda node: node._replace(count=5000 + number) if is_noise(node) else node,
            state,
            is_leaf=is_noise,
        )
        return tx.update(jnp.zeros(D), at, w, **extras)[0]

    number = 40_000
    found = np.cov(np.asarray(updates(jnp.arange(number)), np.float64).T)
    filled = h @ (b / S * np.eye(D)) @ h
    sizes = np.sqrt(np.outer(np.diag(filled), np.diag(filled)))
    assert np.abs((found - filled) / sizes).max() < 5 * np.sqrt(2 / number)
    np.testing.assert_allclose(
        filled + h @ c @ h / S, 2 * TEMPERATURE / N * h, rtol=1e-3, atol=1e-9
    )


@pytest.mark.parametrize("preconditioner", PRECONDITIONERS)
def test_b_is_set_by_the_largest_eigenvalues(preconditioner):
    """Of the Hessian and of the gradients' covariance, both found by power iteration."""
    hessian = regression()[2]
    x, y, *_ = regression()
    rows = (np.asarray(x) @ regression()[3] - np.asarray(y))[:, None] * np.asarray(x)
    exact_a, exact_c = (np.linalg.eigvalsh(m)[-1] for m in (hessian, np.cov(rows.T)))
    noise = noise_state(long_warm(preconditioner)[1])
    assert float(noise.curvature) == pytest.approx(exact_a, rel=0.25)
    assert float(noise.largest_noise) == pytest.approx(exact_c, rel=0.35)
    bound = 2 * S * TEMPERATURE / N * float(noise.curvature) / 0.2
    wanted = bound if preconditioner == "full" else max(bound, float(noise.largest_noise))
    assert float(noise.filling) == pytest.approx(wanted, rel=0.02)
    assert int(noise.estimates) > 0


@pytest.mark.parametrize(
    ("preconditioner", "batch_size", "momentum"),
    [
        ("full", S, None),
        ("diagonal", 32, None),
        pytest.param("full", 32, 0.0, marks=pytest.mark.exhaustive),
    ],
)
def test_unattended_chains_sample_the_posterior(preconditioner, batch_size, momentum):
    """From zero, by the defaults but for a shorter burn-in."""
    tx = optperm.constant_sgd(
        N, batch_size, preconditioner=preconditioner, momentum=momentum, burn_in=1000
    )
    samples = draw(tx, batch_size=batch_size, warmup=2000, num_draws=1500)
    ratio, error = ratios_and_errors(samples.params)
    assert ratio.min() > 0.85
    assert ratio.max() < 1.18
    assert error.max() < 0.25


# Half as long steps, by a schedule; and later steps that are shorter still.
FALLING = optax.piecewise_constant_schedule(0.5, {110: 0.25})


def test_smaller_learning_rates_and_other_bounds_keep_the_law():
    """Steps are half as long, or at most so long, or of at least so much noise: always filled up."""

    @jax.jit
    @jax.vmap
    def run(rate, max_step, damping):
        options = {"learning_rate": rate, "max_step": max_step, "damping": damping}
        return noise_state(warm.__wrapped__("full", **options)[1])

    found = run(
        jnp.array([1.0, 0.5, 1.0, 1.0]),
        jnp.array([jnp.inf, jnp.inf, 1e-3, jnp.inf]),
        jnp.array([0.0, 0.0, 0.0, 50.0]),
    )
    whole, half, short, damped = (replicas.take(found, index) for index in range(4))
    assert float(half.filling) == pytest.approx(2 * float(whole.filling), rel=1e-5)
    assert float(half.stability) == pytest.approx(0.1, rel=0.05)
    scheduled = noise_state(warm("full", learning_rate=FALLING)[1])
    np.testing.assert_allclose(scheduled.filling, half.filling, rtol=1e-5)
    # Bounds are bounds on b: no step is longer, none has less noise than it should.
    h = np.stack([short.preconditioned(row) for row in np.eye(D, dtype=np.float32)])
    assert np.linalg.eigvalsh(h).max() <= 1e-3 * (1 + 1e-5)
    c = np.asarray(short.covariance) + float(short.filling) * np.eye(D)
    np.testing.assert_allclose(h, 2 * S / N * np.linalg.inv(c), rtol=1e-3, atol=1e-7)
    assert float(damped.filling) == 50


def test_chains_have_noise_of_their_own():
    """Each chain, each start and each leaf; and a seed decides it."""
    tx = optperm.sgld(1e-4, N)

    def step(w, opt_state, key):
        del key
        updates, opt_state = tx.update(jax.tree.map(jnp.zeros_like, w), opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    w = {"a": jnp.zeros(2), "b": jnp.zeros(2)}
    run = functools.partial(optperm.draw_samples, step, num_chains=3, num_draws=2)
    one = run(w, tx.init(w), jax.random.key(0)).params
    numbers = np.concatenate([np.asarray(leaf)[:, 0].ravel() for leaf in one.values()])
    assert len(np.unique(numbers)) == len(numbers)
    other = run(w, tx.init(w), jax.random.key(1)).params
    assert not np.any(np.asarray(one["a"]) == np.asarray(other["a"]))
    # A start that was stacked from one state is taken apart too, and what goes on is left alone.
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), (w, tx.init(w)))
    again = run(*stacked, jax.random.key(0), stacked=True)
    support.assert_same_bits(again.params, one)
    seeded = optperm.sgld(1e-4, N, seed=1).init(w)
    assert not np.any(np.asarray(run(w, seeded, jax.random.key(0)).params["a"]) == one["a"])
    # In the place of a chain the copy of another one has noise of its own, and those keep theirs.
    first = run(w, tx.init(w), jax.random.key(0))
    picked = jax.tree.map(
        lambda leaf: leaf[jnp.array([0, 0, 1])], (first.last_params, first.last_opt_state)
    )
    keys = np.asarray(picked[1].key)
    after = np.asarray(run(*picked, jax.random.key(2), stacked=True).last_opt_state.key)
    np.testing.assert_array_equal(after[[0, 2]], keys[[0, 2]])
    assert np.any(after[1] != keys[1])


def test_parts_of_a_partition_draw_other_noise():
    """Two samplers of one seed, on leaves of one shape."""
    tx = optax.partition(
        {"x": optperm.sgld(1e-4, N), "y": optperm.sgld(1e-4, N)}, {"a": "x", "b": "y"}
    )
    w = {"a": jnp.zeros(3), "b": jnp.zeros(3)}
    updates, _ = tx.update(w, tx.init(w), w)
    assert not np.any(np.asarray(updates["a"]) == np.asarray(updates["b"]))


@pytest.mark.filterwarnings("ignore:Some draws are of steps that did not sample")
@pytest.mark.filterwarnings("ignore:The full preconditioner has")
@pytest.mark.parametrize(
    "preconditioner", ["diagonal", pytest.param("full", marks=pytest.mark.exhaustive)]
)
def test_a_run_in_two_parts_is_the_run_in_one(preconditioner):
    """Bit for bit, cut in the burn-in, while estimating, and frozen."""
    tx = optperm.constant_sgd(N, S, preconditioner=preconditioner, burn_in=20)
    step, w, key = stepper(tx), jnp.zeros(D), jax.random.key(0)
    run = functools.partial(optperm.draw_samples, step, key=key, num_chains=2, thinning=7)
    whole = run(w, tx.init(w), num_draws=8)
    part = run(w, tx.init(w), num_draws=2)
    for draws in (2, 4, 6):  # after 14, 28 and 42 steps
        part = run(
            part.last_params,
            part.last_opt_state,
            num_draws=2,
            stacked=True,
            first_step=part.next_step,
        )
        support.assert_same_bits(part.params, whole.params[:, draws : draws + 2])
    support.assert_same_bits(part.last_opt_state, whole.last_opt_state)


@pytest.mark.parametrize(
    ("mapping", "preconditioner"),
    [
        ("pmap", "full"),
        ("shard_map", "diagonal"),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (("vmap", "diagonal"), ("pmap", "diagonal"), ("shard_map", "full"))
        ),
    ],
)
def test_replicas_take_the_same_steps(mapping, preconditioner):
    """A batch spread over four replicas: each takes the noisy step of the whole batch."""
    x, y, *_ = regression()
    tx = optperm.constant_sgd(
        N, S, preconditioner=preconditioner, burn_in=1, freeze_after=2, axis_name=replicas.AXIS
    )
    alone = optperm.constant_sgd(N, S, preconditioner=preconditioner, burn_in=1, freeze_after=2)

    rows, w = np.arange(3 * S).reshape(3, S), np.float32(regression()[3])
    whole = loops.train(alone, w, [(x[r], y[r]) for r in rows], evaluate=loops.evaluation(loss_fn))
    whole, _ = whole[-1]
    parts = rows.reshape(3, 4, S // 4)
    averaged = loops.evaluation(loss_fn, axis_name=replicas.AXIS)
    options = {"evaluate": averaged, "apply": loops.by_addition, "how": mapping, "size": 4}
    found, _ = loops.train(tx, w, [(x[p], y[p]) for p in parts], **options)[-1]
    found = jax.device_get(found)
    for index in range(4):
        support.assert_same_bits(replicas.take(found, index), replicas.take(found, 0))
    np.testing.assert_allclose(replicas.take(found, 0), whole, rtol=1e-4, atol=1e-5)
    assert not np.allclose(whole, regression()[3], atol=1e-4)


def test_params_of_16_bits_have_a_master():
    """The draws of bfloat16 params have the variance that those of float32 have."""
    tx = optperm.constant_sgd(N, 32, preconditioner="full", burn_in=500)

    def narrow_loss(w, batch):
        return loss_fn(w.astype(jnp.float32), batch)

    start, step = jnp.zeros(D, jnp.bfloat16), stepper(tx, 32, narrow_loss)
    samples = draw(tx, start, step=step, num_draws=600, warmup=1000)
    state = samples.last_opt_state
    assert isinstance(state, optperm.MasterState)
    support.assert_same_bits(samples.last_params, state.masters.astype(jnp.bfloat16))
    assert samples.params.dtype == jnp.float32
    support.assert_same_bits(samples.params[:, -1], state.masters)
    ratio, _ = ratios_and_errors(samples.params)
    np.testing.assert_allclose(ratio, 1, rtol=0.2)


@pytest.mark.parametrize("average", [False, True])
def test_draws_of_16_bits_are_not_rounded(average):
    """Of a posterior far narrower than the spacing of bfloat16 at its mean, which is a half."""
    precision, mean = 1e4, jnp.array([100.2, -100.2])
    tx = optperm.sgld(1e-5, 1)

    def step(w, opt_state, key):
        del key
        at = {"w": opt_state.masters["w"] - mean}
        grad = jax.tree.map(lambda x: precision * x, at)
        updates, opt_state = tx.update(grad, opt_state, w)
        return optax.apply_updates(w, updates), opt_state

    w = {"w": jnp.full(2, 100.0, jnp.bfloat16) * jnp.array([1, -1], jnp.bfloat16)}
    options = {"num_draws": 2000, "warmup": 500, "thinning": 2, "average": average}
    # A gradient of a user's own would be that of the rounded params.
    with pytest.warns(UserWarning, match="neighboring numbers of bfloat16 differ"):
        samples = draw(tx, w, step=step, **options)
    draws = np.asarray(samples.params["w"], np.float64)
    assert samples.last_params["w"].dtype == jnp.bfloat16
    np.testing.assert_allclose(draws.mean(axis=(0, 1)), mean, atol=2e-3)
    # A mean of two iterates, which correlate by 1 - epsilon precision / 2, varies less by 1.25 %.
    np.testing.assert_allclose(draws.std(axis=(0, 1)) * np.sqrt(precision), 1, rtol=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_momentum_lets_less_noise_be_filled_in(momentum):
    """b = 2 S T lambda_max(A) (1 - mu) / ((1 + mu) N c): steps diverge later by so much."""
    options = {"rho": 1e9, "burn_in": 40, "freeze_after": 80}
    state = noise_state(warm("diagonal", momentum=momentum, **options)[1])
    expected = state.scale * state.curvature * (1 - momentum) / (1 + momentum) / 0.2
    assert float(state.filling) == pytest.approx(float(expected), rel=1e-5)


@jax.custom_vjp
def same(x):
    return x


@jax.custom_vjp
def halved_square(x):
    return 0.5 * x**2


same.defvjp(lambda x: (x, None), lambda _, g: (g,))
# A rule that is itself one has no forward derivative.
halved_square.defvjp(lambda x: (halved_square(x), x), lambda x, g: (g * same(x),))


@pytest.mark.parametrize("fill", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_loss_without_a_forward_derivative_has_its_curvature_by_a_difference(fill):
    """As `jax.custom_vjp` makes them: the same eigenvalues to three digits."""

    def custom_loss(w, batch):
        x, y = batch
        return jnp.mean(halved_square(x @ w - y)) + optperm.normal_prior(w, 1.0, N)

    found = []
    for loss in (loss_fn, custom_loss):
        tx = optperm.constant_sgd(N, S, fill=fill, burn_in=40, freeze_after=200)
        step, w = jax.jit(stepper(tx, loss_fn=loss)), jnp.ones(D)
        w, opt_state = stepper(tx, loss_fn=loss)(w, tx.init(w), jax.random.key(1))
        for key in jax.random.split(jax.random.key(0), 40):
            w, opt_state = step(w, opt_state, key)
        state = find_state(opt_state, optperm.GradientNoiseState, method="constant_sgd")
        found.append(float(state.curvature if fill else state.stability))
    assert found[0] > 1e-4
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_a_short_burn_in_still_leaves_enough_estimates():
    """C is not frozen after the one estimate that a burn-in of no steps would leave."""
    freezes = [
        plan(burn_in, None, None, 1, True, examples=1).freeze_after
        for burn_in in (0, 500, 1000, 4000)
    ]
    assert freezes == [1000, 1500, 2000, 8000]


@pytest.mark.parametrize(
    ("options", "every"),
    [
        ({}, 4),
        ({"freeze_after": 2100}, 2),
        ({"freeze_after": 100}, 1),
        ({"batch_size": 4}, 2),
        ({"batch_size": 2}, 1),
        ({"preconditioner": "full"}, 1),
        ({"preconditioner": "scalar"}, 4),
        ({"estimator": "single_example"}, 1),
        ({"fill": False}, 1),
        ({"estimate_every": 3}, 3),
    ],
)
def test_estimates_are_as_far_apart_as_their_examples_allow(options, every):
    """Each takes as long as two steps: where many examples tell a variance, a fourth is enough."""
    options = {"batch_size": 16, "burn_in": 20, "freeze_after": 4020, "estimate_after": 4} | options
    tx = optperm.constant_sgd(N, **options)
    rows = jax.random.normal(jax.random.key(0), (options["batch_size"], D))
    extras = {
        "per_example_grad_fn": lambda w: w + rows,
        "example_grad_fn": lambda w: w + rows[0],
        "grad_fn": lambda w: w + rows.mean(0),
    }

    def step(state, _):
        _, state = tx.update(rows.mean(0), state, jnp.zeros(D), **extras)
        return state, noise_state(state).weight

    _, weights = jax.lax.scan(step, tx.init(jnp.zeros(D)), length=20)
    changed = 1 + np.flatnonzero(np.diff(np.asarray(weights)) > 0)
    np.testing.assert_array_equal(changed, np.arange(4, 20, every)[: len(changed)])
    assert len(changed) >= 1


def test_the_mean_of_the_estimates_begins_anew_on_the_way():
    """Where the burn-in ends, and after a quarter and a half of the steps until C is constant."""
    due = plan(100, 180, estimate_after=50, estimate_every=2, fill=True, examples=1)
    ages = [int(due.age(jnp.int32(count))) for count in range(50, 180)]
    begun = [50 + index for index, age in enumerate(ages) if age == 0 and ages[index - 1] != 0]
    assert begun == [50, 100, 120, 140]
    assert max(ages) == 24
    state = noise_state(warm("diagonal", burn_in=100, freeze_after=180, estimate_every=1)[1])
    assert int(state.estimates) == 40


def test_a_full_preconditioner_follows_a_schedule_after_it_is_frozen():
    """Its factor is that of the noise which the learning rate of the step asks for."""
    tx, state, w = warm("full", learning_rate=FALLING)
    before, step = noise_state(state), jax.jit(stepper(tx))
    for key in jax.random.split(jax.random.key(1), 20):
        w, state = step(w, state, key)
    after = noise_state(state)
    # The curvature's last estimate is in it now too.
    assert float(after.filling) == pytest.approx(4 * float(before.filling), rel=0.1)
    expected = np.asarray(after.covariance) + float(after.filling) * np.eye(D)
    np.testing.assert_allclose(
        np.asarray(after.factor) @ np.asarray(after.factor).T, expected, 1e-4
    )
