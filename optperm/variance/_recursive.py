"""Recursive gradients: STORM, SARAH, SPIDER and PAGE."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.control import cond
from optperm.core.dtypes import cast_like, compute_in_order
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Params, Updates
from optperm.core.transformation import transformation
from optperm.variance._batch_gradients import (
    GradFn,
    evaluate_gradient,
    keep_finite,
)
from optperm.variance._svrg import (
    RecursiveGradientState,
    Snapshot,
    correct_gradient,
    is_due,
    list_extra_args,
    make_state,
)


def recursive_gradient(
    a: optax.ScalarOrSchedule,
    probability: optax.ScalarOrSchedule | None = None,
    every: int | jax.Array | None = None,
    *,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Estimate the gradient by the last estimate plus the change of the batch's gradient.

    .. math::
      d_t = \nabla f_{B_t}(\theta_t) + (1 - a_t) (d_{t-1} - \nabla f_{B_t}(\theta_{t-1})), \qquad
      d_0 = \nabla f_{B_0}(\theta_0)

    In some steps, the estimate may restart from the gradient over all examples,
    :math:`d_t = \nabla f(\theta_t)`. The family includes

    - SGD: `recursive_gradient(1.0)`;
    - STORM: `recursive_gradient(a)` with a between 0 and 1; in the paper, a is a multiple of the squared
      learning rate;
    - SARAH and SPIDER: `recursive_gradient(0.0, every=m)`; for SPIDER's steps of a fixed length, add
      `optax.normalize_by_update_norm()` after this transformation;
    - PAGE: `recursive_gradient(0.0, probability=p)`. All replicas draw the same random numbers.

    Args:
      a: :math:`a_t` in [0, 1], a number or a schedule of the step.
      probability: p, in [0, 1], the probability of a restart in a step, a number or a schedule. The
        first step restarts.
      every: m, the number of steps from one restart to the next: steps 0, m, 2m, ... restart.
      key: The random key of the restarts: an int or a `jax.random.key`.

    Returns:
      A transformation whose state is a `RecursiveGradientState`, with the last params and the last
      estimate as its snapshot. Its `update` needs `params` and the extra argument `grad_fn(params)` of
      `optperm.evaluate`, the gradient on this batch at given params. To restart, it also needs
      `full_grad_fn(params)`, the gradient over all examples.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> x = jax.random.normal(jax.random.key(0), (512, 3))
      >>> y = x @ jnp.array([1.0, 2.0, 3.0]) + jax.random.normal(jax.random.key(1), (512,))
      >>> loss_fn = lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2)
      >>> tx = optax.chain(optperm.recursive_gradient(0.0, every=32), optax.sgd(0.05))  # SARAH
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
      >>> bool(jnp.linalg.norm(jax.grad(loss_fn)(w, (x, y))) < 1e-5)  # the optimum, despite the noise
      True

    Notes:
      If the errors of the gradients have the variance :math:`\sigma^2` and do not depend on the params,
      the variance of STORM's estimate approaches :math:`\sigma^2 a / (2 - a)`. With a = 0 and no
      restarts, the error of the first gradient remains forever.

      Unlike SVRG's estimate, this estimate is biased by earlier estimates, and after a large step it is
      worse than the plain gradient. A step costs two gradients. A step that restarts costs the full
      gradient instead of the second gradient. The state contains the last params and a float32 estimate.
      The notes of `svrg` on random numbers and on its place in a chain apply here too.
      `optperm.variance.take_snapshot` sets the estimate between steps.

    Raises:
      TypeError: If a number has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, both `every` and `probability` are given, a needed
        extra argument is missing, or the trees passed to `update` do not match.

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
    needs = list_extra_args(every, probability)
    checks.check_key("key", key)
    restarts = every is not None or probability is not None

    def init(params: Params) -> RecursiveGradientState:
        return RecursiveGradientState(*make_state(params, key))

    def update(
        grads: Updates,
        state: RecursiveGradientState,
        params: Params,
        *,
        grad_fn: GradFn,
        full_grad_fn: Any = None,  # needed for restarts
        **_: Any,
    ) -> tuple[Updates, RecursiveGradientState]:
        last = state.snapshot

        # d_t = grad f_B(theta_t) + (1 - a) (d_{t-1} - grad f_B(theta_{t-1})) is the correction of SVRG
        # with the coefficient 1 - a and the last step as the snapshot
        def follow() -> Updates:
            rest = 1.0 - resolve_schedule("a", a, state.count, float, high=1.0)
            return correct_gradient(last, rest, grads, params, grad_fn=grad_fn)

        # d_t = grad f(theta_t), or the batch's gradient where grad f is not finite
        def restart() -> Updates:
            full_grad = evaluate_gradient(params, full_grad_fn, "full_grad_fn")
            full_grad = cast_like(full_grad, last.full_grad)
            return jax.tree.map(
                lambda mu, g: jnp.where(jnp.isfinite(mu), mu, jnp.asarray(g, mu.dtype)),
                full_grad,
                grads,
            )

        if restarts:
            is_time = is_due(state, every, probability)
            d = cond(is_time, restart, follow)
        else:
            d = follow()
        # The computation of d must read the last params before the same buffers are overwritten.
        d, old = compute_in_order(cast_like(d, last.full_grad), last.params)
        new, d = compute_in_order(keep_finite(params, old), d)
        snapshot = Snapshot(jnp.ones_like(last.is_taken), new, d)
        count = optax.safe_increment(state.count)
        return d, RecursiveGradientState(count, state.key, snapshot)

    return transformation(
        init,
        update,
        method="recursive_gradient",
        like=lambda state: state.snapshot.params,
        dtypes=True,
        needs=needs,
    )
