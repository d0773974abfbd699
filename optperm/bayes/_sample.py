"""Sample a posterior with one call: optima, kernels, chains and a report."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes._batch_noise import choose_draws, measure_batch_noise
from optperm.bayes._batches import Batches
from optperm.bayes._chains import (
    SAMPLERS,
    Samples,
    check_has_params,
    make_fed_runner,
    make_runner,
    numbers_of,
)
from optperm.bayes._conditions import sees_gradient
from optperm.bayes._constant_sgd import ConstantSgdState, constant_sgd
from optperm.bayes._control_variates import Anchor, anchored, full_gradients
from optperm.bayes._forms import FORMS, Preconditioner
from optperm.bayes._kernel import NoiseKernel, check_kernel
from optperm.bayes._learn_kernel import (
    batches_of,
    check_learned,
    choose_form,
    choose_variates,
    learn_kernels,
)
from optperm.bayes._mandt_sgd import MandtSgdState
from optperm.bayes._optima import first_starts, search_starts
from optperm.bayes._prior import make_loss
from optperm.bayes._remainders import wide_params
from optperm.bayes._report import judge
from optperm.bayes._resume import Progress, fingerprint
from optperm.core import checks
from optperm.core.dtypes import all_finite
from optperm.core.fresh_jit import fresh_jit
from optperm.core.keys import make_key
from optperm.core.noise import normal_like
from optperm.core.shapes import Params
from optperm.core.shardings import explicit_mesh
from optperm.core.states import SnapshotState, check_runs, find_states, take_snapshots
from optperm.core.trees import is_function, without_variables
from optperm.evaluation import NOT_GRADIENT, NOT_MEAN, evaluate, is_mean
from optperm.exact import apply_updates

# The maximum change of the full gradient at an anchor, in standard deviations of the posterior.
_MOST_CHANGE = 0.25
# The number of parts of the draws; `on_draws` is called after each part.
_PARTS = 10
# The number of examples of a function's `full_data` that are compared, if they are not in memory.
_COMPARED = 1000
# The default number of steps before the draws.
_BURN_IN = 1000
# The maximum number of entries whose draws are ranked; 4,000 draws take 5 ms per entry.
_MOST_RANKED = 200
# The maximum number of draws at which the loss is checked.
_MOST_CHECKED = 2000
_OUTSIDE = (
    "At a fraction {:.2g} of the draws, the loss or the log prior is infinite or NaN, as outside the "
    "bounds of a prior: the chains ignore such bounds. Transform the parameter (m = exp(u)) and add the "
    "log of the Jacobian (u) to log_prior."
)

# The fields of `Samples` whose conditions are checked before the first step.
_CONDITIONS = {"is_mean": NOT_MEAN, "is_gradient": NOT_GRADIENT}

Loss = Callable[[Any, Any], jax.Array]
Sampler = Callable[[int, int], optax.GradientTransformation]


def sample(
    loss_fn: Callable[[Any, Any], jax.Array],
    data: Any,
    params: Params,
    key: int | jax.Array,
    *,
    log_prior: Callable[[Any], jax.Array] | None = None,
    batch_size: int | None = None,
    num_data: int | None = None,
    full_data: Any = None,
    sampler: Sampler | None = None,
    preconditioner: Preconditioner | None = None,
    control_variates: bool | None = None,
    kernel: NoiseKernel | None = None,
    resume: Any = None,
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

    This function makes four steps, and issues the warnings of the last step:

    1. Optima: with up to 4,096 params, the chains begin in pairs on either side of `params`, about 2
       away in each entry, and L-BFGS on all examples moves each chain to an optimum.
    2. Kernels: `optperm.bayes.learn_kernel` learns the noise and the curvature near each optimum.
    3. Chains: `optperm.constant_sgd` with these kernels, or another `sampler`. Each chain makes a tenth
       of `num_draws` draws, rounded up, and is displaced at random, by about twice the standard
       deviation of these draws. It makes and discards the same number of draws again. R-hat therefore
       compares chains that began too far apart rather than too close together.
    4. Report: `optperm.bayes.posterior_report` diagnoses the draws. With more than 200 entries, it ranks
       the draws of only the 200 entries that have mixed least.

    Before the first step, this function compares the loss of a batch with the losses of its halves, and
    the updates that the sampler gets with the gradient of the loss. Another sampler with
    `control_variates=True` gets a snapshot at the start of each chain, and another at the mean of its
    first tenth of the draws, which are discarded. So does `optperm.svrg` in the sampler, as in
    `lambda n, s: optax.chain(optperm.svrg(every=1000), optperm.sgld(5e-4, n))`, which takes further
    snapshots.

    Args:
      loss_fn: A function `loss_fn(params, batch)`, the mean of :math:`-\log p(x_n | \theta)` over the
        examples of a batch, with or without the prior. Of a pair `(sum, count)`, the sum alone matters:
        it is divided by the number of examples.
      data: A tree of arrays with a leading axis of N examples, of which each batch draws S rows with
        replacement; a tree of NumPy memory maps, or of other arrays that are read by `leaf[rows]`, whose
        rows are read on the host; or a function `data(key)` that returns a batch of S examples, drawn
        with replacement. Without arrays in memory, there is no L-BFGS.
      params: A point near the posterior, a tree.
      key: A random key, or an int.
      log_prior: A function `log_prior(params)`, the number :math:`\log p(\theta)` up to a constant; None
        if `loss_fn` includes the prior. The prior must be smooth and finite everywhere: instead of a
        parameter :math:`m > 0`, sample :math:`u = \log m` with the log prior :math:`\log p(m) + u`,
        where :math:`e^u` is the Jacobian.
      batch_size: S; None for the kernel's S, or as in `optperm.bayes.learn_kernel`, for 32 with another
        sampler.
      num_data: N; None for the number of rows, or for the kernel's N. Required if `data` is a function
        without arrays as `full_data`.
      full_data: All examples, if `data` is a function; see `optperm.bayes.learn_kernel`.
      sampler: None for constant SGD, or a function `sampler(N, S)` that returns another sampling
        transformation, as `lambda n, s: optperm.sgld(1e-5, n)`. The sampler also gets the extra argument
        `full_grad_fn`, the gradient over all examples, if they are arrays in memory.
      preconditioner: The preconditioner of constant SGD; see `optperm.bayes.learn_kernel`.
      control_variates: Whether gradients have control variates, so that the number of steps per
        effective draw does not grow with N; see `optperm.bayes.learn_kernel`. None for False with
        another sampler, or if `data` is a function without `full_data`, otherwise for True.
      kernel: A kernel of `optperm.bayes.learn_kernel` for all chains, which then learn none.
      resume: A folder in which this function keeps the results of each step and of each tenth of the
        draws, as NumPy files. After the process was killed, the same call resumes there, and returns the
        same bits as an undisturbed run. None to keep nothing.
      num_chains: The number of chains.
      num_draws: The number of draws of each chain.
      thinning: The number of steps from one draw to the next.
      burn_in: The number of steps of each chain before the draws. None for 1,000, or for 0 if the chains
        learn kernels.
      starts: Params with a leading axis of chains, or a function from a key to params. The chains begin
        there, without a search and without a displacement.
      on_draws: A function to show progress or to write draws to disk. It is called after each tenth of
        the draws (rounded up, so at most ten times), with the number of draws so far and a tree of the
        new draws as NumPy arrays `(chain, draw, ...)`. With `resume`, it also gets the draws that the
        folder contains.

    Returns:
      `Samples`, whose `params` have leaves `(chain, draw, ...)`, for
      `optperm.bayes.posterior_report` and `optperm.bayes.posterior_predictive`.

    Example:
      Sample the mean m and the deviation s > 0 of normal data. A parameter with bounds needs a
      transform: with :math:`s = e^u` and the prior exp(-s), :math:`\log p(s) = -s`, and the log of the
      Jacobian adds u.

      >>> import jax, jax.numpy as jnp, optperm
      >>> x = 3.0 + 2.0 * jax.random.normal(jax.random.key(0), (500,))
      >>> nll = lambda p, x: jnp.mean((x - p["m"]) ** 2) * jnp.exp(-2 * p["u"]) / 2 + p["u"]
      >>> log_prior = lambda p: -jnp.exp(p["u"]) + p["u"]
      >>> samples = optperm.bayes.sample(
      ...     nll, x, {"m": jnp.zeros(()), "u": jnp.zeros(())}, key=1, log_prior=log_prior,
      ...     batch_size=16, num_draws=500, thinning=10,
      ... )
      >>> m, s = samples.params["m"], jnp.exp(samples.params["u"])
      >>> m.shape
      (4, 500)
      >>> bool(abs(m.mean() - x.mean()) < 0.02), bool(abs(s.mean() - x.std()) < 0.02)
      (True, True)
      >>> bool(abs(m.std() * 500**0.5 / x.std() - 1) < 0.1)  # deviations of the posterior
      True
      >>> bool(abs(s.std() * 1000**0.5 / x.std() - 1) < 0.1)
      True

    Notes:
      With few examples, NUTS (NumPyro, BlackJAX) samples the exact posterior, and may be as fast. With
      many examples, `python benchmarks/nuts.py` compares the effective draws per second.

      With `resume`, the arguments are compared with the arguments of the earlier call. Functions cannot
      be compared, so the loss of a batch at `params` is compared, and the batch of a function `data`. Of
      arrays on disk, 1,000 rows are compared.

      Each call traces its functions, and compiles a program only if it differs from earlier programs.
      Another key needs no new program, unless a leaf of `data` has more than 2**18 entries.

    Raises:
      TypeError: If an argument has the wrong type.
      ValueError: If a count is below 1, params contain no arrays, leaves of the data differ in length,
        `batch_size` exceeds the number of examples, starts do not match the params, `kernel` belongs to
        another model, N or S, params are sharded over explicit axes of a mesh and `starts` is None, or
        the folder `resume` contains a run with other arguments or a damaged file.

    Warns:
      UserWarning: With the warnings of `optperm.bayes.learn_kernel` and of
        `optperm.bayes.posterior_report`. If the loss is not a mean over examples, or a transformation
        changes the gradient before the sampler, the warning comes before the first step.
    """
    counts = {"num_chains": num_chains, "num_draws": num_draws, "thinning": thinning}
    _check_arguments(
        key, burn_in, batch_size, num_data, counts, sampler,
        {"kernel": kernel, "preconditioner": preconditioner, "control_variates": control_variates},
    )  # fmt: skip
    params = without_variables(params)
    check_has_params(params)
    if kernel is not None:
        check_kernel(kernel, params, preconditioner)
        batch_size = int(kernel.batch_size) if batch_size is None else batch_size
        num_data = int(kernel.num_data) if num_data is None and is_function(data) else num_data
    with explicit_mesh(data, params, starts):
        batches = batches_of(
            data, num_data, batch_size, params, num_apart=None, full_data=full_data,
            has_variates=sampler is None and control_variates is not False,
        )  # fmt: skip
        if kernel is not None:
            check_kernel(kernel, params, batch_size=batches.batch_size, num_data=batches.num_data)
        # The step size of another sampler was chosen for the noise of the batches
        asked = control_variates if sampler is None else bool(control_variates)
        has_variates = choose_variates(asked, batches)
        tx = _make_sampler(sampler, batches, params, has_variates)
        batch, _ = batches.split(batches.one(jax.random.key(0)))
        loss = make_loss(loss_fn, params, batch, num_data=batches.num_data, log_prior=log_prior)
        _check_anchor(kernel, loss, batches)
        keys = jax.random.split(make_key(key), 4)
        problem = _Problem(loss, batches, num_chains, -(-num_draws // _PARTS), thinning, keys)
        facts: dict[str, Any] = {}
        if resume is not None:
            facts = counts | {
                "burn_in": burn_in,
                "batch_size": batch_size,
                "sampler": None if sampler is None else "a function",
                "preconditioner": preconditioner,
                "control_variates": has_variates,
                "kernel": fingerprint(kernel),
                "params": fingerprint(params),
                "starts": "a function" if is_function(starts) else fingerprint(starts),
                **_facts_of_data(problem, params, data, full_data, batch),
            }
        progress = Progress(resume, facts)

        # Optima
        first, begun = _find_optima(problem, params, starts, progress, searches=tx is None)
        conditions = _check_conditions(problem, tx, begun) | {
            "is_learned": sampler is None and kernel is None
        }
        # The report also contains these warnings
        said = [text for name, text in _CONDITIONS.items() if conditions[name] is False]
        _warn(said)

        # Kernels, and the samplers of the chains
        if tx is not None:
            tx = optax.chain(anchored(), tx) if has_variates else tx
            opt_state = fresh_jit(jax.vmap(tx.init))(begun)
            check_runs(opt_state, SAMPLERS, method="The sampler")
        else:
            kernels = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_chains), kernel)
            if kernel is None:
                kernels, begun, texts = _learn(
                    problem, begun, preconditioner, has_variates, starts is None, progress,
                    chooses_size=batch_size is None and not batches.is_function,
                )  # fmt: skip
                _warn(texts)
                problem = _resized(problem, int(kernels.batch_size[0]))
            tx = constant_sgd(jax.tree.map(lambda leaf: leaf[0], kernels))
            opt_state = fresh_jit(jax.vmap(_init_constant_sgd))(kernels, begun)

        # Chains
        steps = (0 if conditions["is_learned"] else _BURN_IN) if burn_in is None else burn_in
        chains = _Chains(problem, tx)
        begin = functools.partial(chains.begin, begun, opt_state, steps, starts is None)
        samples = _collect(
            chains, begin, chains.like(begun, opt_state), num_draws, on_draws, progress
        )

        # Report
        samples = samples._replace(starts=first, **conditions)
        if not samples.is_learned:
            samples = measure_batch_noise(tx, loss, problem.batches, samples, keys[0])
        said = [t for t in judge(samples, most_ranked=_MOST_RANKED).warnings if t not in said]
        _warn(said + _judge_bounds(problem, samples))
        return samples


