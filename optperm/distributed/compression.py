"""Compressed contributions with error feedback, packed into bytes for one all-gather.

A. Sarfi et al., "SparseLoCo: Communication Efficient Training with Sparse, Quantized Pseudo-Gradients",
arXiv 2508.15706, 2025; error feedback by F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.mapped_axes import AxisName, varying_axes
from optperm.distributed.commits import Replicas, gather

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
            _, index = jax.lax.top_k(jnp.abs(chunks), self._sent(chunks.shape[1]))
            chunks = jnp.take_along_axis(chunks, index, axis=1)
            places = (_as_bytes(index.astype(jnp.uint16)),)
        if self.bits is None:
            return (_as_bytes(chunks), *places)
        # Levels from -scale to scale, evenly spaced.
        scale = jnp.max(jnp.abs(chunks), axis=1, keepdims=True)
        unit = chunks / jnp.where(scale > 0, scale, 1)
        codes = jnp.round((unit + 1) / 2 * (2**self.bits - 1)).astype(jnp.uint8)
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
            values = (codes.astype(jnp.float32) / (2**self.bits - 1) * 2 - 1) * scale
        if rest:
            index = _from_bytes(rest[0], jnp.uint16).reshape(values.shape).astype(jnp.int32)
            rows = jnp.arange(number)[:, None]
            values = jnp.zeros((number, width), jnp.float32).at[rows, index].set(values)
        return values.reshape(-1)[:size].reshape(shape)

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


def _as_bytes(array: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint8).reshape(-1)


def _from_bytes(array: jax.Array, dtype: Any) -> jax.Array:
    width = jnp.dtype(dtype).itemsize
    return jax.lax.bitcast_convert_type(array.reshape(-1, width), dtype)


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """Codes of so many bits, several in a byte."""
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    grouped = codes.reshape(-1, 8 // bits) << shifts
    return jnp.sum(grouped, axis=1, dtype=jnp.uint8)


def _unpack(packed: jax.Array, bits: int) -> jax.Array:
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)
    return ((packed[:, None] >> shifts) & jnp.uint8(2**bits - 1)).reshape(-1)


def sum_compressed(
    compress: Compression,
    contribution: optax.Updates,
    residual: optax.Updates,
    is_finite: jax.Array,
    replicas: Replicas,
) -> tuple[optax.Updates, jax.Array, optax.Updates, jax.Array]:
    r"""The sum of what all replicas send of their contributions, by one all-gather of bytes.

    .. math::
      e \leftarrow \beta e + \Delta, \qquad s = Q(\mathrm{top}_k(e)), \qquad e \leftarrow e - s

    Args:
      compress: How.
      contribution: :math:`\Delta` of this replica, a tree of floats.
      residual: :math:`e` of this replica, a tree of floats.
      is_finite: Whether this replica's contribution is finite. If not, its :math:`e` stays.
      replicas: The mapped axes of the replicas.

    Returns:
      The sum of the :math:`s` of all that take part, how many do, the new :math:`e`, and whether this
      one does. One whose :math:`e` or :math:`s` overflows does not, and begins again with none.
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
    rest = optax.tree.where(is_sent, rest, optax.tree.zeros_like(rest))
    rest = optax.tree.where(is_finite, rest, residual)
    takes_part = is_finite & is_sent
    weight = takes_part.astype(jnp.float32)
    own = optax.tree.where(takes_part, own, optax.tree.zeros_like(own))
    if replicas.axis_name is None:
        return own, weight, rest, takes_part

    rows, weights = gathered(codes, weight, replicas.axis_name)

    def weighted(codes: Any, weight: jax.Array) -> optax.Updates:
        s = decoded(codes)
        return optax.tree.where(weight > 0, s, optax.tree.zeros_like(s))

    def add(total: optax.Updates, row: Any) -> tuple[optax.Updates, None]:
        return optax.tree.add(total, weighted(*row)), None

    first, others = (
        jax.tree.map(lambda leaf, part=part: leaf[part], (rows, weights))
        for part in (0, slice(1, None))
    )
    total = jax.lax.scan(add, weighted(*first), others)[0]
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
    largest magnitude, and :math:`Q` rounds to evenly spaced levels between minus and plus that.

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
