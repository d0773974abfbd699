"""Compress contributions to bytes for one all-gather, with error feedback.

A. Sarfi et al., "SparseLoCo: Communication Efficient Training with Sparse, Quantized Pseudo-Gradients",
arXiv 2508.15706, 2025; error feedback by F. Seide et al., "1-Bit Stochastic Gradient Descent", 2014.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks
from optperm.core.control import both
from optperm.core.dtypes import computed_once
from optperm.core.mapped_axes import AxisName, varying_axes
from optperm.core.shardings import shard_like, unshard
from optperm.distributed._replicas import Replicas, gather, scale, weigh

_BITS = (1, 2, 4, 8)
# The number of entries that share a scale, and from which a fixed number of entries is sent.
_CHUNK = 4096
_DENSE_CHUNK = 256


@dataclasses.dataclass(frozen=True)
class Compression:
    r"""Compress contributions of replicas to the largest entries, a few bits per entry, or both.

    .. math::
      e \leftarrow \beta e + \Delta, \qquad s = Q(\mathrm{top}_k(e)), \qquad e \leftarrow e - s

    where :math:`\Delta` is the next contribution, and the replica sends :math:`s`. The residual
    :math:`e` stores the other entries and the rounding errors for later commits.

    Attributes:
      fraction: The fraction of entries to send, in (0, 1]: the entries with the largest magnitudes. None
        for all entries.
      bits: :math:`b`, the number of bits per sent entry: 1, 2, 4 or 8. None for float32.
      decay: :math:`\beta` in [0, 1], the factor of the residual :math:`e`. None means 0.95 with a
        fraction, and 1.0 without a fraction.

    Example:
      >>> import optax, optperm
      >>> compress = optperm.distributed.Compression(fraction=1 / 32, bits=2)
      >>> tx = optperm.diloco(optax.adamw(1e-3), every=100, compress=compress)
      >>> compress.decay, optperm.distributed.Compression(bits=4).decay
      (0.95, 1.0)

    Notes:
      With a fraction, the largest entries of each chunk of 4,096 entries of a leaf are sent, a multiple
      of 8 per chunk, and as many of a shorter last chunk. The index of an entry takes two bytes. In
      this case, zeros stay zero, even with one bit.

      Without a fraction, a chunk has 256 entries. The sent entries of a chunk share a scale, their
      maximum magnitude, and :math:`Q` rounds to :math:`2^b - 1` evenly spaced levels from minus
      to plus the scale, including zero. With one bit, the scale is the mean magnitude and :math:`Q` is
      the sign, which is never zero. Therefore, without a fraction, one bit moves entries back and forth
      even if their contribution is zero.

    Raises:
      TypeError: If `fraction` or `decay` is not a number, or `bits` is not an integer.
      ValueError: If an argument is out of range, or neither `fraction` nor `bits` is given.

    References:
      Sarfi et al., `SparseLoCo <https://arxiv.org/abs/2508.15706>`_, 2025

      Douillard et al., `Streaming DiLoCo with overlapping communication
      <https://arxiv.org/abs/2501.18512>`_, 2025
    """

    fraction: float | None = None
    bits: int | None = None
    decay: float | jax.Array | None = None

    def __post_init__(self) -> None:
        """Check the arguments, and set the decay."""
        if self.fraction is None and self.bits is None:
            raise ValueError("Compression needs a fraction, bits or both.")
        if self.fraction is not None:
            checks.check_positive("fraction", self.fraction, 1.0)
            object.__setattr__(self, "fraction", float(self.fraction))
        if self.bits is not None:
            checks.check_static_count("bits", self.bits)
            if self.bits not in _BITS:
                names = ", ".join(map(str, _BITS))
                raise ValueError(f"bits must be one of {names}, got {self.bits!r}.")
        if self.decay is None:
            object.__setattr__(self, "decay", 1.0 if self.fraction is None else 0.95)
        checks.check_in_range("decay", self.decay, 0.0, 1.0, may_be_schedule=False)


class Encoded(NamedTuple):
    """The sent part of a stack of leaves of one shape, in chunks of each leaf.

    Attributes:
      codes: The entries in float32, or packed codes of a few bits in uint8.
      scale: The scale of the codes of each chunk, in float32; None for entries in float32.
      places: The positions of the entries in their chunk, in uint16; None if all are sent.
    """

    codes: jax.Array
    scale: jax.Array | None
    places: jax.Array | None


@functools.partial(jax.jit, static_argnames="compress")
def encode(compress: Compression, leaves: jax.Array) -> Encoded | None:
    """Return the sent part of a stack of leaves, or None if the leaves have no entries."""
    if not leaves.size:
        return None
    size = math.prod(leaves.shape[1:])
    chunks = _split(compress, leaves)
    scale = index = None
    if compress.fraction is not None:
        index = _find_largest(jnp.abs(chunks), _count_sent(compress, chunks.shape[1]))
        chunks = _take_places(chunks, index)
        if compress.bits == 1:
            # One bit cannot represent zero, so the largest entry is sent again instead of a zero.
            index = _repeat_first(index, chunks == 0)
    if compress.bits is None:
        codes = chunks
    elif compress.bits == 1:
        # With one bit, the scale is a mean magnitude, because errors would grow with the maximum. The
        # mean is over entries of the leaf, without the padding of the last chunk, or over sent entries.
        if compress.fraction is None:
            width = chunks.shape[1]
            starts = width * np.arange(len(chunks) // len(leaves), dtype=np.float32)
            number: Any = np.tile(np.clip(size - starts, 0, width), len(leaves))[:, None]
        else:
            number = jnp.maximum(jnp.sum(chunks != 0, axis=1, keepdims=True), 1)
            number = number.astype(jnp.float32)
        scale = jnp.sum(jnp.abs(chunks) / number, axis=1, keepdims=True)
        signed = chunks if compress.fraction is None else _repeat_first(chunks, chunks == 0)
        codes = _pack((signed >= 0).astype(jnp.uint8), 1)
    else:
        # The 2 levels + 1 values are evenly spaced from -scale to scale, so zero stays zero.
        scale = jnp.max(jnp.abs(chunks), axis=1, keepdims=True)
        levels = _count_levels(compress.bits)
        # XLA multiplies by the reciprocal, which is subnormal and becomes zero for the largest numbers.
        factor = jnp.where(scale > 1, 1 / 16, 1)
        unit = chunks * factor / jnp.where(scale > 0, scale * factor, 1)
        codes = _pack((jnp.round(unit * levels) + levels).astype(jnp.uint8), compress.bits)
    return Encoded(codes, scale, index if index is None else index.astype(jnp.uint16))


@functools.partial(jax.jit, static_argnames=("compress", "like"))
def decode(compress: Compression, sent: Encoded | None, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Return the decoded stack of leaves, with the shape and dtype of `like`."""
    if sent is None:
        return jnp.zeros(like.shape, like.dtype)
    values, size = sent.codes, math.prod(like.shape[1:])
    if compress.bits is not None and sent.scale is not None:
        codes = _unpack(sent.codes, compress.bits).reshape(len(sent.scale), -1).astype(jnp.int32)
        # Subtract integers, because XLA may fuse codes / levels - 1, which would never be zero.
        levels = 1 if compress.bits == 1 else _count_levels(compress.bits)
        signed = 2 * codes - 1 if compress.bits == 1 else codes - levels
        values = signed.astype(jnp.float32) / levels * sent.scale
    if sent.places is not None:
        places = sent.places.astype(jnp.int32)
        values = _put_places(values, places, _find_width(compress, size))
    return values.reshape(like.shape[0], -1)[:, :size].reshape(like.shape).astype(like.dtype)


