"""Train params of 16 bits as if they had 24 or 32 bits.

S. Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015, arXiv 1502.02551;
P. Zamirai et al., "Revisiting BFloat16 Training", 2020, arXiv 2010.06192; "FlashOptim: Optimizers for
Memory Efficient Training", 2026, arXiv 2602.23349.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks
from optperm.core.keys import key_data
from optperm.core.noise import mix, mix_key, mixed_words, seeds
from optperm.core.remainders import (
    is_narrow,
    join,
    join_params,
    make_remainder,
    remainder_type,
    round_like,
    split,
    step_params,
)
from optperm.core.shapes import Array, Float32, Int, Int32, Params, PyTree, Updates
from optperm.core.shardings import shard_like
from optperm.core.states import find_state, replace_state
from optperm.core.transformation import transformation
from optperm.core.trees import fill_masked, mask_like, spread_prefix, without_variables


class WidenedState(NamedTuple):
    """State of `widen_params`.

    Attributes:
      count: Number of steps taken, which seeds the random numbers.
      remainder: r of each parameter in 16 bits, int8 or int16, of the same shape. With `bits=0`, it is a
        single zero, uint8. Params in 32 or 64 bits have a single zero of their own dtype.
      inner_state: State of `inner`, over params in at least 32 bits.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    remainder: PyTree[Int[Array, "..."], "Params"]
    inner_state: Any


def widen_params(
    inner: optax.GradientTransformation, *, bits: int = 8, key: int | jax.Array = 0
) -> optax.GradientTransformationExtraArgs:
    r"""Train params of 16 bits as if they had 8 or 16 bits more, without a float32 copy.

    A parameter in bfloat16 has 8 significant bits, so at 1.0, a step of less than 0.002 rounds to
    nothing. This wrapper stores the bits that rounding removes as an integer of the parameter's shape.
    Let B be the bits of a float32 number w, which are evenly spaced numbers in each binade. Its
    parameter P and its remainder r are

    .. math::
      P = \operatorname{round}(B / 2^{16}), \qquad r = (B - 2^{16} P) / 2^{16 - \text{bits}}

    so :math:`2^{16} P + 2^{16 - \text{bits}} r` are the bits of w again. Each step joins, updates and
    splits w:

    .. math::
      w = \operatorname{join}(P, r), \qquad w' = w + u(g; s, w), \qquad
      P', r' = \operatorname{split}(w')

    Before the split, the bits of :math:`w'` are rounded to a multiple of :math:`2^{16 - \text{bits}}` at
    random, so that rounding is unbiased. With `bits=16`, nothing is rounded, except where a step is
    longer than its result: there, r becomes 0, and the error is at most half a unit in the last place of
    the 16-bit step. Around `optperm.quantize_state`, AdamW takes 7.1 bytes per parameter with the
    parameter and its gradient, instead of 16 bytes in float32::

      tx = optperm.widen_params(optperm.quantize_state(optax.adamw(1e-3)))

    Args:
      inner: Any optimizer. It gets params in float32, and gradients cast to float32.
      bits: The bits of r: 8, 16, or 0. With 0, params are rounded at random without a remainder.
      key: The random key of the rounding: an int or a `jax.random.key`. Replicas with the same key round
        with the same numbers.

    Returns:
      A transformation whose state is a `WidenedState`. The updates have the dtypes of the params. Params
      in 32 or 64 bits are updated by `inner` as they are.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> w = plain = jnp.ones(1000, jnp.bfloat16)
      >>> grads = jnp.full(1000, 1e-5, jnp.bfloat16)
      >>> tx = optperm.widen_params(optax.sgd(1.0))
      >>> opt_state, update = tx.init(w), jax.jit(tx.update)
      >>> for _ in range(1000):
      ...     updates, opt_state = update(grads, opt_state, w)
      ...     w = optax.apply_updates(w, updates)
      ...     plain = plain - grads
      >>> wide = optperm.memory.wide_params(w, opt_state)
      >>> round(wide.mean().item(), 4), plain.mean().item()
      (0.99, 1.0)

    Notes:
      Put the whole optimizer inside, with its learning rate, schedule and weight decay: a change of the
      updates after this transformation is lost, as in 16 bits. Clipping may come before.

      Evaluate, average and save `optperm.memory.wide_params(params, opt_state)`. A change of params
      outside of `update` keeps the remainders, which are at most half a unit in the last place. A
      parameter of 0 has no remainder, so pruned entries stay 0.

      With float16, 13 bits of w are missing instead of 16. Below 2^-14, where numbers in float16 are
      evenly spaced, remainders are too.

      Functions among the extra arguments, such as `grad_fn`, are called with params in float32.

    Raises:
      TypeError: If `inner` is not a transformation.
      ValueError: If `bits` is not 0, 8 or 16; if params have fewer than 16 bits; or if `update` gets a
        state that was made with other bits or other params, or the state of another optimizer.

    References:
      Gupta et al., `Deep Learning with Limited Numerical Precision
      <https://arxiv.org/abs/1502.02551>`_, 2015

      `FlashOptim: Optimizers for Memory Efficient Training <https://arxiv.org/abs/2602.23349>`_, 2026
    """
    checks.check_transformation("inner", inner)
    checks.check_static_count("bits", bits, minimum=0)
    if bits not in (0, 8, 16):
        raise ValueError(f"bits must be 0, 8 or 16, got {bits!r}.")
    checks.check_key("key", key)
    optimizer = optax.with_extra_args_support(inner)

    def init(params: Params) -> WidenedState:
        _check_dtypes(params)
        remainder = jax.tree.map(lambda p: make_remainder(p, bits), params)
        inner_state = optimizer.init(jax.tree.map(_widen, params))
        return WidenedState(jnp.zeros([], jnp.int32), remainder, inner_state)

    def update(
        updates: Updates, state: WidenedState, params: Params, **extra_args: Any
    ) -> tuple[Updates, WidenedState]:
        _check_remainders(state.remainder, params, bits)

        # w = join(P, r), w' = w + u(g; s, w)
        w = jax.tree.map(join, params, state.remainder)
        g = jax.tree.map(lambda g, w: g.astype(w.dtype), updates, w)
        u, inner_state = optimizer.update(g, state.inner_state, w, **extra_args)

        # P', r' = split(w')
        seed, numbers = mix_key(key_data(key), state.count), seeds(len(jax.tree.leaves(params)))

        def draw(index: int, p: jax.Array) -> jax.Array:
            return mixed_words(mix(seed ^ numbers[index]), mix(~seed ^ numbers[index]), p)

        moves, remainder = step_params(
            w, u, params, state.remainder, bits, draw if bits < 16 else None
        )
        count = optax.safe_increment(state.count)
        return moves, WidenedState(count, remainder, inner_state)

    return transformation(
        init,
        update,
        method="widen_params",
        conversion="tx.init(params)._replace(inner_state=opt_state) takes the state of inner alone.",
    )