def _check_takes_variates(found: Any) -> None:
    """Raise a ValueError if control variates before a sampler with this state would give wrong draws."""
    if find_states(found, MandtSgdState):
        raise ValueError(
            "control_variates=True takes the noise of the batches away, with which mandt_sgd samples: "
            "leave it out, or use sampler=None."
        )
    if find_states(found, ConstantSgdState):
        raise ValueError(
            "control_variates is for other samplers than constant_sgd, whose kernel may have control "
            "variates itself: pass kernel= instead of sampler=."
        )
    if find_states(found, SnapshotState):
        raise ValueError(
            "sampler has control variates itself, such as optperm.svrg: leave out either."
        )


def _check_anchor(kernel: NoiseKernel | None, loss: Loss, batches: Batches) -> None:
    """Raise a ValueError unless the gradient over all examples, if known, is the kernel's."""
    if kernel is None or not kernel.anchor or not batches.knows_all:
        return
    at, known = kernel.anchor
    found = full_gradients(loss, batches, jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], at))
    change = jax.tree.map(lambda new, old: new[0] - old, found, known)
    distance = float(kernel._replace(anchor=Anchor(at, change)).anchor_distance())
    if not distance <= _MOST_CHANGE:
        raise ValueError(
            "The kernel's control variates belong to other data, another loss or another prior: the "
            "gradient over all examples at their optimum has changed, which moves the posterior by "
            f"{distance:.2g} standard deviations. Learn a new kernel."
        )


