"""Learn the kernel of constant SGD: the noise of its gradients and the curvature near an optimum."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes._batch_order import (
    NUM_PROJECTIONS,
    count_noisy,
    judge_mean_gradient,
    judge_order,
    project,
)
from optperm.bayes._batches import Batches, batches_of_function, batches_of_rows
from optperm.bayes._chains import check_has_params
from optperm.bayes._constant_sgd import ConstantSgdState, constant_sgd
from optperm.bayes._control_variates import Anchor, check_anchors, correct_batch, find_anchors
from optperm.bayes._covariance import ESTIMATES, BatchGradients, Estimator
from optperm.bayes._diagonal_newton import diagonal_newton
from optperm.bayes._faults import judge_kernel, judge_steps
from optperm.bayes._forms import FORMS, Preconditioner, inner
from optperm.bayes._kernel import NoiseKernel
from optperm.bayes._next_kernel import (
    Window,
    any_unknown,
    first_kernel,
    first_window,
    next_kernel,
    next_pass,
    next_window,
    observe,
    probing_steps,
)
from optperm.bayes._optima import search_starts
from optperm.bayes._prior import make_loss
from optperm.bayes._remainders import with_remainders
from optperm.core import checks
from optperm.core.control import when
from optperm.core.dtypes import cast_like
from optperm.core.fresh_jit import fresh_jit_once
from optperm.core.keys import key_data, make_key
from optperm.core.noise import fold
from optperm.core.shapes import Params
from optperm.core.shardings import explicit_mesh, explicit_sharding, is_spread
from optperm.core.states import find_states
from optperm.core.trees import is_function, without_variables
from optperm.evaluation import NOT_MEAN, evaluate, is_mean
from optperm.exact import apply_updates

_LARGEST_FULL = 4096
# The search takes six sixteenths of the steps, and each window a number of sixteenths. The chain stands
# still in the first two windows, whose kernels do not know the curvature yet.
_PARTS, _SEARCH, _WINDOWS, _AT_REST = 16, 6, (1, 1, 2, 2, 4), 2
# The first half of a window at rest is short passes, which find how long probes of the curvature may be.
_PASSES = 6
# If each estimate uses the gradients of many examples, an eighth of the estimates is enough.
_ESTIMATE_EVERY, _ENOUGH = 8, 1000
# The default batch size without control variates, and the limits of the size that is chosen with them.
# Smaller batches are not faster. With larger batches, the cost of a step is proportional to their size,
# so steps that are longer by the same factor gain nothing.
_BATCH_SIZE, _SMALLEST, _LARGEST = 32, 128, 512
# A function's batches are compared at rest over this many epochs, but in at most half of the steps.
_EPOCHS = 16

_NEWTON = with_remainders(diagonal_newton(), method="learn_kernel")

Loss = Callable[[Any, Any], jax.Array]
# The gradients of a batch at params: the gradient that the chain takes, whose noise is measured.
GradientsFn = Callable[[Any, Any], BatchGradients]


_NOT_FINITE = (
    "In {} of the steps of learn_kernel, some entries of the gradients were not finite. These entries "
    "were left out, so the kernel does not belong to the posterior. Remove examples with NaN or "
    "infinity."
)
_OUTSIDE = (
    "The log prior at the params that learn_kernel returns is infinite or NaN, as outside the bounds of "
    "a prior: steps ignore such bounds. Transform the parameter (m = exp(u)) and add the log of the "
    "Jacobian (u) to log_prior."
)


class _Defaults(NamedTuple):
    """The maximum momentum, c, and the maximum ratio of noises."""

    momentum: float
    stability: float
    noise_ratio: float


_WITHOUT = _Defaults(momentum=0.9, stability=0.2, noise_ratio=10.0)
# Where the noise depends on the params, its fraction is a fifth at most
_WITH_VARIATES = _Defaults(momentum=0.5, stability=0.5, noise_ratio=0.25)


class Learned(NamedTuple):
    """The kernels of chains.

    Attributes:
      kernels: A `NoiseKernel` whose leaves have an axis of chains.
      params: The last params of the chains.
      warnings: What the batches show, apart from what the kernels show.
    """

    kernels: NoiseKernel
    params: Params
    warnings: list[str]


def learn_kernel(
    loss_fn: Callable[[Any, Any], jax.Array],
    data: Any,
    params: Params,
    key: int | jax.Array,
    *,
    batch_size: int | None = None,
    num_data: int | None = None,
    full_data: Any = None,
    log_prior: Callable[[Any], jax.Array] | None = None,
    preconditioner: Preconditioner | None = None,
    estimator: Estimator = "per_example",
    momentum: float | None = None,
    stability: float | None = None,
    noise_ratio: float | None = None,
    steps: int = 8000,
    chunk_size: int | None = None,
    control_variates: bool | None = None,
) -> tuple[NoiseKernel, Params]:
    r"""Learn the kernel with which `optperm.constant_sgd` samples a posterior.

    .. math::
      W^\top C W = \operatorname{diag}(\Lambda), \qquad W^\top A W \approx I, \qquad
      a_i \ge w_i^\top A w_i

    where C is the covariance of one example's gradient and A is the Hessian of the mean loss with the
    prior, both near an optimum. With up to 4,096 params and `data` in memory, L-BFGS on all examples
    moves the params to an optimum first. Then steps scaled by each parameter's curvature
    search on batches, in three eighths of `steps`. Five windows follow, each with the kernel of the
    window before. In the first two windows, the params stand still, and the first half of each window is
    six short passes, which find how long a probe of the curvature may be. In the other windows, the
    params move as the draws will. Each window estimates :math:`C`, :math:`a_i` (Hutchinson's estimator
    in the coordinates of :math:`H^{1/2}`) and the spread of the batches' curvatures. Two further
    estimates may lower
    :math:`\rho`: the variation of the noise with the params and, if :math:`W = I`, the correlation of
    the noise. See `optperm.bayes.NoiseKernel`.

    With control variates (Baker et al.), the kernel has an anchor :math:`\theta^*`, where the search
    ended, and the gradient over all examples there. Steps use the gradient

    .. math::
      g_B(\theta) - g_B(\theta^*) + \nabla L(\theta^*)

    whose noise per example is about :math:`H_n (\theta - \theta^*)`, with the Hessian :math:`H_n` of the
    example. In a posterior, :math:`|\theta - \theta^*|^2` is proportional to 1 / N, so the number of
    steps per effective draw does not grow with N. From the third window on, C is the covariance of this
    noise along the chain. The gradient over all examples is computed
    three times, in parts. The kernel has two more trees like params.

    Args:
      loss_fn: A function `loss_fn(params, batch)`, the mean of :math:`-\log p(x_n | \theta)` over the
        examples of a batch, with or without the prior, as for `optperm.bayes.sample`. If it returns a
        pair `(sum, count)`, use sum / S in your own loop: the kernel belongs to this gradient.
      data: A tree of arrays with a leading axis of N examples. Rows are drawn at random, with
        replacement. NumPy memory maps, and other arrays that are read by `leaf[rows]`, stay on disk: at
        most 64 MB of their rows are in memory at once. Or a function `key -> batch`, which is called on
        the host, and returns S examples, drawn with replacement with the key.
      params: A point near the posterior, a tree.
      key: A random key, or an int.
      batch_size: S. None for the size of a function's batches, or for 32 without control variates. With
        control variates, None is for the smallest power of two from 128 to 512 at which the noise that
        they leave shortens no step, :math:`S \ge \frac{c N}{2} (1 + 1 / \rho) \max_i \Lambda_i / a_i`
        with the maximum :math:`\rho`, after the third window, in which the chain moves with its longest
        steps. Up to this S, steps are proportional to S.
      num_data: N; None for the number of rows. Needed if `data` is a function, unless `full_data` are
        arrays.
      full_data: All examples, if `data` is a function: a tree of arrays or memory maps, or an iterable
        of batches that starts again, such as a list. Control variates need the gradient over all
        examples. Arrays in memory are also searched by L-BFGS.
      log_prior: A function `log_prior(params)`, the number :math:`\log p(\theta)` up to a constant; None
        if `loss_fn` includes the prior.
      preconditioner: "full", "diagonal" (:math:`W = I`) or "scalar" (one h). None for "full" up to 4,096
        params, and for "diagonal" above.
      estimator: The estimator of C: "per_example", from the gradients of the batch's examples;
        "single_example", from one further example; or "two_batches", from the two halves of a batch, for
        losses that mix examples.
      momentum: :math:`\mu`, in [0, 1). None for :math:`(S - 1) / (S + 1)`, but at most 0.5 with control
        variates, and 0.9 without. At the same stability, momentum makes steps
        :math:`(1 + \mu) / (1 - \mu)` times as long.
      stability: c, in (0, 2), the maximum eigenvalue of :math:`H A (1 - \mu) / (1 + \mu)`. None for 0.5
        with control variates, and 0.2 without. On a quadratic, a fraction :math:`\varphi` of noise from
        the batches makes variances too large by :math:`\varphi c / (2 - c)`, and injected noise changes
        no variance.
      noise_ratio: The maximum of :math:`\rho`, the ratio of the batches' noise to the injected noise.
        None for 0.25 with control variates, and 10 without.
      steps: The number of steps of the search on batches and of the windows, at least 16.
      chunk_size: The number of per-example gradients held in memory at once. None for a million entries
        in total, but at least 8 gradients.
      control_variates: Whether the kernel has control variates. None for True, but False if `data` is a
        function without `full_data`, or if the estimator is "two_batches".

    Returns:
      The `NoiseKernel`, a tree of arrays that Orbax and pickle can save, and the params at which
      sampling may start, a tree like `params`.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> x = jax.random.normal(jax.random.key(0), (1000, 2))
      >>> y = x @ jnp.array([1.0, 2.0]) + jax.random.normal(jax.random.key(1), (1000,))
      >>> loss_fn = lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2) / 2
      >>> kernel, w = optperm.bayes.learn_kernel(
      ...     loss_fn, (x, y), jnp.zeros(2), key=0, batch_size=10, steps=2000
      ... )
      >>> W = kernel.basis.w  # W^T A W = I, with the Hessian A = x^T x / N
      >>> bool(jnp.allclose(W.T @ (x.T @ x / 1000) @ W, jnp.eye(2), atol=0.2))
      True
      >>> bool(kernel.noise_left < 0.05)  # the fraction of the noise that control variates leave
      True

    Notes:
      The loss must be a mean over examples. A loss that sums examples, or mixes them as BatchNorm does,
      has different noise. Before the first step, the loss of a batch is compared with the losses of its
      halves. A function's batches are compared with each other at fixed params: chunks of
      the data make draws too wide, and shuffled epochs make draws too narrow.

      The diagonal and scalar preconditioners take shorter steps if the noise is more correlated. They
      keep all variances within a fifth of the posterior's, or warn. With correlated features, they need
      many steps. With D params, the full preconditioner needs two D x D matrices and, at the end of each
      window, one decomposition.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, if there are fewer examples than `batch_size`, if
        `num_data` is missing or wrong, or if no batch has shown finite gradients and a curvature.

    Warns:
      UserWarning: If the loss is not a mean over examples, if the order of a function's batches changes
        their noise, if their mean gradient contradicts `full_data`, if gradients are not finite, if the
        log prior at the returned params is not finite, or if draws with this kernel would not follow the
        posterior.

    References:
      Mandt, Hoffman and Blei, `Stochastic Gradient Descent as Approximate Bayesian Inference
      <https://arxiv.org/abs/1704.04289>`_, JMLR 2017

      Baker, Fearnhead, Fox and Nemeth, `Control Variates for Stochastic Gradient MCMC
      <https://arxiv.org/abs/1706.05439>`_, Statistics and Computing 2019
    """
    check_learning(
        key,
        batch_size,
        num_data,
        preconditioner,
        estimator,
        momentum,
        stability,
        noise_ratio,
        steps,
        chunk_size,
        control_variates,
    )
    params = without_variables(params)
    check_has_params(params)
    checks.check_real_floating("params", params)
    typed = make_key(key)
    with explicit_mesh(data, params):
        num_apart = 1 if estimator == "single_example" else 0
        batches = batches_of(
            data, num_data, batch_size, params, num_apart=num_apart, full_data=full_data,
            has_variates=control_variates is not False and estimator != "two_batches",
        )  # fmt: skip
        first, _ = batches.split(batches.one(typed))
        loss = make_loss(loss_fn, params, first, num_data=batches.num_data, log_prior=log_prior)
        if not is_mean(loss, params, first):
            warnings.warn(NOT_MEAN, stacklevel=2)
        stacked = jax.tree.map(lambda p: jnp.asarray(p)[None], params)
        if batches.all_rows is not None:
            stacked = search_starts(loss, stacked, batches.all_rows)
        found = learn_kernels(
            loss, batches, stacked, typed[None], preconditioner=preconditioner, estimator=estimator,
            momentum=momentum, stability=stability, noise_ratio=noise_ratio, steps=steps,
            chunk_size=chunk_size, control_variates=control_variates,
            is_searched=batches.all_rows is not None,
            chooses_size=batch_size is None and not batches.is_function,
        )  # fmt: skip
    kernel, last = jax.tree.map(lambda leaf: leaf[0], (found.kernels, found.params))
    check_learned(kernel)
    if log_prior is not None and not np.isfinite(log_prior(last)):
        warnings.warn(_OUTSIDE, stacklevel=2)
    said = judge_steps(kernel, 1) + judge_kernel(kernel)
    for text in found.warnings + said:
        warnings.warn(text, stacklevel=2)
    return kernel, last


def choose_variates(
    control_variates: bool | None, batches: Batches, estimator: Estimator = "per_example"
) -> bool:
    """Return whether kernels have control variates; for None, choose it by the data.

    Raises:
      ValueError: If there is no gradient over all examples.
    """
    if control_variates and not batches.knows_all:
        raise ValueError(
            "control_variates=True needs the gradient over all examples: pass full_data, or data as "
            "arrays, or control_variates=False."
        )
    if control_variates and estimator == "two_batches":
        raise ValueError(
            "control_variates=True needs a mean over examples, but estimator='two_batches' is for "
            "losses that mix examples: pass control_variates=False, or another estimator."
        )
    if control_variates is None:
        return batches.knows_all and estimator != "two_batches"
    return control_variates


def choose_form(preconditioner: Preconditioner | None, params: Params) -> Preconditioner:
    """Return the preconditioner; for None, choose it by the number of params."""
    is_small = optax.tree.size(params) <= _LARGEST_FULL
    return preconditioner or ("full" if is_small else "diagonal")


def check_learned(kernel: NoiseKernel) -> None:
    """Raise a ValueError unless the curvature of all kernels is known."""
    if not all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(kernel.curvature)):
        raise ValueError(
            "No kernel was learned, because no batch has shown finite gradients and a curvature: check "
            "that the loss and its gradient at the params are finite, and that the loss includes a "
            "prior. Without a prior, a model that fits its data, or a linear loss, has no optimum."
        )


def check_learning(
    key: Any,
    batch_size: Any,
    num_data: Any,
    preconditioner: Any,
    estimator: Any,
    momentum: Any,
    stability: Any,
    noise_ratio: Any,
    steps: Any,
    chunk_size: Any,
    control_variates: Any,
) -> None:
    """Raise unless the arguments of `learn_kernel` are valid."""
    checks.check_key("key", key)
    if batch_size is not None:
        checks.check_static_count("batch_size", batch_size)
    if num_data is not None:
        checks.check_static_count("num_data", num_data)
    checks.check_static_count("steps", steps, minimum=_PARTS)
    checks.check_choice("estimator", estimator, tuple(ESTIMATES))
    if stability is not None:
        checks.check_positive("stability", stability)
    if stability is not None and float(stability) >= 2:
        raise ValueError(f"stability must be below 2, got {float(stability):g}.")
    if noise_ratio is not None:
        checks.check_positive("noise_ratio", noise_ratio)
    if preconditioner is not None:
        checks.check_choice("preconditioner", preconditioner, tuple(FORMS))
    if momentum is not None:
        checks.check_decay("momentum", momentum)
    if chunk_size is not None:
        checks.check_static_count("chunk_size", chunk_size)
    if control_variates is not None:
        checks.check_flag("control_variates", control_variates)


def learn_kernels(
    loss: Loss,
    batches: Batches,
    params: Params,
    keys: jax.Array,
    *,
    preconditioner: Preconditioner | None = None,
    estimator: Estimator = "per_example",
    momentum: float | None = None,
    stability: float | None = None,
    noise_ratio: float | None = None,
    steps: int = 8000,
    chunk_size: int | None = None,
    control_variates: bool | None = None,
    is_searched: bool = False,
    chooses_size: bool = False,
) -> Learned:
    """Return a kernel for each chain, and the points at which the chains may begin to sample.

    Args:
      loss: The mean loss over a batch, with the prior.
      batches: The batches.
      params: The starts of the chains, near optima, with a leading axis of chains.
      keys: A key for each chain, (chain,).
      preconditioner: As for `learn_kernel`, as are the other arguments.
      estimator: The estimator of C.
      momentum: The momentum.
      stability: c.
      noise_ratio: The maximum ratio of noises.
      steps: The number of steps.
      chunk_size: The number of per-example gradients in memory at once.
      control_variates: Whether the kernels have control variates; None if the data allow it.
      is_searched: Whether the starts are optima, so that control variates help the search.
      chooses_size: Whether kernels with control variates choose the size of the batches, after the first
        window in which the chains move.
    """
    has_anchor = choose_variates(control_variates, batches, estimator)
    size, unit = batches.batch_size, steps // _PARTS
    form = choose_form(preconditioner, jax.tree.map(lambda leaf: leaf[0], params))
    default = _WITH_VARIATES if has_anchor else _WITHOUT
    mu = min(default.momentum, (size - 1) / (size + 1)) if momentum is None else momentum
    begin = functools.partial(
        first_kernel, preconditioner=form, num_data=batches.num_data, batch_size=size, momentum=mu,
        max_noise_ratio=default.noise_ratio if noise_ratio is None else noise_ratio,
        max_stability=default.stability if stability is None else stability,
    )  # fmt: skip
    params, split = _join(params)
    loss_of = functools.partial(_loss_of_joined, loss, split)

    programs = functools.partial(_programs, loss_of, estimator, form, steps, chunk_size)
    descend, move, stand = programs(batches)

    def run(program: Any, carry: Any, kernels: Any, phase: int, length: int) -> Any:
        own = _fold(keys, phase)
        for first, count, part in batches.parts(own, length, unit):
            places = jnp.int32(first), jnp.int32(count)
            carry = program(carry, kernels, own, part, *places)
        return carry

    find = functools.partial(find_anchors, loss_of, batches) if has_anchor else None
    params, anchors = _search(functools.partial(run, descend), find, params, unit, is_searched)
    kernels = fresh_jit_once(jax.vmap(begin))(params)._replace(anchor=anchors)
    seen = fresh_jit_once(jax.vmap(first_window))(kernels, params)
    restart, again = fresh_jit_once(jax.vmap(_restart)), fresh_jit_once(jax.vmap(next_pass))
    end = fresh_jit_once(jax.vmap(_end_window, in_axes=(0, 0, None)))
    said: list[str] = []
    resting: NoiseKernel | None = None
    left_out = jnp.zeros(len(keys), jnp.int32)
    for number, length in enumerate(_WINDOWS, start=1):
        left, short = length * unit, length * unit // (2 * _PASSES)
        for one in range(_PASSES if number <= _AT_REST else 0):
            phase = len(_WINDOWS) + 2 + number + _AT_REST * one
            carry = restart(kernels, params, seen, _fold(keys, phase))
            *_, seen = run(move, carry, kernels, phase, short)
            kernels, seen = again(kernels, seen)
            left -= short
        carry = restart(kernels, params, seen, _fold(keys, number))
        params, opt_state, seen = run(move, carry, kernels, number, left)
        left_out += find_states(opt_state, ConstantSgdState)[0].left_out
        kernels, seen = end(kernels, seen, jnp.bool_(number < _AT_REST))
        if has_anchor and number == _AT_REST:
            # The noise of the batches at rest; from here on, the noise that control variates leave
            resting = kernels
            kernels = kernels._replace(noise=optax.tree.zeros_like(kernels.noise))
        if has_anchor and chooses_size and number == _AT_REST + 1:
            # Without noise in its kernel, this window has taken the longest steps, and they were stable
            batches, kernels = _resize(batches, kernels)
            _, move, _ = programs(batches)
        if number == 1 and batches.is_function:
            at_rest = min(max(_EPOCHS * batches.num_data // size, unit), steps // 2)
            rows = jnp.zeros((len(keys), at_rest, NUM_PROJECTIONS))
            _, rows = run(stand, (params, rows), kernels, len(_WINDOWS) + 1, at_rest)
            said = _judge_batches(rows.swapaxes(0, 1), kernels, params)
    said += [_NOT_FINITE.format(int(np.max(left_out)))] if np.any(left_out) else []
    kernels = _split_kernels(kernels, resting, jax.vmap(split), form)
    return Learned(kernels, jax.vmap(split)(params), said)


def _programs(
    loss: Loss,
    estimator: Estimator,
    form: Preconditioner,
    steps: int,
    chunk_size: int | None,
    batches: Batches,
) -> list[Callable[..., Any]]:
    """Return programs for parts of the search, of a window, and of batches at fixed params."""
    size = batches.batch_size
    every = _steps_per_estimate(size, estimator, form, steps)

    def gradients(params: Any, batch: Any) -> BatchGradients:
        here, apart = batches.split(batch)
        e = evaluate(loss, params, here, example=apart)
        return BatchGradients(params, e.grad, e.extra_args, size, chunk_size, None)

    return [
        fresh_jit_once(functools.partial(_run_part, functools.partial(step, gradients), batches))
        for step in (_descend, functools.partial(_move, estimator, every), _stand)
    ]


def batches_of(
    data: Any,
    num_data: int | None,
    batch_size: int | None,
    params: Params,
    *,
    num_apart: int | None,
    full_data: Any,
    has_variates: bool,
) -> Batches:
    """Return the batches of a user's data; without a size, a function's, or a size to begin with.

    Args:
      data: As for `learn_kernel`, as are the other arguments.
      num_data: N.
      batch_size: S.
      params: The params of one chain.
      num_apart: The number of further examples that are drawn with each batch. None for one example,
        but for none with a function, unless its batches have one example.
      full_data: All examples of a function.
      has_variates: Whether there are control variates.
    """
    if is_function(data):
        return batches_of_function(
            data, num_data, batch_size, num_apart=num_apart, full_data=full_data
        )
    if full_data is not None:
        raise ValueError(
            "full_data is for a function data: arrays contain all examples themselves. Leave it out."
        )
    if batch_size is None:
        # The trace of A^-1 C of the noise H_n (theta - theta*) grows with D, for any N
        chosen = max(_SMALLEST, min(optax.tree.size(params), _LARGEST))
        checks.check_arrays("data", data)
        num_rows = checks.count_examples("data", data)
        batch_size = min(chosen if has_variates else _BATCH_SIZE, num_rows)
    # An estimate of the noise from batches of one example needs another example
    num_apart = 1 if num_apart is None else num_apart
    return batches_of_rows(data, num_data, batch_size, num_apart=num_apart)


def _judge_batches(rows: jax.Array, kernels: NoiseKernel, params: Params) -> list[str]:
    """Return warnings about the order of a function's batches, and about their mean gradient.

    Args:
      rows: Projections of gradients at the params, (step, chain, 64).
      kernels: The kernels, whose anchors are at the params.
      params: The params.
    """
    said = judge_order(rows, jax.vmap(count_noisy)(kernels, params))
    if said or not kernels.anchor:
        return said
    return judge_mean_gradient(rows, jax.vmap(project)(kernels, kernels.anchor.full_grad))


def _resize(batches: Batches, kernels: NoiseKernel) -> tuple[Batches, NoiseKernel]:
    """Return batches of the smallest power of two at which their noise shortens no step."""
    ratios = jax.vmap(lambda k: k.noise_over_stability(k.scale(), k.max_stability))(kernels)
    wanted = batches.batch_size * max(float(jnp.max(ratios)), 1e-3)
    size = min(max(_SMALLEST, min(2 ** math.ceil(math.log2(wanted)), _LARGEST)), batches.num_data)
    assert batches.resize is not None
    return batches.resize(size), kernels._replace(
        batch_size=jnp.full_like(kernels.batch_size, size)
    )


def _search(
    run: Callable[..., Any],
    find: Callable[[Any], Any] | None,
    params: Params,
    unit: int,
    is_searched: bool,
) -> tuple[Params, Any]:
    """Return the params after the search on batches, and their anchors; () if there is no `find`."""
    states = fresh_jit_once(jax.vmap(_NEWTON.init))(params)
    if find is None:
        params, _ = run((params, states), (), 0, _SEARCH * unit)
        return params, ()
    # Far from an optimum, control variates would add noise
    weights = jnp.full(len(jax.tree.leaves(params)[0]), float(is_searched))
    for phase, length in ((0, _SEARCH - _SEARCH // 3), (len(_WINDOWS) + 2, _SEARCH // 3)):
        kernels = find(params), weights
        params, states = run((params, states), kernels, phase, length * unit)
        weights = jnp.ones_like(weights)
    return params, check_anchors(find(params))


def _split_kernels(
    kernels: NoiseKernel, resting: NoiseKernel | None, split: Callable[[Any], Any], form: str
) -> NoiseKernel:
    """Return kernels whose trees are those of the params.

    Kernels with anchors get the fraction of the noise at rest that control variates leave.
    """
    if resting is not None:
        left = jax.vmap(_noise_over_curvature)(kernels) / jax.vmap(_noise_over_curvature)(resting)
        anchor = Anchor(*map(split, kernels.anchor))
        kernels = kernels._replace(noise_left=left.astype(jnp.float32), anchor=anchor)
    if form != "diagonal":
        return kernels
    return kernels._replace(noise=split(kernels.noise), curvature=split(kernels.curvature))


def _join(params: Params) -> tuple[Any, Callable[[Any], Any]]:
    """Return params as one array (chain, D), and the function that returns one chain's tree.

    One array compiles in a fraction of the time of many leaves. Leaves of several dtypes, or on several
    devices, are not joined.
    """
    leaves, structure = jax.tree.flatten(params)
    is_placed = any(explicit_sharding(leaf) is not None or is_spread(leaf) for leaf in leaves)
    if is_placed or len({leaf.dtype for leaf in leaves}) > 1:
        return params, lambda one: one
    shapes = [leaf.shape[1:] for leaf in leaves]
    ends = np.cumsum([math.prod(shape) for shape in shapes])[:-1]

    def split(one: jax.Array) -> Any:
        parts = jnp.split(one, ends)
        return jax.tree.unflatten(
            structure, [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        )

    return jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1), split


def _loss_of_joined(loss: Loss, split: Callable[[Any], Any], params: Any, batch: Any) -> jax.Array:
    return loss(split(params), batch)


def _descend(
    gradients: GradientsFn, carry: Any, kernel: Any, batch: Any, key: jax.Array, number: jax.Array
) -> Any:
    """Take a step of the search, with the control variates of an anchor and a weight, or without ()."""
    del key, number
    params, opt_state = carry
    found = gradients(params, batch)
    if kernel:
        found = correct_batch(found, *kernel)
    updates, opt_state = _NEWTON.update(found.grad, opt_state, params, **found.extras)
    return apply_updates(params, updates, opt_state), opt_state


def _move(
    estimator: Estimator,
    every: int,
    gradients: GradientsFn,
    carry: Any,
    kernel: NoiseKernel,
    batch: Any,
    key: jax.Array,
    number: jax.Array,
) -> Any:
    """Take a step of a window, in which every so many batches are observed."""
    params, opt_state, seen = carry
    found = gradients(params, batch)
    observed = found
    if kernel.anchor:
        # At the anchor itself, control variates would leave no noise
        moves = jnp.logical_not(any_unknown(kernel))
        observed = correct_batch(found, kernel.anchor, moves)

    def look(seen: Window) -> Window:
        h, noise_key = probing_steps(kernel, seen.bound), fold(key_data(key), number)
        return observe(seen, kernel, observed, estimator, h, noise_key, number // every)

    # The number of the step is the same in all chains, so vmap keeps the conditional
    seen = when(number % every == 0, look, seen)
    updates, opt_state = constant_sgd(kernel).update(found.grad, opt_state, params, **found.extras)
    return apply_updates(params, updates, opt_state), opt_state, seen


def _stand(
    gradients: GradientsFn,
    carry: Any,
    kernel: NoiseKernel,
    batch: Any,
    key: jax.Array,
    number: jax.Array,
) -> Any:
    """Project the gradient of a batch at fixed params."""
    del key
    params, rows = carry
    row = project(kernel, gradients(params, batch).grad)
    return params, jax.lax.dynamic_update_index_in_dim(rows, row, number, 0)


def _restart(kernel: NoiseKernel, params: Params, seen: Window, key: jax.Array) -> Any:
    """Return the params, the sampler's state and the statistics at the start of a window."""
    return params, constant_sgd(kernel, key=key).init(params), seen