def wide_params(params: Params, opt_state: Any) -> Params:
    """Return params of 16 bits with their remainders, in float32.

    Args:
      params: The params after a step.
      opt_state: The optimizer state after the step, with the state of `optperm.widen_params` anywhere in
        it.

    Returns:
      The params. Leaves that have no remainder in 16 bits are cast to float32; wider leaves are returned
      as they are.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> w = jnp.ones(2, jnp.bfloat16)
      >>> tx = optperm.widen_params(optax.sgd(1.0), bits=16)
      >>> updates, opt_state = tx.update(jnp.full(2, 2.0**-10, jnp.bfloat16), tx.init(w), w)
      >>> optperm.memory.wide_params(optax.apply_updates(w, updates), opt_state).tolist()
      [0.9990234375, 0.9990234375]

    Raises:
      ValueError: If `opt_state` has no state of `widen_params`, or its state does not fit the params.
    """
    remainder = find_state(opt_state, WidenedState, method="widen_params").remainder
    plain = without_variables(params)
    _check_remainders(remainder, mask_like(plain, remainder), _read_bits(remainder))
    joined = jax.tree.leaves(join_params(plain, remainder))
    return jax.tree.unflatten(jax.tree.structure(params), joined)


def narrow_params(wide: Params, opt_state: Any, dtype: Any) -> tuple[Params, Any]:
    """Return params of 16 bits, and an optimizer state with their remainders, for params in float32.

    Use it to start from a checkpoint in float32, or to continue with averaged params.

    Args:
      wide: The params in float32.
      opt_state: `tx.init(params)` of params in 16 bits, or a later state. Only the remainders change.
      dtype: The dtype of the params of 16 bits: bfloat16 or float16, or a tree of dtypes like params.

    Returns:
      The params, rounded to the nearest number with their bits, and the optimizer state. Leaves whose
      params had 32 or 64 bits in `init` do not change.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> wide = jnp.array([1.001, -0.3])
      >>> tx = optperm.widen_params(optax.adam(1e-3))
      >>> opt_state = tx.init(wide.astype(jnp.bfloat16))
      >>> params, opt_state = optperm.memory.narrow_params(wide, opt_state, jnp.bfloat16)
      >>> params.tolist()
      [1.0, -0.30078125]
      >>> [round(x, 4) for x in optperm.memory.wide_params(params, opt_state).tolist()]
      [1.001, -0.3]

    Raises:
      ValueError: If `opt_state` has no state of `widen_params`, its state does not fit the params or has
        no params of 16 bits, or a dtype is neither bfloat16 nor float16.
    """
    state = find_state(opt_state, WidenedState, method="widen_params")
    if not any(jnp.issubdtype(r.dtype, jnp.integer) for r in jax.tree.leaves(state.remainder)):
        raise ValueError(
            "opt_state has no params of 16 bits: make it with init of params in 16 bits, such as "
            "tx.init(jax.tree.map(lambda p: p.astype(jnp.bfloat16), wide))."
        )
    plain = without_variables(wide)
    own = mask_like(plain, state.remainder)
    dtypes = spread_prefix(
        "dtype", without_variables(dtype), own, _is_narrow_dtype, "bfloat16 or float16"
    )
    structure: Any = jax.tree.structure(own)
    rows = zip(*map(jax.tree.leaves, (own, state.remainder, dtypes)), strict=True)
    pairs = [_narrow(*row) for row in rows]
    narrowed, remainders = (structure.unflatten([pair[i] for pair in pairs]) for i in range(2))
    _check_remainders(remainders, narrowed, _read_bits(state.remainder))
    params = jax.tree.leaves(fill_masked(narrowed, plain))
    new = state._replace(remainder=remainders)
    new_state = replace_state(opt_state, WidenedState, new, method="widen_params")
    return jax.tree.unflatten(jax.tree.structure(wide), params), new_state