def _facts_of_data(
    problem: _Problem, params: Params, data: Any, full_data: Any, batch: Any
) -> dict[str, Any]:
    """Return what a folder keeps of the data, of the key and of the loss."""
    read_all = None if full_data is None else problem.batches.read_all
    of_all = full_data if read_all is None else next(read_all(_COMPARED), None)
    return {
        "num_data": problem.batches.num_data,
        "key": np.asarray(jax.random.key_data(problem.keys[0])).tolist(),
        "data": fingerprint(batch if is_function(data) else data),
        "full_data": fingerprint(of_all),
        "place of the data": "host" if problem.batches.rows is None else "memory",
        "loss of a batch": f"{float(fresh_jit(problem.loss)(params, batch)):.4g}",
    }


def _warn(texts: list[str]) -> None:
    for text in texts:
        warnings.warn(text, stacklevel=3)


class _Problem(NamedTuple):
    """What all chains have in common.

    Attributes:
      loss: The mean loss over a batch, with the prior.
      batches: The batches.
      num_chains: The number of chains.
      part: The number of draws in a tenth.
      thinning: The number of steps from one draw to the next.
      keys: Keys for the starts, the batches of the chains, the checks, and the kernels.
    """

    loss: Loss
    batches: Batches
    num_chains: int
    part: int
    thinning: int
    keys: jax.Array


