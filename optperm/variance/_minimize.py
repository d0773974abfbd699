"""Minimize a convex loss over data, with a bound on the distance from the minimum.

O. Sebbouh, N. Gazagnadou, S. Jelassi, F. Bach and R. M. Gower, "Towards closing the gap between the
theory and practice of SVRG", NeurIPS 2019; A. Gonen, F. Orabona and S. Shalev-Shwartz, "Solving Ridge
Regression using Sketched Preconditioned SVRG", ICML 2016; J. Lee, Y. Sun and M. Saunders, "Proximal
Newton-Type Methods for Minimizing Composite Functions", SIAM Journal on Optimization 24 (3), 2014.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from optperm.core import checks
from optperm.core.fresh_jit import fresh_jit
from optperm.core.keys import make_key
from optperm.core.shapes import Params
from optperm.core.shardings import can_be_seen, explicit_mesh
from optperm.evaluation import NOT_MEAN, LossFn, checked_sum, divide_sum, evaluate, is_mean
from optperm.variance._chunks import Chunks, generator, length_of, make_chunks, take_batch
from optperm.variance._curvature import (
    factor_roots,
    hessian_matrix,
    hessian_product,
    inverse_root,
    largest_eigenvalue,
    multiply_roots,
    singular_below,
)
from optperm.variance._katyusha import katyusha
from optperm.variance._minimum import Minimum, MinimumHistory, Pass
from optperm.variance._svrg import svrg, take_snapshot

Proximal = Callable[[Any], optax.GradientTransformation]

# Up to this number of params, the Hessian is a matrix, from at least so many examples and so many
# examples per param.
_DENSE, _ROWS, _ROWS_PER_PARAM = 512, 8192, 32
# Up to this number of products, the number of examples times d squared, all examples are used.
_PRODUCTS_OF_ALL = 2**26
# The same loss differs by this many roundings, from the order of its sums.
_ROUNDINGS = 1e3
# A measured eigenvalue may be too small by this factor, from the power iteration.
_TOO_SMALL = 1.1
# A loss is not convex if an eigenvalue is lower than this fraction of the largest, below zero.
_NEGATIVE = 1e-3
# A loss is small if the gap of the initial params is larger than this multiple of tol times the loss.
_SMALL = 10.0
_USED_UP = "max_passes={:g} are used up."
# A measured Hessian may be too large by this factor, from its sample and its change up to the optimum.
_SAFETY = 2.0
# The number of batches whose largest eigenvalues are measured, and the products for each eigenvalue.
_BATCHES, _PRODUCTS = 4, 8
# The number of examples whose gradients are computed at once, for the cache of the processor.
_GROUP = 4096
# With a preconditioner, SVRG needs few steps, and is not used with fewer.
_MOST_STEPS, _FEWEST_STEPS = 64, 16
# L-BFGS evaluates the stopping rule after this number of iterations.
_ITERATIONS = 5
# The number of entries of the gradients of examples from which factors of the curvature are measured.
_FACTOR_ENTRIES = 2**25
# Up to this number of condition numbers of steps per pass, Katyusha needs fewer passes than L-BFGS.
_KATYUSHA = 30
# The model of a proximal Newton step is minimized up to this fraction of the mapping's norm.
_MODEL, _MOST_MODEL_STEPS = 1e-2, 2000
# Passes without a decrease by a fifth, after which rounding is measured.
_PATIENCE, _DECREASE = 5, 0.8
# How much larger than a measured rounding error a value may be that counts as rounding.
_NOISE = 10.0


class Look(NamedTuple):
    """The objective at params w, seen from a full gradient.

    Attributes:
      value: f(w), the mean loss.
      grad: Its gradient, (d,).
      hessian: The Hessian on a sample, (d, d); (0, 0) if there are too many params.
      root: C with C C' = H^-1, (d, d) or (0, 0).
      point: The params after a proximal gradient step; w without a proximal step.
      vector: The gradient mapping, (d,).
      mapping: Its norm.
      gap: A bound on the objective at the point minus its minimum, or NaN.
      strong: The bound from the given strong convexity, or infinity.
      noise: The part of the gap, or without a gap of the mapping, that is the rounding of the point.
      smoothness: The largest eigenvalue of the Hessian of a batch, preconditioned or not.
      largest: The largest eigenvalue of the Hessian.
      lowest: The lowest eigenvalue of the scaled Hessian, relative to its largest; or NaN.
    """

    value: jax.Array
    grad: jax.Array
    hessian: jax.Array
    root: jax.Array
    point: jax.Array
    vector: jax.Array
    mapping: jax.Array
    gap: jax.Array
    strong: jax.Array
    noise: jax.Array
    smoothness: jax.Array
    largest: jax.Array
    lowest: jax.Array


@dataclasses.dataclass(frozen=True)
class Objective:
    """The sum of a mean loss of a vector w and a penalty.

    Attributes:
      loss_fn: The loss of a tree of params.
      unravel: The function from a vector to the tree.
      proximal: The function of a rate that returns the proximal step, or None.
      strong_convexity: The strong convexity of the objective, or None.
      chunks: The examples.
      size: The number of params d.
      is_dense: Whether the Hessian is a matrix.
      batch_size: The number of examples per step.
    """

    loss_fn: LossFn
    unravel: Callable[[jax.Array], Any]
    proximal: Proximal | None
    strong_convexity: float | None
    chunks: Chunks
    size: int
    is_dense: bool
    batch_size: int

    def sums(self, w: jax.Array, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Return the sum of the losses of a batch and its count, which has no gradient."""
        total, count, _ = checked_sum(self.loss_fn, self.unravel(w), batch, has_aux=False)
        size = jnp.asarray(length_of(batch), total.dtype)
        return (size * total, size) if count is None else (total, jax.lax.stop_gradient(count))

    def mean(self, w: jax.Array, batch: Any) -> jax.Array:
        """Return the mean loss of a batch."""
        total, count, _ = checked_sum(self.loss_fn, self.unravel(w), batch, has_aux=False)
        return divide_sum(total, count)

    def proximal_step(self, v: jax.Array, move: jax.Array, rate: jax.Array) -> jax.Array:
        """Return prox(v + move) for the rate, or v + move without a penalty."""
        if self.proximal is None:
            return v + move
        moved: jax.Array = optax.apply_updates(v, self.proximal_of(rate).update(move, (), v)[0])
        return moved

    def proximal_of(self, rate: jax.Array) -> optax.GradientTransformation:
        """Return the proximal step as a transformation of vectors, without a state."""
        assert self.proximal is not None
        tx = optax.with_extra_args_support(self.proximal(rate))

        def update(updates: jax.Array, params: Any) -> jax.Array:
            tree = self.unravel(params)
            return ravel_pytree(tx.update(self.unravel(updates), tx.init(tree), tree)[0])[0]

        return optax.stateless(update)

    def position(self, index: int, count: int, size: int, chunk: Any) -> int:
        """Return the start of one of `count` batches that are spread over a chunk."""
        rows = (length_of(chunk) // self.chunks.parts) - size // self.chunks.parts
        return rows * index // max(count, 1)

    def batch(self, chunk: Any, start: Any, size: int) -> Any:
        """Return a batch of a chunk."""
        return take_batch(chunk, start, size, self.chunks.parts)


def minimize(
    loss_fn: LossFn,
    data: Any,
    params: Params,
    *,
    proximal: Proximal | None = None,
    strong_convexity: float | None = None,
    tol: float = 1e-6,
    max_passes: float = 100,
    batch_size: int | None = None,
    key: int | jax.Array = 0,
    callback: Callable[[MinimumHistory], object] | None = None,
) -> Minimum:
    r"""Minimize a convex mean loss, with or without a penalty.

    .. math::
      \min_\theta F(\theta), \qquad F(\theta) = f(\theta) + h(\theta), \qquad
      f(\theta) = \frac{1}{n} \sum_{i=1}^n \ell(\theta, x_i)

    With the gradient mapping :math:`G = (\theta - \theta^+) / \eta` of the proximal gradient step
    :math:`\theta^+ = \mathrm{prox}_{\eta h}(\theta - \eta \nabla f(\theta))`, a Hessian H of f and a
    strong convexity :math:`\mu` of F, the result :math:`\theta^+` satisfies

    .. math::
      F(\theta^+) - F^* \le \tfrac12 G^T H^{-1} G, \qquad
      F(\theta^+) - F^* \le \tfrac12 \lVert G \rVert^2 \left(\tfrac1\mu + \eta\right)

    The run stops if one of the bounds is at most :math:`\text{tol} \cdot \max(1, |f|)`. Without strong
    convexity, the bounds do not exist. Then the run stops if :math:`\lVert G \rVert` is at most tol
    times its value at the start, and the gap is NaN. Without a penalty, :math:`G = \nabla f`.

    The method depends on the number of params d, the number of examples n and the measured condition
    number:

    - *preconditioned SVRG*, for d up to 512: `optperm.svrg`, the inverse Hessian of a sample, and SGD,
      for any condition number;
    - *preconditioned L-BFGS*, for d up to 512 and few examples: `optax.lbfgs` for params in which the
      first Hessian is the identity;
    - *proximal Newton*, for d up to 512 with a penalty: each step minimizes the quadratic model of f
      plus the penalty;
    - *proximal SVRG*, for more params with a penalty: `optperm.svrg`, SGD and the proximal step;
    - *SVRG*, for more params, if the data are read in chunks, or if the condition number is at most the
      number n / b of steps in a pass; `optperm.katyusha`, if it is at most 30 n / b;
    - *preconditioned L-BFGS* otherwise, where dense kernels are multiplied by the inverse root of the
      second moments of their inputs.

    Args:
      loss_fn: As in `optperm.evaluate`. `loss_fn(params, batch)` returns the scalar mean loss over the
        leading axis of the batch's leaves. With weights of examples or classes, or with padding, it
        returns the pair `(sum, count)` of the weighted losses' sum and the sum of the weights. A smooth
        penalty is part of the loss. Intercepts are params without a penalty.
      data: All examples, as a tree of arrays of shape (n, ...): an array, a tuple, or a dict. Or a list
        or another iterable of batches that starts again, such as files on disk; batches may differ in
        length. Arrays are shuffled once. Memory maps, sharded arrays and iterables are not copied, and
        keep their order: a step takes rows from 16 parts of a chunk, or from each device.
      params: The initial params, in float32 or float64; all computations are in this dtype.
      proximal: A function from a rate to the proximal step, such as
        `lambda rate: optperm.proximal(rate, l1=0.02)`, which may be masked: `optax.masked`.
      strong_convexity: :math:`\mu > 0`, the strong convexity of F, such as the weight of a penalty
        :math:`\mu |\theta|^2 / 2`, or None to measure it, for d up to 512.
      tol: The tolerance, relative to the maximum of 1 and the loss, or to the first gradient.
      max_passes: The number of passes over the examples after which the run ends. The run completes its
        pass, and up to three further passes check the result.
      batch_size: The number of examples per step, at most n. By default, about n / 100 with a
        preconditioner, and at most 500 otherwise.
      key: The random key of the shuffle and of the batches: an int or a `jax.random.key`.
      callback: A function that is called with the history after each pass, such as `print`.

    Returns:
      A `Minimum` with the params, and with `converged`, `gap`, `passes`, `seconds`, `history` and
      `method`.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> x = jax.random.normal(jax.random.key(0), (512, 3))
      >>> y = x @ jnp.array([3.0, 0.0, 1.0]) + jax.random.normal(jax.random.key(1), (512,))
      >>> loss_fn = lambda w, batch: 0.5 * jnp.mean((batch[0] @ w - batch[1]) ** 2)
      >>> lasso = lambda rate: optperm.proximal(rate, l1=0.2)
      >>> found = optperm.variance.minimize(loss_fn, (x, y), jnp.zeros(3), proximal=lasso)
      >>> found.converged, found.gap < 1e-6, [entry != 0 for entry in found.params.tolist()]
      (True, True, [True, False, True])

    Notes:
      H is measured on all examples if :math:`n d^2 \le 2^{26}`, and otherwise on a sample of 8192
      examples, or 32 per param. At the end, the bound must also hold with the H of all examples at the
      params after a Newton step. The bound is doubled, because H is not measured at the optimum.

      The result and the choice of the method do not depend on measured time. Each call traces the loss,
      so `loss_fn` sees the current values of outside variables, and compiles only new programs.

      A step that raises the loss is undone, and the rate is divided by 4. A penalty on unscaled features
      remains slow, since one rate must suit all features: the warning names the ratio of their scales.

    Raises:
      TypeError: If an argument has the wrong type, the loss is not a real scalar, or this function is
        called under `jax.jit`.
      ValueError: If an argument is out of range, params have 16 bits, arrays differ in their leading
        axis or their number between passes, the loss is not a mean, the proximal step is an optimizer,
        the strong convexity is larger than the curvature, or the loss at the initial params is not
        finite; the message names the rows that are not finite.

    Warns:
      RuntimeWarning: If the run has not converged, with the reason, such as a negative curvature or
        data that change between passes.
      UserWarning: If the loss is so small that the initial params are within the tolerance.

    References:
      Johnson and Zhang, `Accelerating Stochastic Gradient Descent using Predictive Variance Reduction
      <https://papers.nips.cc/paper/4937>`_, NeurIPS 2013

      Gonen, Orabona and Shalev-Shwartz, `Solving Ridge Regression using Sketched Preconditioned SVRG
      <https://arxiv.org/abs/1602.02350>`_, ICML 2016

      Lee, Sun and Saunders, `Proximal Newton-Type Methods for Minimizing Composite Functions
      <https://arxiv.org/abs/1206.1623>`_, 2014
    """
    begun = time.perf_counter()
    _check_arguments(
        params, data, proximal, strong_convexity, tol, max_passes, batch_size, key, callback
    )
    key = make_key(key)
    chunks = make_chunks(data, key)
    with explicit_mesh(chunks.first, params):
        w, unravel = ravel_pytree(jax.tree.map(jnp.asarray, params))
        is_dense = w.size <= _DENSE
        size = _default_batch(chunks, w.size, is_dense and proximal is None)
        objective = Objective(
            loss_fn,
            unravel,
            proximal,
            strong_convexity,
            chunks,
            w.size,
            is_dense,
            batch_size or size,
        )
        objective = dataclasses.replace(objective, batch_size=_fit_batch(objective, batch_size))
        _check_loss(objective, w)
        _check_proximal(objective, w)
        return _Run(objective, key, tol, max_passes, callback, begun).run(w)


def _check_arguments(
    params: Any,
    data: Any,
    proximal: Any,
    strong_convexity: Any,
    tol: Any,
    max_passes: Any,
    batch_size: Any,
    key: Any,
    callback: Any,
) -> None:
    if isinstance(data, Iterator):
        raise TypeError(
            "data must be a tree of arrays, or an iterable of batches that starts again, such as a "
            "list: an iterator can be used only once."
        )
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((params, data))):
        raise TypeError("minimize runs passes one after another: call it outside jax.jit.")
    if callback is not None:
        checks.check_function("callback", callback, "of the history")
    if not jax.tree.leaves(params):
        raise ValueError(f"params must contain at least one array, got {params!r}.")
    checks.check_real_floating("params", params)
    narrow = [leaf.dtype for leaf in map(jnp.asarray, jax.tree.leaves(params))]
    if any(dtype.itemsize < 4 for dtype in narrow):
        raise ValueError(f"params must have the dtype float32 or float64, got {narrow[0]}.")
    checks.check_positive("tol", tol, math.inf)
    checks.check_positive("max_passes", max_passes, math.inf)
    if strong_convexity is not None:
        checks.check_positive("strong_convexity", strong_convexity, checks.LARGEST_FLOAT32)
    if batch_size is not None:
        checks.check_static_count("batch_size", batch_size)
    checks.check_key("key", key)
    if proximal is not None:
        checks.check_function("proximal", proximal, "of a rate")
        checks.check_transformation("proximal(rate)", proximal(1.0))


