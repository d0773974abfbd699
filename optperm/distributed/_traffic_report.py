"""A report on the bytes that replicas send."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from optperm.core import checks
from optperm.core.mapped_axes import AxisName, axis_names
from optperm.core.shapes import Params
from optperm.core.tables import align
from optperm.core.transformation import known_extra_args
from optperm.distributed._every import Every, Exchange

# The bytes on each link of a ring of k replicas, divided by the bytes of one replica's operand
_CARRIED: dict[str, Callable[[int], float]] = {
    **dict.fromkeys(("psum", "pmax", "pmin"), lambda k: 2 * (k - 1) / k),
    **dict.fromkeys(("reduce_scatter", "all_to_all"), lambda k: (k - 1) / k),
    "all_gather": lambda k: k - 1,
    "ppermute": lambda k: 1,
}


class Sent(NamedTuple):
    """The traffic of one replica.

    Attributes:
      name: `"fragment 0"` and so on, `"all"`, or `"synchronous"`.
      bytes_per_commit: The bytes that the replica passes to the collectives of one commit.
      bytes_per_step: The mean of these bytes over a period.
      seconds_per_commit: The time that a link needs for a commit; None without a bandwidth.
      seconds_per_step: The mean of this time over a period; None without a bandwidth.
    """

    name: str
    bytes_per_commit: float
    bytes_per_step: float
    seconds_per_commit: float | None
    seconds_per_step: float | None


class TrafficReport(NamedTuple):
    """Result of `traffic_report`; it prints as a table.

    Attributes:
      fragments: The traffic of a replica for each fragment of a plan, or for a single fragment without a
        plan.
      all: The traffic of a replica for all fragments.
      synchronous: The traffic of a replica if each step averaged all gradients.
    """

    fragments: tuple[Sent, ...]
    all: Sent
    synchronous: Sent

    def __str__(self) -> str:
        """Return the table, with lines for several fragments, for all and for synchronous training."""
        head = ("sent by a replica", "bytes/commit", "bytes/step", "of synchronous")
        rows: list[tuple[str, ...]] = [(*head, "s/commit", "s/step")]
        whole = max(self.synchronous.bytes_per_step, 1)
        for sent in (*self.fragments * (len(self.fragments) > 1), self.all, self.synchronous):
            sizes = f"{sent.bytes_per_commit:,.0f}", f"{sent.bytes_per_step:,.1f}"
            ratio = f"{sent.bytes_per_step / whole:.3g}"
            times = [
                "" if seconds is None else f"{seconds:.3g}"
                for seconds in (sent.seconds_per_commit, sent.seconds_per_step)
            ]
            rows.append((sent.name, *sizes, ratio, *times))
        # Leave out the columns of seconds if no bandwidth is given
        columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
        return align(zip(*columns, strict=True))


def traffic_report(
    tx: optax.GradientTransformation,
    params: Params,
    *,
    axis_name: AxisName,
    every: float | Every,
    bandwidth: float | None = None,
    replicas: int = 2,
    shard_axes: AxisName = (),
) -> TrafficReport:
    r"""Report the bytes that a replica of `optperm.agn` or `optperm.diloco` sends.

    The report traces `tx.update` with and without a commit, and counts the operands of the collectives
    of the commit: the bytes that one replica passes to collectives, after compression. It needs only
    shapes, and no devices. The last line shows the traffic of synchronous training, which sends all
    gradients in every step.

    The traffic on a link depends on the collective. If :math:`k` replicas form a ring and each passes
    :math:`B` bytes to a collective, each link carries

    .. math::
      \frac{2 (k - 1)}{k} B \text{ for an all-reduce}, \qquad (k - 1) B \text{ for an all-gather}, \qquad
      B \text{ for a pair},

    which is :math:`B` for two replicas. The seconds are eight times these bytes, divided by the
    bandwidth.

    Args:
      tx: An optimizer with `optperm.agn` or `optperm.diloco`, in any nesting that passes `commit=` on.
      params: The model's params, or their shapes from `jax.eval_shape`. If a replica is sharded, pass
        the whole model.
      axis_name: The axis or axes of the replicas, as given to the method.
      every: The plan given to the method; otherwise, the mean number of local steps per commit.
      bandwidth: The bandwidth of a replica's link in each direction, in bits per second, such as `1e9`.
        None for a report without seconds.
      replicas: :math:`k`, at least 2.
      shard_axes: The argument `shard_axes` of the method.

    Returns:
      A `TrafficReport`; it prints as a table.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"kernel": jnp.zeros((784, 128)), "bias": jnp.zeros(128)}
      >>> compress = optperm.distributed.Compression(bits=4)
      >>> tx = optperm.diloco(optax.adam(1e-3), every=100, axis_name="host", compress=compress)
      >>> report = optperm.distributed.traffic_report
      >>> print(report(tx, params, axis_name="host", every=100, bandwidth=1e8, replicas=4))
      sent by a replica  bytes/commit  bytes/step  of synchronous  s/commit  s/step
      all                52,224        522.2       0.0013          0.0125    0.000125
      synchronous        401,920       401,920.0   1               0.0482    0.0482

    Notes:
      An all-reduce also contains the sum of the weights, 4 bytes per fragment. Compressed contributions
      and `combine="sequential"` use all-gathers. With many replicas, an all-gather sends more than an
      all-reduce of 4 bytes per entry: with 4 bits, about 16 or more replicas. The report does not
      include latency or collectives within a replica. A commit at the end of training sends all
      fragments once more.

    Raises:
      TypeError: If `tx` is not a transformation.
      ValueError: If a commit of `tx` sends nothing over the axis; if `every` is not the plan of the
        method; or if a number is out of range.
    """
    checks.check_transformation("tx", tx)
    checks.check_count("replicas", replicas, minimum=2)
    if bandwidth is not None:
        checks.check_positive("bandwidth", bandwidth)
    if isinstance(every, Every):
        exchanges: list[Any] = [Exchange(every, (p,), (p,)) for p in range(every.fragments)]
        steps: float = every.period
    else:
        checks.check_positive("every", every)
        exchanges, steps = [True], every
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), params)
    names, others = axis_names(axis_name), axis_names(shard_axes)
    mesh = AbstractMesh((replicas, *[1] * (len(names) + len(others) - 1)), (*names, *others))

    def trace(commit: bool | Exchange) -> Counter[str]:
        return _sum_operands(_trace(tx, shapes, mesh, commit), set(names))

    local = trace(False)
    fragments = tuple(
        _describe(f"fragment {p}", trace(each) - local, steps, bandwidth, replicas)
        for p, each in enumerate(exchanges)
    )
    columns = zip(*(sent[1:] for sent in fragments), strict=True)
    total: Any = [None if None in column else sum(column) for column in columns]
    whole = Sent("all", *total)
    if not whole.bytes_per_commit:
        raise ValueError(
            f"traffic_report found that a commit of tx sends nothing over the axis {axis_name!r}: give "
            "tx an optperm.agn or optperm.diloco with this axis_name."
        )
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    synchronous = _describe("synchronous", Counter(psum=size), 1, bandwidth, replicas)
    return TrafficReport(fragments, whole, synchronous)


def _describe(
    name: str, sent: Counter[str], steps: float, bandwidth: float | None, replicas: int
) -> Sent:
    """Return the traffic of the operands of all collectives in one commit."""
    seconds = _time(sent, bandwidth, replicas)
    per_step = None if seconds is None else seconds / steps
    return Sent(name, sent.total(), sent.total() / steps, seconds, per_step)


def _time(sent: Counter[str], bandwidth: float | None, replicas: int) -> float | None:
    """Return the seconds that a link in a ring needs for the operands of all collectives."""
    if bandwidth is None:
        return None
    return sum(8 * _CARRIED[kind](replicas) * size for kind, size in sent.items()) / bandwidth


def _trace(tx: Any, shapes: Params, mesh: AbstractMesh, commit: bool | Exchange) -> Any:
    """Return the jaxpr of an update of one replica."""

    def init(params: Params) -> Any:
        # A new function is needed, because JAX would not trace the same function twice.
        return tx.init(params)

    def step(params: Params, state: Any) -> Any:
        return tx.update(params, state, params, **known_extra_args(tx, {"commit": commit}))

    with jax.sharding.use_abstract_mesh(mesh):
        state = jax.eval_shape(init, shapes)
        mapped = jax.shard_map(step, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.make_jaxpr(mapped)(shapes, state).jaxpr


def _sum_operands(jaxpr: Any, names: set[str]) -> Counter[str]:
    """Return the bytes of the operands of each kind of collective over the named axes."""
    sent = Counter[str]()
    for eqn in jaxpr.eqns:
        leaves = (getattr(leaf, "jaxpr", leaf) for leaf in jax.tree.leaves([*eqn.params.values()]))
        inner = [_sum_operands(leaf, names) for leaf in leaves if hasattr(leaf, "eqns")]
        if eqn.primitive.name == "cond":
            # Count one branch: any of the pairs, which send equally much, or the branch that sends.
            inner = [max(inner, key=Counter.total)]
        for each in inner * eqn.params.get("length", 1):
            sent += each
        kind = eqn.primitive.name
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        if kind in _CARRIED and names & set(axis_names(axes)):
            sent[kind] += sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
    return sent
