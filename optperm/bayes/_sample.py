"""Sample a posterior with one call, including batches, starts and burn-in."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes._batch_noise import batch_covariance, measure_batch_noise, update_covariance
from optperm.bayes._chains import SAMPLERS, Samples, check_has_params, make_runner
from optperm.bayes._conditions import sees_gradient
from optperm.bayes._constant_sgd import ConstantSgdState, constant_sgd
from optperm.bayes._draw_samples import steps_to_learn
from optperm.bayes._kernel import NoiseKernel
from optperm.bayes._report import judge
from optperm.bayes._starts import first_starts, search_starts
from optperm.core import checks
from optperm.core.current import jit_current
from optperm.core.dtypes import all_finite
from optperm.core.keys import make_key
from optperm.core.noise import normal_like
from optperm.core.shapes import Params
from optperm.core.shardings import explicit_mesh, take_rows
from optperm.core.states import (
    SnapshotState,
    check_runs,
    find_states,
    replace_state,
    take_snapshots,
)
from optperm.core.trees import without_variables
from optperm.evaluation import (
    NOT_GRADIENT,
    NOT_MEAN,
    LossFn,
    checked_sum,
    evaluate,
    is_mean,
    num_examples,
)
from optperm.exact import apply_updates

# The number of parts of the draws; `on_draws` is called after each part.
_PARTS = 10
_BURN_IN = 1000
# The maximum number of entries whose draws are ranked; 4,000 draws take 5 ms per entry.
_MOST_RANKED = 200
_UNSEEN = (
    "In a fraction {:.2g} of the steps, the loss or the log prior was infinite or NaN, as outside the "
    "bounds of a prior, but the gradient was finite: the draws ignore such bounds. Transform the "
    "parameter (m = exp(u)) and add the log of the Jacobian (u) to log_prior."
)

# The fields of `Samples` whose conditions are checked before the first step.
_CONDITIONS = {"is_mean": NOT_MEAN, "is_gradient": NOT_GRADIENT}

Sampler = Callable[..., optax.GradientTransformation]


def sample(
    loss_fn: Callable[[Any, Any], jax.Array],
    data: Any,
    params: Params,
    key: int | jax.Array,
    *,
    log_prior: Callable[[Any], jax.Array] | None = None,
    batch_size: int = 32,
    sampler: Sampler = constant_sgd,
    num_chains: int = 4,
    num_draws: int = 1000,
    thinning: int = 20,
    burn_in: int | None = None,
    starts: Any = None,
    on_draws: Callable[[int, Any], None] | None = None,
) -> Samples:
    r"""Draw from the posterior of a model whose loss is a mean over examples.

    .. math::
      p(\theta | x) \propto p(\theta) \prod_{n = 1}^{N} p(x_n | \theta), \qquad
      L(\theta) = -\frac{1}{N} \sum_n \log p(x_n | \theta) - \frac{1}{N} \log p(\theta)

    Batches are drawn from the data with replacement. With up to 4,096 params, the chains begin in pairs
    on either side of `params`, about 2 away in each entry, and L-BFGS on all examples moves each chain
    to an optimum. After the burn-in, each chain makes a tenth of `num_draws` draws, rounded up. The
    chain is then displaced at random, by about twice the standard deviation of these draws. It makes and
    discards the same number of draws again. R-hat therefore compares chains that began too far apart
    rather than too close together. With up to 10 draws, there is no displacement.

    Before the first step, this function compares the loss of a batch with the losses of its halves, and
    the updates that the sampler gets with the gradient of the loss. A control variate before the
    sampler, as in `lambda n, s: optax.chain(optperm.svrg(), optperm.sgld(5e-4, n))`, gets a snapshot at
    the start of each chain, and another at the mean of its first tenth of the draws, which are
    discarded; `svrg` with `every` or `probability` takes further snapshots.

    This function issues the warnings of `optperm.bayes.posterior_report`. With more than 200 entries, it
    ranks the draws of only the 200 entries that have mixed least.

    Args:
      loss_fn: A function `loss_fn(params, batch)`, the mean of :math:`-\log p(x_n | \theta)` over the
        examples of a batch, with or without the prior. Of a pair `(sum, count)`, the sum alone matters:
        it is divided by the number of examples.
      data: A tree of arrays with a leading axis of N examples.
      params: A point near the posterior, a tree.
      key: A random key, or an int.
      log_prior: A function `log_prior(params)`, the number :math:`\log p(\theta)` up to a constant; None
        if `loss_fn` includes the prior. The prior must be smooth and finite everywhere: instead of a
        parameter :math:`m > 0`, sample :math:`u = \log m` with the log prior :math:`\log p(m) + u`,
        where :math:`e^u` is the Jacobian.
      batch_size: S. With 1, pass a sampler with `estimator="single_example"`.
      sampler: A function `sampler(N, S)` that returns the sampling transformation:
        `optperm.constant_sgd`, `functools.partial(optperm.constant_sgd, preconditioner="diagonal")` or
        `lambda n, s: optperm.sgld(1e-5, n)`. The sampler also gets the extra argument `full_grad_fn`,
        the gradient over all examples. A function that accepts `kernel=` is called again after the
        warm-up, and the draws are then made in a second, smaller program.
      num_chains: The number of chains.
      num_draws: The number of draws of each chain.
      thinning: The number of steps from one draw to the next.
      burn_in: The number of steps of each chain before the draws. None for the steps in which the
        sampler learns, or for 1,000 if it does not learn.
      starts: Params with a leading axis of chains, or a function from a key to params. The chains begin
        there, without a search and without a displacement.
      on_draws: A function to show progress or to write draws to disk. It is called after each tenth of
        the draws (rounded up, so at most ten times), with the number of draws so far and a tree of the
        new draws as NumPy arrays `(chain, draw, ...)`.

    Returns:
      `Samples`, whose `params` have leaves `(chain, draw, ...)`, for
      `optperm.bayes.posterior_report` and `optperm.bayes.posterior_predictive`.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> x = 3.0 + jax.random.normal(jax.random.key(0), (500,))  # the posterior: N(mean of x, 1/500)
      >>> loss_fn = lambda mean, batch: jnp.mean((batch - mean) ** 2) / 2
      >>> starts = jnp.linspace(1.0, 5.0, 4)  # one per chain; by default a search finds them
      >>> key, counts = jax.random.key(1), {"num_draws": 500, "thinning": 10}
      >>> samples = optperm.bayes.sample(
      ...     loss_fn, x, jnp.zeros(()), key, batch_size=16, starts=starts, **counts
      ... )
      >>> bool(abs(samples.params.mean() - x.mean()) < 0.01), samples.params.shape
      (True, (4, 500))
      >>> bool(abs(500 * samples.params.var() - 1) < 0.15)
      True

      Sample a parameter with bounds through a transform. Here, a rate m > 0 has the prior exp(-m), so
      :math:`\log p(m) = -m`. With :math:`m = e^u`, the log of the Jacobian adds u.

      >>> counts_of = jnp.array([2.0, 0.0, 1.0, 3.0] * 25)  # Poisson; m ~ Gamma(1 + 150, 1 + 100)
      >>> nll = lambda u, k: jnp.mean(jnp.exp(u) - k * u)
      >>> log_prior = lambda u: -jnp.exp(u) + u
      >>> samples = optperm.bayes.sample(
      ...     nll, counts_of, jnp.zeros(()), key, log_prior=log_prior, batch_size=16, **counts
      ... )
      >>> m = jnp.exp(samples.params)
      >>> bool(abs(m.mean() - 151 / 101) < 0.02), bool(abs(m.std() * 101 / 151**0.5 - 1) < 0.1)
      (True, True)

    Notes:
      If each step can use all examples, NUTS (NumPyro, BlackJAX) samples the exact posterior. Each leaf
      of `data` is indexed on the device in each step. Each call traces its functions, and compiles a
      program only if it differs from earlier programs. Another key needs no new program, unless a leaf
      of `data` has more than 2**18 entries.

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If a count is below 1, params contain no arrays, leaves of the data differ in length,
        `batch_size` exceeds the number of examples, starts do not match the params, or params are
        sharded over explicit axes of a mesh and `starts` is None.

    Warns:
      UserWarning: With the warnings of `optperm.bayes.posterior_report`. If the loss is not a mean over
        examples, or a transformation changes the gradient before the sampler, the warning comes before
        the first step.
    """
    _check_arguments(key, burn_in, batch_size, num_chains, num_draws, thinning, sampler)
    params = without_variables(params)
    check_has_params(params)
    data = jax.tree.map(jnp.asarray, data)
    num_data = checks.count_examples("data", data)
    if num_data < batch_size:
        raise ValueError(
            f"batch_size must be at most the number of examples, {num_data}, got {batch_size}."
        )
    with explicit_mesh(data, params, starts):
        tx = _make_sampler(sampler, num_data, batch_size)
        jax.eval_shape(tx.init, params)  # raises, before the search, if params cannot be sampled

        loss = _mean_over_rows(loss_fn, params, data)
        loss = loss if log_prior is None else _add_prior(loss, log_prior, num_data)
        jax.eval_shape(lambda p: evaluate(loss, p, data).value, params)  # rejects a bad loss

        keys = jax.random.split(make_key(key), 3)
        first = first_starts(params, keys[0], num_chains, starts)
        begun = first if starts is not None else search_starts(lambda p: loss(p, data), first)
        conditions = _check_conditions(tx, loss, begun, data, num_data, batch_size, keys[2])
        # The report also contains these warnings
        said = [text for name, text in _CONDITIONS.items() if conditions[name] is False]
        for text in said:
            warnings.warn(text, stacklevel=2)
        part = -(-num_draws // _PARTS)

        def chains_of(tx: optax.GradientTransformationExtraArgs) -> Callable[..., Samples]:
            step = _make_step(loss, tx, data, num_data, batch_size)
            run = make_runner(step, num_chains=num_chains, num_draws=part, stacked=True)

            def draw(params: Any, watched: Any, first_step: Any, burn_in: int = 0) -> Samples:
                counts = {"thinning": thinning, "burn_in": burn_in, "first_step": first_step}
                return run(params, watched, keys[1], **counts)

            return draw

        drawn, tx, draw = _burn_in(chains_of, sampler, tx, loss, data, batch_size, begun, burn_in)
        has_snapshots = bool(find_states(drawn.last_opt_state, SnapshotState))
        if starts is None or has_snapshots:
            # Discard as many steps again, which R-hat would otherwise count as draws. The draws before a
            # snapshot have more noise
            at = drawn.last_params if starts is not None else _displace(drawn, keys[2])
            drawn = draw(at, drawn.last_opt_state, drawn.next_step)
            watched = drawn.last_opt_state._replace(unseen=jnp.zeros(num_chains, jnp.int32))
            drawn = draw(drawn.last_params, watched, drawn.next_step)
        samples = _collect(draw, drawn, num_draws, on_draws)
        opt_state, _, unseen = samples.last_opt_state
        samples = samples._replace(starts=first, last_opt_state=opt_state, **conditions)
        if batch_size > 1:
            problem = loss, data, num_data, batch_size
            samples = measure_batch_noise(
                functools.partial(batch_covariance, *problem),
                functools.partial(update_covariance, tx, *problem),
                samples,
                batch_size,
                keys[0],
            )
        found = [x for x in judge(samples, most_ranked=_MOST_RANKED).warnings if x not in said]
        if np.any(unseen):
            steps = -(-num_draws // part) * part * thinning
            found.append(_UNSEEN.format(np.mean(unseen) / steps))
        for text in found:
            warnings.warn(text, stacklevel=2)
        return samples


def _check_arguments(
    key: Any,
    burn_in: Any,
    batch_size: Any,
    num_chains: Any,
    num_draws: Any,
    thinning: Any,
    sampler: Any,
) -> None:
    checks.check_key("key", key)
    if burn_in is not None:
        checks.check_count("burn_in", burn_in, minimum=0)
    sizes = {"batch_size": batch_size, "num_chains": num_chains, "num_draws": num_draws}
    for name, count in (sizes | {"thinning": thinning}).items():
        checks.check_static_count(name, count)
    checks.check_function(
        "sampler", sampler, "(num_data, batch_size) that returns a transformation"
    )


def _make_sampler(
    sampler: Sampler, num_data: int, batch_size: int, **options: Any
) -> optax.GradientTransformationExtraArgs:
    with warnings.catch_warnings():
        # This warning is wrong here: N examples drawn with replacement have noise
        warnings.filterwarnings("ignore", "batch_size is num_data")
        return optax.with_extra_args_support(sampler(num_data, batch_size, **options))


def _check_conditions(
    tx: optax.GradientTransformationExtraArgs,
    loss: Callable[[Any, Any], jax.Array],
    starts: Any,
    data: Any,
    num_data: int,
    batch_size: int,
    key: jax.Array,
) -> dict[str, Any]:
    """Return the fields of `Samples` for the conditions that can be checked on a batch."""
    params = jax.tree.map(lambda leaf: leaf[0], starts)
    rows = jax.random.randint(key, (max(batch_size, 2),), 0, num_data)
    batch = jax.tree.map(lambda leaf: take_rows(leaf, rows), data)
    of_size = jax.tree.map(lambda leaf: leaf[:batch_size], batch)
    return {
        "is_mean": is_mean(loss, params, batch),
        "is_gradient": sees_gradient(tx, loss, params, of_size, key),
    }


def _take_snapshots(
    loss: Callable[[Any, Any], jax.Array], data: Any, opt_state: Any, params: Any
) -> Any:
    """Return the states of chains with snapshots at the params of the chains."""

    def take(opt_state: Any, params: Any, data: Any) -> Any:
        full_grads = jax.lax.map(jax.grad(lambda p: loss(p, data)), params)
        return jax.vmap(take_snapshots)(opt_state, params, full_grads)

    return jit_current(take)(opt_state, params, data)


def _center(drawn: Samples) -> Any:
    """Return the mean of each chain's draws."""
    return jax.tree.map(
        lambda draws, p: jnp.mean(draws, axis=1).astype(p.dtype), drawn.params, drawn.last_params
    )


