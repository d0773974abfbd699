"""Loopless Katyusha: SVRG with momentum for strongly convex losses.

D. Kovalev, S. Horvath and P. Richtarik, "Don't Jump Through Hoops and Remove Those Loops: SVRG and
Katyusha are Better Without the Outer Loop", ALT 2020, after Z. Allen-Zhu, "Katyusha: The First Direct
Acceleration of Stochastic Gradient Methods", STOC 2017.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, cast_like
from optperm.core.mapped_axes import varying_zeros
from optperm.core.shapes import Array, Float, Int32, Params, PyTree, Updates
from optperm.core.transformation import transformation
from optperm.exact import count_mismatches, mismatch_warnings
from optperm.variance._batch_gradients import BATCH_GRADIENT, GradFn, keep_finite
from optperm.variance._svrg import FULL_GRADIENT, SvrgState, correct_loopless, make_state


class KatyushaState(NamedTuple):
    """State of `katyusha`.

    Attributes:
      svrg: The number of steps, the random key, and the snapshot (w and the full gradient at w).
      y: The point after one gradient step, in float32 or the parameter's dtype if wider.
      z: The point after steps along all gradients so far, in the same dtype.
      mismatches: Number of steps whose params differed by more than rounding from the average of y, z
        and the snapshot, because something else had moved the params.
    """

    svrg: SvrgState
    y: PyTree[Float[Array, "?*shape"], "Params"]
    z: PyTree[Float[Array, "?*shape"], "Params"]
    mismatches: Int32[Array, ""]

    def warnings(self, params: Any) -> list[str]:
        """Return a sentence if something other than `katyusha` has changed the params.

        Args:
          params: Not used.
        """
        del params
        return mismatch_warnings("katyusha", self.mismatches)


def katyusha(
    learning_rate: float | jax.Array,
    strong_convexity: float | jax.Array,
    probability: float | jax.Array,
    *,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Minimize a strongly convex loss with loopless Katyusha, an accelerated SVRG.

    With the params :math:`x`, the learning rate :math:`\alpha`, the strong convexity :math:`\mu` and the
    probability p of a snapshot,

    .. math::
      \tau &= \min\left(\sqrt{2 \alpha \mu / p}, \, \tfrac12\right), \qquad s = \alpha / \tau \\
      g_t &= \nabla f_B(x_t) - \nabla f_B(w_t) + \nabla f(w_t) \\
      z_{t+1} &= \frac{z_t + s (\mu x_t - g_t)}{1 + s \mu} \\
      y_{t+1} &= x_t + \tau (z_{t+1} - z_t) \\
      w_{t+1} &= y_t \text{ with probability } p \text{, else } w_t \\
      x_{t+1} &= \tau z_{t+1} + \tfrac12 w_{t+1} + \left(\tfrac12 - \tau\right) y_{t+1}

    from :math:`x_0 = y_0 = z_0 = w_0`. This is the paper's method with :math:`\theta_1 = \tau`,
    :math:`\theta_2 = 1/2`, :math:`\eta = 1 / (3 \tau)` and :math:`\alpha = 1 / (3 L)` for an L-smooth
    loss. As in SGD, :math:`y_{t+1} \approx x_t - \alpha g_t`, so rates for SVRG are suitable. If the
    condition number :math:`L / \mu` is above the number of examples, as with an L2 penalty of 1/n,
    Katyusha needs fewer passes over the examples than `optperm.svrg`.

    Katyusha is a complete optimizer: its updates lead to an average of points in its state. No
    transformation after it in a chain may change its updates, and no wrapper may move the params, as
    `optperm.agn` and `optperm.laperm` do. `mismatches` in the state counts steps after such changes,
    and `optperm.training.fit` warns. If something else changes the params, make a new state.

    Args:
      learning_rate: :math:`\alpha > 0`. Use `optperm.variance.svrg_learning_rate` to find a rate, and
        keep it constant: the params are averages whose weights depend on the rate.
      strong_convexity: :math:`\mu > 0`, such as the weight of a penalty :math:`\mu |x|^2 / 2` that is
        part of a convex loss.
      probability: p, in (0, 1]. With n examples in batches of b, p = b / (2 n) gives one full gradient
        per two passes over the examples. All replicas draw the same random numbers.
      key: The random key of the snapshots: an int or a `jax.random.key`.

    Returns:
      A transformation whose state is a `KatyushaState`. Its `update` needs `params` and two extra
      arguments. `grad_fn(params)` of `optperm.evaluate` is the gradient on this batch at given
      params. `full_grad_fn(params)` is the gradient over all examples.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> x = jax.random.normal(jax.random.key(0), (512, 3)) * jnp.array([1.0, 0.3, 0.1])
      >>> y = x @ jnp.ones(3) + jax.random.normal(jax.random.key(1), (512,))
      >>> def loss_fn(w, batch):
      ...     return jnp.mean((batch[0] @ w - batch[1]) ** 2) / 2 + jnp.sum(w**2) / 512
      >>> tx = optperm.katyusha(0.1, strong_convexity=1 / 256, probability=16 / 512)
      >>> def step(carry, rows):
      ...     w, opt_state = carry
      ...     e = optperm.evaluate(loss_fn, w, (x[rows], y[rows]))
      ...     full_grad_fn = lambda w: jax.grad(loss_fn)(w, (x, y))
      ...     updates, opt_state = tx.update(
      ...         e.grad, opt_state, w, full_grad_fn=full_grad_fn, **e.extra_args
      ...     )
      ...     return (optax.apply_updates(w, updates), opt_state), None
      >>> rows = jax.random.randint(jax.random.key(2), (1500, 16), 0, 512)
      >>> w = jnp.zeros(3)
      >>> (w, _), _ = jax.lax.scan(step, (w, tx.init(w)), rows)
      >>> bool(jnp.linalg.norm(jax.grad(loss_fn)(w, (x, y))) < 1e-5)
      True

    Notes:
      `benchmarks/variance.py` compares Katyusha with SVRG and L-BFGS. On small problems, L-BFGS is
      better. If the learning rate is too large, the final loss is high but finite.

      A step needs two gradients. The state contains two more trees than the state of `optperm.svrg`. If
      the params have 16 bits, x is rounded to 16 bits, but y and z are not.

      Inside `optax.MultiSteps`, only the last of the accumulated gradients would be corrected. Use
      larger batches instead. Inside `optax.partition` or `optax.masked`, Katyusha is exact only while
      the other params do not change.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, an extra argument is missing, or the trees passed to
        `update` do not match.

    References:
      Kovalev, Horvath and Richtarik, `Don't Jump Through Hoops and Remove Those Loops: SVRG and Katyusha
      are Better Without the Outer Loop <https://arxiv.org/abs/1901.08689>`_, ALT 2020

      Allen-Zhu, `Katyusha: The First Direct Acceleration of Stochastic Gradient Methods
      <https://arxiv.org/abs/1603.05953>`_, STOC 2017
    """
    checks.check_positive("learning_rate", learning_rate, checks.LARGEST_FLOAT32)
    checks.check_positive("strong_convexity", strong_convexity, checks.LARGEST_FLOAT32)
    checks.check_positive("probability", probability, 1.0)
    checks.check_key("key", key)

    def init(params: Params) -> KatyushaState:
        def widen(leaf: Any) -> jax.Array:
            return jnp.array(leaf, accumulation_dtype(leaf), copy=True)

        y, z = (jax.tree.map(widen, params) for _ in range(2))
        return KatyushaState(make_state(params, key), y, z, varying_zeros(params, jnp.int32))

    def update(
        grads: Updates,
        state: KatyushaState,
        params: Params,
        *,
        grad_fn: GradFn,
        full_grad_fn: GradFn,
        **_: Any,
    ) -> tuple[Updates, KatyushaState]:
        alpha, mu, p = (
            jnp.asarray(each, float) for each in (learning_rate, strong_convexity, probability)
        )
        alpha = jnp.maximum(alpha, jnp.finfo(alpha.dtype).tiny)  # traced rates may be zero
        tau = jnp.minimum(jnp.sqrt(2 * alpha * mu / p), 0.5)
        s = alpha / tau

        # g = grad f_B(x) - grad f_B(w) + grad f(w); w' = y with probability p, else w
        g, snapshot = correct_loopless(
            state.svrg,
            jnp.ones([]),
            probability,
            grads,
            params,
            at=cast_like(state.y, params),
            grad_fn=grad_fn,
            full_grad_fn=full_grad_fn,
        )

        # x = tau z + w / 2 + (1 / 2 - tau) y
        def combine(z: jax.Array, w: jax.Array, y: jax.Array) -> jax.Array:
            t = tau.astype(z.dtype)
            return t * z + w.astype(z.dtype) / 2 + (0.5 - t) * y

        x = jax.tree.map(combine, state.z, state.svrg.snapshot.params, state.y)

        # z' = (z + s (mu x - g)) / (1 + s mu)
        def accumulate(z: jax.Array, x: jax.Array, g: Any) -> jax.Array:
            rate, m = s.astype(z.dtype), mu.astype(z.dtype)
            return (z + rate * (m * x - jnp.asarray(g, z.dtype))) / (1 + rate * m)

        z = keep_finite(jax.tree.map(accumulate, state.z, x, g), state.z)
        # y' = x + tau (z' - z)
        y = jax.tree.map(lambda x, new, z: x + tau.astype(z.dtype) * (new - z), x, z, state.z)
        # x' = tau z' + w' / 2 + (1 / 2 - tau) y'
        new_x = jax.tree.map(combine, z, snapshot.params, y)
        moves = jax.tree.map(lambda x, p: x - jnp.asarray(p, x.dtype), new_x, params)
        count = optax.safe_increment(state.svrg.count)
        mismatches = count_mismatches(state.mismatches, params, cast_like(x, params))
        return moves, KatyushaState(SvrgState(count, state.svrg.key, snapshot), y, z, mismatches)

    return transformation(
        init,
        update,
        method="katyusha",
        like=lambda state: state.svrg.snapshot.params,
        dtypes=True,
        needs=BATCH_GRADIENT | FULL_GRADIENT,
    )
