"""IVON: variational learning of a normal distribution with a diagonal covariance, in the memory of Adam.

Y. Shen, N. Daheim, B. Cong, P. Nickl, G. M. Marconi, C. Bazan, R. Yokota, I. Gurevych, D. Cremers,
M. E. Khan and T. Moellenhoff, "Variational Learning is Effective for Large Deep Networks", ICML 2024,
arXiv 2402.17641, algorithm 1.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes._remainders import with_remainders
from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, wide_zeros
from optperm.core.mapped_axes import AxisName, axis_names, varying_axes
from optperm.core.noise import normal_like
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Array, Float, Int32, Params, PyTree, Updates
from optperm.core.shardings import can_be_seen
from optperm.core.transformation import transformation, wrapper
from optperm.core.trees import fill_masked, mask_like

_STEP = (
    "draw = optperm.bayes.sample_params(opt_state, params, key), then "
    "update(jax.grad(loss_fn)(draw, batch), opt_state, params, draw=draw)"
)
# The ratio of the first draws' standard deviation to the root mean square of the weights
_FIRST_RATIO, _LARGEST_RATIO = 0.1, 0.5


class IvonState(NamedTuple):
    r"""State of `ivon`, in float32 or the parameter's dtype if wider.

    Attributes:
      count: Number of steps taken.
      momentum: :math:`g`, the running mean of the gradients.
      hessian: :math:`h`, the estimate of the Hessian's diagonal.
      num_data: :math:`\lambda`. The variances are :math:`1 / (\lambda (h + \delta))`.
      weight_decay: :math:`\delta`.
      hess_init: :math:`h_0`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    momentum: PyTree[Float[Array, "?*shape"], "Params"]
    hessian: PyTree[Float[Array, "?*shape"], "Params"]
    num_data: Float[Array, ""]
    weight_decay: Float[Array, ""]
    hess_init: Float[Array, ""]

    def draw(self, params: Params, key: jax.Array) -> Params:
        """Return params in which a draw from the normal distribution replaces the mean.

        Args:
          params: All params.
          key: A random key.
        """
        mean = mask_like(params, self.momentum)
        threefry = jax.random.key_data(jax.random.key(jax.random.bits(key), impl="threefry2x32"))

        # theta = m + z / sqrt(lambda (h + delta))
        def draw(m: Any, h: jax.Array, z: jax.Array) -> jax.Array:
            precision = self.num_data.astype(h.dtype) * (h + self.weight_decay.astype(h.dtype))
            return m.astype(h.dtype) + z.astype(h.dtype) * jax.lax.rsqrt(precision)

        noise = normal_like(threefry, mean)
        return fill_masked(jax.tree.map(draw, mean, self.hessian, noise), params)

    def warnings(self, params: Params) -> list[str]:
        """Return a warning if the first draws are too wide for most leaves, as far as Python can see.

        Args:
          params: All params, before the first step.
        """
        seen = jax.tree.leaves(mask_like(params, self.momentum))
        numbers = self.num_data, self.hess_init, self.weight_decay
        if not all(map(can_be_seen, (*seen, *numbers, self.count))) or np.any(self.count):
            return []
        num_data, hess_init, weight_decay = (float(np.max(number)) for number in numbers)
        deviation = (num_data * (hess_init + weight_decay)) ** -0.5
        scales = [scale for leaf in seen if leaf.size and (scale := float(_scale([leaf]))) > 0]
        wide = sum(deviation > _LARGEST_RATIO * scale for scale in scales)
        if 2 * wide <= len(scales):
            return []
        return [
            f"The first draws of ivon deviate by {deviation:.2g} = 1 / sqrt(num_data (hess_init + "
            f"weight_decay)), more than half of the root mean square of the weights in {wide} of "
            f"{len(scales)} leaves (their median root mean square is {np.median(scales):.2g}), so the "
            "network may learn little. Pass a larger hess_init, or omit it if you have passed a small "
            "value."
        ]