def _narrow(wide: Any, remainder: Any, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return a leaf in 16 bits and its remainder; a leaf without 16 bits is returned as it is."""
    if not jnp.issubdtype(remainder.dtype, jnp.integer):
        return wide, remainder
    bits = _read_bits(remainder)
    param, new = split(jnp.asarray(wide, jnp.float32), dtype, bits, None)
    return param.astype(dtype), (new if bits else remainder)


def _is_narrow_dtype(node: Any) -> bool:
    """Return whether a node is bfloat16 or float16; raise for other dtypes."""
    if not isinstance(node, np.dtype | type | str) and not hasattr(node, "dtype"):
        return False
    if jnp.dtype(node) not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"dtype must be bfloat16 or float16, got {jnp.dtype(node)}.")
    return True


def lost_updates(params: Params, updates: Updates) -> Float32[Array, ""]:
    """Return the fraction of entries whose update is not 0, but does not change the parameter.

    If it is large, params of 16 bits are hardly trained: use `optperm.widen_params`.

    Args:
      params: The params before the step.
      updates: The updates, a tree like params.

    Returns:
      The fraction of all entries, a float32 scalar.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> w = jnp.array([1.0, 0.001], jnp.bfloat16)
      >>> optperm.memory.lost_updates(w, jnp.full(2, 1e-4, jnp.bfloat16)).item()
      0.5

    Raises:
      ValueError: If the trees do not match.
    """
    checks.check_same_tree("updates", updates, params, source="params", dtypes=False)

    def count(p: Any, u: Any) -> jax.Array:
        p, u = jnp.asarray(p), jnp.asarray(u)
        dtype = jnp.promote_types(p.dtype, jnp.float32)
        start = p.astype(dtype)
        reached = round_like(start + u.astype(dtype), p)
        return jnp.sum((u != 0) & (reached == start), dtype=jnp.float32)

    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(updates), strict=True)
    lost = sum((count(p, u) for p, u in pairs), jnp.zeros([], jnp.float32))
    return lost / max(sum(map(jnp.size, jax.tree.leaves(params))), 1)


def _widen(param: Any) -> Any:
    return shard_like(jnp.asarray(param, jnp.float32), param) if is_narrow(param) else param


def _check_dtypes(params: Params) -> None:
    """Raise if a leaf has fewer than 16 bits."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if jnp.finfo(dtype).bits < 16:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} must have at least 16 bits, such as bfloat16, got "
                f"{dtype}."
            )


def _check_remainders(remainder: Any, params: Params, bits: int) -> None:
    """Raise unless the remainders are those of these params with these bits."""
    structure: Any = jax.tree.structure(params)
    if structure != jax.tree.structure(remainder):
        checks.check_same_tree("params", params, remainder, source="the optimizer state")
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for (path, p), r in zip(leaves, jax.tree.leaves(remainder), strict=True):
        wanted = remainder_type(p, bits)
        if (r.shape, r.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {jnp.result_type(p)}{list(jnp.shape(p))}, whose "
                f"remainder with bits={bits} is {wanted.dtype}{list(wanted.shape)}, but the optimizer "
                f"state has {r.dtype}{list(r.shape)}: it was made with other bits or for other params. "
                "To change bits, pass optperm.memory.wide_params(params, opt_state) and a new state to "
                "optperm.memory.narrow_params, and carry over the moments with "
                "new._replace(inner_state=opt_state.inner_state)."
            )


def _read_bits(remainder: Any) -> int:
    """Return the bits with which remainders were made."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(remainder)]
    found = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.integer)]
    return 8 * found[0].itemsize if found and found[0] != jnp.uint8 else 0