def _burn_in(
    chains_of: Callable[..., Callable[..., Samples]],
    sampler: Sampler,
    tx: optax.GradientTransformationExtraArgs,
    loss: Callable[[Any, Any], jax.Array],
    data: Any,
    batch_size: int,
    starts: Any,
    burn_in: int | None,
) -> tuple[Samples, optax.GradientTransformationExtraArgs, Callable[..., Samples]]:
    """Return the first part of the draws, the transformation of the next part, and its `chains_of`.

    Args:
      chains_of: The function that returns the draws of a transformation.
      sampler: The sampler.
      tx: Its transformation.
      loss: The mean loss over a batch.
      data: All examples.
      batch_size: S.
      starts: The params at which the chains begin.
      burn_in: The number of steps of the burn-in; None for the steps in which the sampler learns.
    """
    opt_state = jit_current(jax.vmap(tx.init))(starts)
    check_runs(opt_state, SAMPLERS, method="The sampler, which has its own burn_in_optimizer,")
    has_snapshots = bool(find_states(opt_state, SnapshotState))
    if has_snapshots:
        opt_state = _take_snapshots(loss, data, opt_state, starts)
    if burn_in is None:
        burn_in = steps_to_learn(opt_state) or _BURN_IN
    none = jnp.zeros(len(jax.tree.leaves(starts)[0]), jnp.int32)
    draw = chains_of(tx)
    drawn = draw(starts, _Watched(opt_state, none + burn_in, none), 0, burn_in)
    opt_state = drawn.last_opt_state.opt_state
    size = checks.count_examples("data", data)
    handed_over = _hand_over(sampler, size, batch_size, drawn.last_params, opt_state)
    if handed_over is not None:
        tx, opt_state = handed_over
        draw = chains_of(tx)
    if has_snapshots:
        # Near the mode, the snapshot leaves hardly any noise of the batches
        opt_state = _take_snapshots(loss, data, opt_state, _center(drawn))
    watched = drawn.last_opt_state._replace(opt_state=opt_state)
    return drawn._replace(last_opt_state=watched), tx, draw