def _find_width(compress: Compression, size: int) -> int:
    """Return the length of the chunks of a leaf, a multiple of 8."""
    longest = _DENSE_CHUNK if compress.fraction is None else _CHUNK
    return min(longest, -(-size // 8) * 8)


def _count_sent(compress: Compression, width: int) -> int:
    """Return the number of sent entries per chunk, a multiple of 8 to fill whole bytes."""
    return min(width, max(8, round(width * (compress.fraction or 0) / 8) * 8))


def _split(compress: Compression, leaves: jax.Array) -> jax.Array:
    """Return the chunks of each leaf of a stack, the last one padded with zeros."""
    rows = leaves.reshape(len(leaves), -1).astype(jnp.float32)
    width = _find_width(compress, rows.shape[1])
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % width))).reshape(-1, width)


def _count_levels(bits: int) -> int:
    """Return the number of levels above zero."""
    return int(2 ** (bits - 1) - 1)


def _repeat_first(rows: jax.Array, where: jax.Array) -> jax.Array:
    """Return rows in which entries with a true condition are replaced by their row's first entry."""
    return jnp.where(where, rows[:, :1], rows)


def _find_largest(sizes: jax.Array, number: int) -> jax.Array:
    """Return the indices of the largest entries of each row; equal entries are in order."""

    @jax.custom_batching.custom_vmap
    def find(sizes: jax.Array) -> jax.Array:
        return jax.lax.top_k(sizes, number)[1]

    @find.def_vmap
    def _(axis_size: int, in_batched: Any, sizes: jax.Array) -> tuple[jax.Array, bool]:
        # For a top_k, XLA gathers rows from several devices; a sort needs no gathering.
        if axis_size == 1:
            return find(sizes[0])[None], True
        order = jnp.argsort(-sizes, axis=-1, stable=True)
        # With x64, the indices of a sort have 64 bits, but the indices of a top_k have 32.
        return order[..., :number].astype(jnp.int32), True

    result: jax.Array = find(sizes)
    return result


