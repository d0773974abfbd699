"""Compressed contributions with error feedback, packed into bytes for one all-gather.

A. Sarfi et al., "SparseLoCo: Communication Efficient Training with Sparse, Quantized Pseudo-Gradients",
arXiv 2508.15706, 2025; error feedback by F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.contract import checks
from optperm.contract.mapped_axes import AxisName, varying_axes
from optperm.distributed.commits import Replicas, gather, scale, weigh

_BITS = (1, 2, 4, 8)
# Entries that share a scale, and of which the same number is sent.
_CHUNK = 4096
_DENSE_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Compression:
    """What `compress_quantized` and `compress_top_k` return: how a leaf becomes bytes.

    Attributes:
      fraction: The share of the entries that is sent; None for all.
      bits: Bits of each entry that is sent; None for float32.
      decay: The factor of what was held back, before the next contribution is added to it.
    """

    fraction: float | None
    bits: int | None
    decay: float | jax.Array

    def encode(self, leaf: jax.Array) -> tuple[jax.Array, ...]:
        """The bytes of a leaf: codes, scales and places, each an array of uint8."""
        if not leaf.size:
            return ()
        chunks = self._chunks(leaf)
        places: tuple[jax.Array, ...] = ()
        if self.fraction is not None:
            index = _places_of_largest(jnp.abs(chunks), self._sent(chunks.shape[1]))
            chunks = jnp.take_along_axis(chunks, index, axis=1)
            places = (_as_bytes(index.astype(jnp.uint16)),)
        if self.bits is None:
            return (_as_bytes(chunks), *places)
        # With more than one bit an odd number of evenly spaced levels, so that zero stays zero.
        if self.bits == 1:
            # The mean over the entries that there are: the last chunk is padded.
            starts = self._width(leaf.size) * np.arange(len(chunks), dtype=np.float32)
            number = np.clip(leaf.size - starts, 0, chunks.shape[1])[:, None]
            scale = jnp.sum(jnp.abs(chunks) / number, axis=1, keepdims=True)
            codes = (chunks >= 0).astype(jnp.uint8)
        else:
            scale, levels = jnp.max(jnp.abs(chunks), axis=1, keepdims=True), self._levels()
            # The reciprocal of the largest numbers would be a subnormal one, which counts as zero.
            factor = jnp.where(scale > 1, 1 / 16, 1)
            unit = chunks * factor / jnp.where(scale > 0, scale * factor, 1)
            codes = (jnp.round(unit * levels) + levels).astype(jnp.uint8)
        return (_pack(codes, self.bits), _as_bytes(scale), *places)

    def decode(self, encoded: tuple[jax.Array, ...], shape: tuple[int, ...]) -> jax.Array:
        """The float32 leaf that such bytes stand for."""
        if not encoded:
            return jnp.zeros(shape, jnp.float32)
        size, width = math.prod(shape), self._width(math.prod(shape))
        number = -(-size // width)
        if self.bits is None:
            values, rest = _from_bytes(encoded[0], jnp.float32).reshape(number, -1), encoded[1:]
        else:
            scale, rest = _from_bytes(encoded[1], jnp.float32).reshape(number, 1), encoded[2:]
            codes = _unpack(encoded[0], self.bits).reshape(number, -1)
            signed = 2.0 * codes - 1 if self.bits == 1 else codes / self._levels() - 1.0
            values = signed.astype(jnp.float32) * scale
        if rest:
            index = _from_bytes(rest[0], jnp.uint16).reshape(values.shape).astype(jnp.int32)
            rows = jnp.arange(number)[:, None]
            values = jnp.zeros((number, width), jnp.float32).at[rows, index].set(values)
        return values.reshape(-1)[:size].reshape(shape)

    def _levels(self) -> int:
        """How many levels are above zero."""
        assert self.bits is not None
        return int(2 ** (self.bits - 1) - 1)

    def _width(self, size: int) -> int:
        """How long the chunks of a leaf of this size are: a multiple of 8."""
        longest = _DENSE_CHUNK if self.fraction is None else _CHUNK
        return min(longest, -(-size // 8) * 8)

    def _sent(self, width: int) -> int:
        """How many entries of a chunk are sent: at least 8, and a multiple of 8, which fill bytes."""
        assert self.fraction is not None
        return min(width, max(8, round(width * self.fraction / 8) * 8))

    def _chunks(self, leaf: jax.Array) -> jax.Array:
        width = self._width(leaf.size)
        flat = leaf.reshape(-1).astype(jnp.float32)
        return jnp.pad(flat, (0, -flat.size % width)).reshape(-1, width)


def _places_of_largest(sizes: jax.Array, number: int) -> jax.Array:
    """The places of so many largest entries of each row, equal ones in order."""

    @jax.custom_batching.custom_vmap
    def places(sizes: jax.Array) -> jax.Array:
        return jax.lax.top_k(sizes, number)[1]

    @places.def_vmap
    def _(axis_size: int, in_batched: Any, sizes: jax.Array) -> tuple[jax.Array, bool]:
        # To take the top of rows that lie on several devices XLA gathers them; a sort stays in place.
        if axis_size == 1:
            return places(sizes[0])[None], True
        return jnp.argsort(-sizes, axis=-1, stable=True)[..., :number], True

    result: jax.Array = places(sizes)
    return result


# TPUs pad a last axis to 128: bytes and codes of one number lie far apart instead, on a leading axis.


def _as_bytes(array: jax.Array) -> jax.Array:
    width = array.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * width}").reshape(-1)
    return jnp.concatenate([(bits >> (8 * i)).astype(jnp.uint8) for i in range(width)])


def _from_bytes(array: jax.Array, dtype: Any) -> jax.Array:
    width = jnp.dtype(dtype).itemsize
    parts = array.reshape(width, -1).astype(f"uint{8 * width}")
    return jax.lax.bitcast_convert_type(_joined(parts, 8), dtype)


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """Codes of so many bits, several in a byte."""
    # By way of one axis, as on explicit meshes batched arrays can be reshaped.
    return _joined(codes.reshape(-1).reshape(8 // bits, -1), bits)


def _joined(parts: jax.Array, bits: int) -> jax.Array:
    shifted = [part << (bits * i) for i, part in enumerate(parts)]
    return functools.reduce(jnp.bitwise_or, shifted)


def _unpack(packed: jax.Array, bits: int) -> jax.Array:
    mask = jnp.uint8(2**bits - 1)
    return jnp.concatenate([(packed >> shift) & mask for shift in range(0, 8, bits)])


def sum_compressed(
    compress: Compression,
    contribution: optax.Updates,
    residual: optax.Updates,
    is_finite: jax.Array,
    replicas: Replicas,
    weight: Any = None,
) -> tuple[optax.Updates, jax.Array, optax.Updates, jax.Array]:
    r"""Return the weighted sum of what all replicas send of their contributions, by one all-gather.

    .. math::
      e \leftarrow \beta e + \Delta, \qquad s = Q(\mathrm{top}_k(e)), \qquad e \leftarrow e - s

    Args:
      compress: How.
      contribution: :math:`\Delta` of this replica, a tree of floats.
      residual: :math:`e` of this replica, a tree of floats.
      is_finite: Whether this replica's contribution is finite. If not, its :math:`e` stays.
      replicas: The mapped axes of the replicas.
      weight: This replica's weight; None for 1.

    Returns:
      The sum of the :math:`w s` of all that take part, the sum of their :math:`w`, the new :math:`e`,
      and whether this one does. One whose :math:`e` or :math:`s` overflows does not, and begins again
      with none. One of weight zero has sent nothing: its :math:`e` stays.
    """
    e = jax.tree.map(lambda e, n: compress.decay * e + n, residual, contribution)
    leaves, structure = jax.tree.flatten(e)
    codes = [compress.encode(leaf) for leaf in leaves]

    def decoded(codes: list[tuple[jax.Array, ...]]) -> optax.Updates:
        pairs = zip(codes, leaves, strict=True)
        s = [compress.decode(code, leaf.shape).astype(leaf.dtype) for code, leaf in pairs]
        return jax.tree.unflatten(structure, s)

    own = decoded(codes)
    rest = optax.tree.sub(e, own)
    is_sent = replicas.are_finite((own, rest))
    w, takes_part = weigh(weight, is_finite & is_sent, jnp.float32)
    kept = optax.tree.where(w > 0, rest, residual)
    rest = optax.tree.where(is_sent, kept, optax.tree.zeros_like(rest))
    rest = optax.tree.where(is_finite, rest, residual)
    if replicas.axis_name is None:
        return scale(own, w), w, rest, takes_part

    rows, weights = gathered(codes, w, replicas.axis_name)

    def add(total: optax.Updates, row: Any) -> tuple[optax.Updates, None]:
        return optax.tree.add(total, scale(decoded(row[0]), row[1])), None

    first, others = (
        jax.tree.map(lambda leaf, part=part: leaf[part], (rows, weights))
        for part in (0, slice(1, None))
    )
    total = jax.lax.scan(add, scale(decoded(first[0]), first[1]), others)[0]
    return total, jnp.sum(weights), rest, takes_part


def gathered(codes: Any, weight: jax.Array, axis_name: AxisName) -> tuple[Any, jax.Array]:
    """The bytes of all replicas, and a weight of each, along a leading axis, by one all-gather.

    Leaves that vary over other axes than the rest, where JAX tracks that, travel by themselves.
    """
    parts, structure = jax.tree.flatten((codes, _as_bytes(weight.reshape(1))))
    rows: list[Any] = [None] * len(parts)

    def kind(index: int) -> list[str]:
        return sorted(varying_axes(parts[index]))

    for _, group in itertools.groupby(sorted(range(len(parts)), key=kind), key=kind):
        places = list(group)
        joined = gather(jnp.concatenate([parts[i] for i in places]), axis_name)
        ends = list(itertools.accumulate(parts[i].size for i in places))
        for i, row in zip(places, jnp.split(joined, ends[:-1], axis=1), strict=True):
            rows[i] = row
    gathered_codes, weights = jax.tree.unflatten(structure, rows)
    return gathered_codes, jax.vmap(lambda row: _from_bytes(row, jnp.float32)[0])(weights)


def compress_quantized(bits: int, decay: float = 1.0) -> Compression:
    r"""Sends every entry in a few bits, for `compress=` of `optperm.diloco`.

    What rounding leaves out is added to the next contribution, :math:`e \leftarrow \beta e + \Delta`,
    :math:`s = Q(e)`, :math:`e \leftarrow e - s`. Runs of 256 entries of a leaf share a scale, their
    largest magnitude, and :math:`Q` rounds to :math:`2^b - 1` evenly spaced levels between minus and
    plus that, of which zero is one. With one bit the scale is the mean magnitude and :math:`Q` the sign,
    which has no zero: what never moved is moved to and fro by it.

    Args:
      bits: 1, 2, 4 or 8, of each entry.
      decay: :math:`\beta` in [0, 1], of what was left out so far.

    Returns:
      A `Compression`.

    Raises:
      TypeError: If an argument is not a number.
      ValueError: If an argument is out of range.

    Example:
      >>> import optax, optperm
      >>> tx = optperm.diloco(
      ...     optax.adamw(1e-3), sync_every=100, compress=optperm.compress_quantized(bits=4)
      ... )

    References:
      Douillard et al., `Streaming DiLoCo with overlapping communication
      <https://arxiv.org/abs/2501.18512>`_, 2025
    """
    _check_bits(bits)
    checks.check_in_range("decay", decay, 0.0, 1.0, may_be_schedule=False)
    return Compression(None, bits, decay)


def compress_top_k(fraction: float, bits: int | None = None, decay: float = 0.95) -> Compression:
    r"""Sends only the largest entries, for `compress=` of `optperm.diloco`.

    What is not sent is added to the next contribution, :math:`e \leftarrow \beta e + \Delta`,
    :math:`s = Q(\mathrm{top}_k(e))`, :math:`e \leftarrow e - s`. The largest are those of each run of
    4,096 entries of a leaf, a multiple of 8 of them, and their places take two bytes each.

    Args:
      fraction: The share of entries that is sent, in (0, 1].
      bits: 1, 2, 4 or 8, of each entry that is sent; None sends float32.
      decay: :math:`\beta` in [0, 1], of what was left out so far.

    Returns:
      A `Compression`.

    Raises:
      TypeError: If an argument is not a number.
      ValueError: If an argument is out of range.

    Example:
      >>> import optax, optperm
      >>> tx = optperm.diloco(
      ...     optax.adamw(1e-3), sync_every=100, compress=optperm.compress_top_k(1 / 32, bits=2)
      ... )

    References:
      Sarfi et al., `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025
    """
    checks.check_positive("fraction", fraction)
    checks.check_in_range("fraction", fraction, 0.0, 1.0, may_be_schedule=False)
    if bits is not None:
        _check_bits(bits)
    checks.check_in_range("decay", decay, 0.0, 1.0, may_be_schedule=False)
    return Compression(float(fraction), bits, decay)


def _check_bits(bits: object) -> None:
    checks.check_static_count("bits", bits)
    if bits not in _BITS:
        raise ValueError(f"bits must be one of {', '.join(map(str, _BITS))}, got {bits!r}.")