def _default_batch(chunks: Chunks, d: int, is_preconditioned: bool) -> int:
    n = length_of(chunks.first)
    return max(n // 100, 8 * d) if is_preconditioned else min(max(n // 500, 16), 500)


def _fit_batch(objective: Objective, given: int | None) -> int:
    """Return the batch size as a multiple of the parts of a chunk."""
    n, parts = length_of(objective.chunks.first), objective.chunks.parts
    if given is not None and given > n:
        raise ValueError(f"data must contain at least batch_size={given} examples, got {n}.")
    size = min(objective.batch_size, n)
    return max(size // parts, 1) * parts


def _check_loss(objective: Objective, w: jax.Array) -> None:
    """Raise a ValueError if the loss has another dtype than the params, or is not a mean."""
    first, few = objective.chunks.first, objective.chunks.few
    value = jax.eval_shape(objective.mean, w, few)
    if value.dtype != w.dtype:
        raise ValueError(
            f"The loss must have the dtype {w.dtype} of params, got {value.dtype}: "
            "convert the data or the params."
        )
    if not all(map(can_be_seen, jax.tree.leaves(first))):
        return
    # A penalty that is divided by the size of the batch is a mean at zero only.
    near = w + jax.random.normal(jax.random.key(1), w.shape, w.dtype)
    point = near if np.isfinite(objective.mean(near, few)) else w
    if not is_mean(objective.loss_fn, objective.unravel(point), few):
        raise ValueError(f"loss_fn must be a mean over examples. {NOT_MEAN}")


def _check_proximal(objective: Objective, w: jax.Array) -> None:
    """Raise a ValueError if the proximal step contradicts the properties of a proximal step."""
    if objective.proximal is None:
        return

    def step(v: jax.Array, rate: float) -> jax.Array:
        return objective.proximal_step(v, jnp.zeros_like(v), jnp.asarray(rate, v.dtype))

    def step_by(u: jax.Array) -> jax.Array:
        return objective.proximal_step(w, u, jnp.ones([], w.dtype))

    # A proximal step P is firmly nonexpansive: (P(a) - P(b))' (a - b) >= |P(a) - P(b)|^2
    u = jax.random.normal(jax.random.key(2), w.shape, w.dtype) * (1 + jnp.abs(w))
    change = step_by(u) - step_by(-u)
    size = float(jnp.vdot(change, change))
    advice = (
        "proximal must be a function from a rate to the proximal step of a convex penalty, such as "
        "lambda rate: optperm.proximal(rate, l1=0.02)"
    )
    if not float(jnp.vdot(change, 2 * u)) >= (1 - 1e-3) * size:
        raise ValueError(f"{advice}, got a step in another direction, as from an optimizer.")
    # Only projections do not depend on the rate, and a second projection changes nothing.
    once = step(w + u, 1.0)
    if bool(jnp.all(once == step(w + u, 2.0**-10))) and not bool(jnp.all(step(once, 1.0) == once)):
        raise ValueError(f"{advice}, got a step that does not depend on the rate.")


class _Run:
    """One run of `minimize`."""

    def __init__(
        self,
        objective: Objective,
        key: jax.Array,
        tol: float,
        max_passes: float,
        callback: Callable[[MinimumHistory], object] | None,
        begun: float,
    ) -> None:
        self.objective, self.key, self.tol = objective, key, tol
        self.max_passes, self.callback, self.begun = max_passes, callback, begun
        self.history, self.passes, self.count = MinimumHistory(), 0.0, 0
        # The norm of the first mapping, and the lowest eigenvalue that was seen, relative to the largest
        self.first, self.lowest, self.gap = 1.0, 0.0, math.nan
        self.is_compared, self.is_changed = False, False
        # Whether a Hessian is measured on all examples
        chunks = objective.chunks
        self.has_all = not objective.is_dense or (
            chunks.is_whole and chunks.parts == 1 and length_of(chunks.first) <= _rows(objective)
        )
        self._sums = {
            has_all: fresh_jit(functools.partial(_sum_chunk, objective, has_all))
            for has_all in (False, True)
        }
        self._judge = fresh_jit(functools.partial(_judge, objective))

    def look(self, w: jax.Array) -> Look:
        """Return the look at w, from a pass over all chunks."""
        sums: Any = None
        count = 0
        for chunk in self.objective.chunks.read():
            found = self._sums[self.has_all](w, chunk)
            sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
            count += length_of(chunk)
        if self.count not in (0, count):
            raise ValueError(
                "data must contain the same examples in each pass, "
                f"got {self.count} examples, and then {count}."
            )
        self.passes, self.count = self.passes + 1, count
        start = jax.random.normal(self.key, w.shape, w.dtype)
        look: Look = self._judge(w, *sums, self.objective.chunks.first, start)
        self._check_strong_convexity(look)
        lowest = float(look.lowest)
        if not self.objective.is_dense:
            is_rounding = abs(float(look.largest)) < jnp.finfo(w.dtype).eps * abs(float(look.value))
            lowest = 0.0 if is_rounding else float(look.largest / look.smoothness)
        self.lowest = min(self.lowest, lowest)
        return look

    def _check_strong_convexity(self, look: Look) -> None:
        """Raise a ValueError if the strong convexity is larger than the curvature of the loss."""
        mu = self.objective.strong_convexity
        if mu is None or self.objective.proximal is not None:
            return
        name, measured = "largest", float(look.largest)
        if self.objective.is_dense and self.has_all:
            eigenvalues = np.linalg.eigvalsh(np.asarray(look.hessian, np.float64))
            rounding = _ROUNDINGS * float(jnp.finfo(look.grad.dtype).eps) * measured
            name, measured = "lowest", float(eigenvalues[0]) + rounding
        if mu > _TOO_SMALL * abs(measured):
            raise ValueError(
                f"strong_convexity must be at most the lowest eigenvalue of the Hessian, got {mu:g}, "
                f"and the {name} eigenvalue is at most {_TOO_SMALL * abs(measured):.2g}."
            )

    def run(self, w: jax.Array) -> Minimum:
        """Return the minimum from the start w."""
        start, look = w, self.look(w)
        self._check_start(w, look)
        self.first = float(look.mapping) or 1.0
        name, advance = _choose(self, look)
        scale, best, since, lowest = 1.0, math.inf, 0, look
        while True:
            gap, measure, limit = self._measure(look)
            self._record(look, gap)
            since = 0 if measure < _DECREASE * best else since + 1
            best = min(best, measure)
            reason = "" if measure <= limit else self._give_up(w, look, scale, since)
            if reason is not None and (again := self._look_again(w, look, is_end=not reason)):
                look, lowest, best, since = again, again, math.inf, 0
                continue
            if reason:
                break
            step: tuple[jax.Array, Look] | None = None
            if reason is not None:
                holds, step = self._check_bound(w, look)
                if holds:
                    break
                if self.passes >= self.max_passes:
                    reason = _USED_UP.format(self.max_passes)
                    break
            if step is not None:
                w, look = step
                continue
            new, used, rise = advance(w, look, scale)
            self.passes += used
            after = self.look(new)
            if not _is_worse(after, look, rise):
                w, look, scale = new, after, min(1.0, 2 * scale)
                lowest = min(lowest, look, key=lambda each: float(each.mapping))
            elif self.has_all:
                scale /= 4
            else:  # The sample of H may miss large examples.
                self.has_all = True
                look = self.look(w)
        if reason and self.objective.proximal is not None and not self.objective.is_dense:
            look = lowest
        return self._finish(name, look, reason, is_start=w is start)

    def _record(self, look: Look, gap: float) -> None:
        """Add a row to the history, and call the callback."""
        seconds = time.perf_counter() - self.begun
        self.history.add(Pass(self.passes, seconds, gap, float(look.mapping) / self.first))
        if self.callback is not None:
            self.callback(self.history)

    def _measure(self, look: Look) -> tuple[float, float, float]:
        """Return the gap, the measure of the stopping rule, and its limit."""
        gap = float(look.gap)
        if math.isnan(gap):
            return gap, float(look.mapping) / self.first, self.tol
        return gap, gap, self.tol * max(1.0, abs(float(look.value)))

    def _give_up(self, w: jax.Array, look: Look, scale: float, since: int) -> str | None:
        """Return the reason to end without convergence, or None."""
        if (since >= _PATIENCE or self.passes >= self.max_passes) and self._is_noise(w, look):
            return (
                f"{w.dtype} cannot: the gradient is its own rounding error. "
                + ("Enable x64 (jax.enable_x64)" if w.dtype == jnp.float32 else "Raise tol")
                + ", or pass a larger tol."
            )
        if self.passes >= self.max_passes:
            return _USED_UP.format(self.max_passes) + self._advise()
        if scale < 2.0**-30:
            return f"the loss rises with every rate.{self._advise()}"
        return None

    def _look_again(self, w: jax.Array, look: Look, *, is_end: bool) -> Look | None:
        """Return a look with the H of all examples at the same params, or None if it is not needed."""
        objective = self.objective
        is_sampled = not self.has_all and (objective.proximal is not None or not is_end)
        if self.is_compared or not (is_sampled or not objective.chunks.is_whole):
            return None
        self.has_all, self.is_compared = True, True
        again = self.look(w)
        self._compare(w, again, look)
        return again

    def _compare(self, w: jax.Array, new: Look, old: Look) -> None:
        """Notice data that changed between passes, from two looks at the same params up to rounding."""
        spread = abs(float(old.value)) + float(jnp.vdot(jnp.abs(w), jnp.abs(old.grad)))
        rounding = _ROUNDINGS * float(jnp.finfo(w.dtype).eps) * spread
        if abs(float(new.value) - float(old.value)) > rounding:
            self.is_changed = True

    def _check_bound(self, w: jax.Array, look: Look) -> tuple[bool, tuple[jax.Array, Look] | None]:
        """Return whether the bound holds after a Newton step, too, and this step if it is better."""
        if not self.objective.is_dense or math.isnan(float(look.gap)):
            self.gap = float(look.gap)
            return True, None
        # G' H^-1 G / 2 with the H of all examples at w - p, where p = H(w)^-1 G
        self.has_all = True
        new = w - look.root @ (look.root.T @ look.vector)
        after = self.look(new)
        bound = _SAFETY * 0.5 * float(jnp.sum(jnp.square(after.root.T @ look.vector)))
        self.gap = min(max(float(look.gap), bound), float(look.strong))
        if self.gap <= self.tol * max(1.0, abs(float(look.value))):
            return True, None
        is_step = self.objective.proximal is None and not _is_worse(after, look, 0.0)
        return False, (new, after) if is_step else None

    def _finish(self, name: str, look: Look, reason: str, *, is_start: bool) -> Minimum:
        """Return the result, with a warning that contains the reason if there is one."""
        gap = self.gap if not reason else float(look.gap)
        if self.is_changed:
            reason, gap = "the data changed between passes.", math.nan
        elif self.lowest < -_NEGATIVE:
            ratio = f"{self.lowest:.2g} times the largest"
            reason = f"the loss is not convex: the Hessian has a negative eigenvalue, {ratio}."
        if self.passes != self.history[-1].passes:
            self._record(look, gap)
        value = abs(float(look.value))
        if reason:
            relative = f"relative gradient {float(look.mapping) / self.first:.1e}"
            reached = relative if math.isnan(gap) else f"gap {gap:.1e}"
            message = f"minimize has not converged ({reached}, tol {self.tol:g}): {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=4)
        elif is_start and gap > _SMALL * self.tol * value:
            message = (
                f"The initial params are the result, since their gap {gap:.1e} is within "
                f"tol={self.tol:g}. The loss is only {value:.1e}: pass a smaller tol, such as "
                f"{self.tol * value:.0e}, or scale the loss."
            )
            warnings.warn(message, UserWarning, stacklevel=4)
        return Minimum(
            params=self.objective.unravel(look.point),
            converged=not reason,
            gap=gap,
            passes=self.passes,
            seconds=time.perf_counter() - self.begun,
            history=self.history,
            method=name,
        )

    def _check_start(self, w: jax.Array, look: Look) -> None:
        """Raise a ValueError that names rows if the loss or the gradient at the start is not finite."""
        if math.isfinite(float(look.value)) and np.isfinite(np.asarray(look.grad)).all():
            return
        first, order = 0, self.objective.chunks.order
        for chunk in self.objective.chunks.read():
            for path, leaf in jax.tree_util.tree_leaves_with_path(chunk):
                if not jnp.issubdtype(leaf.dtype, jnp.inexact) or not can_be_seen(leaf):
                    continue
                is_bad = ~np.isfinite(np.asarray(leaf)).reshape(len(leaf), -1).all(axis=1)
                rows = np.flatnonzero(is_bad)
                rows = np.sort(order[rows]) if order is not None else first + rows
                if len(rows):
                    shown = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
                    name = f"data{jax.tree_util.keystr(path)}"
                    raise ValueError(f"{name} is not finite in {len(rows)} rows: {shown}.")
            first += length_of(chunk)
        got = f"got {float(look.value)}"
        raise ValueError(f"The loss and its gradient at the initial params must be finite, {got}.")

    def _is_noise(self, w: jax.Array, look: Look) -> bool:
        """Return whether the measure is the rounding error of the gradient and of the params."""
        measure = look.mapping if math.isnan(float(look.gap)) else look.gap
        if look.noise >= measure / _NOISE:
            return True
        # The gradient at the nearest params in random directions differs by its rounding error.
        signs = jax.random.rademacher(self.key, w.shape, w.dtype)
        near = w * (1 + jnp.finfo(w.dtype).eps * signs)
        other = self.look(near)
        self._compare(w, other, look)
        error = other.grad - look.grad
        if math.isnan(float(look.gap)):
            return bool(look.mapping <= _NOISE * jnp.linalg.norm(error))
        sizes = [
            jnp.linalg.norm(look.root.T @ each if look.root.size else each)
            for each in (look.grad, error)
        ]
        return self.objective.proximal is None and bool(sizes[0] <= _NOISE * sizes[1])

    def _advise(self) -> str:
        """Return a sentence about features with different scales, or an empty string."""
        for path, leaf in jax.tree_util.tree_leaves_with_path(self.objective.chunks.first):
            if leaf.ndim < 2 or not jnp.issubdtype(leaf.dtype, jnp.floating):
                continue
            if not can_be_seen(leaf):
                continue
            few = np.asarray(leaf[:_ROWS], np.float64).reshape(min(len(leaf), _ROWS), -1)
            scales = np.sqrt(np.mean(few**2, axis=0))
            scales = scales[scales > 0]
            if len(scales) and scales.max() > 10 * scales.min():
                return (
                    f" The scales of the columns of data{jax.tree_util.keystr(path)} differ by a factor "
                    f"of {scales.max() / scales.min():.2g}: divide each column by its scale."
                )
        return ""


def _rows(objective: Objective) -> int:
    """Return the number of examples of the sample on which a Hessian is measured."""
    chunks, d = objective.chunks, objective.size
    n = length_of(chunks.first)
    if not chunks.is_whole:
        return max(n // 16, 256)
    return n if n * d**2 <= _PRODUCTS_OF_ALL else max(_ROWS, _ROWS_PER_PARAM * d)


def _sum_chunk(
    objective: Objective, has_all: bool, w: jax.Array, chunk: Any
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return the sums of losses, gradients and counts of a chunk, and of Hessians of a part or all."""
    n = length_of(chunk)
    both = jax.value_and_grad(objective.sums, has_aux=True)

    def add_hessian(batch: Any) -> tuple[jax.Array, jax.Array]:
        hessian = hessian_matrix(lambda w: objective.sums(w, batch)[0], w)
        return hessian, objective.sums(w, batch)[1]

    def add(batch: Any) -> Any:
        (total, count), grad = both(w, batch)
        return (total, grad, count), add_hessian(batch) if has_all and objective.is_dense else ()

    if objective.chunks.parts > 1 or n < 2 * _GROUP:
        sums, of_hessian = add(chunk)
    else:
        # Groups that fit the cache are read only once.
        whole = n // _GROUP * _GROUP
        groups = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, _GROUP, *leaf.shape[1:]), chunk)
        first = add(jax.tree.map(lambda leaf: leaf[whole:], chunk)) if whole < n else None
        zero, zeros = jnp.zeros([], w.dtype), jnp.zeros_like(w)
        nothing = (
            (jnp.zeros((w.size, w.size), w.dtype), zero) if has_all and objective.is_dense else ()
        )
        (sums, of_hessian), _ = jax.lax.scan(
            lambda sums, group: (jax.tree.map(jnp.add, sums, add(group)), None),
            first or ((zero, zeros, zero), nothing),
            groups,
        )
    if not objective.is_dense:
        of_hessian = jnp.zeros((0, 0), w.dtype), jnp.zeros([], w.dtype)
    elif not has_all:
        of_hessian = add_hessian(objective.batch(chunk, 0, min(_rows(objective), n)))
    return *sums, *of_hessian


def _judge(
    objective: Objective,
    w: jax.Array,
    total: jax.Array,
    grad: jax.Array,
    count: jax.Array,
    hessian: jax.Array,
    hessian_count: jax.Array,
    chunk: Any,
    start: jax.Array,
) -> Look:
    """Return the look at w from the sums over all chunks."""
    one = jnp.ones_like(count)
    value, grad = total / jnp.where(count > 0, count, one), grad / jnp.where(count > 0, count, one)
    # L, from the matrix, or from a product on many examples
    if objective.is_dense:
        hessian = hessian / jnp.where(hessian_count > 0, hessian_count, one)
        root, lowest = inverse_root(hessian)
        largest = jnp.linalg.eigvalsh(hessian)[-1]
    else:
        few = objective.batch(chunk, 0, min(_ROWS, length_of(chunk)))
        multiply = hessian_product(lambda w: objective.mean(w, few), w)
        root, lowest = hessian, jnp.full([], jnp.nan, w.dtype)
        largest = largest_eigenvalue(multiply, start, _PRODUCTS)

    # The largest eigenvalue of the Hessians of batches, C' H_B C with a preconditioner
    is_preconditioned = objective.is_dense and objective.proximal is None

    def measure(position: jax.Array) -> jax.Array:
        batch = objective.batch(chunk, position, objective.batch_size)
        multiply = hessian_product(lambda w: objective.mean(w, batch), w)
        if is_preconditioned:
            return largest_eigenvalue(lambda v: root.T @ multiply(root @ v), start, _PRODUCTS)
        return largest_eigenvalue(multiply, start, _PRODUCTS)

    size = objective.batch_size
    positions = [objective.position(i, _BATCHES - 1, size, chunk) for i in range(_BATCHES)]
    smoothness = jnp.max(jnp.abs(jax.lax.map(measure, jnp.asarray(positions))))
    smoothness = jnp.maximum(smoothness, 1.0 if is_preconditioned else jnp.abs(largest))

    # G = (w - w+) / eta with w+ = prox(w - eta grad f(w)) and eta < 1 / L
    eta = 1 / (1.3 * jnp.where(largest > 0, largest, one))
    point, mapping, rounding = w, grad, jnp.zeros_like(w)
    if objective.proximal is not None:
        point = objective.proximal_step(w, -eta * grad, eta)
        mapping = (w - point) / eta
        # Two roundings, each by at most half of the spacing
        rounding = jnp.finfo(w.dtype).eps * jnp.abs(w) / eta
    norm = jnp.linalg.norm(mapping)
    # F(w+) - F* <= G' H^-1 G / 2, and <= |G|^2 (1 / mu + eta) / 2
    gap, noise = jnp.full([], jnp.nan, w.dtype), jnp.linalg.norm(rounding)
    strong = jnp.full([], jnp.inf, w.dtype)
    if objective.is_dense:
        is_regular = lowest > singular_below(w.dtype)
        error = _SAFETY * 0.5 * jnp.sum(jnp.square(root * rounding[:, None]))
        bound = _SAFETY * 0.5 * jnp.sum(jnp.square(root.T @ mapping)) + error
        gap, noise = jnp.where(is_regular, bound, jnp.nan), jnp.where(is_regular, error, noise)
    if objective.strong_convexity is not None:
        factor = 0.5 * (1 / objective.strong_convexity + eta)
        error = factor * jnp.sum(jnp.square(rounding))
        bound = factor * norm**2 + error
        is_less = ~(gap <= bound)
        gap, noise = jnp.where(is_less, bound, gap), jnp.where(is_less, error, noise)
        strong = bound
    return Look(
        value=value,
        grad=grad,
        hessian=hessian,
        root=root,
        point=point,
        vector=mapping,
        mapping=norm,
        gap=gap,
        strong=strong,
        noise=noise,
        smoothness=smoothness,
        largest=largest,
        lowest=lowest,
    )


def _is_worse(new: Look, old: Look, rise: float | None) -> bool:
    """Return whether a step has to be undone, with a bound on the rise of the penalty, if known."""
    if not (math.isfinite(float(new.value)) and math.isfinite(float(new.mapping))):
        return True
    if rise is None:  # the objective is not known
        return bool(new.mapping > 10 * old.mapping)
    rounding = _ROUNDINGS * float(jnp.finfo(new.grad.dtype).eps) * abs(float(old.value))
    return not float(new.value) + rise <= float(old.value) + rounding


# The function of params, their look and a factor of the rate returns new params, the number of passes,
# and a bound on the rise of the penalty, which is None if unknown.
Advance = Callable[[jax.Array, Look, float], tuple[jax.Array, float, float | None]]


def _choose(run: _Run, look: Look) -> tuple[str, Advance]:
    """Return the name and the function of the method, by n, d and the condition number."""
    objective, d = run.objective, look.grad.size
    n, steps = run.count, run.count // objective.batch_size
    has_penalty = objective.proximal is not None
    # The condition number of batches; with a preconditioner, of the loss
    mu = objective.strong_convexity or 0.0
    smoothness = look.smoothness
    if objective.is_dense:
        eigenvalues = np.linalg.eigvalsh(np.asarray(look.hessian, np.float64))
        mu = max(mu, float(eigenvalues[0]))
        smoothness = look.smoothness if has_penalty else look.largest
    condition = float(smoothness) / mu if mu > 0 else math.inf
    is_whole = objective.chunks.is_whole
    if has_penalty:
        is_dense = objective.is_dense
        found = ("proximal Newton", _newton) if is_dense else ("proximal SVRG", _svrg)
    elif objective.is_dense and (steps >= _FEWEST_STEPS or not is_whole):
        found = "preconditioned SVRG", _svrg
    elif not objective.is_dense and (condition <= steps or not is_whole):
        found = "SVRG", _svrg
    elif (
        objective.strong_convexity is not None
        and not objective.is_dense
        and (condition <= _KATYUSHA * steps)
    ):
        found = "Katyusha", _katyusha
    else:
        found = "preconditioned L-BFGS", _lbfgs
    known = f"{condition:.1e}" if math.isfinite(condition) else "unknown"
    return f"{found[0]} ({n} examples, {d} params, condition number {known})", found[1](run)


def _scan_batches(
    objective: Objective,
    tx: optax.GradientTransformationExtraArgs,
    w: jax.Array,
    state: Any,
    chunk: Any,
    starts: jax.Array,
    **extra_args: Any,
) -> tuple[jax.Array, Any]:
    """Return w and the state after a step for the batch of a chunk at each start."""

    def loss(w: jax.Array, batch: Any) -> Any:
        return objective.loss_fn(objective.unravel(w), batch)

    def step(carry: Any, start: jax.Array) -> tuple[Any, None]:
        w, state = carry
        e = evaluate(loss, w, objective.batch(chunk, start, objective.batch_size))
        updates, state = tx.update(e.grad, state, w, **extra_args, **e.extra_args)
        return (optax.apply_updates(w, updates), state), None

    w, state = jax.lax.scan(step, (w, state), starts)[0]
    return w, state


def _svrg(run: _Run) -> Advance:
    """Make the function that takes the steps of SVRG from one snapshot."""
    objective, rng = run.objective, generator(run.key)
    is_preconditioned = objective.is_dense and objective.proximal is None
    size, parts = objective.batch_size, objective.chunks.parts

    def steps(
        w: jax.Array, snapshot: jax.Array, look: Look, scale: Any, chunk: Any, starts: jax.Array
    ) -> jax.Array:
        rate, grad, root = scale / (2 * look.smoothness), look.grad, look.root
        # w <- prox(w - eta P (grad f_B(w) - grad f_B(w~) + grad f(w~))), with P = H^-1 or 1
        parts = [svrg()]
        if is_preconditioned:
            parts.append(optax.stateless(lambda g, _: root @ (root.T @ g)))
        parts.append(optax.sgd(rate))
        if objective.proximal is not None:
            parts.append(objective.proximal_of(rate))
        tx = optax.chain(*parts)
        state = take_snapshot(tx.init(snapshot), snapshot, grad)
        return _scan_batches(objective, tx, w, state, chunk, starts)[0]

    compiled = fresh_jit(steps)

    def advance(w: jax.Array, look: Look, scale: float) -> tuple[jax.Array, float, float | None]:
        new, used = w, 0
        left = _MOST_STEPS if is_preconditioned else math.inf
        for chunk in objective.chunks.read():
            each = length_of(chunk) // parts // (size // parts)
            starts = rng.permutation(each)[: int(min(left, each))] * (size // parts)
            if not len(starts):
                continue
            given = w, look, np.asarray(scale, w.dtype), chunk, np.asarray(starts, np.int32)
            new = compiled(new, *given)
            used, left = used + len(starts) * size, left - len(starts)
        return new, used / run.count, None if objective.proximal is not None else 0.0

    return advance


def _newton(run: _Run) -> Advance:
    """Make the function that takes one proximal Newton step."""
    objective = run.objective

    def step(w: jax.Array, look: Look, damping: jax.Array) -> tuple[jax.Array, jax.Array]:
        # min_v grad f(w)' (v - w) + (v - w)' H (v - w) / 2 + h(v), by accelerated proximal gradients
        h = look.hessian + damping * jnp.diag(jnp.diag(look.hessian))
        rate = 1 / ((1 + damping) * look.largest * 1.01)

        def is_going(carry: Any) -> jax.Array:
            _, _, _, norm, count, _ = carry
            return (norm > _MODEL * look.mapping) & (count < _MOST_MODEL_STEPS)

        def improve(carry: Any) -> Any:
            v, y, t, _, count, rise = carry
            slope = look.grad + h @ (y - w)
            new = objective.proximal_step(y, -rate * slope, rate)
            # s = (y - new) / eta - slope is a subgradient of h, so h(new) - h(v) <= s' (new - v)
            rise = rise + jnp.vdot((y - new) / rate - slope, new - v)
            # Momentum starts again if it points uphill.
            t = jnp.where(jnp.vdot(y - new, new - v) > 0, 1.0, t)
            following = (1 + jnp.sqrt(1 + 4 * t**2)) / 2
            return (
                new,
                new + (t - 1) / following * (new - v),
                following,
                jnp.linalg.norm(y - new) / rate,
                count + 1,
                rise,
            )

        one, zero = jnp.ones([], w.dtype), jnp.zeros([], w.dtype)
        start = (w, w, one, jnp.full([], jnp.inf, w.dtype), jnp.zeros([], jnp.int32), zero)
        new, *_, rise = jax.lax.while_loop(is_going, improve, start)
        return new, rise

    compiled = fresh_jit(step)

    def advance(w: jax.Array, look: Look, scale: float) -> tuple[jax.Array, float, float | None]:
        new, rise = compiled(w, look, np.asarray(1 / scale - 1, w.dtype))
        return new, 0.0, float(rise)

    return advance


def _katyusha(run: _Run) -> Advance:
    """Make the function that takes the steps of Katyusha in one pass."""
    objective, rng = run.objective, generator(run.key)
    size, parts = objective.batch_size, objective.chunks.parts
    chunk, state, rate, kept = objective.chunks.first, None, None, 1.0

    def make(rate: Any) -> Any:
        mu = objective.strong_convexity
        assert mu is not None
        p = size / (2 * run.count)
        return katyusha(rate, strong_convexity=mu, probability=p, key=run.key)

    def steps(w: jax.Array, state: Any, rate: jax.Array, chunk: Any, starts: jax.Array) -> Any:
        tx = make(rate)

        def full_grad_fn(w: jax.Array) -> jax.Array:
            _, grad, count, _, _ = _sum_chunk(objective, False, w, chunk)
            return grad / count

        return _scan_batches(objective, tx, w, state, chunk, starts, full_grad_fn=full_grad_fn)

    compiled = fresh_jit(steps)

    def advance(w: jax.Array, look: Look, scale: float) -> tuple[jax.Array, float, float | None]:
        nonlocal state, rate, kept
        if state is None or scale < kept:  # the rate is constant, until the loss rises
            rate, kept = scale / (2 * look.smoothness), scale
            state = make(rate).init(w)
        each = length_of(chunk) // parts // (size // parts)
        starts = jnp.asarray(rng.permutation(each) * (size // parts), jnp.int32)
        w, state = compiled(w, state, rate, chunk, starts)
        return w, 1.5, 0.0

    return advance


def _lbfgs(run: _Run) -> Advance:
    """Make the function that takes some iterations of L-BFGS, in params in which H is near to 1."""
    objective, tx = run.objective, optax.lbfgs()
    chunk = objective.chunks.first
    carry: Any = None

    def find_roots(w: jax.Array, chunk: Any) -> Any:
        few = objective.batch(chunk, 0, min(length_of(chunk), max(_FACTOR_ENTRIES // w.size, 1)))
        params = objective.unravel(w)
        e = evaluate(objective.loss_fn, params, few)
        return factor_roots(e.extra_args["per_example_grad_fn"](params))

    def iterate(
        v: jax.Array, state: Any, origin: jax.Array, roots: Any, chunk: Any, left: np.ndarray
    ) -> tuple[jax.Array, Any, jax.Array, jax.Array]:
        # w = w_0 + C v
        def place(v: jax.Array) -> jax.Array:
            if objective.is_dense:
                return origin + roots @ v
            return origin + ravel_pytree(multiply_roots(roots, objective.unravel(v)))[0]

        def value_fn(v: jax.Array) -> jax.Array:
            return objective.mean(place(v), chunk)

        value_and_grad = optax.value_and_grad_from_state(value_fn)

        def is_going(carry: Any) -> jax.Array:
            *_, count, evaluations = carry
            return (count < _ITERATIONS) & (evaluations < left)

        def step(carry: Any) -> Any:
            v, state, count, evaluations = carry
            value, grad = value_and_grad(v, state=state)
            updates, state = tx.update(grad, state, v, value=value, grad=grad, value_fn=value_fn)
            evaluations += jnp.asarray(state[-1].info.num_linesearch_steps, jnp.int32)
            return optax.apply_updates(v, updates), state, count + 1, evaluations

        zero = jnp.zeros([], jnp.int32)
        v, state, _, evaluations = jax.lax.while_loop(is_going, step, (v, state, zero, zero))
        return v, state, place(v), evaluations

    compiled = fresh_jit(iterate)

    def advance(w: jax.Array, look: Look, scale: float) -> tuple[jax.Array, float, float | None]:
        nonlocal carry
        if carry is None or scale < 1:
            roots = look.root if objective.is_dense else fresh_jit(find_roots)(w, chunk)
            v = jnp.zeros_like(w)
            carry = v, tx.init(v), w, roots
        left = np.asarray(min(max(run.max_passes - run.passes, 1), 10**6), np.int32)
        v, state, new, evaluations = compiled(*carry, chunk, left)
        carry = v, state, *carry[2:]
        return new, float(evaluations), 0.0

    return advance