# All positions are within the chunks, so XLA need not check bounds or handle negative indices.
_INSIDE: Any = {"mode": "promise_in_bounds", "wrap_negative_indices": False}


@jax.vmap
def _take_places(row: jax.Array, places: jax.Array) -> jax.Array:
    """Return the entries at the given positions of each row."""
    return row.at[places].get(**_INSIDE)


def _put_places(values: jax.Array, places: jax.Array, width: int) -> jax.Array:
    """Return rows of zeros with the values at the given positions."""

    @jax.vmap
    def put(values: jax.Array, places: jax.Array) -> jax.Array:
        return jnp.zeros(width, values.dtype).at[places].set(values, **_INSIDE)

    return put(values, places)


# TPUs pad the last axis to 128, so a leading axis indexes the bytes of a number.


def _as_bytes(array: jax.Array) -> jax.Array:
    """Return the bytes of numbers: the first byte of all numbers, then the second, and so on."""
    width = array.dtype.itemsize
    bits = jax.lax.bitcast_convert_type(array, f"uint{8 * width}").reshape(-1)
    return jnp.concatenate([(bits >> (8 * i)).astype(jnp.uint8) for i in range(width)])


def _from_bytes(array: jax.Array, dtype: Any) -> jax.Array:
    """Return the numbers from the result of `_as_bytes`."""
    width = jnp.dtype(dtype).itemsize
    parts = array.reshape(width, -1).astype(f"uint{8 * width}")
    return jax.lax.bitcast_convert_type(_join(parts, 8), dtype)