def _check_arguments(
    key: Any,
    burn_in: Any,
    batch_size: Any,
    num_data: Any,
    counts: dict[str, Any],
    sampler: Any,
    of_kernels: dict[str, Any],
) -> None:
    checks.check_key("key", key)
    if burn_in is not None:
        checks.check_count("burn_in", burn_in, minimum=0)
    for name, count in counts.items():
        checks.check_static_count(name, count)
    for name, count in (("batch_size", batch_size), ("num_data", num_data)):
        if count is not None:
            checks.check_static_count(name, count)
    if of_kernels["preconditioner"] is not None:
        checks.check_choice("preconditioner", of_kernels["preconditioner"], tuple(FORMS))
    if of_kernels["control_variates"] is not None:
        checks.check_flag("control_variates", of_kernels["control_variates"])
    if of_kernels["kernel"] is not None and of_kernels["control_variates"] is not None:
        raise ValueError(
            "control_variates is for kernels that sample learns: pass it to learn_kernel instead."
        )
    if sampler is None:
        return
    checks.check_function(
        "sampler", sampler, "(num_data, batch_size) that returns a transformation"
    )
    for name, value in of_kernels.items():
        if value is not None and name != "control_variates":
            raise ValueError(f"{name} is for sampler=None: pass it to your sampler instead.")


