"""DimReduce: quasi-Newton steps in a subspace of the params, with a line search.

T. Li, L. Tan, Z. Huang, Q. Tao, Y. Liu and X. Huang, "Low Dimensional Trajectory Hypothesis is True:
DNNs Can Be Trained in Tiny Subspaces", TPAMI 2023, arXiv 2103.11154.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.control import cond
from optperm.core.dtypes import accumulation_dtype, all_finite, computed_once
from optperm.core.mapped_axes import AxisName, varying_axes
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Array, Float, Int32, Params, PyTree, Updates
from optperm.core.transformation import transformation
from optperm.exact import apply_updates
from optperm.subspace._line_searches import LINE_SEARCHES, Line
from optperm.subspace._quasi_newton import QuasiNewtonState, dot, make_quasi_newton, norm
from optperm.subspace._subspace import (
    SEARCH_EXTRAS,
    Subspace,
    check_same_subspace,
    coordinates,
    empty_subspace,
    lift,
    mean_over_replicas,
    step_where,
)

# A residual of at most this many rounding errors of the gradient counts as zero.
_ROUNDINGS = 16


class DimReduceState(NamedTuple):
    r"""State of `dim_reduce` on each replica.

    Attributes:
      count: Number of calls of `update`, including skipped steps.
      subspace: The basis :math:`P`.
      residual: :math:`m`, the momentum of the part of the gradients outside the subspace.
      quasi_newton: :math:`B`, :math:`s`, :math:`g_k^{\text{last}}`, and the number of consecutive line
        searches without a step.
      step_length: :math:`c`, the length accepted by the last line search, or 0.
      num_trials: Number of trials of the last line search.
      inner_state: State of `inner`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    subspace: Subspace
    residual: PyTree[Float[Array, "?*shape"], "Params"]
    quasi_newton: QuasiNewtonState
    step_length: Float[Array, ""]
    num_trials: Int32[Array, ""]
    inner_state: Any