def ivon(
    learning_rate: optax.ScalarOrSchedule,
    num_data: float | jax.Array,
    *,
    hess_init: float | jax.Array | None = None,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.99999,
    weight_decay: float | jax.Array = 1e-4,
    mc_samples: int = 1,
    clip_radius: float | jax.Array | None = None,
    rescale_lr: bool = True,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Learn a normal distribution over the params, whose mean is the params themselves.

    Each step takes the gradient :math:`\hat g` of the batch's mean loss at a draw
    :math:`\theta = m + \epsilon`, :math:`\epsilon \sim \mathcal{N}(0, 1 / (\lambda (h + \delta)))`. All
    products are elementwise:

    .. math::
      \hat h &= \lambda (h + \delta)\, \epsilon\, \hat g \\
      g &\leftarrow \beta_1 g + (1 - \beta_1) \hat g \\
      h &\leftarrow \beta_2 h + (1 - \beta_2) \hat h
        + \tfrac12 (1 - \beta_2)^2 \frac{(h - \hat h)^2}{h + \delta} \\
      \bar g &= g / (1 - \beta_1^t) \\
      m &\leftarrow m - \alpha\, \mathrm{clip}_\xi \frac{\bar g + \delta m}{h + \delta}

    :math:`\hat h` estimates the Hessian's diagonal from the gradient alone, by Price's theorem. The last
    term of the third line keeps :math:`h + \delta` positive.

    Args:
      learning_rate: A number or a schedule that determines :math:`\alpha` (see `rescale_lr`). Tune this
        value. With the defaults of the other arguments, 0.3 and 1 are good first guesses.
      num_data: :math:`\lambda > 0`, the number of training examples (the effective sample size). A
        larger number makes the learned distribution narrower ("cold"), but not the first draws with
        `hess_init=None`.
      hess_init: :math:`h_0 > 0`. None sets the standard deviation of the first draws to a tenth of the
        root mean square :math:`w` of the weights in all leaves with two or more axes (or in all leaves,
        if none has two), :math:`1 / \sqrt{\lambda h_0} = 0.1\, w`; if these weights are zero,
        :math:`h_0` is 1. A smaller :math:`h_0` makes the draws wider. With draws as wide as the weights,
        a network does not learn.
      b1: :math:`\beta_1 \in [0, 1)`.
      b2: :math:`\beta_2 \in [0, 1)`. After T steps, the fraction :math:`\beta_2^T` of :math:`h` is still
        :math:`h_0`: see Notes. With :math:`\beta_2 = 0.9`, the draws of a network can become so wide
        that the network hardly learns.
      weight_decay: :math:`\delta > 0`. The prior has the precision :math:`\lambda \delta`.
      mc_samples: The number of draws per step. With more than one, `updates` and `draw` have a leading
        axis of that length.
      clip_radius: :math:`\xi > 0`, the maximum magnitude of an entry of the direction. None for
        :math:`\xi = \sigma_0 / (h_0 + \delta)`, where
        :math:`\sigma_0 = 1 / \sqrt{\lambda (h_0 + \delta)}` is the standard deviation of the first
        draws. With `rescale_lr`, no entry then moves by more than `learning_rate` times :math:`\sigma_0`
        per step. `inf` for no limit.
      rescale_lr: If True, :math:`\alpha` is `learning_rate` times :math:`h_0 + \delta`, which makes the
        first step, before clipping, close to a step of SGD. If False, :math:`\alpha` is `learning_rate`.
      axis_name: The mapped axis or axes over which :math:`\hat g` and :math:`\hat h` are averaged. Each
        replica has its own part of the batch and its own draw, from its own key.

    Returns:
      A transformation whose state is an `IvonState`. Its `update` needs the params, the gradient at a
      draw, and this draw as the extra argument `draw`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> curvature = jnp.array([1.0, 100.0])
      >>> grad_fn = jax.grad(lambda w: 0.5 * jnp.sum(curvature * (w - 1.0) ** 2))
      >>> tx = optperm.ivon(0.05, num_data=1000.0, b2=0.999)
      >>> def step(carry, key):
      ...     w, opt_state = carry
      ...     draw = optperm.bayes.sample_params(opt_state, w, key)
      ...     updates, opt_state = tx.update(grad_fn(draw), opt_state, w, draw=draw)
      ...     return (optax.apply_updates(w, updates), opt_state), None
      >>> w = jnp.zeros(2)
      >>> keys = jax.random.split(jax.random.key(0), 10_000)
      >>> (w, opt_state), _ = jax.lax.scan(step, (w, tx.init(w)), keys)
      >>> bool(jnp.allclose(w, 1.0, atol=0.05) & jnp.allclose(opt_state.hessian, curvature, rtol=0.2))
      True

    Notes:
      With the default `b2`, learning the Hessian takes about 100,000 steps. In a shorter run, all
      weights keep the standard deviation of the first draws, by default a tenth of the weights' root
      mean square. The noise regularizes, but the draws contain little information about the uncertainty.
      `b2=1 - 3 / steps` makes the draws up to :math:`e^{3/2} = 4.5` times as wide by the end. A smaller
      `b2` learns :math:`h`. If there are more weights than examples, the distribution then becomes wide,
      because `weight_decay` is a weak prior, and the likelihood is worse.

      The params are the mean, so you can evaluate the model at the params.
      `optperm.bayes.posterior_predictive` averages predictions over draws from
      `optperm.bayes.sample_params`. `optperm.training.fit` and `optperm.with_loss` make a draw in each
      step, with `mc_samples=1`.

      On a quadratic with Hessian :math:`H`, a weak prior and little noise from the batches, the
      variances tend to :math:`1 / (\lambda (\mathrm{diag} H + \delta))`. These are the variances of the
      best normal approximation with a diagonal covariance.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range; if `draw` is missing or is `params` itself; if
        gradients do not vary over `axis_name`, where `jax.shard_map` tracks this; or if trees do not
        match.

    References:
      Shen et al., `Variational Learning is Effective for Large Deep Networks
      <https://arxiv.org/abs/2402.17641>`_, ICML 2024
    """
    checks.check_in_range("learning_rate", learning_rate, 0.0, float("inf"))
    if clip_radius is not None:
        checks.check_positive("clip_radius", clip_radius)
    chosen = {} if hess_init is None else {"hess_init": hess_init}
    for name, number in {"num_data": num_data, "weight_decay": weight_decay, **chosen}.items():
        checks.check_positive(name, number, checks.LARGEST_FLOAT32)
    for name, number in {"b1": b1, "b2": b2}.items():
        checks.check_decay(name, number)
    checks.check_static_count("mc_samples", mc_samples)
    checks.check_axis_name("axis_name", axis_name)

    def init(params: Params) -> IvonState:
        dtype = accumulation_dtype(params)
        size = jnp.asarray(num_data, dtype)
        h_0 = _choose_hess_init(params, size) if hess_init is None else hess_init
        state = IvonState(
            count=jnp.zeros([], jnp.int32),
            momentum=wide_zeros(params),
            hessian=optax.tree.full_like(wide_zeros(params), h_0),
            num_data=size,
            weight_decay=jnp.asarray(weight_decay, dtype),
            hess_init=jnp.asarray(h_0, dtype),
        )
        for text in state.warnings(params):
            warnings.warn(text, stacklevel=4)  # where init is called
        return state

    def update(
        grads: Updates,
        state: IvonState,
        params: Params,
        *,
        draw: Params | None = None,
        grads_of_draws: Updates | None = None,
        **_: Any,
    ) -> tuple[Updates, IvonState]:
        draw = _check_draw(draw, params, state.momentum, mc_samples)
        if grads_of_draws is not None:
            checks.check_same_tree("updates", grads_of_draws, draw, source="draw", dtypes=False)
        count = optax.safe_increment(state.count)
        rate = resolve_schedule("learning_rate", learning_rate, state.count, state.num_data.dtype)
        given = grads if grads_of_draws is None else grads_of_draws, draw, params
        products = jax.tree.map(_mean_product(mc_samples), *given)
        # All replicas have the same h, so the mean of epsilon g^ gives the mean of h^
        if axis_name is not None:
            _check_are_local(grads, axis_name)
            grads, products = jax.lax.pmean((grads, products), axis_name)
        debias = 1 - jnp.asarray(b1, rate.dtype) ** count.astype(rate.dtype)

        def step(m: Any, g: Any, g_hat: Any, h: Any, product: Any) -> tuple[Any, Any, Any]:
            dtype = h.dtype
            # Compute 1 - beta in Python: in float32, 1 - 0.99999 has an error of 0.1%
            h_0, delta, rate_1, rate_2, debiasing, alpha = (
                jnp.asarray(x, dtype)
                for x in (state.hess_init, weight_decay, 1 - b1, 1 - b2, debias, rate)
            )
            m, g_hat, size = m.astype(dtype), g_hat.astype(dtype), state.num_data.astype(dtype)
            # xi = sigma_0 / (h_0 + delta), with sigma_0 = 1 / sqrt(lambda (h_0 + delta))
            widest = jax.lax.rsqrt(size * (h_0 + delta)) / (h_0 + delta)
            radius = widest if clip_radius is None else jnp.asarray(clip_radius, dtype)
            # h^ = lambda (h + delta) epsilon g^, with the lambda and the delta of the draw
            h_hat = size * (h + state.weight_decay.astype(dtype)) * product
            # g <- beta_1 g + (1 - beta_1) g^
            g = jnp.where(jnp.isfinite(g_hat), g + rate_1 * (g_hat - g), g)
            # h <- beta_2 h + (1 - beta_2) h^ + (1 - beta_2)^2 (h - h^)^2 / 2 (h + delta)
            new_h = h + rate_2 * (h_hat - h) + 0.5 * (rate_2 * (h - h_hat)) ** 2 / (h + delta)
            # Exact arithmetic keeps h + delta above 0, but rounding may not
            h = jnp.where(jnp.isfinite(new_h) & (new_h + delta > 0), new_h, h)
            # m <- m - alpha clip((g / (1 - beta_1^t) + delta m) / (h + delta)), with the new h
            moved = jnp.clip((g / debiasing + delta * m) / (h + delta), -radius, radius)
            # The first step is a step of SGD, since h is h_0
            scale = h_0 + delta if rescale_lr else 1.0
            return -alpha * scale * moved, g, h

        out = jax.tree.map(step, params, state.momentum, grads, state.hessian, products)
        updates, momentum, hessian = (
            jax.tree.map(lambda _, found, i=i: found[i], params, out) for i in range(3)
        )
        return updates, IvonState(
            count=count,
            momentum=momentum,
            hessian=hessian,
            num_data=jnp.asarray(num_data),
            weight_decay=jnp.asarray(weight_decay),
            hess_init=state.hess_init,
        )

    single = with_remainders(
        transformation(
            init,
            update,
            method="ivon",
            like=lambda state: state.momentum,
            axis_name=axis_name,
            takes_gradient=True,
        ),
        method="ivon",
        at_wide=True,
    )
    if mc_samples == 1:
        return single

    def update_by_draws(
        updates: Updates, state: Any, params: Params | None = None, **extra_args: Any
    ) -> tuple[Updates, Any]:
        given = updates, extra_args.get("draw")
        if jax.tree.map(jnp.shape, given) == jax.tree.map(jnp.shape, (params, params)):
            raise ValueError(
                f"updates and draw need a leading axis of {mc_samples} draws: optperm.training.fit and "
                "optperm.with_loss make one draw per step, so pass mc_samples=1 for these."
            )
        mean = jax.tree.map(lambda g: jnp.mean(g, axis=0, dtype=accumulation_dtype(g)), updates)
        return single.update(mean, state, params, grads_of_draws=updates, **extra_args)

    return wrapper(single.init, update_by_draws, method="ivon")


def _scale(leaves: list[Any]) -> jax.Array:
    """Return the root mean square of the entries of leaves."""
    dtype = accumulation_dtype(leaves)
    squares = [jnp.sum(jnp.square(leaf.astype(dtype))) for leaf in leaves]
    return jnp.sqrt(sum(squares, jnp.zeros([], dtype)) / max(sum(leaf.size for leaf in leaves), 1))


def _choose_hess_init(params: Any, num_data: jax.Array) -> jax.Array:
    """Return the h_0 for first draws with a tenth of the weights' root mean square as deviation."""
    leaves = list(map(jnp.asarray, jax.tree.leaves(params)))
    # Leave out leaves with one axis: biases, which are often zero, and scales of norms.
    w = _scale([leaf for leaf in leaves if leaf.ndim > 1] or leaves).astype(num_data.dtype)
    # 1 / sqrt(lambda h_0) = 0.1 w
    h_0 = jnp.minimum(1 / (num_data * (_FIRST_RATIO * w) ** 2), checks.LARGEST_FLOAT32)
    return jnp.where(w > 0, h_0, 1.0)


def _check_draw(draw: Any, params: Any, like: Any, mc_samples: int) -> Any:
    """Return the draw, masked like the state; raise unless the draw belongs to these params."""
    if draw is None:
        raise ValueError(f"ivon needs the extra argument draw: {_STEP}.")
    draw = mask_like(draw, like)
    if mc_samples > 1:
        like = jax.tree.map(lambda g: jax.ShapeDtypeStruct((mc_samples, *g.shape), g.dtype), like)
    checks.check_same_tree("draw", draw, like, source="the optimizer state")
    if any(map(operator.is_, jax.tree.leaves(draw), jax.tree.leaves(params))):
        raise ValueError(f"draw is params itself, but params must stay the mean: {_STEP}.")
    return draw


def _check_are_local(grads: Any, axis_name: AxisName) -> None:
    """Raise if the types of the gradients show that the gradients are the same on all replicas."""
    tracked = varying_axes(jax.lax.axis_index(axis_name)).intersection(axis_names(axis_name))
    if tracked - varying_axes(grads):
        raise ValueError(
            f"Gradients do not vary over the axis {axis_name!r}, as if they were sums or means over "
            "replicas. Draw with jax.random.fold_in(key, jax.lax.axis_index(axis_name)), or pass no "
            "axis_name."
        )


def _mean_product(mc_samples: int) -> Any:
    """Return the function (g^, draw, m) -> epsilon g^ for a leaf, with the mean over stacked draws."""

    def product(g: Any, draw: Any, m: Any) -> jax.Array:
        dtype = accumulation_dtype(m)
        g, draw, m = (jnp.asarray(x, dtype) for x in (g, draw, m))
        if mc_samples == 1:
            return (draw - m) * g
        return jnp.mean((draw - m[None]) * g, axis=0)

    return product