def _make_sampler(
    sampler: Sampler | None, batches: Batches, params: Params, has_variates: bool
) -> optax.GradientTransformationExtraArgs | None:
    """Return the sampler for N and S; raise, before the search, if it cannot sample the params."""
    if sampler is None:
        return None
    with warnings.catch_warnings():
        # This warning is wrong here: N examples drawn with replacement have noise
        warnings.filterwarnings("ignore", "batch_size is num_data")
        tx = optax.with_extra_args_support(sampler(batches.num_data, batches.batch_size))
    opt_state = jax.eval_shape(tx.init, params)
    if has_variates:
        _check_takes_variates(opt_state)
    return tx


def _find_optima(
    problem: _Problem, params: Params, starts: Any, progress: Progress, *, searches: bool
) -> tuple[Any, Any]:
    """Return the first points of the chains, and the optima that L-BFGS finds from there.

    Args:
      problem: What all chains have in common.
      params: The params.
      starts: The user's starts; None for points around the params.
      progress: The folder.
      searches: Whether chains search an optimum later if L-BFGS cannot, without data in memory.
    """
    loss, rows = problem.loss, problem.batches.all_rows
    given = starts
    if starts is None and rows is None and not searches:
        given = jax.tree.map(lambda p: jnp.stack([p] * problem.num_chains), params)
    first = first_starts(params, problem.keys[0], problem.num_chains, given)
    if starts is not None or rows is None:
        return first, first

    def search() -> tuple[Any, list[str]]:
        return search_starts(loss, first, rows), []

    return first, progress.phase("optima", search, lambda: first)[0]


def _check_conditions(
    problem: _Problem, tx: optax.GradientTransformationExtraArgs | None, starts: Any
) -> dict[str, Any]:
    """Return the fields of `Samples` for the conditions that can be checked on a batch.

    Args:
      problem: What all chains have in common.
      tx: The sampler; None for constant SGD, which gets the gradient.
      starts: The starts of the chains.
    """
    params, loss, key = jax.tree.map(lambda leaf: leaf[0], starts), problem.loss, problem.keys[2]
    rows = problem.batches.one(key)
    batch, _ = problem.batches.split(rows)
    return {
        # A mean is seen with at least two examples
        "is_mean": is_mean(loss, params, batch if problem.batches.batch_size > 1 else rows),
        "is_gradient": True if tx is None else sees_gradient(tx, loss, params, batch, key),
    }


def _init_constant_sgd(kernel: NoiseKernel, params: Params) -> Any:
    return constant_sgd(kernel).init(params)


