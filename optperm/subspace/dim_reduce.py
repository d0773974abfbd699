"""DimReduce: quasi-Newton steps in a subspace of the params, with a line search.

T. Li, L. Tan, Z. Huang, Q. Tao, Y. Liu and X. Huang, "Low Dimensional Trajectory Hypothesis is True:
DNNs Can Be Trained in Tiny Subspaces", TPAMI 2023, arXiv 2103.11154.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, all_finite, cast_like
from optperm.contract.mapped_axes import AxisName, mark_varying, varying_axes
from optperm.contract.schedules import resolve_schedule
from optperm.contract.shardings import shard_like
from optperm.contract.states import find_state, mask_like, replace_state, without_variables
from optperm.contract.transformation import transformation
from optperm.placement import apply_updates
from optperm.subspace.phases import SEARCH_EXTRAS, mean_over_replicas, step_where
from optperm.subspace.subspace import (
    Subspace,
    empty_subspace,
    inner_products,
    lift,
    own_rows,
    project,
)

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree

Curvature = Literal["absolute", "relative"]


class DimReduceState(NamedTuple):
    r"""State of `dim_reduce`, one on each replica.

    Attributes:
      count: Calls of `update`, skipped steps included.
      subspace: The basis :math:`P`.
      residual: :math:`m`, what the gradients had outside the subspace, with momentum.
      inverse_hessian: :math:`B`, the BFGS approximation within the subspace. Like the other numbers
        there it is in float32, or in float64 if any parameter is.
      last_gradient: The projected gradient of the last step that the line search accepted.
      has_last: Whether there was such a step.
      last_move: :math:`s`, that step.
      step_length: :math:`c`, what the line search accepted in this step, or 0.
      inner_state: State of the optimizer that makes updates of it.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    subspace: Subspace
    residual: PyTree[Float[Array, "?*shape"], "Params"]
    inverse_hessian: Float[Array, "k k"]
    last_gradient: Float[Array, "k"]
    has_last: Bool[Array, ""]
    last_move: Float[Array, "k"]
    step_length: Float[Array, ""]
    inner_state: Any


