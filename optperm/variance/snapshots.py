"""Points at which the gradient is known: when they are renewed, and what they correct."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, all_finite, cast_like
from optperm.contract.keys import as_key, key_data
from optperm.contract.mapped_axes import cond, mark_varying, varying_axes
from optperm.contract.schedules import resolve_schedule
from optperm.contract.states import mask_like

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree, UInt32

GradFn = Callable[[optax.Params], optax.Updates]
BATCH_GRADIENT = {"grad_fn": "the gradient on this batch at given params"}
_FULL_GRADIENT = {
    "full_grad_fn": "the gradient over all examples at given params, beside those of the batch (fit "
    "takes it between steps: leave out refresh_every and refresh_probability, and pass "
    "epoch_start=optperm.take_snapshot): full_grad_fn=lambda params: optperm.evaluate(loss_fn, params, "
    "all_examples).grad, with"
}


class Snapshot(NamedTuple):
    r"""A point at which the full gradient is known.

    Attributes:
      is_taken: Whether there is one yet.
      params: :math:`\tilde\theta`; the initial params before the first one is taken.
      full_grad: :math:`\mu`, the full gradient there, in float32 or the parameter's dtype if wider; zero
        before.
    """

    is_taken: Bool[Array, ""]
    params: PyTree[Float[Array, "?*shape"], "Params"]
    full_grad: PyTree[Float[Array, "?*shape"], "Params"]


class SvrgState(NamedTuple):
    """State of `svrg` and of `recursive_gradient`.

    Attributes:
      count: Steps taken.
      key: Data of the threefry key from which the coins of `refresh_probability` are drawn.
      snapshot: The snapshot that the next step uses. For `recursive_gradient` it is the last step: its
        params, and the estimate of the full gradient there.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    key: UInt32[Array, "2"]
    snapshot: Snapshot


def initial_state(params: optax.Params, seed: int | jax.Array) -> SvrgState:
    """Without a snapshot yet."""
    return SvrgState(
        count=jnp.zeros([], jnp.int32),
        key=key_data(seed),
        snapshot=Snapshot(
            is_taken=mark_varying(jnp.zeros([], bool), varying_axes(params)),
            params=jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params),
            full_grad=jax.tree.map(
                lambda leaf: jnp.zeros_like(leaf, accumulation_dtype(leaf)), params
            ),
        ),
    )


def installed(
    old: Snapshot, params: optax.Params, full_grad: optax.Updates
) -> tuple[Snapshot, jax.Array]:
    """A new snapshot, or the old one if the new one is not finite; and whether it is."""
    params, full_grad = mask_like(params, old.params), mask_like(full_grad, old.params)
    source = "the optimizer state"
    checks.check_same_tree("params", params, old.params, source=source)
    checks.check_same_tree("full_grad", full_grad, old.params, source=source, dtypes=False)
    checks.check_same_mesh("params", params, old.params, source=source)
    checks.check_same_mesh("full_grad", full_grad, old.params, source=source)
    params, full_grad = cast_like((params, full_grad), (old.params, old.full_grad))
    is_finite = all_finite((params, full_grad))
    new = Snapshot(is_taken=jnp.ones_like(old.is_taken), params=params, full_grad=full_grad)
    return optax.tree.where(is_finite, new, old), is_finite


def gradient_at(params: optax.Params, grad_fn: GradFn, name: str = "grad_fn") -> optax.Updates:
    """What a function of that name says of the gradient at params, as a tree like them."""
    grads = mask_like(grad_fn(params), params)
    checks.check_same_tree(f"{name}(params)", grads, params, source="params", dtypes=False)
    return grads


def corrected_by(
    snapshot: Snapshot,
    c: jax.Array,
    grads: optax.Updates,
    params: optax.Params,
    *,
    grad_fn: GradFn,
) -> optax.Updates:
    r"""The gradients less what their batch gets wrong at a snapshot, in float32 or wider.

    .. math::
      g - c (\nabla f_B(\tilde\theta) - \mu)

    An entry that is not finite then, in the dtype of its parameter, is the gradient's own; so are all
    where there is no snapshot or the coefficient is zero.
    """
    is_used = snapshot.is_taken & (c != 0.0)
    # It alone stands behind the condition: the rest is one pass over the params, which XLA joins with
    # what follows.
    at_snapshot = cond(
        is_used,
        lambda: cast_like(gradient_at(snapshot.params, grad_fn), snapshot.full_grad),
        lambda: optax.tree.zeros_like(snapshot.full_grad),
    )

    def correct(g: Any, g_snapshot: jax.Array, mu: jax.Array, theta: Any) -> jax.Array:
        wide = accumulation_dtype((mu, g))
        g, g_snapshot, mu, c_t = (jnp.asarray(x, wide) for x in (g, g_snapshot, mu, c))
        # In this order what is large and nearly equal cancels first, without a rounding error.
        new = (g - c_t * g_snapshot) + c_t * mu
        return jnp.where(is_used & jnp.isfinite(new.astype(jnp.result_type(theta))), new, g)

    return jax.tree.map(correct, grads, at_snapshot, snapshot.full_grad, params)


def needs_of(
    refresh_every: int | jax.Array | None, refresh_probability: optax.ScalarOrSchedule | None
) -> dict[str, str]:
    """The extra arguments of a method that may ask for the full gradient in its steps; checks both."""
    if refresh_every is not None:
        checks.check_count("refresh_every", refresh_every)
    if refresh_probability is not None:
        checks.check_in_range("refresh_probability", refresh_probability, 0.0, 1.0)
        if refresh_every is not None:
            raise ValueError("Pass refresh_every or refresh_probability, not both.")
    is_refreshed = refresh_every is not None or refresh_probability is not None
    return BATCH_GRADIENT | (_FULL_GRADIENT if is_refreshed else {})


def is_due(
    state: SvrgState,
    refresh_every: int | jax.Array | None,
    refresh_probability: optax.ScalarOrSchedule | None,
) -> jax.Array:
    """Whether this step asks for the full gradient; the same on all replicas."""
    if refresh_probability is None:
        return state.count % jnp.asarray(refresh_every, jnp.int32) == 0
    key = as_key(state.key)
    p = resolve_schedule("refresh_probability", refresh_probability, state.count, high=1.0)
    coin = jax.random.bernoulli(jax.random.fold_in(key, state.count), p)
    return coin | ~state.snapshot.is_taken


def in_order(first: Any, second: Any) -> tuple[Any, Any]:
    """Both trees, the first of them computed, once, before anything is made of the second.

    Else XLA computes the first again wherever it is used, from copies of the state that it is made of.
    """
    return jax.lax.optimization_barrier((first, second))


def where_finite(new: optax.Params, old: optax.Params) -> optax.Params:
    """The new tree, with the old one's entries for those that are not finite."""
    return jax.tree.map(
        lambda x, y: jnp.where(jnp.isfinite(x), jnp.asarray(x, y.dtype), y), new, old
    )