def _collect(
    draw: Callable[..., Samples],
    drawn: Samples,
    num_draws: int,
    on_draws: Callable[[int, Any], None] | None,
) -> Samples:
    """Return all draws, given the first part."""
    part = -(-num_draws // _PARTS)
    parts: list[Any] = []
    for end in range(part, num_draws + part, part):
        if parts:
            drawn = draw(drawn.last_params, drawn.last_opt_state, drawn.next_step)
        here = min(part, num_draws - end + part)
        new = drawn.params, drawn.step_sizes, drawn.temperatures
        parts.append(jax.tree.map(lambda leaf, n=here: np.asarray(leaf)[:, :n], new))
        if on_draws is not None:
            on_draws(min(end, num_draws), parts[-1][0])
    params, step_sizes, temperatures = jax.tree.map(
        lambda *x: jnp.asarray(np.concatenate(x, axis=1)), *parts
    )
    return drawn._replace(params=params, step_sizes=step_sizes, temperatures=temperatures)


def _displace(drawn: Samples, key: jax.Array) -> Any:
    """Return theta + 2 sd z for each chain, where sd is the standard deviation of the chain's draws."""
    return jax.tree.map(
        lambda p, draws, z: (p + 2 * jnp.std(draws, axis=1) * z).astype(p.dtype),
        drawn.last_params,
        drawn.params,
        normal_like(jax.random.key_data(key), drawn.last_params),
    )


class _Watched(NamedTuple):
    """An optimizer state with two counters.

    Attributes:
      opt_state: The state.
      until_draws: The number of burn-in steps that are left.
      unseen: The number of steps after the burn-in with a nonfinite loss but a finite gradient.
    """

    opt_state: Any
    until_draws: jax.Array
    unseen: jax.Array


def _make_step(
    loss: Callable[[Any, Any], jax.Array],
    tx: optax.GradientTransformationExtraArgs,
    data: Any,
    num_data: int,
    batch_size: int,
) -> Callable[[Any, Any, jax.Array], tuple[Any, Any]]:
    """Return a step for `make_runner`, on a batch of the data."""

    def full_grad_fn(params: Any) -> Any:
        return jax.grad(lambda p: loss(p, data))(params)

    def step(params: Any, watched: Any, key: jax.Array) -> tuple[Any, Any]:
        rows = jax.random.randint(key, (batch_size,), 0, num_data)
        other = jax.random.randint(jax.random.fold_in(key, 1), (1,), 0, num_data)
        batch, example = (
            jax.tree.map(lambda leaf, at=at: take_rows(leaf, at), data) for at in (rows, other)
        )
        e = evaluate(loss, params, batch, example=example)
        updates, opt_state = tx.update(
            e.grad, watched.opt_state, params, full_grad_fn=full_grad_fn, **e.extra_args
        )
        # A sampler notices the bounds of a prior only in the gradient
        is_unseen = (watched.until_draws == 0) & ~jnp.isfinite(e.value) & all_finite(e.grad)
        return apply_updates(params, updates, opt_state), _Watched(
            opt_state,
            jnp.maximum(watched.until_draws - 1, 0),
            watched.unseen + is_unseen.astype(jnp.int32),
        )

    return step


def _hand_over(
    sampler: Sampler, num_data: int, batch_size: int, params: Any, opt_state: Any
) -> tuple[optax.GradientTransformationExtraArgs, Any] | None:
    """Return a sampler with the kernels of the chains, and its states.

    Return None if `sampler` does not accept `kernel=`, or if a chain has not learned a kernel.
    """
    states = find_states(opt_state, ConstantSgdState)
    if len(states) != 1 or "kernel" not in inspect.signature(sampler).parameters:
        return None
    state = states[0]
    is_learned = np.all(state.kernel.is_ready) and np.all(state.count >= state.freeze_after)
    if not (is_learned and jax.tree.leaves(state.window)):
        return None

    def make(kernel: NoiseKernel) -> optax.GradientTransformationExtraArgs:
        return _make_sampler(sampler, num_data, batch_size, kernel=kernel)

    begun = jit_current(jax.vmap(lambda kernel, params: make(kernel).init(params)))(
        state.kernel, params
    )
    tx = make(jax.tree.map(lambda leaf: leaf[0], state.kernel))
    learned = state._replace(window=())
    return tx, replace_state(begun, ConstantSgdState, learned, method="constant_sgd")


def _mean_over_rows(loss_fn: LossFn, params: Params, data: Any) -> Callable[[Any, Any], jax.Array]:
    """Return the loss, or the sum of a pair divided by the number of the batch's examples.

    N times this mean is the negative log likelihood for any counts, such as of tokens or of a mask.
    """
    pairs = list[bool]()

    def loss(params: Any, batch: Any) -> jax.Array:
        total, count, _ = checked_sum(loss_fn, params, batch, has_aux=False)
        pairs.append(count is not None)
        return total / num_examples(batch)

    jax.eval_shape(lambda p: loss(p, data), params)
    return loss if pairs[0] else loss_fn


def _add_prior(
    loss_fn: Callable[[Any, Any], jax.Array], log_prior: Callable[[Any], Any], num_data: int
) -> Callable[[Any, Any], jax.Array]:
    """Return the loss of a batch minus the log prior divided by the number of examples."""

    def loss(params: Any, batch: Any) -> jax.Array:
        log_p = log_prior(params)
        if isinstance(log_p, tuple | list | dict) or jnp.shape(log_p):
            came = jax.tree.map(jax.typeof, log_p)
            raise TypeError(f"log_prior must return a real scalar, got {came}.")
        return loss_fn(params, batch) - log_p / num_data

    return loss
