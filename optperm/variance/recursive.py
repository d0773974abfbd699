"""Recursive gradients: STORM, SARAH, SPIDER and PAGE, each by what it keeps of its last estimate."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.dtypes import cast_like
from optperm.contract.mapped_axes import cond
from optperm.contract.schedules import resolve_schedule
from optperm.contract.transformation import transformation
from optperm.variance.batch_gradients import GradFn, gradient_at, in_order, where_finite
from optperm.variance.svrg import (
    Snapshot,
    SvrgState,
    corrected_by,
    initial_state,
    is_due,
    needs_of,
)


def recursive_gradient(
    a: optax.ScalarOrSchedule,
    refresh_probability: optax.ScalarOrSchedule | None = None,
    refresh_every: int | jax.Array | None = None,
    *,
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Estimates the gradient by the last estimate and by how the batch's gradient has changed since.

    .. math::
      d_t = \nabla f_{B_t}(\theta_t) + (1 - a_t) (d_{t-1} - \nabla f_{B_t}(\theta_{t-1})), \qquad
      d_0 = \nabla f_{B_0}(\theta_0)

    Now and then it may begin again from the gradient over all examples,
    :math:`d_t = \nabla f(\theta_t)`. These are of the family:

    - SGD: `recursive_gradient(1.0)`;
    - STORM: `recursive_gradient(a)` with a between 0 and 1. In the paper it is a multiple of the square
      of the learning rate;
    - SARAH and SPIDER: `recursive_gradient(0.0, refresh_every=m)`. SPIDER goes steps of a given length:
      `optax.normalize_by_update_norm()` follows;
    - PAGE: `recursive_gradient(0.0, refresh_probability=p)`. All replicas draw the same.

    Where the gradients of examples have errors of variance :math:`\sigma^2` that do not depend on the
    params, the variance of STORM's estimate goes to :math:`\sigma^2 a / (2 - a)`. Without refreshes and
    with a = 0 what is wrong with the first gradient stays for ever.

    An estimate is biased by those before it, unlike SVRG's, and a large step away from the last params
    makes it worse than the plain gradient. It costs two gradients a step; a step that refreshes costs
    the full gradient instead of the second one. The state holds the last params and a float32 estimate.
    What the docstring of `svrg` says of dropout, of what else changes gradients, of `optax.MultiSteps`,
    `optax.masked` and `optax.partition` holds here too. `optperm.take_snapshot` takes a full gradient
    for the estimate between steps.

    An entry of the estimate that is not finite is that of the batch; if that is not finite either, the
    next step begins again there.

    Args:
      a: :math:`a_t` in [0, 1], a number or a schedule of the step.
      refresh_probability: p, in [0, 1], a number or a schedule of the step. The first step refreshes.
      refresh_every: m, in steps: steps 0, m, 2m, ... refresh.
      seed: Seed of the coins.

    Returns:
      A transformation whose state is a `SvrgState`, with the last params and the last estimate for its
      snapshot. Its `update` needs `params` and the extra argument `grad_fn(params)`, the gradient on the
      batch at other params, as `optperm.evaluate` makes it; to refresh also `full_grad_fn(params)`, the
      gradient over all examples.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> x = jax.random.normal(jax.random.key(0), (512, 3))
      >>> y = x @ jnp.array([1.0, 2.0, 3.0]) + jax.random.normal(jax.random.key(1), (512,))
      >>> loss_fn = lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2)
      >>> tx = optax.chain(optperm.recursive_gradient(0.0, refresh_every=32), optax.sgd(0.05))  # SARAH
      >>> @jax.jit
      ... def step(w, opt_state, batch):
      ...     e = optperm.evaluate(loss_fn, w, batch)
      ...     full_grad_fn = optperm.evaluate(loss_fn, w, (x, y)).extra_args["grad_fn"]
      ...     updates, opt_state = tx.update(
      ...         e.grad, opt_state, w, full_grad_fn=full_grad_fn, **e.extra_args
      ...     )
      ...     return optax.apply_updates(w, updates), opt_state
      >>> w = jnp.zeros(3)
      >>> opt_state = tx.init(w)
      >>> for epoch in range(8):
      ...     for i in range(0, 512, 16):
      ...         w, opt_state = step(w, opt_state, (x[i : i + 16], y[i : i + 16]))
      >>> bool(jnp.linalg.norm(jax.grad(loss_fn)(w, (x, y))) < 1e-5)  # the optimum, in spite of noise
      True

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, both ways to refresh are given, an extra argument
        that is needed is missing, or the trees passed to `update` do not match.

    References:
      Cutkosky and Orabona, `Momentum-Based Variance Reduction in Non-Convex SGD
      <https://arxiv.org/abs/1905.10018>`_, NeurIPS 2019

      Nguyen et al., `SARAH: A Novel Method for Machine Learning Problems Using Stochastic Recursive
      Gradient <https://arxiv.org/abs/1703.00102>`_, ICML 2017

      Fang et al., `SPIDER: Near-Optimal Non-Convex Optimization via Stochastic Path Integrated
      Differential Estimator <https://arxiv.org/abs/1807.01695>`_, NeurIPS 2018

      Li et al., `PAGE: A Simple and Optimal Probabilistic Gradient Estimator for Nonconvex Optimization
      <https://arxiv.org/abs/2008.10898>`_, ICML 2021
    """
    checks.check_in_range("a", a, 0.0, 1.0)
    needs = needs_of(refresh_every, refresh_probability)
    checks.check_seed("seed", seed)
    is_refreshed = refresh_every is not None or refresh_probability is not None

    def init(params: optax.Params) -> SvrgState:
        return initial_state(params, seed)

    def update(
        grads: optax.Updates,
        state: SvrgState,
        params: optax.Params,
        *,
        grad_fn: GradFn,
        full_grad_fn: Any = None,  # needed where it refreshes
        **_: Any,
    ) -> tuple[optax.Updates, SvrgState]:
        last = state.snapshot

        # d <- g + (1 - a) (d - grad f_B(theta_{t-1})): the last step is the snapshot of this one
        def follow() -> optax.Updates:
            rest = 1.0 - resolve_schedule("a", a, state.count, float, high=1.0)
            return corrected_by(last, rest, grads, params, grad_fn=grad_fn)

        # d <- grad f(theta)
        def begin_again() -> optax.Updates:
            full_grad = cast_like(gradient_at(params, full_grad_fn, "full_grad_fn"), last.full_grad)
            return jax.tree.map(
                lambda mu, g: jnp.where(jnp.isfinite(mu), mu, jnp.asarray(g, mu.dtype)),
                full_grad,
                grads,
            )

        if is_refreshed:
            is_time = is_due(state, refresh_every, refresh_probability)
            d = cond(is_time, begin_again, follow)
        else:
            d = follow()
        d, there = in_order(cast_like(d, last.full_grad), last.params)
        here, d = in_order(where_finite(params, there), d)
        snapshot = Snapshot(jnp.ones_like(last.is_taken), here, d)
        return d, SvrgState(optax.safe_increment(state.count), state.key, snapshot)

    return transformation(
        init,
        update,
        method="recursive_gradient",
        like=lambda state: state.snapshot.params,
        needs=needs,
    )