def _end_window(kernel: NoiseKernel, seen: Window, rests: jax.Array) -> tuple[NoiseKernel, Window]:
    """Return the next kernel, and the start of its window; if it rests, curvature is just a bound."""
    new = next_kernel(kernel, seen)
    start, unknown = next_window(new, seen), optax.tree.full_like(new.curvature, jnp.inf)
    curvature, bound = optax.tree.where(
        rests, (unknown, new.curvature), (new.curvature, start.bound)
    )
    return new._replace(curvature=curvature), start._replace(bound=bound)


def _run_part(
    step: Callable[..., Any],
    batches: Batches,
    carry: Any,
    kernels: Any,
    keys: jax.Array,
    part: Any,
    first: jax.Array,
    count: jax.Array,
) -> Any:
    """Run all chains for a part of a window, whose number of steps is no constant of the program."""

    def take_step(number: jax.Array, carry: Any) -> Any:
        batch = batches.batch(part, keys, first, number)
        new = jax.vmap(step, in_axes=(0, 0, 0, 0, None))(carry, kernels, batch, keys, number)
        return cast_like(new, carry)

    return jax.lax.fori_loop(first, first + count, take_step, carry)


def _noise_over_curvature(kernel: NoiseKernel) -> jax.Array:
    """Return the sum of Lambda_i / a_i, about the trace of A^-1 C in any basis."""
    ratios = jax.tree.map(
        lambda noise, a: jnp.where(a > 0, noise / jnp.where(a > 0, a, 1.0), 0.0),
        kernel.noise,
        kernel.curvature,
    )
    return inner(ratios, optax.tree.ones_like(ratios))


def _fold(keys: jax.Array, number: int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, number)


def _steps_per_estimate(
    batch_size: int, estimator: Estimator, form: Preconditioner, steps: int
) -> int:
    """Return the number of steps from one estimate to the next."""
    if estimator != "per_example" or form == "full":
        return 1
    return max(1, min(batch_size // 2, steps // _ENOUGH, _ESTIMATE_EVERY))