def _pack(codes: jax.Array, bits: int) -> jax.Array:
    """Pack several codes of a few bits into each byte."""
    # Reshape to one axis first, as batched arrays on explicit meshes require.
    return _join(codes.reshape(-1).reshape(8 // bits, -1), bits)


def _join(parts: jax.Array, bits: int) -> jax.Array:
    """Join rows of codes into bytes, with the first row in the lowest bits."""
    shifted = [part << (bits * i) for i, part in enumerate(parts)]
    return functools.reduce(jnp.bitwise_or, shifted)


def _unpack(packed: jax.Array, bits: int) -> jax.Array:
    """Return the codes from a result of `_pack`."""
    mask = jnp.uint8(2**bits - 1)
    return jnp.concatenate([(packed >> shift) & mask for shift in range(0, 8, bits)])


class Sent(NamedTuple):
    """What a replica sends: encoded stacks of leaves.

    Attributes:
      compress: The encoder.
      encoded: The encoded stacks.
      decoded: The stacks that all replicas decode from them.
    """

    compress: Compression
    encoded: list[Encoded | None]
    decoded: list[jax.Array]

    def sum(self, w: jax.Array, replicas: Replicas) -> tuple[list[jax.Array], jax.Array]:
        """Return sum_i w_i s_i over the replicas and sum_i w_i, with one all-gather."""
        if replicas.axis_name is None:
            return scale(self.decoded, w), w

        def add(total: Any, row: list[jax.Array]) -> tuple[Any, None]:
            return optax.tree.add(total, scaled(row)), None

        def scaled(row: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
            s, w = decode_row(row)
            return scale(s, w), w

        # Add one replica after another, to hold only one decoded tree in memory.
        rows, decode_row = self._gather(w, replicas.axis_name)
        first, others = ([row[part] for row in rows] for part in (0, slice(1, None)))
        total: Any = jax.lax.scan(add, scaled(first), others)[0]
        return total

    def gather(self, w: jax.Array, replicas: Replicas) -> tuple[list[jax.Array], jax.Array]:
        """Return the decoded s_i and the w_i of all replicas in rows, with one all-gather."""
        if replicas.axis_name is None:
            return [s[None] for s in self.decoded], w[None]
        rows, decode_row = self._gather(w, replicas.axis_name)
        decoded: Any = jax.lax.map(decode_row, rows)
        return decoded

    def _gather(
        self, w: jax.Array, axis_name: AxisName
    ) -> tuple[list[jax.Array], Callable[[list[jax.Array]], tuple[list[jax.Array], jax.Array]]]:
        """Return packed rows of all replicas, and a function from a row to its s and w."""
        rows, unpack = gather_packed((self.encoded, w.reshape(1)), axis_name)

        def decode_row(row: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
            encoded, (w,) = unpack(row)
            # Weights are finite, but without the sort in `both`, XLA takes minutes to compile the loop.
            w = jnp.where(both(w > 0, jnp.isfinite(w)), w, 0)
            return decode_all(self.compress, encoded, self.decoded), w

        return rows, decode_row


def decode_all(
    compress: Compression, encoded: list[Encoded | None], likes: list[jax.Array]
) -> list[jax.Array]:
    """Return decoded stacks with the types of other stacks."""
    shapes = [jax.ShapeDtypeStruct(like.shape, like.dtype) for like in likes]
    found = [decode(compress, *each) for each in zip(encoded, shapes, strict=True)]
    return list(map(shard_like, found, likes))


def encode_contribution(
    compress: Compression,
    x: list[jax.Array],
    residual: list[jax.Array],
    is_finite: jax.Array,
    replicas: Replicas,
    weight: Any = None,
) -> tuple[Sent, list[jax.Array], jax.Array]:
    r"""Encode this replica's contribution with error feedback.

    .. math::
      e \leftarrow \beta e + x, \qquad s = Q(\mathrm{top}_k(e)), \qquad e \leftarrow e - s

    Args:
      compress: The encoder.
      x: The contribution, as stacks of leaves of one shape.
      residual: :math:`e` of this replica, in the same stacks.
      is_finite: Whether the contribution is finite; otherwise :math:`e` does not change.
      replicas: The mapped axes of the replicas.
      weight: This replica's weight; None for 1.

    Returns:
      What is sent, the new :math:`e`, and whether this replica may take part. If :math:`e` or :math:`s`
      overflows, it may not, and :math:`e` becomes zero. A replica with weight zero sends nothing, so its
      :math:`e` does not change.
    """
    # e <- beta e + x
    decay: Any = compress.decay
    x = optax.tree.where(is_finite, x, optax.tree.zeros_like(x))
    e = jax.tree.map(lambda e, x: decay * e + x, residual, x)
    # s = Q(top_k(e)), e <- e - s. Stacks of the same shape are traced once; a traced decay cannot be a
    # static argument.
    compress = dataclasses.replace(compress, decay=1.0)
    # The encoder works on whole leaves, also of explicit meshes.
    encoded = [encode(compress, unshard(stack)) for stack in e]
    s = decode_all(compress, encoded, e)
    rest = optax.tree.sub(e, s)
    is_sent = replicas.are_finite((s, rest))
    w, _ = weigh(weight, is_finite & is_sent, jnp.float32)
    rest_if_sent = optax.tree.where(w > 0, rest, residual)
    rest = optax.tree.where(is_sent, rest_if_sent, optax.tree.zeros_like(rest))
    rest = optax.tree.where(is_finite, rest, residual)
    return Sent(compress, encoded, s), rest, is_finite & is_sent


def gather_packed(
    tree: Any, axis_name: AxisName
) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """Return all replicas' arrays as packed rows, from one all-gather, and a function to unpack a row.

    Arrays of the same dtype are converted to bytes at once. If JAX tracks varying axes, arrays that vary
    over different axes are gathered separately.
    """
    parts, structure = jax.tree.flatten(tree)

    def find_kind(place: int) -> tuple[list[str], str]:
        return sorted(varying_axes(parts[place])), parts[place].dtype.name

    kinds = [
        list(group)
        for _, group in itertools.groupby(sorted(range(len(parts)), key=find_kind), key=find_kind)
    ]
    rows = list[jax.Array]()
    for _, group in itertools.groupby(kinds, key=lambda places: find_kind(places[0])[0]):
        joined = [jnp.concatenate([parts[i].reshape(-1) for i in places]) for places in group]
        gathered = gather(jnp.concatenate([_as_bytes(each) for each in joined]), axis_name)
        ends = list(itertools.accumulate(each.nbytes for each in joined))
        pieces = jnp.split(gathered, ends[:-1], axis=1)
        for piece, each in zip(pieces, joined, strict=True):
            rows.append(jax.vmap(functools.partial(_from_bytes, dtype=each.dtype))(piece))

    def unpack(row: list[jax.Array]) -> Any:
        found: list[Any] = [None] * len(parts)
        for joined, places in zip(row, kinds, strict=True):
            sizes = [parts[i].size for i in places]
            # XLA compiles equal kernels once, but constant starts would need a kernel for each array.
            starts = computed_once([np.int32(n) for n in itertools.accumulate([0, *sizes[:-1]])])
            for i, start, size in zip(places, starts, sizes, strict=True):
                piece = jax.lax.dynamic_slice(joined, (start,), (size,))
                found[i] = piece.reshape(parts[i].shape)
        return jax.tree.unflatten(structure, found)

    return computed_once(rows), unpack