def _learn(
    problem: _Problem,
    starts: Any,
    preconditioner: Preconditioner | None,
    has_variates: bool,
    is_searched: bool,
    progress: Progress,
    *,
    chooses_size: bool,
) -> tuple[NoiseKernel, Any, list[str]]:
    """Return a kernel for each chain, the params at which the chains begin, and warnings."""
    batches = problem.batches
    one = jax.tree.map(lambda leaf: leaf[0], starts)
    form = choose_form(preconditioner, one)

    def learn() -> tuple[Any, list[str]]:
        found = learn_kernels(
            problem.loss, batches, starts, jax.random.split(problem.keys[3], problem.num_chains),
            preconditioner=form,
            estimator="single_example" if batches.batch_size == 1 else "per_example",
            control_variates=has_variates,
            is_searched=is_searched and batches.all_rows is not None,
            chooses_size=chooses_size,
        )  # fmt: skip
        return (found.kernels, found.params), found.warnings

    def like() -> Any:
        begin = functools.partial(
            NoiseKernel.unknown, preconditioner=form, control_variates=has_variates
        )
        return jax.eval_shape(jax.vmap(begin), starts), starts

    (kernels, params), texts = progress.phase("kernels", learn, like)
    check_learned(kernels)
    return kernels, params, texts


def _resized(problem: _Problem, batch_size: int) -> _Problem:
    """Return the problem with batches of the size of the kernels."""
    batches = problem.batches
    if batches.resize is None or batches.batch_size == batch_size:
        return problem
    return problem._replace(batches=batches.resize(batch_size))


class _Chains:
    """The chains of a sampler."""

    def __init__(self, problem: _Problem, tx: optax.GradientTransformationExtraArgs) -> None:
        self.problem = problem
        batches, loss = problem.batches, problem.loss
        whole = {}
        if batches.all_rows is not None:
            whole["full_grad_fn"] = jax.grad(lambda p: loss(p, batches.all_rows))

        def take_step(params: Any, opt_state: Any, rows: Any) -> tuple[Any, Any]:
            batch, other = batches.split(rows)
            e = evaluate(loss, params, batch, example=other)
            updates, opt_state = tx.update(e.grad, opt_state, params, **whole, **e.extra_args)
            return apply_updates(params, updates, opt_state), opt_state

        def step(params: Any, opt_state: Any, key: jax.Array) -> tuple[Any, Any]:
            return take_step(params, opt_state, batches.one(key))

        sizes = {"num_chains": problem.num_chains, "num_draws": problem.part}
        self._run = (
            make_fed_runner(take_step, batches.parts, **sizes)
            if batches.rows is None
            else make_runner(step, **sizes, stacked=True)
        )

    def draw(self, params: Any, opt_state: Any, first_step: Any, burn_in: int = 0) -> Samples:
        """Return a tenth of the draws of each chain, after a burn-in."""
        thinning, key = self.problem.thinning, self.problem.keys[1]
        return self._run(
            params, opt_state, key, thinning=thinning, burn_in=burn_in, first_step=first_step
        )

    def begin(self, params: Any, opt_state: Any, burn_in: int, is_displaced: bool) -> Samples:
        """Return the first tenth of the draws.

        Args:
          params: The params of the chains.
          opt_state: The states of the chains.
          burn_in: The number of steps before the draws.
          is_displaced: Whether to displace the chains after a tenth of the draws.
        """
        has_snapshots = bool(find_states(opt_state, SnapshotState))
        if has_snapshots:
            opt_state = self._take_snapshots(opt_state, params)
        drawn = self.draw(params, opt_state, 0, burn_in)
        if not (is_displaced or has_snapshots):
            return drawn
        opt_state = drawn.last_opt_state
        if has_snapshots:
            # Near the mode, the snapshot leaves hardly any noise of the batches
            opt_state = self._take_snapshots(opt_state, _center(drawn))
        # Discard as many steps again, which R-hat would otherwise count as draws. The draws before a
        # snapshot have more noise
        at = _displace(drawn, self.problem.keys[2]) if is_displaced else drawn.last_params
        drawn = self.draw(at, opt_state, drawn.next_step)
        return self.draw(drawn.last_params, drawn.last_opt_state, drawn.next_step)

    def _take_snapshots(self, opt_state: Any, params: Any) -> Any:
        """Return the states of chains with snapshots at the params of the chains."""
        if not self.problem.batches.knows_all:
            raise ValueError(
                "A control variate needs the gradient over all examples at snapshots: pass full_data, "
                "or data as arrays, in memory or on disk."
            )
        full_grads = full_gradients(self.problem.loss, self.problem.batches, params)
        return fresh_jit(jax.vmap(take_snapshots))(opt_state, params, full_grads)

    def like(self, params: Any, opt_state: Any) -> Samples:
        """Return the shapes and dtypes of a tenth of the draws."""

        def one(params: Any, opt_state: Any) -> Any:
            draw = wide_params(params, opt_state), numbers_of(opt_state)
            return jax.tree.map(lambda x: jnp.stack([x] * self.problem.part), draw)

        draws, numbers = jax.eval_shape(jax.vmap(one), params, opt_state)
        step_sizes, temperatures = numbers or (None, None)
        count: Any = jax.ShapeDtypeStruct((), jnp.int32)
        return Samples(
            draws, params, opt_state, count, count, params,
            step_sizes=step_sizes, temperatures=temperatures,
        )  # fmt: skip


