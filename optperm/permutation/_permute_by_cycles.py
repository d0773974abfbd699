"""The step of SGPerm: permute weight vectors along cycles.

Y. Qiu and R. Suda, "Permute to Train: A New Dimension to Training Deep Neural Networks",
arXiv 2003.02570, 2020.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.export import register_namedtuple_serialization

from optperm._leaf_axes import warn_of_others
from optperm.core import checks, noise
from optperm.core.dtypes import accumulation_dtype, compute_in_order
from optperm.core.fingerprints import UNSET
from optperm.core.keys import as_key, key_data
from optperm.core.mapped_axes import stack_scalars, varying_zeros
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Array, Float, Float32, Int32, Params, PyTree, UInt32, Updates
from optperm.core.states import ForLoop
from optperm.core.transformation import transformation
from optperm.core.trees import mask_like, unstack
from optperm.exact import Exact, count_mismatches, mismatch_warnings
from optperm.permutation import _cycles as cycles
from optperm.permutation._weight_vectors import (
    Vectors,
    find_vectors,
    init_ranks,
    permute_vectors,
    warn_of_constant_vectors,
)

# The shape (batch, *rows) of the weight vectors of each leaf, by the leaf's number.
Shapes = dict[int, tuple[int, ...]]
# Weights stand still if the last 50 steps move at most a tenth of the fraction moved by the first 5.
_WINDOW, _FIRST, _STILL = 50, 5, 0.1


@functools.partial(
    register_namedtuple_serialization, serialized_name="optperm.permutation.PermuteByCyclesState"
)
class PermuteByCyclesState(NamedTuple):
    """State of `permute_by_cycles`.

    Attributes:
      count: Number of steps taken.
      key: Data of the threefry key for the random partitions and pivots.
      weights: The exact weights, a permutation of the initial weights in each weight vector.
      ranks: The rank of each weight in its weight vector.
      fraction_moved: The fraction of the weights in weight vectors that the last step moved.
      mismatches: Number of steps whose params differed from the previous weights by more than rounding.
        Before such a step, something else moved the params, which may then not be a permutation.
      fingerprint: A number for each of the arguments `shaped_by()`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    key: UInt32[Array, "2"]
    weights: PyTree[Float[Array, "?*shape"], "Params"]
    ranks: PyTree[Int32[Array, "?*shape"], "Params"]
    fraction_moved: Float32[Array, ""]
    mismatches: Int32[Array, ""]
    fingerprint: UInt32[Array, "arguments"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments that determine what the state means."""
        return ("axes",)

    def exact(self) -> list[Exact]:
        """Return the weights as exact entries, except for scalars, which are not permuted.

        Other leaves that stay keep their initial values.
        """
        where = jax.tree.map(lambda w: True if w.ndim else optax.MaskedNode(), self.weights)
        return [Exact(mask_like(self.weights, where), where, is_target=True)]

    def for_loop(self) -> ForLoop:
        """Return the fraction that the last step moved, and a function to judge all such fractions."""
        return ForLoop({"fraction_moved": self.fraction_moved}, judge_movement)

    def warnings(self, params: Any) -> list[str]:
        """Return a sentence if something other than `sgperm` has changed the params.

        Args:
          params: Not used.
        """
        del params
        return mismatch_warnings("sgperm", self.mismatches)

    def replace_targets(self, other: "PermuteByCyclesState") -> "PermuteByCyclesState":
        """Return this state with the weights, ranks and mismatches of another state.

        Args:
          other: A state whose weights are a permutation of the same values.
        """
        return self._replace(weights=other.weights, ranks=other.ranks, mismatches=other.mismatches)


def permute_by_cycles(
    aggressiveness: optax.ScalarOrSchedule,
    partition_ratio: optax.ScalarOrSchedule,
    *,
    min_partition_size: int = 10,
    include_remainder: bool = True,
    centralize: bool = False,
    key: int | jax.Array = 0,
    axes: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Permute each weight vector along cycles in which every weight moves as recommended.

    The incoming updates are a recommendation :math:`m`, which is negative where the weight should rise
    and positive where it should fall. All weights of a kernel or an embedding that enter one output unit
    form a weight vector; a scale or a bias is one weight vector. Copies, such as stacked layers, have
    their own weight vectors. A vector has :math:`n` entries and the range :math:`A = \max - \min`. A
    step does the following for each weight vector:

    1. Split the vector at random into disjoint subsets of
       :math:`P = \max(P_{\min}, \lfloor \lambda n \rfloor)` entries; the last subset may be smaller.
       Exclude entries with a zero or nonfinite recommendation or a nonfinite weight, which leaves
       :math:`s` entries of a subset.
    2. Let a weight :math:`w` move to the position of any weight in :math:`[w, w + \epsilon)` if it
       should rise, or in :math:`[w - \epsilon, w)` if it should fall, with
       :math:`\epsilon = A (\alpha + 1/s)`.
    3. In descending order of :math:`|m|`, find a cycle of such moves from each entry, through entries
       that are not in a cycle yet: depth first, nearest weight first. Every entry on the cycle moves one
       position along it.

    Each weight vector therefore keeps its values bit for bit, and every moved weight follows its
    recommendation, by at most :math:`\epsilon`.

    Args:
      aggressiveness: :math:`\alpha \ge 0`, a number or a schedule of the step.
      partition_ratio: :math:`\lambda \in [0, 1]`, a number or a schedule of the step.
      min_partition_size: :math:`P_{\min} \ge 1`, in entries.
      include_remainder: Whether to include a last subset of fewer than :math:`P` entries.
      centralize: Whether to subtract the pivot :math:`\bar m + z \sigma / 2` from :math:`m`, where
        :math:`\bar m` and :math:`\sigma` are the mean and standard deviation over the weight vector, and
        :math:`z \sim N(0, 1)` is drawn in each step. All permutations have the same sum, so no
        permutation can follow the mean. If two weights should rise and the pivot is between their
        recommendations, the weight with the larger :math:`|m|` can pass the other weight. Entries with
        zero :math:`m` also take part. Platforms may round the pivot differently.
      key: The random key of the partitions and pivots, or an int as its seed. The same key gives the
        same partitions on every platform.
      axes: What each leaf is: a tree like params of `optperm.LeafAxes`,
        `optax.contrib.GaLoreDimensionNumbers` for kernels, and None for leaves that stay, or a function
        from params to such a tree. None for `optperm.leaf_axes`.

    Returns:
      A transformation whose state is a `PermuteByCyclesState`. Its `update` needs `params`.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> params = {"bias": jnp.array([0.5, -0.5, 0.0, 0.25])}
      >>> tx = optperm.permute_by_cycles(aggressiveness=1.0, partition_ratio=1.0)
      >>> opt_state = tx.init(params)
      >>> wishes = {"bias": jnp.array([0.0, -2.0, 1.0, 1.0])}  # the second up, the last two down
      >>> updates, opt_state = tx.update(wishes, opt_state, params)
      >>> optperm.apply_updates(params, updates, opt_state)["bias"].tolist()
      [0.5, 0.0, -0.5, 0.25]
      >>> float(opt_state.fraction_moved)
      0.5

    Notes:
      This transformation computes updates from the exact weights in its state, so nothing may follow it
      in a chain. `optperm.apply_updates` sets these weights bit for bit. With `optax.apply_updates`, the
      params stay within one rounding error of these weights and never drift. Scalars keep their values,
      and so do leaves whose axes are not known; `init` warns if these leaves hold more than 1% of the
      entries.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, if `axes` does not fit the params or names no weights,
        if the state was made with other `axes`, or if the trees passed to `update` do not match.

    References:
      Qiu and Suda, `Permute to Train: A New Dimension to Training Deep Neural Networks
      <https://arxiv.org/abs/2003.02570>`_, 2020
    """
    checks.check_in_range("aggressiveness", aggressiveness, 0.0, float("inf"))
    checks.check_in_range("partition_ratio", partition_ratio, 0.0, 1.0)
    checks.check_count("min_partition_size", min_partition_size)
    checks.check_flag("include_remainder", include_remainder)
    checks.check_flag("centralize", centralize)
    checks.check_key("key", key)

    def init(params: Params) -> PermuteByCyclesState:
        vectors = find_vectors(params, axes)
        warn_of_others("permute_by_cycles", params, axes)
        warn_of_constant_vectors(params, vectors)
        return PermuteByCyclesState(
            count=jnp.zeros([], jnp.int32),
            key=key_data(key),
            weights=jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params),
            ranks=init_ranks(params, vectors),
            # Zeros have the type that an update returns, for a scan inside `jax.shard_map`.
            fraction_moved=varying_zeros(params, jnp.float32),
            mismatches=varying_zeros(params, jnp.int32),
        )

    def update(
        m: Updates, state: PermuteByCyclesState, params: Params, **_: Any
    ) -> tuple[Updates, PermuteByCyclesState]:
        alpha = resolve_schedule("aggressiveness", aggressiveness, state.count)
        ratio = resolve_schedule("partition_ratio", partition_ratio, state.count, high=1.0)
        data = noise.fold(state.key, state.count)
        vectors = find_vectors(params, axes)
        shapes = _find_shapes(state.weights, vectors)
        # The kernel draws the subsets from the seeds.
        seeds = _draw_seeds(data, shapes)
        pivots = _draw_pivots(data, shapes, m) if centralize else {}
        moved: list[jax.Array] = []

        @functools.cache
        def partition_size(n: int) -> jax.Array:
            return _compute_partition_size(ratio, n, min_partition_size)

        def permute(
            index: int, w: jax.Array, ranks: jax.Array, m: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            # Step 1: P = max(P_min, floor(lambda n))
            size = partition_size(w.shape[1])
            m = _centralize(m, pivots[index][:, None]) if centralize else m
            # Steps 2 and 3: cycles of moves by at most A (alpha + 1 / s), by descending |m|.
            w, ranks, num_moved = cycles.permute_rows(
                m, w, ranks, seeds[index], alpha, size, drop_remainder=not include_remainder
            )
            moved.append(jnp.sum(num_moved).astype(jnp.float32))
            return w, ranks

        # The weights are compared before the kernel overwrites them.
        mismatches, weights = compute_in_order(
            count_mismatches(state.mismatches, params, state.weights), state.weights
        )
        weights, ranks = permute_vectors(permute, vectors, weights, state.ranks, m)
        pairs = zip(jax.tree.leaves(weights), vectors, strict=True)
        size = sum(leaf.size for leaf, own in pairs if own is not None)
        new_state = state._replace(
            count=optax.safe_increment(state.count),
            weights=weights,
            ranks=ranks,
            fraction_moved=jnp.sum(stack_scalars(moved)) / max(size, 1),
            mismatches=mismatches,
        )
        # Updates are computed from the targets, so the next step undoes rounding errors in the params.
        return optax.tree.sub(weights, params), new_state

    return transformation(
        init,
        update,
        method="permute_by_cycles",
        like=lambda s: s.weights,
        dtypes=True,
        shape_arguments=lambda params: {"axes": find_vectors(params, axes)},
    )


def _find_shapes(weights: Params, vectors: Sequence[Vectors | None]) -> Shapes:
    found: Shapes = {}
    for index, (leaf, own) in enumerate(zip(jax.tree.leaves(weights), vectors, strict=True)):
        if own is not None:
            batch, _, *rows = own.shape(leaf)
            found[index] = (batch, *rows)
    return found


def _draw_seeds(data: jax.Array, shapes: Shapes) -> dict[int, jax.Array]:
    """Return two random words for each weight vector, (batch, *rows, 2), by the leaf's number."""
    words = noise.bits(data, [(*shape, 2) for shape in shapes.values()], [*shapes])
    return dict(zip(shapes, words, strict=True))


def _draw_pivots(data: jax.Array, shapes: Shapes, m: Updates) -> dict[int, jax.Array]:
    """Return a normal number for each weight vector of each leaf, (batch, *rows), by the leaf's number.

    A generator costs its own program, so leaves with equally many weight vectors share a generator.
    """
    groups = collections.defaultdict[Any, list[int]](list)
    wishes = jax.tree.leaves(m)
    for index, shape in shapes.items():
        groups[math.prod(shape), accumulation_dtype(wishes[index])].append(index)
    drawn: dict[int, jax.Array] = {}
    for (number, dtype), members in groups.items():

        def draw(index: jax.Array, number: int = number, dtype: Any = dtype) -> jax.Array:
            leaf_key = jax.random.fold_in(as_key(data), index)
            return jax.random.normal(jax.random.fold_in(leaf_key, 1), (number,), dtype)

        rows = jax.vmap(draw)(jnp.array(members, jnp.uint32))
        drawn |= zip(members, unstack(rows), strict=True)
    return {index: row.reshape(shapes[index]) for index, row in drawn.items()}


def _centralize(m: jax.Array, z: jax.Array) -> jax.Array:
    """Return m - mean - z std / 2 for each weight vector in m, (batch, n, *rows), up to a scale."""
    wide = m.astype(accumulation_dtype(m))
    # Multiply by a power of two to avoid overflow and underflow of squares; only the order of m matters.
    largest = jnp.max(jnp.abs(wide), 1, where=jnp.isfinite(wide), initial=0, keepdims=True)
    wide = jnp.ldexp(wide, -jnp.frexp(largest)[1])
    mean, std = (f(wide, 1, where=jnp.isfinite(wide), keepdims=True) for f in (jnp.mean, jnp.std))
    return (wide - mean - 0.5 * z * std).astype(m.dtype)


def _compute_partition_size(ratio: jax.Array, n: int, minimum: int | jax.Array) -> jax.Array:
    """Return P = max(P_min, floor(ratio * n)), at most n."""
    # In float32, the product with a ratio of 1 may differ from n if n is above 2^24
    size = jnp.where(ratio < 1, jnp.floor(ratio * n).astype(jnp.int32), n)
    return jnp.clip(size, jnp.minimum(jnp.asarray(minimum, jnp.int32), n), n)


def judge_movement(columns: Mapping[str, np.ndarray]) -> list[str]:
    """Return a sentence if weights do not move, or hardly anymore, from the fractions of all steps."""
    moved = columns["fraction_moved"]
    if len(moved) >= _FIRST and not np.any(moved):
        says = f"No weight has moved in {len(moved)} steps: take a larger aggressiveness."
        return [f"{says} Weights with few values need sgperm(aggressiveness=1.0)."]
    if len(moved) < 2 * _WINDOW:
        return []
    first, last = np.mean(moved[:_FIRST]), np.mean(moved[-_WINDOW:])
    if not last <= _STILL * first:
        return []
    return [
        f"After step {len(moved)}, weights hardly change positions: {last:.1%} of them moved per step "
        f"in the last {_WINDOW} steps, but {first:.1%} in the first {_FIRST}. Pass sgperm num_steps, "
        "the length of the run, or an aggressiveness that falls more slowly."
    ]
