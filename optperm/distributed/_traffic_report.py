"""A report on the bytes that replicas send."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from optperm.core import checks
from optperm.core.mapped_axes import axis_names
from optperm.core.shapes import Params
from optperm.core.tables import align
from optperm.distributed._exchanging import Method, look_at_methods
from optperm.distributed._local_steps import Period
from optperm.distributed._plans import Every, Exchange

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
    bandwidth: float | None = None,
    *,
    every: float | None = None,
    replicas: int = 2,
) -> TrafficReport:
    r"""Report the bytes that a replica of `optperm.agn` or `optperm.diloco` sends.

    The report counts the operands of the collectives in a traced commit: the bytes that one replica
    passes to collectives, after compression. It needs only shapes, and no devices. The last line shows
    the traffic of synchronous training, which sends all gradients in every step.

    The traffic on a link depends on the collective. If :math:`k` replicas form a ring and each passes
    :math:`B` bytes to a collective, each link carries

    .. math::
      \frac{2 (k - 1)}{k} B \text{ for an all-reduce}, \qquad (k - 1) B \text{ for an all-gather}, \qquad
      B \text{ for a pair},

    which is :math:`B` for two replicas. The seconds are eight times these bytes, divided by the
    bandwidth.

    Args:
      tx: An optimizer with one `optperm.agn` or `optperm.diloco`, in any nesting.
      params: The model's params, or their shapes from `jax.eval_shape`. If a replica is sharded, pass
        the whole model.
      bandwidth: The bandwidth of a replica's link in each direction, in bits per second, such as `1e9`.
        None for a report without seconds.
      every: The mean number of local steps per commit, if the method's period is a schedule or a traced
        number. None for the method's own period.
      replicas: :math:`k`, at least 2.

    Returns:
      A `TrafficReport`; it prints as a table.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"kernel": jnp.zeros((784, 128)), "bias": jnp.zeros(128)}
      >>> compress = optperm.distributed.Compression(bits=4)
      >>> tx = optperm.diloco(optax.adam(1e-3), every=100, axis_name="host", compress=compress)
      >>> print(optperm.distributed.traffic_report(tx, params, bandwidth=1e8, replicas=4))
      sent by a replica  bytes/commit  bytes/step  of synchronous  s/commit  s/step
      all                52,224        522.2       0.0013          0.0125    0.000125
      synchronous        401,920       401,920.0   1               0.0482    0.0482

    Notes:
      An all-reduce also contains the sum of the weights, 4 bytes per fragment. Compressed contributions
      and `combine="sequential"` of `agn` use all-gathers. With many replicas, an all-gather sends more
      than an all-reduce of 4 bytes per entry: with 4 bits, about 16 or more replicas. The report does
      not include latency or collectives within a replica. A commit at the end of training sends all
      fragments once more.

    Raises:
      TypeError: If `tx` is not a transformation.
      ValueError: If `tx` does not contain exactly one of these methods; if the method has no
        `axis_name` and therefore sends nothing; if its period is a schedule and `every` is not given;
        or if a number is out of range.
    """
    checks.check_transformation("tx", tx)
    checks.check_count("replicas", replicas, minimum=2)
    if bandwidth is not None:
        checks.check_positive("bandwidth", bandwidth)
    if every is not None:
        checks.check_positive("every", every)
    shapes = _shapes(params)
    found: list[tuple[Sent, ...]] = []

    def look(method: Method) -> None:
        found.append(tuple(_measure(method, bandwidth, every, replicas)))

    def init(params: Params) -> Any:
        # A new function is needed, because JAX would not trace the same function twice.
        return tx.init(params)

    with look_at_methods(look):
        jax.eval_shape(init, shapes)
    if len(found) != 1:
        wanted = "one optperm.agn or optperm.diloco"
        raise ValueError(f"traffic_report needs exactly {wanted} in tx, got {len(found)}.")
    (fragments,) = found
    columns = zip(*(sent[1:] for sent in fragments), strict=True)
    total: Any = [None if None in column else sum(column) for column in columns]
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))
    seconds = _time(Counter(psum=size), bandwidth, replicas)
    synchronous = Sent("synchronous", size, size, seconds, seconds)
    return TrafficReport(fragments, Sent("all", *total), synchronous)


def _measure(
    method: Method, bandwidth: float | None, every: float | None, replicas: int
) -> Iterator[Sent]:
    """Yield the traffic of a replica for each fragment."""
    name, plan = method.name, method.every
    if method.replicas.axis_name is None:
        says = f"{name} without axis_name is a single replica, which sends nothing"
        raise ValueError(f"{says}: pass axis_name to {name}.")
    if isinstance(plan, Every):
        fragments: list[Any] = [Exchange((p,), (p,)) for p in range(plan.fragments)]
        steps: Any = plan.period if every is None else every
    else:
        fragments, steps = [True], _find_steps(name, plan) if every is None else every
    local = _trace(method, False, replicas)
    for p, exchange in enumerate(fragments):
        sent = _trace(method, exchange, replicas) - local
        seconds = _time(sent, bandwidth, replicas)
        per_step = None if seconds is None else seconds / steps
        yield Sent(f"fragment {p}", sent.total(), sent.total() / steps, seconds, per_step)


def _find_steps(name: str, every: Period) -> int:
    if callable(every) or isinstance(every, jax.core.Tracer):
        raise ValueError(f"The period of {name} is a schedule or traced: pass its mean as every=.")
    return int(every)


def _time(sent: Counter[str], bandwidth: float | None, replicas: int) -> float | None:
    """Return the seconds that a link in a ring needs for the operands of all collectives."""
    if bandwidth is None:
        return None
    return sum(8 * _CARRIED[kind](replicas) * size for kind, size in sent.items()) / bandwidth


def _trace(method: Method, commit: bool | Exchange, replicas: int) -> Counter[str]:
    """Return the bytes of the operands of each kind of collective between replicas, in one step."""
    names = axis_names(method.replicas.axis_name)
    axes = *names, *axis_names(method.replicas.shard_axes)
    mesh = AbstractMesh((replicas, *[1] * (len(axes) - 1)), axes)
    params = _shapes(method.params)

    def init(params: Params) -> Any:
        return method.tx.init(params)

    def step(params: Params, state: Any) -> Any:
        return method.tx.update(params, state, params, commit=commit)

    # Here, `init` must not pass the method to the report again.
    with look_at_methods(None), jax.sharding.use_abstract_mesh(mesh):
        state = jax.eval_shape(init, params)
        mapped = jax.shard_map(step, in_specs=P(), out_specs=P(), check_vma=False)
        return _sum_operands(jax.make_jaxpr(mapped)(params, state).jaxpr, set(names))


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


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), tree)
