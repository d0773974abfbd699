"""Store the moments of an optimizer in 8 bits, or first moments in 4 bits.

T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", ICLR 2022, arXiv 2110.02861; OCP,
"Microscaling Formats (MX) Specification", version 1.0; H. Xi et al., "COAT: Compressing Optimizer States
and Activations for Memory-Efficient FP8 Training", 2024, arXiv 2410.19313; B. Li et al., "Memory
Efficient Optimizers with 4-bit States", NeurIPS 2023, arXiv 2309.01507.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from optperm.core import checks
from optperm.core.dtypes import computed_once
from optperm.core.fingerprints import UNSET
from optperm.core.keys import key_data
from optperm.core.noise import mix, mix_key, seeds
from optperm.core.shapes import Array, Int32, Params, UInt32, Updates
from optperm.core.shardings import is_spread, shard_like, sharding_of
from optperm.core.states import find_states, match_params
from optperm.core.transformation import transformation
from optperm.core.trees import (
    is_flag,
    resolve_tree,
    spread_prefix,
    without_boxes,
    without_variables,
)
from optperm.memory._apollo import ApolloState
from optperm.memory._blocks import (
    BLOCK,
    Blocks,
    Even,
    Form,
    Largest,
    Linear,
    Odd,
    Random,
    Root,
    decode,
    encode,
)
from optperm.memory._low_rank import LowRankState
from optperm.memory._moments import decode_states, match_others
from optperm.memory._register_moments import (
    KNOWN,
    Moment,
    find_known_states,
    is_known,
    list_moments,
    replace_moments,
)

# With jit, these functions are traced once for all leaves of the same shape
_encode = jax.jit(encode, static_argnums=1)
_decode = jax.jit(decode, static_argnums=(2, 3))


class QuantizedState(NamedTuple):
    """State of `quantize_state`.

    Attributes:
      count: Number of steps taken, which seeds the random numbers.
      inner_state: State of `inner`, with codes instead of moments: float8_e4m3fn of the same shape, or
        uint8 for 4 bits, with two codes of the last axis in a byte.
      exponents: For each array of moments, in the order of the known states of `inner`, an empty tuple
        if the array is not quantized. Otherwise the entry names the rounding by its type, such as
        `Root`, and has the exponents of the blocks, an int8 array (..., ceil(n / 32)) for a last axis
        of n, and a zero `like` of the dtype of the array.
      fingerprint: The arguments `min_size` and `include` with which the state was made. It is zero in a
        state that `quantize` made from shapes, which fits all arguments.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    inner_state: Any
    exponents: Any
    fingerprint: UInt32[Array, "2"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments in the fingerprint."""
        return "min_size", "include"

    def decode(self) -> Any:
        """Return the state of `inner`, with its moments instead of codes."""
        if not isinstance(self.exponents, tuple | list):  # a placeholder of `optax.tree.map_params`
            return self.inner_state
        found: list[Any] = []
        for moment, blocks in zip(list_moments(self.inner_state), self.exponents, strict=True):
            if not blocks:
                found.append(moment.array)
                continue
            dtype = jnp.result_type(blocks.like)
            x = _decode(moment.array, blocks.exponents, type(blocks), dtype)
            found.append(x if moment.mean is None else x + jnp.square(found[moment.mean]))
        return replace_moments(self.inner_state, found)


def quantize_state(
    inner: optax.GradientTransformation,
    *,
    bits: int = 8,
    min_size: int = 4096,
    include: Any | Callable[[Params], Any] | None = None,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Store the moments of an optimizer in 8 bits, a quarter of their usual memory.

    Each step decodes the moments, takes a step of `inner`, and encodes the new moments. The last axis of
    a moment is divided into blocks of 32 numbers. A block has 32 codes c in float8_e4m3fn and one
    exponent e, with

    .. math::
      m_i \approx c_i \, 2^e \quad \text{(first moments)}, \qquad
      v_i \approx (c_i \, 2^e)^2 \quad \text{(second moments)}

    where e is such that the maximum of :math:`|m|` or :math:`\sqrt{v}` over the block, divided by
    :math:`2^e`, is in (128, 256]. With :math:`\beta_2` near 1, a step changes v by less than half the
    distance between two codes, so rounding to the nearest code would hardly ever change v. Therefore the
    root :math:`r = \sqrt{v} / 2^e` is rounded at random to one of its neighbors :math:`r_0 \le r < r_1`.
    The probability of rounding up is

    .. math::
      p = \frac{r^2 - r_0^2}{r_1^2 - r_0^2},

    so the rounding is unbiased in v. First moments are also rounded at random, without bias in m. The
    momentum of Muon, which is orthogonalized as a matrix, has codes in int8 instead, because rounding
    errors that are small relative to the matrix matter more there than errors that are small relative
    to their entries::

      tx = optperm.quantize_state(optax.adamw(1e-3))

    Args:
      inner: Any optimizer with moments in a known state of Optax: Adam and its variants (AdamW, NAdam,
        RAdam, Adamax, Yogi, AMSGrad, AdaBelief, AdEMAMix, Adan except its last gradient), Lion,
        momentum, EMA, Adagrad, Adadelta, Muon, RMSProp (but not centered with a bias correction), and
        unfactored second moments of Adafactor; or a state that `optperm.memory.register_moments` names.
        The states can be nested in `inner`, such as in a chain, a partition, `optperm.low_rank` or
        `optperm.apollo`.
      bits: 8, or 4 for first moments in 4 bits (e2m1), rounded at random; second moments keep 8 bits.
        With 4 bits, a first moment that is much smaller than others in its block becomes 0 or many times
        too large. Some weights then take steps that are tens of times the learning rate, and the loss of
        a long run may rise.
      min_size: Moments with fewer entries are not quantized.
      include: The params whose moments are quantized: a tree of booleans like params, a prefix of such a
        tree, or a function from params to such a tree. None for all. The authors of 8-bit optimizers
        exclude embeddings.
      key: The random key of the rounding: an int or a `jax.random.key`. Replicas with the same key, as
        under `jax.vmap`, round with the same numbers.

    Returns:
      A transformation whose state is a `QuantizedState`. Its `update` needs what `inner` needs.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optperm.quantize_state(optax.adamw(1e-3))
      >>> params = {"kernel": jnp.ones((64, 256)), "bias": jnp.zeros(256)}
      >>> opt_state = tx.init(params)
      >>> opt_state.inner_state[0].nu["kernel"].dtype
      dtype(float8_e4m3fn)
      >>> updates, opt_state = tx.update(params, opt_state, params)
      >>> round(optperm.memory.state_report(tx, params).words_per_param, 2)
      0.54

    Notes:
      `inner` may include weight decay and a learning rate, which have no moments. Put `optax.masked`
      around this transformation, not inside. Rounding noise raises the maxima of second moments
      (AMSGrad) by 10% to 60% in a few thousand steps; use Adam for long runs. First moments below 1e-5
      of the maximum of their block become 0 or about 1e-5 of it. Second moments below 1e-10 of the
      maximum stay at the smallest code, because dividing a first moment by a second moment of 0 would
      give an enormous step. One outlier therefore slows its block until the moments forget it, so clip
      gradients first.

      Counts, keys, float64 moments, arrays without an axis, and unknown states are not quantized.
      `init` warns if nothing is left to quantize.

      Blocks do not continue from one row to the next. With 8 bits, a last axis of fewer than 8 entries,
      as in convolutions of Equinox (out, in, height, width), is merged with axes before it until there
      are at least 32 entries. Shard such a leaf along the first of these axes, or along another axis.
      With 4 bits, axes are not merged, so each row has its own exponent.

      `optperm.memory.quantize` and `optperm.memory.dequantize` convert a checkpoint of the plain
      optimizer to a checkpoint of the quantized optimizer and back.

    Raises:
      TypeError: If `inner` is not a transformation, or a number has the wrong type.
      ValueError: If `bits` is neither 8 nor 4, `include` does not fit the params or selects none of
        them, no state of `inner` is known, or `update` gets a state that was made with other `bits`,
        `include` or `min_size`; or, with 4 bits, if a device has an odd number of entries of a sharded
        last axis.

    References:
      Dettmers et al., `8-bit Optimizers via Block-wise Quantization
      <https://arxiv.org/abs/2110.02861>`_, 2022

      Li et al., `Memory Efficient Optimizers with 4-bit States
      <https://arxiv.org/abs/2309.01507>`_, 2023
    """
    checks.check_transformation("inner", inner)
    if isinstance(bits, bool) or bits not in (4, 8):
        raise ValueError(f"bits must be 8 or 4, got {bits!r}.")
    checks.check_static_count("min_size", min_size)
    checks.check_key("key", key)
    optimizer = optax.with_extra_args_support(inner)

    def init(params: Params) -> QuantizedState:
        inner_state = inner.init(params)
        plain = without_variables(inner_state)
        moments = list_moments(plain)
        if not find_known_states(plain):
            raise ValueError(
                "inner of quantize_state has no state with known moments: it has "
                f"{checks.name_states(inner_state)}. Known states are "
                f"{', '.join(each.__name__ for each in KNOWN)}. Name the moments of another state with "
                "optperm.memory.register_moments, or use inner without quantize_state."
            )
        _warn_of_unknown(inner_state, params, min_size)
        included = _flag_moments(plain, params, _resolve_include(include, params))
        forms = [
            _find_form(moment, bits) if flag and _is_large(moment.array, min_size) else None
            for moment, flag in zip(moments, included, strict=True)
        ]
        has_arrays = any(jnp.ndim(leaf) and jnp.size(leaf) for leaf in jax.tree.leaves(params))
        if has_arrays and not any(forms):
            warnings.warn(
                "quantize_state saves nothing: no included moment in 16 or 32 bits has at least "
                f"min_size={min_size} entries.",
                UserWarning,
                stacklevel=2,
            )
        count = jnp.zeros([], jnp.int32)
        # This prevents XLA from computing the codes of zeros at compile time, which takes long.
        inner_state = computed_once(inner_state)
        return QuantizedState(count, *_encode_state(inner_state, forms, key, count))

    def update(
        updates: Updates,
        state: QuantizedState,
        params: Params | None = None,
        **extra_args: Any,
    ) -> tuple[Updates, QuantizedState]:
        forms = _find_forms(state.exponents)
        if any(form in ((Random, Linear) if bits == 4 else (Even, Odd)) for form in forms):
            raise ValueError(
                f"bits must be {8 if bits == 4 else 4}, as in the state, got {bits}. To change bits, "
                "convert the state with optperm.memory.dequantize, then optperm.memory.quantize."
            )
        inner_state = state.decode()
        updates, inner_state = optimizer.update(updates, inner_state, params, **extra_args)
        count = optax.safe_increment(state.count)
        encoded = _encode_state(inner_state, forms, key, count)
        return updates, QuantizedState(count, *encoded, state.fingerprint)

    def shape_arguments(params: Params) -> dict[str, Any]:
        flags = _resolve_include(include, params)
        flags = jax.tree.map(lambda _: True, params) if flags is True else flags
        return {"min_size": min_size, "include": flags}

    return transformation(
        init,
        update,
        method="quantize_state",
        needs_params=False,
        shape_arguments=shape_arguments,
        conversion="optperm.memory.quantize(opt_state, like) converts the state of a plain optimizer.",
    )


def quantize(opt_state: Any, like: Any, *, key: int | jax.Array = 0) -> Any:
    """Convert the state of a plain optimizer to the state of the quantized optimizer.

    Args:
      opt_state: A state of the optimizer without `optperm.quantize_state`.
      like: A state of the quantized optimizer, or its shapes from `jax.eval_shape`.
      key: The random key of the rounding: an int or a `jax.random.key`.

    Returns:
      A state with the structure of `like` and the values of `opt_state`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"kernel": jnp.ones((64, 256))}
      >>> plain, tx = optax.adam(1e-3), optperm.quantize_state(optax.adam(1e-3))
      >>> _, opt_state = plain.update(params, plain.init(params))
      >>> quantized = optperm.memory.quantize(opt_state, tx.init(params))
      >>> back = optperm.memory.dequantize(quantized)
      >>> bool(jnp.allclose(back[0].mu["kernel"], opt_state[0].mu["kernel"], rtol=2**-4))
      True

    Raises:
      TypeError: If `key` is neither an int nor a random key.
      ValueError: If the trees do not match.
    """
    checks.check_key("key", key)
    if not find_states(like, QuantizedState):
        raise ValueError(
            "like has no QuantizedState: pass jax.eval_shape(tx.init, params) of the quantized tx."
        )

    def convert(old: Any, state: Any) -> Any:
        if not isinstance(old, QuantizedState):
            return state
        plain = jax.eval_shape(QuantizedState.decode, old)
        checks.check_same_tree("opt_state", state, plain, source="like, decoded,", dtypes=False)
        # A state from vmap has several counts.
        count, forms = jnp.zeros(old.count.shape, jnp.int32), _find_forms(old.exponents)
        fingerprint = old.fingerprint
        if isinstance(fingerprint, jax.ShapeDtypeStruct):
            fingerprint = jnp.zeros(fingerprint.shape, fingerprint.dtype)
        codes, exponents = _encode_state(state, forms, key, jnp.zeros([], jnp.int32))
        exponents = jax.tree.map(
            lambda new, like: jnp.broadcast_to(new, like.shape), exponents, old.exponents
        )
        return QuantizedState(count, codes, exponents, fingerprint)

    return jax.tree.map(convert, like, opt_state, is_leaf=_is_quantized)


def dequantize(opt_state: Any) -> Any:
    """Convert the state of a quantized optimizer to the state of the plain optimizer.

    Args:
      opt_state: A state with `QuantizedState` anywhere in it.

    Returns:
      The state, with the decoded state of `inner` instead of each `QuantizedState`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optperm.quantize_state(optax.adam(1e-3))
      >>> opt_state = optperm.memory.dequantize(tx.init({"kernel": jnp.ones((64, 256))}))
      >>> opt_state[0].mu["kernel"].dtype
      dtype('float32')

    Raises:
      ValueError: If `opt_state` has no `QuantizedState`.
    """
    if not find_states(opt_state, QuantizedState):
        raise ValueError(
            "opt_state has no QuantizedState: pass the state of optperm.quantize_state."
        )
    return decode_states(opt_state)


def _is_quantized(node: Any) -> bool:
    return isinstance(node, QuantizedState)


def _resolve_include(include: Any, params: Any) -> Any:
    """Return True for each included parameter, in a tree like params, or True for all.

    Raises:
      ValueError: If `include` does not fit the params, or if a tree or a function includes none of them.
    """
    if include is None:
        return True
    chosen = resolve_tree(include, without_boxes(params))
    flags = spread_prefix("include", chosen, params, is_flag, "True or False")
    found = jax.tree.leaves(flags)
    if found and not any(found) and not is_flag(include):
        raise ValueError("include selects no params: it is False for each leaf of the params.")
    return flags


def _is_large(array: Any, min_size: int) -> bool:
    """Return whether an array of moments has 16 or 32 bits, an axis, and at least so many entries."""
    dtype = jnp.result_type(array)
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and 2 <= dtype.itemsize <= 4
    return bool(is_narrow and array.ndim and array.size >= min_size)


def _find_form(moment: Moment, bits: int) -> Form:
    """Return the form of a moment's codes."""
    if moment.role == "maximum":
        return Largest
    if moment.role not in ("mean", "matrix"):
        return Root
    if bits == 4:
        return Odd if moment.array.shape[-1] % 2 else Even
    return Linear if moment.role == "matrix" else Random


def _flag_moments(inner_state: Any, params: Any, flags: Any) -> list[bool]:
    """Return whether each moment belongs to an included parameter, or to no parameter."""
    moments, chosen = list_moments(inner_state), jax.tree.leaves(flags)
    if flags is True:
        return [True] * len(moments)
    places = {id(match.leaf): match.place for match in match_params(inner_state, params)}
    found = [places[id(moment.array)] for moment in moments]
    return [place is None or bool(chosen[place]) for place in found]


def _encode_state(
    inner_state: Any, forms: Sequence[Form | None], key: Any, count: jax.Array
) -> tuple[Any, Any]:
    """Return a state with codes instead of moments, and the exponents."""
    if not forms:  # Placeholders of `optax.tree.map_params` have no moments.
        return inner_state, jnp.zeros([], jnp.int8)
    # The seed is a hash of the key and the step, combined with the number of the array
    seed, numbers = mix_key(key_data(key), count), seeds(len(forms))
    moments = list_moments(inner_state)
    arrays: list[Any] = []
    exponents: list[Blocks | tuple[()]] = []
    for moment, form, number in zip(moments, forms, numbers, strict=True):
        x: Any = moment.array
        blocks: Blocks | tuple[()] = ()
        if form is not None:
            # The moments of a parameter share one start, since one kernel encodes them.
            own, start = mix(seed ^ number), mix(~seed ^ numbers[moment.place])
            # v - m^2, the divisor of "centered" squares, keeps its precision where v is near m^2.
            wide = x if moment.mean is None else x - jnp.square(moments[moment.mean].array)
            codes, e = _encode(wide, form, own, start)
            blocks = form(_shard_exponents(e, x), jnp.zeros([], x.dtype))
            x = shard_like(codes, x) if codes.shape == x.shape else codes
        arrays.append(x)
        exponents.append(blocks)
    return replace_moments(inner_state, arrays), tuple(exponents)


def _find_forms(exponents: Any) -> list[Form | None]:
    """Return the form of each moment's codes, or None."""
    is_empty = not isinstance(exponents, tuple | list)
    return [] if is_empty else [type(blocks) if blocks else None for blocks in exponents]


def _shard_exponents(e: jax.Array, moment: Any) -> jax.Array:
    """Return exponents; outside `jax.jit`, they get their array's sharding as far as blocks allow."""
    sharding = sharding_of(moment) if is_spread(moment) else None
    if sharding is None:
        return e
    spec = [*sharding.spec, *[None] * (moment.ndim - len(sharding.spec))]
    # The last axis of the exponents is that of merged trailing axes.
    axes = e.ndim - 1
    piece = math.prod(sharding.shard_shape(moment.shape)[axes:])
    last = spec[axes] if piece % BLOCK == 0 and not any(spec[axes + 1 :]) else None
    return jax.device_put(e, NamedSharding(sharding.mesh, P(*spec[:axes], last)))


def _warn_of_unknown(inner_state: Any, params: Any, min_size: int) -> None:
    """Warn about a state whose large arrays are not quantized, with the number of words."""
    ours = {LowRankState.__name__, ApolloState.__name__}
    words: dict[str, float] = {}
    for leaf, _, owner in match_others(inner_state, params, is_known):
        dtype, size = jnp.result_type(leaf), jnp.size(leaf)
        is_number = jnp.issubdtype(dtype, jnp.inexact) and size >= min_size
        if is_number and owner not in ours:
            words[owner] = words.get(owner, 0.0) + size * dtype.itemsize / 4
    for owner, number in words.items():
        warnings.warn(
            f"quantize_state does not know the moments of {owner}: its {number:.10g} words are not "
            "quantized.",
            UserWarning,
            stacklevel=2,
        )