def dim_reduce(
    inner: optax.GradientTransformation | None = None,
    *,
    n_components: int,
    rho: optax.ScalarOrSchedule = 0.55,
    gamma: optax.ScalarOrSchedule = 0.9,
    alpha: optax.ScalarOrSchedule = 1e-3,
    sigma: optax.ScalarOrSchedule = 0.4,
    max_search_steps: int | jax.Array | None = None,
    line_search: Literal["safeguarded", "mindspore"] = "safeguarded",
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Train with quasi-Newton steps in a subspace, and with small gradient steps outside it.

    The :math:`k` rows of :math:`P` are orthonormal over all params; `optperm.subspace.set_basis` or
    `optperm.dldr` sets them. Let :math:`f` be the loss on the batch, :math:`g` its gradient, and
    :math:`u` the step of `inner`:

    .. math::
      g_k &= P g, \qquad y = g_k - g_k^{\text{last}} \\
      T &= I - \frac{y s^\top}{y^\top s}, \qquad
      B \leftarrow T^\top B T + \frac{s s^\top}{y^\top s}
      \quad \text{if } y^\top s > \epsilon |y| |s| \\
      d &= -B g_k, \qquad v(c) = u(-c P^\top d) \\
      c &= \text{the first length tried with } f(\theta + v(c)) < f(\theta) + \sigma g^\top v(c) \\
      m &\leftarrow \gamma m + g - P^\top g_k, \qquad
      \theta \leftarrow \theta + u(\alpha m - c P^\top d)

    Then :math:`s \leftarrow c d` and :math:`g_k^{\text{last}} \leftarrow g_k`. If no length satisfies
    the inequality, :math:`c = 0`, and :math:`B`, :math:`s` and :math:`g_k^{\text{last}}` do not change.
    With :math:`\alpha = 0`, the params stay in the subspace through their current values (P-BFGS).
    Until a basis is set, only the residual moves the params.

    Args:
      inner: :math:`u`, any optimizer, or None for `optax.sgd(1.0)`. It sees the gradient
        :math:`\alpha m - c P^\top d`.
      n_components: :math:`k \ge 1`, the number of rows of :math:`P`.
      rho: :math:`\rho \in [0, 1]`, the maximum ratio of a trial length to the previous, rejected length.
      gamma: :math:`\gamma \in [0, 1]`, the momentum of the residual.
      alpha: :math:`\alpha \ge 0`, the learning rate of the residual.
      sigma: :math:`\sigma \in [0, 1]`, the fraction of the predicted decrease that a trial must reach.
      max_search_steps: :math:`i_{\max} \ge 1`, the maximum number of trials per line search. None for
        10, or for 2 with `"mindspore"`.
      line_search: `"safeguarded"` or `"mindspore"`.
      axis_name: The axis or axes of `jax.pmap`, `jax.shard_map` or `jax.vmap` over which the rows of the
        basis and the batch are distributed. None for a single replica.

    Returns:
      A transformation whose state is a `DimReduceState`. Its `update` needs `params` and the extra
      arguments `value` and `value_fn`, which `optperm.evaluate` makes. `rho`, `gamma`, `alpha` and
      `sigma` may be schedules. A traced value that is out of range is clipped to the range.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> scales = jnp.array([1.0, 10.0, 100.0])  # a valley
      >>> loss_fn = lambda w, batch: jnp.sum(scales * (w - batch) ** 2)
      >>> target = jnp.array([3.0, 2.0, 1.0])
      >>> tx = optperm.dim_reduce(n_components=3)
      >>> w = jnp.zeros(3)
      >>> opt_state = optperm.subspace.set_basis(tx.init(w), jnp.eye(3))
      >>> @jax.jit
      ... def step(w, opt_state):
      ...     e = optperm.evaluate(loss_fn, w, target)
      ...     updates, opt_state = tx.update(e.grad, opt_state, w, **e.extra_args)
      ...     return optperm.apply_updates(w, updates, opt_state), opt_state
      >>> for _ in range(30):
      ...     w, opt_state = step(w, opt_state)
      >>> [round(x, 3) for x in w.tolist()]
      [3.0, 2.0, 1.0]

    Notes:
      `line_search="safeguarded"` does not depend on the scale of the loss or of the params. Initially,
      :math:`B = I`, but the first update with a pair :math:`(s, y)` starts from
      :math:`(s^\top y / y^\top y) I`. The first trial length is 1, or :math:`|f| / |g_k|^2` while there
      is no pair. Each further length minimizes the parabola through :math:`f` and the rejected loss,
      but is at most :math:`\rho` times and at least 0.1 times the previous length. After
      `max_search_steps` failed trials, the next step continues with the next length. After two such
      steps in a row, the search resets :math:`B`. A residual :math:`g - P^\top g_k` as small as its own
      rounding counts as zero.

      `line_search="mindspore"` is MindSpore's search, which may stall forever (at curvatures above 2.2
      if there are two trials):

      .. math::
        c = \max \{\rho^i : f(\theta + v(\rho^i)) < f(\theta) + \sigma \rho^i g_k^\top d,\
        0 \le i < i_{\max} \}

      Initially, :math:`B = I`, and :math:`B` is updated only if :math:`y^\top s > 10^{-20}`.
      `quasi_newton.rejections` in the state counts the consecutive failures of the search.

      No transformation after this method may change its updates, because the curvature belongs to its
      own steps: pass the transformation in `inner`, as in `optax.chain(optax.sgd(0.1), ...)`. A step
      costs two passes over :math:`P`, and one evaluation of the loss per trial.

    Raises:
      TypeError: If a number has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument or an untraced value of a schedule is out of range, an extra argument is
        missing, `axis_name` is not bound in `init` or `update`, or the trees passed to `update` do not
        match.

    References:
      Li et al., `Low Dimensional Trajectory Hypothesis is True: DNNs Can Be Trained in Tiny Subspaces
      <https://arxiv.org/abs/2103.11154>`_, 2023
    """
    optimizer = checks.as_optimizer("inner", optax.sgd(1.0) if inner is None else inner)
    checks.check_static_count("n_components", n_components)
    checks.check_in_range("rho", rho, 0.0, 1.0)
    checks.check_in_range("gamma", gamma, 0.0, 1.0)
    checks.check_in_range("alpha", alpha, 0.0, float("inf"))
    checks.check_in_range("sigma", sigma, 0.0, 1.0)
    checks.check_choice("line_search", line_search, tuple(LINE_SEARCHES))
    rule = LINE_SEARCHES[line_search]
    max_trials = rule.max_trials if max_search_steps is None else max_search_steps
    checks.check_count("max_search_steps", max_trials)

    def init(params: Params) -> DimReduceState:
        dtype = accumulation_dtype(params)
        return DimReduceState(
            count=jnp.zeros([], jnp.int32),
            subspace=empty_subspace(params, n_components, axis_name),
            residual=optax.tree.zeros_like(params),
            quasi_newton=make_quasi_newton(n_components, dtype),
            step_length=jnp.zeros([], dtype),
            num_trials=jnp.zeros([], jnp.int32),
            inner_state=optimizer.init(params),
        )

    def update(
        updates: Updates, state: DimReduceState, params: Params, **extra_args: Any
    ) -> tuple[Updates, DimReduceState]:
        check_same_subspace("dim_reduce", state.subspace, n_components, axis_name)
        P, previous, t = state.subspace, state.quasi_newton, state.count
        dtype = state.step_length.dtype
        rho_t = resolve_schedule("rho", rho, t, dtype, high=1.0)
        gamma_t = resolve_schedule("gamma", gamma, t, dtype, high=1.0)
        alpha_t = resolve_schedule("alpha", alpha, t, dtype)
        sigma_t = resolve_schedule("sigma", sigma, t, dtype, high=1.0)
        # f, its function and g, averaged over replicas
        g, extras = mean_over_replicas(updates, params, extra_args, axis_name)
        f, f_at = extras["value"], extras["value_fn"]

        # g_k = P g
        gk = coordinates(P, g, dtype)
        # y = g_k - g_k^last, T = I - y s' / y's, B <- T' B T + s s' / y's
        current = rule.learn(previous, gk)
        # d = -B g_k
        d = -dot(current.inverse_hessian, gk)
        # P'd and P'g_k, by one pass over P
        p_d, p_gk = lift(P, jnp.stack([d, gk]))
        # m <- gamma m + g - P'g_k
        r = optax.tree.sub(g, p_gk)
        is_finite, is_rounding = _examine_residual(r, norm(gk))
        is_used = ~is_rounding if rule.drops_rounding else jnp.ones_like(is_rounding)
        m = _decay(gamma_t, state.residual, is_used, r, is_finite)

        def u(direction: Updates) -> tuple[Updates, Any]:
            return step_where(is_finite, optimizer, direction, state.inner_state, params, extras)

        # v(c) = u(-c P'd) and f(theta + v(c))
        def try_step(c: jax.Array) -> tuple[Updates, jax.Array]:
            v, stepped = u(_scale(-c, p_d))
            return v, jnp.asarray(f_at(apply_updates(params, v, stepped)), dtype)

        # c = the first length tried with f(theta + v(c)) < f(theta) + sigma g'v(c)
        line = Line(
            f=f,
            gk=gk,
            d=d,
            try_step=try_step,
            predict=None if inner is None else lambda v: _predict_change(g, v, f),
            sigma=sigma_t,
            rho=rho_t,
            # There are no trials before a basis is set, or if f or g is not finite
            max_trials=jnp.where(is_finite & jnp.isfinite(f) & P.is_set, max_trials, 0),
        )
        # s <- c d and g_k^last <- g_k, or s, g_k^last and B do not change
        found, quasi_newton = rule.search(line, previous, current)
        c = found.step_length
        # theta <- theta + u(alpha m - c P'd)
        within = optax.tree.where(found.is_accepted, _scale(-c, p_d), optax.tree.zeros_like(p_d))
        moves, inner_state = u(_add_scaled(alpha_t, m, within))
        return moves, DimReduceState(
            count=optax.safe_increment(t),
            subspace=P,
            residual=m,
            quasi_newton=quasi_newton,
            step_length=c,
            num_trials=found.num_trials,
            inner_state=inner_state,
        )

    return transformation(
        init,
        update,
        method="dim_reduce",
        like=lambda state: state.residual,
        dtypes=True,
        needs=SEARCH_EXTRAS,
        axis_name=axis_name,
    )


def _scale(c: jax.Array, tree: Updates) -> Updates:
    return jax.tree.map(lambda leaf: c.astype(leaf.dtype) * leaf, tree)


def _add_scaled(c: jax.Array, tree: Updates, other: Updates) -> Updates:
    """Return c x + y, in the dtypes of y."""
    return jax.tree.map(lambda x, y: c.astype(y.dtype) * x.astype(y.dtype) + y, tree, other)


def _decay(
    gamma: jax.Array, m: Updates, is_used: jax.Array, r: Updates, is_finite: jax.Array
) -> Updates:
    """Return gamma m + r in the dtypes of m, or m if r is not finite or the sum overflows."""
    used = jax.tree.map(lambda leaf: is_used.astype(leaf.dtype) * leaf, r)
    new = optax.tree.cast_like(_add_scaled(gamma, m, used), m)
    return computed_once(
        jax.tree.map(lambda new, m: jnp.where(is_finite & jnp.isfinite(new), new, m), new, m)
    )


def _examine_residual(r: Updates, size: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return whether a residual is finite, and whether it is a rounding error of a gradient."""
    # Compute |r / |g_k||^2, so that the square of a small gradient does not underflow
    is_known = (size > 0) & jnp.isfinite(size)
    scale = 1 / jnp.where(is_known, size, jnp.ones_like(size))
    parts = [jnp.sum((leaf.astype(size.dtype) * scale) ** 2) for leaf in jax.tree.leaves(r)]
    squares = computed_once(sum(parts, start=jnp.zeros_like(size)))
    # The sum of squares answers both questions, unless squares of finite numbers overflow.
    is_finite = cond(jnp.isfinite(squares), lambda: jnp.ones([], jnp.bool_), lambda: all_finite(r))
    limit = (_ROUNDINGS * jnp.finfo(size.dtype).eps) ** 2
    return is_finite, is_known & (squares <= limit)


def _predict_change(g: Updates, step: Updates, f: jax.Array) -> jax.Array:
    """Return g'v, the change of the loss that the gradient predicts for a step."""
    parts = jax.tree.map(lambda x, y: jnp.sum(x.astype(f.dtype) * y.astype(f.dtype)), g, step)
    total = computed_once(sum(jax.tree.leaves(parts), start=jnp.zeros_like(f)))
    # The value is the same on all replicas, but its type may vary over the axes of the params.
    axes = tuple(sorted(varying_axes(total) - varying_axes(f)))
    return jax.lax.pmean(total, axes) if axes else total
