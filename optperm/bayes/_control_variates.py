"""Control variates at an optimum: the gradients of batches, without most of their noise.

J. Baker, P. Fearnhead, E. Fox and C. Nemeth, "Control Variates for Stochastic Gradient MCMC", Statistics
and Computing 29, 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.bayes._batches import Batches
from optperm.bayes._covariance import BatchGradients
from optperm.core.dtypes import accumulation_dtype, all_finite, cast_like, wide_zeros
from optperm.core.fresh_jit import fresh_jit_once
from optperm.core.shapes import Array, Float, Params, PyTree, Updates
from optperm.core.shardings import explicit_sharding, is_spread
from optperm.core.transformation import transformation
from optperm.evaluation import num_examples

# The number of examples that are evaluated at once in a pass over the data.
_ROWS = 4096

Loss = Callable[[Any, Any], jax.Array]


class Anchor(NamedTuple):
    r"""A point near an optimum at which the gradient over all examples is known.

    Attributes:
      params: :math:`\theta^*`, a tree like params.
      full_grad: :math:`\nabla L(\theta^*)`, in float32 or wider.
    """

    params: PyTree[Float[Array, "?*shape"], "Params"]
    full_grad: PyTree[Float[Array, "?*shape"], "Params"]


def anchor_like(params: Params) -> Anchor:
    """Return an anchor with the structure, shapes and dtypes for params."""
    return Anchor(jax.tree.map(jnp.zeros_like, params), wide_zeros(params))


class AnchoredState(NamedTuple):
    """State of `anchored`.

    Attributes:
      anchor: The last snapshot.
    """

    anchor: Anchor

    def with_snapshot(self, params: Params, full_grad: Updates) -> AnchoredState:
        """Return the state with an anchor at given params, if the params and the gradient are finite.

        Args:
          params: All params.
          full_grad: The gradient over all examples at these params.
        """
        new = Anchor(params, cast_like(full_grad, self.anchor.full_grad))
        return AnchoredState(optax.tree.where(all_finite(new), new, self.anchor))


def anchored() -> optax.GradientTransformationExtraArgs:
    """Return a transformation that corrects the gradient of a batch by its error at a snapshot."""

    def init(params: Params) -> AnchoredState:
        return AnchoredState(anchor_like(params))

    def update(
        g: Updates, state: AnchoredState, params: Params, *, grad_fn: Any, **_: Any
    ) -> tuple[Updates, AnchoredState]:
        del params
        return correct(state.anchor, g, grad_fn(state.anchor.params)), state

    return transformation(
        init,
        update,
        method="control_variates",
        like=lambda state: state.anchor.params,
        needs={"grad_fn": "the gradient of the batch at given params"},
    )


def correct(anchor: Anchor, g: Updates, at_anchor: Updates, weight: Any = 1) -> Updates:
    r"""Return :math:`g_B(\theta) - w (g_B(\theta^*) - \nabla L(\theta^*))`, in float32 or wider.

    Args:
      anchor: The anchor.
      g: :math:`g_B(\theta)`, perhaps with an axis of examples.
      at_anchor: :math:`g_B(\theta^*)`, of the same shapes.
      weight: w; 1 for the control variate, and 0 for none.
    """

    def of_leaf(g: jax.Array, at: jax.Array, mu: jax.Array) -> jax.Array:
        wide = accumulation_dtype(mu)
        w = jnp.asarray(weight, wide)
        # In this order, large, nearly equal numbers cancel exactly
        return (g.astype(wide) - w * at.astype(wide)) + jnp.broadcast_to(w * mu, jnp.shape(g))

    return jax.tree.map(of_leaf, g, at_anchor, anchor.full_grad)


def correct_batch(batch: BatchGradients, anchor: Anchor, weight: Any = 1) -> BatchGradients:
    """Return the corrected gradients of a batch and of its examples.

    Its `grad_fn` stays, because a control variate does not change the curvature.
    """

    def corrected(grad_fn: Any) -> Any:
        def call(params: Params, **part: Any) -> Updates:
            rows = grad_fn(params, **part), grad_fn(anchor.params, **part)
            return correct(anchor, *rows, weight)

        vars(call).update(vars(grad_fn))
        return call

    names = {"per_example_grad_fn", "example_grad_fn"} & batch.extras.keys()
    grad = correct(anchor, batch.grad, batch.extras["grad_fn"](anchor.params), weight)
    own = {name: corrected(batch.extras[name]) for name in names}
    return batch._replace(grad=grad, extras=batch.extras | own)


def find_anchors(loss: Loss, batches: Batches, params: Params) -> Anchor:
    """Return the anchor of each chain, by one pass over all examples.

    Args:
      loss: The mean loss over a batch.
      batches: The batches, whose examples are all known.
      params: The params, with a leading axis of chains.
    """
    return Anchor(params, full_gradients(loss, batches, params))


def check_anchors(anchors: Anchor) -> Anchor:
    """Return anchors.

    Raises:
      ValueError: If a full gradient is not finite.
    """
    if not bool(all_finite(anchors.full_grad)):
        raise ValueError(
            "The gradient over all examples is not finite where the search for an optimum ended: remove "
            "examples with NaN or infinity, and return (sum, count) from a loss that divides by the sum "
            "of weights, which may be 0. If all examples are finite, the loss may have no optimum: add "
            "a prior. With control_variates=False, entries that are not finite are left out."
        )
    return anchors


def full_gradients(loss: Loss, batches: Batches, params: Params) -> Updates:
    r"""Return :math:`\nabla L(\theta) = \sum_B \frac{|B|}{N} \nabla L_B(\theta)` of each chain.

    Args:
      loss: The mean loss over a batch.
      batches: The batches, whose examples are all known.
      params: The params, with a leading axis of chains.
    """
    n = batches.num_data
    size = min(n, _ROWS)

    def of_part(total: Any, params: Params, rows: Any) -> Any:
        count = num_examples(rows)
        grads = jax.vmap(jax.grad(lambda p: loss(p, rows)))(params)
        return jax.tree.map(lambda sum_, g: sum_ + (count / n) * g.astype(sum_.dtype), total, grads)

    if batches.read_all is not None:
        add, found = fresh_jit_once(of_part), 0
        total = fresh_jit_once(wide_zeros)(params)
        for rows in batches.read_all(size):
            found += num_examples(rows)
            total = add(total, params, rows) if num_examples(rows) else total
        if found != n:
            raise ValueError(
                f"full_data has {found} examples, but num_data is {n}: each example must be there once, "
                "without padding."
            )
        return total

    def whole(params: Params, rows: Any) -> Updates:
        leaves = jax.tree.leaves(rows)
        if any(explicit_sharding(leaf) is not None or is_spread(leaf) for leaf in leaves):
            return jax.lax.map(
                lambda p: optax.tree.cast(
                    jax.grad(lambda p: loss(p, rows))(p), accumulation_dtype(p)
                ),
                params,
            )

        def slice_of(start: Any, length: int) -> Any:
            return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, length), rows)

        total = jax.lax.fori_loop(
            0, n // size, lambda i, total: of_part(total, params, slice_of(i * size, size)),
            wide_zeros(params),
        )  # fmt: skip
        return of_part(total, params, slice_of(n - n % size, n % size)) if n % size else total

    return fresh_jit_once(whole)(params, batches.all_rows)