def dim_reduce(
    optimizer: optax.GradientTransformation | None = None,
    *,
    n_components: int,
    rho: optax.ScalarOrSchedule = 0.55,
    gamma: optax.ScalarOrSchedule = 0.9,
    alpha: optax.ScalarOrSchedule = 1e-3,
    sigma: optax.ScalarOrSchedule = 0.4,
    max_search_steps: int | jax.Array = 2,
    axis_name: AxisName | None = None,
    curvature: Curvature = "absolute",
) -> optax.GradientTransformationExtraArgs:
    r"""Quasi-Newton steps within a subspace, and small ones of gradient descent outside of it.

    :math:`P` has :math:`k` orthonormal rows over all params, given by `optperm.set_basis`. With
    :math:`f` the loss on this batch, :math:`g` its gradient and :math:`u` the step of `optimizer`:

    .. math::
      g_k &= P g, \qquad y = g_k - g_k^{\text{last}} \\
      T &= I - \frac{y s^\top}{y^\top s}, \qquad
      B \leftarrow T^\top B T + \frac{s s^\top}{y^\top s} \quad \text{if } y^\top s > 10^{-20} \\
      d &= -B g_k, \qquad
      c = \max \{\rho^i : f(\theta + u(-\rho^i P^\top d)) < f(\theta) + \sigma \rho^i g_k^\top d,\
      0 \le i < i_{\max} \} \\
      m &\leftarrow \gamma m + g - P^\top g_k, \qquad
      \theta \leftarrow \theta + u(\alpha m - c P^\top d)

    then :math:`s \leftarrow c d` and :math:`g_k^{\text{last}} \leftarrow g_k`. Where no :math:`i`
    satisfies the inequality :math:`c = 0`, and :math:`B`, :math:`s` and :math:`g_k^{\text{last}}` stay
    what they were. :math:`B` starts as the identity; :math:`\alpha = 0` keeps the params in the subspace
    through where they are (P-BFGS). Until a basis is set only the residual moves them.

    A step costs two passes over :math:`P`, and one evaluation of the loss for each trial of the line
    search. Trials do not touch the state of `optimizer`. A trial whose loss is not finite is rejected;
    a gradient that is not finite skips the step: everything but the count stays as it was.

    With an axis of :math:`R` replicas each holds :math:`\lceil k / R \rceil` rows of :math:`P`, and
    everything else in full. A step is then an all-gather of k numbers, one all-reduce of
    :math:`P^\top d` and :math:`P^\top g_k` together, and the averages of the loss and the gradient over
    the replicas. The params must be the same on all of them. Call `init` within the mapped function,
    where the number of replicas is known:

    .. code-block:: python

      opt_state = jax.pmap(tx.init, axis_name="replica")(params)
      opt_state = jax.pmap(optperm.set_basis, in_axes=(0, None))(opt_state, basis)

    and give `update` the extra arguments of each replica's own batch.

    Args:
      optimizer: :math:`u`, any optimizer, which sees :math:`\alpha m - c P^\top d` for the gradient;
        None for `optax.sgd(1.0)`.
      n_components: :math:`k \ge 1`, the rows of :math:`P`.
      rho: :math:`\rho \in [0, 1]`, by which a step that was rejected is shortened.
      gamma: :math:`\gamma \in [0, 1]`, the momentum of the residual.
      alpha: :math:`\alpha \ge 0`, the learning rate of the residual.
      sigma: :math:`\sigma \in [0, 1]`, the share of the predicted decrease that a trial has to reach.
      max_search_steps: :math:`i_{\max} \ge 1`, the trials of one line search.
      axis_name: The axis of `jax.pmap`, `jax.shard_map` or `jax.vmap` over which the rows of the basis
        and the batch are spread, or several. None for a single replica.
      curvature: When :math:`B` is updated: `"absolute"`, if :math:`y^\top s > 10^{-20}`, as in the
        paper's code; or `"relative"`, if :math:`y^\top s > \epsilon |y| |s|` with the machine's
        :math:`\epsilon`, which does not depend on the scale of the loss.

    Returns:
      A transformation whose state is a `DimReduceState`. Its `update` needs `params` and the extra
      arguments `value` and `value_fn`, as `optperm.evaluate` makes them. `rho`, `gamma`, `alpha` and
      `sigma` may be schedules of the step.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, an extra argument is missing, `axis_name` is not bound
        where `init` or `update` is called, or the trees passed to `update` do not match.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> scales = jnp.array([1.0, 10.0, 100.0])  # a valley
      >>> loss_fn = lambda w, batch: jnp.sum(scales * (w - batch) ** 2)
      >>> target = jnp.array([3.0, 2.0, 1.0])
      >>> tx = optperm.dim_reduce(n_components=3, max_search_steps=20)
      >>> w = jnp.zeros(3)
      >>> opt_state = optperm.set_basis(tx.init(w), jnp.eye(3))
      >>> for _ in range(30):
      ...     e = optperm.evaluate(loss_fn, w, target)
      ...     updates, opt_state = tx.update(e.grad, opt_state, w, **e.extra_args)
      ...     w = optperm.apply_updates(w, updates, opt_state)
      >>> [round(x, 3) for x in w.tolist()]
      [3.0, 2.0, 1.0]

    References:
      Li et al., `Low Dimensional Trajectory Hypothesis is True: DNNs Can Be Trained in Tiny Subspaces
      <https://arxiv.org/abs/2103.11154>`_, 2023
    """
    inner = optax.sgd(1.0) if optimizer is None else optimizer
    checks.check_transformation("optimizer", inner)
    inner = optax.with_extra_args_support(inner)
    checks.check_static_count("n_components", n_components)
    for name, number in (("rho", rho), ("gamma", gamma), ("sigma", sigma)):
        checks.check_in_range(name, number, 0.0, 1.0)
    checks.check_in_range("alpha", alpha, 0.0, float("inf"))
    checks.check_count("max_search_steps", max_search_steps)
    checks.check_axis_name("axis_name", axis_name)
    checks.check_choice("curvature", curvature, get_args(Curvature))

    def init(params: optax.Params) -> DimReduceState:
        dtype = accumulation_dtype(params)
        return DimReduceState(
            count=jnp.zeros([], jnp.int32),
            subspace=empty_subspace(params, n_components, axis_name),
            residual=optax.tree.zeros_like(params),
            inverse_hessian=jnp.eye(n_components, dtype=dtype),
            last_gradient=jnp.zeros(n_components, dtype),
            has_last=jnp.zeros([], jnp.bool_),
            last_move=jnp.zeros(n_components, dtype),
            step_length=jnp.zeros([], dtype),
            inner_state=inner.init(params),
        )

    def update(
        updates: optax.Updates, state: DimReduceState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, DimReduceState]:
        P, dtype = state.subspace, state.step_length.dtype
        g, extras = mean_over_replicas(updates, params, extra_args, axis_name)
        f, f_at, is_finite = extras["value"], extras["value_fn"], all_finite(g)
        names = {"rho": rho, "gamma": gamma, "alpha": alpha, "sigma": sigma}
        rho_t, gamma_t, alpha_t, sigma_t = (
            resolve_schedule(name, number, state.count, dtype) for name, number in names.items()
        )

        def u(direction: optax.Updates) -> tuple[optax.Updates, Any]:
            return step_where(is_finite, inner, direction, state.inner_state, params, extras)

        # g_k = P g
        gk = project(P, g, n_components, dtype, axis_name)
        # y = g_k - g_k^last, T = I - y s' / y's, B <- T' B T + s s' / y's
        B = _bfgs(state, gk, curvature)
        # d = -B g_k
        d = -_dot(B, gk)
        p_d, p_gk = lift(P, jnp.stack([d, gk]), axis_name)  # P'd and P'g_k
        # c = max {rho^i : f(theta + u(-rho^i P'd)) < f(theta) + sigma rho^i g_k'd}
        slope = sigma_t * _dot(gk, d)

        def is_enough(c: jax.Array) -> jax.Array:
            trial = jnp.asarray(f_at(apply_updates(params, *u(_scaled(-c, p_d)))), dtype)
            return jnp.isfinite(trial) & (trial < f + c * slope)

        num_trials = jnp.where(is_finite & P.is_set, max_search_steps, 0)
        c, is_accepted = _line_search(
            is_enough, rho_t, num_trials, varying_axes(f, slope, num_trials)
        )
        # m <- gamma m + g - P'g_k
        m = jax.tree.map(_axpy(gamma_t), state.residual, optax.tree.sub(g, p_gk))
        m = optax.tree.where(is_finite, cast_like(m, params), state.residual)
        # XLA would compute it anew for the step, from a copy of the old one.
        m = jax.lax.optimization_barrier(m)
        # theta <- theta + u(alpha m - c P'd)
        within = optax.tree.where(is_accepted, _scaled(-c, p_d), optax.tree.zeros_like(p_d))
        moves, inner_state = u(jax.tree.map(_axpy(alpha_t), m, within))
        # s <- c d and g_k^last <- g_k, or they and B stay what they were
        learned = (B, gk, is_accepted, c * d)
        held = (state.inverse_hessian, state.last_gradient, state.has_last, state.last_move)
        B, gk_last, has_last, s = optax.tree.where(is_accepted, learned, held)
        count = optax.safe_increment(state.count)
        return moves, DimReduceState(count, P, m, B, gk_last, has_last, s, c, inner_state)

    return transformation(
        init,
        update,
        method="dim_reduce",
        like=lambda state: state.residual,
        needs=SEARCH_EXTRAS,
        axis_name=axis_name,
    )