def _center(drawn: Samples) -> Any:
    """Return the mean of each chain's draws."""
    return jax.tree.map(
        lambda draws, p: jnp.mean(draws, axis=1).astype(p.dtype), drawn.params, drawn.last_params
    )


def _displace(drawn: Samples, key: jax.Array) -> Any:
    """Return theta + 2 sd z for each chain, where sd is the standard deviation of the chain's draws."""
    return jax.tree.map(
        lambda p, draws, z: (p + 2 * jnp.std(draws, axis=1) * z).astype(p.dtype),
        drawn.last_params,
        drawn.params,
        normal_like(jax.random.key_data(key), drawn.last_params),
    )


def _collect(
    chains: _Chains,
    begin: Callable[[], Samples],
    like: Samples,
    num_draws: int,
    on_draws: Callable[[int, Any], None] | None,
    progress: Progress,
) -> Samples:
    """Return all draws.

    Args:
      chains: The chains.
      begin: A function that returns the first part of the draws.
      like: The shapes and dtypes of a part.
      num_draws: The number of draws of each chain.
      on_draws: The user's function.
      progress: The folder, which may contain the first parts.
    """
    part, parts = chains.problem.part, list[Any]()
    of_draws, of_chains = _split_draws(like)
    # The states of the chains are kept only at the end of the last part
    known = progress.load("chains", (jax.ShapeDtypeStruct((), jnp.int32), of_chains))
    done, last = (0, None) if known is None else (int(known[0]), known[1])
    for number, end in enumerate(range(part, num_draws + part, part), start=1):
        name = f"draws-{number:02}"
        if number <= done:
            new = progress.load(name, of_draws)
            if new is None:
                raise ValueError(
                    f"{progress.folder}/{name}.npz is missing: pass another folder as resume=."
                )
        else:
            drawn = (
                begin()
                if last is None
                else chains.draw(last.last_params, last.last_opt_state, last.next_step)
            )
            new, last = _split_draws(drawn)
            progress.save(name, new)
            progress.save("chains", (jnp.int32(number), last))
        here = min(part, num_draws - end + part)
        parts.append(jax.tree.map(lambda leaf, n=here: np.asarray(leaf)[:, :n], new))
        if on_draws is not None:
            on_draws(min(end, num_draws), parts[-1][0])
    params, step_sizes, temperatures = jax.tree.map(
        lambda *x: jnp.asarray(np.concatenate(x, axis=1)), *parts
    )
    assert last is not None
    return last._replace(params=params, step_sizes=step_sizes, temperatures=temperatures)


def _split_draws(drawn: Samples) -> tuple[tuple[Any, Any, Any], Samples]:
    """Return the draws with their step sizes and temperatures, and the rest of the samples."""
    rest = drawn._replace(params=(), step_sizes=None, temperatures=None)
    return (drawn.params, drawn.step_sizes, drawn.temperatures), rest


def _judge_bounds(problem: _Problem, samples: Samples) -> list[str]:
    """Return a warning if the loss is not finite at some draws; samplers see only the gradient."""

    def are_outside(draws: Any, batch: Any) -> jax.Array:
        def is_outside(params: Any) -> jax.Array:
            return all_finite(params) & ~jnp.isfinite(problem.loss(params, batch))

        return jnp.mean(jax.lax.map(is_outside, draws))

    batch, _ = problem.batches.split(problem.batches.one(problem.keys[2]))
    draws, _ = choose_draws(samples.params, _MOST_CHECKED)
    fraction = float(fresh_jit(are_outside)(draws, batch))
    return [_OUTSIDE.format(fraction)] if fraction else []
