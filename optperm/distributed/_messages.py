"""Commits as messages between separate jobs, without a collective.

J. Hermans et al., "Accumulated Gradient Normalization", arXiv 1710.02368, 2017, with a parameter server;
B. Liu et al., "Asynchronous Local-SGD Training for Language Modeling", arXiv 2401.09135, 2024;
"Decoupled DiLoCo", arXiv 2604.21428, 2026.

A job and the center exchange a commit in three functions. The user moves the messages between them:

    contribution    x = c - theta (diloco) or a / T (agn),  x <- Q(e)      in a job
      |
      | message
      v
    merge           n = sum w x / sum w,  c <- c + u(n; s_c)               where the center is
      |
      | center
      v
    pull            theta <- alpha theta + (1 - alpha) c                   in a job
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, all_finite, cast_like, place_like
from optperm.core.fingerprints import check_fingerprint, check_not_stacked, describe_difference
from optperm.core.shapes import Array, Float, Int32, Params, PyTree, Updates
from optperm.core.states import find_state, replace_state
from optperm.core.trees import fill_masked, mask_like
from optperm.distributed._agn import AgnState
from optperm.distributed._compression import (
    BITS,
    Compression,
    Encoded,
    decode_all,
    encode,
    encode_contribution,
)
from optperm.distributed._exchange import (
    Combine,
    divide_by_steps,
    make_center_step,
    subtract_params,
)
from optperm.distributed._find_center import LOCAL_STATES
from optperm.distributed._local_update import keep_exact
from optperm.distributed._replicas import Replicas, check_weight, divide, scale, weigh
from optperm.exact import placing_states

# (rows of the moves, their weights) -> the gradient of the center
CombineRows: TypeAlias = Callable[[Updates, jax.Array], Updates]
_METHOD = "agn or optperm.diloco"
_SOURCE = "the center in the optimizer state"


class Contribution(NamedTuple):
    """The message of a job to the center; all leaves are arrays.

    Attributes:
      move: The contribution, with the sign of a gradient: a tree like the params in float32 or wider, or
        its encoding by an `optperm.distributed.Compression`.
      weight: The weight :math:`w` of the contribution; zero without a step.
      version: The version of the center at which the job started.
      steps: The number :math:`T` of local steps in the contribution.
      options: The method (0 for AGN, 1 for DiLoCo), and the fraction and the bits of the compression, or
        zeros. Contributions with different options are not merged.
    """

    move: Any
    weight: Float[Array, ""]
    version: Int32[Array, ""]
    steps: Int32[Array, ""]
    options: Float[Array, "3"]


class Center(NamedTuple):
    """The center of separate jobs; all leaves are arrays.

    Attributes:
      params: The common params of all jobs.
      opt_state: The state of the center's optimizer.
      version: The number of merges that moved the center.
    """

    params: PyTree[Float[Array, "..."]]
    opt_state: Any
    version: Int32[Array, ""]


def contribution(
    params: Params,
    opt_state: Any,
    weight: float | jax.Array = 1.0,
    compress: Compression | None = None,
) -> tuple[Contribution, Any]:
    r"""Return what a job would contribute to a commit as a message, and begin a new period.

    With the center :math:`c` at which the period began, the params :math:`\theta`, and the sum :math:`a`
    of the gradients of :math:`T` local steps, the contribution is

    .. math::
      x = c - \theta \text{ for } \texttt{diloco}, \qquad x = a / T \text{ for } \texttt{agn}

    The params do not move. The next contribution contains only later steps: :math:`c \leftarrow \theta`
    in the returned state, or :math:`a \leftarrow 0` and :math:`T \leftarrow 0`.

    Args:
      params: The params :math:`\theta` of the job, which may be sharded.
      opt_state: A state with an `optperm.agn` or `optperm.diloco`, in any nesting, whose steps had
        `commit=False`.
      weight: The weight :math:`w \ge 0` of the contribution, such as the number of its examples.
      compress: The `optperm.distributed.Compression` that the method has; None for float32. The state
        keeps what the message leaves out for later messages.

    Returns:
      The `Contribution`, for `optperm.distributed.merge`, and the new optimizer state.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> from optperm.distributed import init_center, merge, pull
      >>> outer = optax.sgd(1.0)
      >>> tx = optperm.diloco(optax.sgd(0.5), outer, every=100)
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state, center = tx.init(params), init_center(params, outer)
      >>> updates, opt_state = tx.update(jnp.ones(2), opt_state, params, commit=False)
      >>> params = optperm.apply_updates(params, updates, opt_state)
      >>> message, opt_state = optperm.distributed.contribution(params, opt_state)
      >>> message.move.tolist(), int(message.steps)
      ([0.5, 0.5], 1)
      >>> center = merge(center, [message], outer)
      >>> params, opt_state = pull(params, opt_state, center)
      >>> params.tolist(), int(center.version)
      ([0.5, 1.5], 1)

    Notes:
      Without a step since the last contribution or pull, the message has zeros and weight 0, and the
      state does not change. A contribution that is not finite has weight 0 too, and the state counts it
      in `skipped`.

      If a message is lost, its steps are lost for the center, but not for the job's params until its
      next pull. For an evaluation, use `params`, `center.params`, or a copy of both.

      A step without `commit=False` may commit to the job's own center. Such steps are in no message.

    Raises:
      TypeError: If `weight` is not a number, or `compress` is not a `Compression`.
      ValueError: If `weight` is negative or not finite, trees do not match, the method has another
        `compress`, several fragments or a delay, or `inner` sets exact params (`optperm.sgperm`).

    References:
      Liu et al., `Asynchronous Local-SGD Training for Language Modeling
      <https://arxiv.org/abs/2401.09135>`_, 2024
    """
    state, theta = _find_job("contribution", params, opt_state)
    check_weight(weight)
    _check_compression(state, compress)
    if isinstance(state, AgnState):
        # x = a / T
        steps = state.steps[0]
        x = divide_by_steps(state.accumulator, steps)
    else:
        # x = c - theta
        steps = state.since_commit
        x = subtract_params(state.center, theta)
    has_steps = steps > 0
    x = optax.tree.where(has_steps, x, optax.tree.zeros_like(x))
    is_finite, residual = all_finite(optax.tree.cast_like(x, state.center)), state.residual
    weight = jnp.where(has_steps, weight, 0)
    move = x
    if compress is not None:
        # e <- beta e + x, x <- Q(e), e <- e - x
        move, residual, is_finite = _encode(compress, x, residual, is_finite, weight)
        move = optax.tree.where(has_steps, move, optax.tree.zeros_like(move))
    w, takes_part = weigh(weight, is_finite, accumulation_dtype(theta))
    message = Contribution(move, w, state.commits, steps, _list_options(state, compress))
    # c <- theta, a <- 0, T <- 0
    new = state._replace(
        since_commit=jnp.zeros_like(state.since_commit),
        center=cast_like(optax.tree.where(has_steps, theta, state.center), state.center),
        residual=residual,
        skipped=state.skipped + jnp.logical_not(takes_part).astype(jnp.int32),
    )
    return message, _replace_job(opt_state, _restart_sums(new))


def init_center(params: Params, outer: optax.GradientTransformation) -> Center:
    """Return the first center of separate jobs, which all start with the same params.

    Args:
      params: The params, in the dtypes of the center: `center_dtype` of the method, if given.
      outer: The optimizer of the center, as given to `optperm.agn` or `optperm.diloco`. Its state is in
        the center, and the jobs do not use it.

    Returns:
      A `Center` with a copy of the params and version 0.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> center = optperm.distributed.init_center(jnp.zeros(3), optax.sgd(0.5, momentum=0.9))
      >>> int(center.version)
      0

    Notes:
      If the method trains only some params (`optax.masked`), pass
      `optperm.distributed.center_params(opt_state)`.

    Raises:
      TypeError: If `outer` is not a transformation, or a parameter does not have a real floating dtype.
    """
    optimizer = checks.as_optimizer("outer", outer)
    checks.check_real_floating("params", params)
    copy = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params)
    state = optimizer.init(copy)
    return Center(copy, cast_like(state, state), jnp.zeros([], jnp.int32))


def merge(
    center: Center,
    contributions: Sequence[Contribution],
    outer: optax.GradientTransformation,
    combine: Combine | CombineRows = "mean",
) -> Center:
    r"""Move the center by the contributions that have arrived, with one step of its optimizer.

    .. math::
      n = \frac{\sum_i w_i x_i}{\sum_i w_i}, \qquad c \leftarrow c + u(n; s_c)

    This is a commit of `optperm.agn` or `optperm.diloco`, for any number of jobs.

    Args:
      center: The center.
      contributions: The messages, at least one, from jobs with the same options.
      outer: The optimizer :math:`u` of the center, with which `init_center` made its state.
      combine: `"mean"`; `"sum"` for :math:`n = \sum_i w_i x_i`; `"sequential"` for one step for each
        :math:`w_i x_i`, in the order of the list; or a function from the stacked :math:`x_i`, a tree
        with a leading axis of contributions, and the vector of :math:`w_i` to :math:`n`.

    Returns:
      The new center, whose version is one higher. Contributions that are not finite, or whose weight is
      not positive, are left out. If none remains, or :math:`n` overflows, the center does not change.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> from optperm.distributed import contribution, init_center
      >>> outer = optax.sgd(1.0)
      >>> tx, params = optperm.agn(optax.sgd(0.1), outer), jnp.zeros(2)
      >>> messages = []
      >>> for grad in (1.0, 2.0, 30.0):
      ...     updates, opt_state = tx.update(jnp.full(2, grad), tx.init(params), params, commit=False)
      ...     messages.append(contribution(params + updates, opt_state)[0])
      >>> center = init_center(params, outer)
      >>> optperm.distributed.merge(center, messages, outer).params.tolist()
      [-11.0, -11.0]
      >>> def median(moves, weights):
      ...     return jax.tree.map(lambda x: jnp.median(x, axis=0), moves)
      >>> optperm.distributed.merge(center, messages, outer, combine=median).params.tolist()
      [-2.0, -2.0]

    Notes:
      `center.version - message.version` is the staleness of a message. To weight a message by its
      staleness, replace its `weight`. The mean of a single message does not depend on its weight, so use
      `"sum"` if messages are merged one at a time.

      A message that is merged twice counts twice, so the transport must deliver each message once.

      A function as `combine`, and compressed contributions, need values: call `merge` outside `jax.jit`.
      The extra arguments of an optimizer, such as `value`, are not available at the center.

    Raises:
      TypeError: If `outer` is not a transformation.
      ValueError: If there is no contribution; if a contribution has another tree, other shapes or other
        dtypes than the center, or other options than the first contribution; if the center's state is
        not a state of `outer`; or if `combine` is not one of the above.

    References:
      Hermans et al., `Accumulated Gradient Normalization <https://arxiv.org/abs/1710.02368>`_, 2017
    """
    optimizer = checks.as_optimizer("outer", outer)
    if not callable(combine):
        checks.check_choice("combine", combine, get_args(Combine))
    _check_center(center)
    wanted = jax.eval_shape(optimizer.init, center.params)
    checks.check_same_tree("center.opt_state", center.opt_state, wanted, source="outer.init")
    messages, compress = _check_contributions(center, contributions)
    dtype, start = accumulation_dtype(center.params), jax.tree.map(jnp.asarray, center)
    step = make_center_step(optimizer, {}, start.params, None)
    rows = (_read_row(message, compress, start.params, dtype) for message in messages)
    at, has_moved = (start.params, start.opt_state), jnp.array(False)

    # c <- c + u(n; s_c), unless n has no contributions, or n, c or s_c overflows
    def move(at: tuple[Params, Any], n: Updates, weights: jax.Array) -> Any:
        n = cast_like(n, start.params)
        new = step(*at, n, True)
        is_kept = (weights > 0) & all_finite(n) & _stays_finite(at, new)
        return jax.tree.map(lambda old, each: jnp.where(is_kept, each, old), at, new), is_kept

    if combine == "sequential":
        # n = w_i x_i, for one i after another
        for x, w in rows:
            at, is_valid = move(at, scale(x, w), w)
            has_moved |= is_valid
    elif callable(combine):
        at, has_moved = move(at, *_combine_rows(combine, list(rows), start.params))
    else:
        # n = sum w x, or n = sum w x / sum w
        total, weights = optax.tree.zeros_like(start.params, dtype), jnp.zeros([], dtype)
        for x, w in rows:
            total, weights = optax.tree.add(total, scale(x, w)), weights + w
        at, has_moved = move(at, total if combine == "sum" else divide(total, weights), weights)
    return Center(*at, start.version + jnp.asarray(has_moved).astype(jnp.int32))


def _stays_finite(old: Any, new: Any) -> jax.Array:
    """Return whether no number that was finite is not finite any more."""
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    flags = [
        jnp.all(jnp.isfinite(after) | ~jnp.isfinite(before))
        for before, after in pairs
        if jnp.issubdtype(jnp.result_type(after), jnp.inexact)
    ]
    return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


def pull(
    params: Params,
    opt_state: Any,
    center: Center,
    mixing: float | jax.Array = 0.0,
    *,
    allow_older: bool = False,
) -> tuple[Params, Any]:
    r"""Move a job to the center, and begin a new period; the local optimizer keeps its state.

    .. math::
      \theta \leftarrow \alpha \theta + (1 - \alpha) c

    A job may pull at any time, also without a contribution: a job that joins later starts with a pull.

    Args:
      params: The params :math:`\theta` of the job.
      opt_state: A state with an `optperm.agn` or `optperm.diloco`, in any nesting.
      center: The center, in the dtypes of the center in the state.
      mixing: :math:`\alpha` in [0, 1], as in `optperm.diloco`. 0 drops the steps since the last
        contribution, and 1 keeps the job's params.
      allow_older: Whether to take a center whose version is below the version of the job's own center,
        as after a restart of the center from a checkpoint.

    Returns:
      The new params, in the dtypes and shardings of `params`, and the new optimizer state.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> outer = optax.sgd(0.5)
      >>> tx = optperm.diloco(optax.adam(1e-3), outer, every=100)
      >>> center = optperm.distributed.init_center(jnp.ones(2), outer)
      >>> params = jnp.zeros(2)
      >>> params, opt_state = optperm.distributed.pull(params, tx.init(params), center)
      >>> params.tolist()
      [1.0, 1.0]

    Notes:
      Entries that `inner` fixes or keeps at zero stay so. Params that are not finite are replaced by the
      center, for any `mixing`. With `mixing`, the next contribution of `diloco` also contains the
      distance of the job from the center, as in a commit.

      Within `jax.jit`, where versions are not known, an older center changes nothing.

    Raises:
      TypeError: If `mixing` is not a number or `allow_older` is not a bool.
      ValueError: If `mixing` is out of range, the center has another tree, other shapes or other dtypes
        than the center in the state, or is older, the state has several fragments or a delay, or `inner`
        sets exact params (`optperm.sgperm`).

    References:
      Douillard et al., `Streaming DiLoCo with overlapping communication
      <https://arxiv.org/abs/2501.18512>`_, 2025
    """
    state, theta = _find_job("pull", params, opt_state)
    checks.check_in_range("mixing", mixing, 0.0, 1.0, may_be_schedule=False)
    checks.check_flag("allow_older", allow_older)
    _check_center(center)
    checks.check_same_tree("center.params", center.params, state.center, source=_SOURCE)
    is_taken = jnp.asarray(allow_older | (jnp.asarray(center.version) >= state.commits))
    if not isinstance(is_taken, jax.core.Tracer) and not is_taken:
        raise ValueError(
            f"The center has version {int(center.version)}, but the job's own center has version "
            f"{int(state.commits)}: read the newest center, or pass allow_older=True. Steps without "
            "commit=False raise the version of the job's own center."
        )
    c = cast_like(
        jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), center.params), state.center
    )
    own = cast_like(theta, state.center)
    c = keep_exact(c, own, state.local_state, is_due=True, axis_name=None)
    # The center replaces params that are not finite.
    is_whole = jnp.logical_not(all_finite(theta)) | (jnp.asarray(mixing) == 0)

    # theta <- alpha theta + (1 - alpha) c
    def mix(p: jax.Array, c: jax.Array) -> jax.Array:
        dtype = accumulation_dtype(p)
        alpha = jnp.asarray(mixing, dtype)
        mixed = alpha * p.astype(dtype) + (1 - alpha) * c.astype(dtype)
        return jnp.where(is_whole, c.astype(p.dtype), mixed.astype(p.dtype))

    new = _restart_sums(
        state._replace(
            since_commit=jnp.zeros_like(state.since_commit),
            commits=jnp.asarray(center.version),
            center=c,
            pulled=jnp.full_like(state.pulled, is_whole),
            local_state=(),
        )
    )
    kept = theta, state._replace(local_state=())
    moved = cast_like(optax.tree.where(is_taken, (jax.tree.map(mix, theta, c), new), kept), kept)
    theta, new = moved[0], moved[1]._replace(local_state=state.local_state)
    return fill_masked(theta, params), _replace_job(opt_state, new)


def _find_job(method: str, params: Params, opt_state: Any) -> tuple[Any, Params]:
    """Return the state of AGN or DiLoCo in an optimizer state, and the params that it trains."""
    state: Any = find_state(opt_state, LOCAL_STATES, method=_METHOD)
    check_not_stacked(method, state)
    if len(state.center_state) != 1 or jax.tree.leaves(state.in_flight):
        raise ValueError(
            f"{method} needs a method without fragments or a delay: pass every= as a number to it."
        )
    if placing_states(state.local_state):
        raise ValueError(
            f"{method} needs an inner optimizer that does not set exact params (as sgperm does), "
            "because a message contains no targets."
        )
    theta = mask_like(params, state.center)
    checks.check_same_tree("params", theta, state.center, source=_SOURCE, dtypes=False)
    return state, theta


def _replace_job(opt_state: Any, new: Any) -> Any:
    return replace_state(opt_state, type(new), new, method=_METHOD)


def _restart_sums(state: Any) -> Any:
    """Return a state whose sum of gradients is empty, if it has one."""
    if not isinstance(state, AgnState):
        return state
    accumulator, steps = optax.tree.zeros_like((state.accumulator, state.steps))
    return state._replace(accumulator=accumulator, steps=steps)


def _check_compression(state: Any, compress: Compression | None) -> None:
    """Raise unless the method has the same compression."""
    if not isinstance(compress, Compression | None):
        wanted = "an optperm.distributed.Compression or None"
        raise TypeError(f"compress must be {wanted}, got {compress!r}.")
    options = None if compress is None else (compress.fraction, compress.bits)
    check_fingerprint("contribution", state, {"compress": options})
    if bool(jax.tree.leaves(state.residual)) != (compress is not None):
        raise ValueError(describe_difference("contribution", "compress"))


def _list_options(state: Any, compress: Compression | None) -> jax.Array:
    """Return the options of a message as an array."""
    method = LOCAL_STATES.index(type(state))
    fraction, bits = (None, None) if compress is None else (compress.fraction, compress.bits)
    return jnp.array([method, fraction or 0, bits or 0], jnp.float32)


def _encode(
    compress: Compression, x: Updates, residual: Updates, is_finite: jax.Array, weight: jax.Array
) -> tuple[Any, Updates, jax.Array]:
    """Return a tree of encoded leaves, the new residual, and whether the contribution is valid."""
    # Each leaf is a stack of its own, so jobs with different shardings send the same arrays.
    structure: Any = jax.tree.structure(x)
    leaves, e = ([leaf[None] for leaf in jax.tree.leaves(tree)] for tree in (x, residual))
    sent, e, is_valid = encode_contribution(
        compress, leaves, e, is_finite, Replicas(None, ()), weight
    )
    rest = structure.unflatten([jnp.squeeze(stack, 0) for stack in e])
    return structure.unflatten(sent.encoded), rest, is_valid


def _check_center(center: Any) -> None:
    if not isinstance(center, Center):
        got = checks.with_article(type(center).__name__)
        raise ValueError(f"center must be an optperm.distributed.Center, got {got}.")


def _check_contributions(
    center: Center, contributions: Sequence[Contribution]
) -> tuple[list[Contribution], Compression | None]:
    """Return the contributions and their compression; the first that does not fit raises an error."""
    if isinstance(contributions, Contribution):
        raise ValueError("contributions must be a list of contributions: pass [contribution].")
    messages = list(contributions)
    if not messages:
        raise ValueError("merge needs at least one contribution, got an empty list.")
    compress = None
    for index, message in enumerate(messages):
        name = f"contributions[{index}]"
        if not isinstance(message, Contribution):
            got = checks.with_article(type(message).__name__)
            raise ValueError(f"{name} must be an optperm.distributed.Contribution, got {got}.")
        for field, shape in (("weight", ()), ("version", ()), ("steps", ()), ("options", (3,))):
            if (found := jnp.shape(getattr(message, field))) != shape:
                raise ValueError(f"{name}.{field} must have the shape {shape}, got {found}.")
        compress = _read_compression(name, message)
        _check_same_options(name, message, messages[0])
        _check_move(f"{name}.move", message.move, center.params, compress)
    return messages, compress


def _read_compression(name: str, message: Contribution) -> Compression | None:
    """Return the compression of a message from its options; a traced message has no compression."""
    if isinstance(message.options, jax.core.Tracer):
        nodes = jax.tree.leaves(message.move, is_leaf=lambda node: isinstance(node, Encoded))
        if any(isinstance(node, Encoded) for node in nodes):
            raise ValueError(
                f"{name} is compressed, and merge needs to read its options: call merge outside jax.jit."
            )
        return None
    method, fraction, bits = np.asarray(message.options).tolist()
    is_known = method in range(len(LOCAL_STATES)) and 0 <= fraction <= 1 and bits in (0, *BITS)
    if not is_known:
        raise ValueError(f"{name} has unknown options: {_describe(message)}.")
    return Compression(fraction or None, int(bits) or None) if fraction or bits else None


def _check_same_options(name: str, message: Contribution, first: Contribution) -> None:
    """Raise if two messages are known to have different options."""
    own, wanted = message.options, first.options
    if isinstance(own, jax.core.Tracer) or isinstance(wanted, jax.core.Tracer):
        return
    if not np.array_equal(own, wanted):
        raise ValueError(
            f"{name} has {_describe(message)}, but contributions[0] has {_describe(first)}: merge "
            "contributions of jobs with the same method and the same compress=."
        )


def _describe(message: Contribution) -> str:
    method, fraction, bits = np.asarray(message.options).tolist()
    return f"method={method:g}, fraction={fraction:g}, bits={bits:g}"


def _check_move(name: str, move: Any, params: Params, compress: Compression | None) -> None:
    """Raise unless a move has the tree, the shapes and the dtypes of a contribution to a center."""

    def expect(p: Any) -> Any:
        if compress is None:
            return p
        row = jax.ShapeDtypeStruct((1, *jnp.shape(p)), accumulation_dtype(p))
        return jax.eval_shape(lambda x: encode(compress, x), row)

    wanted, is_encoded = jax.tree.map(expect, params), compress is not None
    checks.check_same_tree(name, move, wanted, source="the center", dtypes=is_encoded)
    if not is_encoded:
        for path, leaf in jax.tree_util.tree_leaves_with_path(move):
            if (dtype := jnp.result_type(leaf)) not in (jnp.float32, jnp.float64):
                place = f"{name}{jax.tree_util.keystr(path)}"
                raise ValueError(f"{place} must be float32 or float64, got {dtype}.")


def _read_row(
    message: Contribution, compress: Compression | None, params: Params, dtype: Any
) -> tuple[Updates, jax.Array]:
    """Return x and w of a message, with w = 0 if the message is left out."""
    x = message.move
    if compress is not None:
        structure: Any = jax.tree.structure(params)
        likes = [jnp.zeros_like(p, accumulation_dtype(p))[None] for p in jax.tree.leaves(params)]
        decoded = decode_all(compress, structure.flatten_up_to(x), likes)
        x = structure.unflatten([jnp.squeeze(stack, 0) for stack in decoded])
    x = jax.tree.map(lambda leaf, p: place_like(jnp.asarray(leaf), p), x, params)
    # A contribution is left out if x is not finite, or overflows in the dtype of the center.
    return x, weigh(message.weight, all_finite(optax.tree.cast_like(x, params)), dtype)[0]


def _combine_rows(
    combine: CombineRows, rows: list[tuple[Updates, jax.Array]], params: Params
) -> tuple[Updates, jax.Array]:
    """Return the user's combination of the contributions with a positive weight, and their weight."""
    weights = jnp.stack([w for _, w in rows])
    if isinstance(weights, jax.core.Tracer):
        raise ValueError("A function as combine needs values: call merge outside jax.jit.")
    counted = [(x, w) for x, w in rows if w > 0]
    if not counted:
        return optax.tree.zeros_like(params), jnp.sum(weights)
    moves, w = jax.tree.map(lambda *leaves: jnp.stack(leaves), *counted)
    n, name = combine(moves, w), "the result of combine"
    checks.check_same_tree(name, n, params, source="the center", dtypes=False)
    return n, jnp.sum(weights)