def _axpy(c: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The function c x + y of two leaves, in the dtype of y."""
    return lambda x, y: c.astype(y.dtype) * x.astype(y.dtype) + y


def set_basis(opt_state: Any, basis: optax.Params) -> Any:
    r"""The optimizer state with a basis for `dim_reduce`.

    What was learned of the curvature in an earlier basis is forgotten; the residual is kept.

    Args:
      opt_state: The state of an optimizer with `optperm.dim_reduce` anywhere in it. It is left alone. A
        state of many replicas needs this function mapped over them, with the same basis for all:
        `jax.pmap(optperm.set_basis, in_axes=(0, None))`, or `jax.vmap` alike, or a call within the
        function given to `jax.shard_map`. Each takes its own rows.
      basis: A tree like params whose leaves have a leading axis of `n_components` rows, all of them,
        orthonormal over all leaves together, of any real floating dtypes; `optperm.pca_basis` makes one.

    Returns:
      The whole optimizer state, of the same structure, shapes and dtypes.

    Raises:
      TypeError: If a leaf is not of a real floating dtype.
      ValueError: If there is no state of dim_reduce, or more than one, the basis does not match the
        params in it, or (where Python can see it) its rows are not finite, or not orthonormal to
        within 1e-3 or the rounding of their dtype. Rows of zeros are fine.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"w": jnp.zeros(3), "b": jnp.zeros(())}
      >>> tx = optax.chain(optax.clip(1.0), optperm.dim_reduce(n_components=1))
      >>> basis = {"w": jnp.array([[0.6, 0.0, 0.0]]), "b": jnp.array([0.8])}
      >>> opt_state = optperm.set_basis(tx.init(params), basis)
      >>> bool(opt_state[1].subspace.is_set)
      True
    """
    state = find_state(opt_state, DimReduceState, method="dim_reduce")
    basis = mask_like(without_variables(basis), state.residual)
    checks.check_real_floating("basis", basis, advice="Leave the others out of the optimizer.")
    k = state.last_gradient.shape[-1]
    wanted = jax.tree.map(
        lambda m: jax.ShapeDtypeStruct((k, *jnp.shape(m)), jnp.float32), state.residual
    )
    checks.check_same_tree("basis", basis, wanted, source="the optimizer state", dtypes=False)
    is_finite = all_finite(basis)
    if not isinstance(is_finite, jax.core.Tracer) and not is_finite:
        raise ValueError("basis has entries that are not finite: take it from finite snapshots.")
    _check_orthonormal(basis, k)
    first_row = state.subspace.first_row
    rows = jax.tree.map(
        lambda leaf, held: own_rows(shard_like(leaf, held), first_row, held.shape[0]),
        basis,
        state.subspace.rows,
    )
    subspace = Subspace(rows, first_row, jnp.ones_like(state.subspace.is_set))
    new = cast_like(with_fresh_curvature(state)._replace(subspace=subspace), state)
    return replace_state(opt_state, DimReduceState, new, method="dim_reduce")


def _check_orthonormal(basis: optax.Params, k: int) -> None:
    """Raises a ValueError unless all rows that are not zero are orthonormal, where Python can see it."""
    leaves, dtype = jax.tree.leaves(basis), accumulation_dtype(basis)
    wide = [jnp.asarray(leaf, dtype) for leaf in leaves]
    gram = sum((inner_products(leaf, leaf) for leaf in wide), start=jnp.zeros((k, k), dtype))
    if not leaves or isinstance(gram, jax.core.Tracer):
        return
    products = np.asarray(gram)
    wanted = np.diag(products.diagonal() > 0).astype(products.dtype)
    gaps = np.abs(products - wanted)
    i, j = np.unravel_index(gaps.argmax(), gaps.shape)
    # Rounding to a dtype changes an inner product of two unit vectors by at most its epsilon.
    tolerance = max(1e-3, *(2 * float(jnp.finfo(jnp.result_type(leaf)).eps) for leaf in leaves))
    if gaps[i, j] > tolerance:
        raise ValueError(
            f"basis must have orthonormal rows, but the inner product of rows {i} and {j} is "
            f"{products[i, j]:.6g}, {gaps[i, j]:.3g} from {wanted[i, j]:g}, where {tolerance:.2g} is "
            "allowed. optperm.pca_basis makes such rows of snapshots, jnp.linalg.qr of other vectors."
        )


def with_fresh_curvature(state: DimReduceState) -> DimReduceState:
    """The state as before the first step, but for the residual and the inner optimizer."""
    return state._replace(
        inverse_hessian=jnp.eye(state.last_move.shape[0], dtype=state.last_move.dtype),
        last_gradient=jnp.zeros_like(state.last_gradient),
        has_last=jnp.zeros_like(state.has_last),
        last_move=jnp.zeros_like(state.last_move),
    )


def _bfgs(state: DimReduceState, gk: jax.Array, curvature: Curvature) -> jax.Array:
    """B after the pair (s, y), if there is one and its curvature is positive."""
    hessian, s = state.inverse_hessian, state.last_move
    y = gk - state.last_gradient
    ys = _dot(y, s)
    if curvature == "absolute":
        is_positive = ys > 1e-20
    else:
        eps = jnp.finfo(ys.dtype).eps
        is_positive = ys > eps * jnp.linalg.norm(y) * jnp.linalg.norm(s)
    is_used = state.has_last & is_positive
    scale = 1.0 / jnp.where(is_used, ys, jnp.ones_like(ys))
    t = jnp.eye(s.size, dtype=s.dtype) - jnp.outer(y, s) * scale
    new = _dot(_dot(t.T, hessian), t) + jnp.outer(s, s) * scale
    return jnp.where(is_used, new, hessian)


def _line_search(
    is_enough: Callable[[jax.Array], jax.Array],
    rho: jax.Array,
    max_steps: jax.Array,
    axes: frozenset[str],
) -> tuple[jax.Array, jax.Array]:
    """The first of 1, rho, rho^2, ... that is enough, or 0; and whether there is one.

    Args:
      is_enough: Whether the step of a length lowers the loss enough.
      rho: By which a length is multiplied to give the next one.
      max_steps: How many are tried.
      axes: The mapped axes over which the answers vary.
    """

    def is_searching(carry: Any) -> jax.Array:
        index, _, is_accepted = carry
        return ~is_accepted & (index < max_steps)

    def try_next(carry: Any) -> Any:
        index, c, _ = carry
        is_accepted = is_enough(c)
        return mark_varying((index + 1, jnp.where(is_accepted, c, c * rho), is_accepted), axes)

    start = (jnp.zeros([], jnp.int32), jnp.ones_like(rho), jnp.zeros([], jnp.bool_))
    _, c, is_accepted = jax.lax.while_loop(is_searching, try_next, mark_varying(start, axes))
    return jnp.where(is_accepted, c, jnp.zeros_like(c)), is_accepted


def _scaled(c: jax.Array, tree: optax.Updates) -> optax.Updates:
    return jax.tree.map(lambda leaf: c.astype(leaf.dtype) * leaf, tree)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)
