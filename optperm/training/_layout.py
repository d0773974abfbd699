"""The placement of a run's arrays, and the mapping of its steps over devices.

Without `axis_name`, a method is compiled as one program for all devices: batches are sharded, params
keep the user's placement, and XLA inserts the communication. With `axis_name`, the method runs in
`jax.shard_map` over this axis of the mesh, and the other axes stay automatic.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optperm.core import checks
from optperm.core.mapped_axes import AxisName, axis_names, varying_axes
from optperm.core.states import find_states
from optperm.core.trees import leaf_paths
from optperm.exact import CommittingState
from optperm.training._history import COUNT

AXIS = "replica"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The placement of arrays on a mesh. With `own`, a carry has a leading axis of replicas."""

    # A mesh with automatic axes; None for the default device.
    mesh: Mesh | None = None
    batch: tuple[Any, ...] = ()  # the PartitionSpec of a batch
    mapped: tuple[str, ...] = ()  # the axes over which the method is mapped
    own: bool = False  # True if each replica steps with its own gradient, and has its own carry
    home: Mesh | None = None  # the mesh of the user, perhaps with explicit axes

    @property
    def parts(self) -> int:
        """The number of equal parts of a batch."""
        return self._size(axis_names(self.batch[0]) if self.batch else ())

    @property
    def replicas(self) -> int:
        """The number of replicas over which the method is mapped."""
        return self._size(self.mapped)

    def _size(self, names: Iterable[str]) -> int:
        return math.prod(self.mesh.shape[name] for name in names) if self.mesh is not None else 1

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes of the mesh along which replicas have their own carries."""
        return self.mapped if self.own else ()

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context for tracing and calling steps."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def sharding(self, *spec: Any) -> Any:
        """Return the sharding of a spec on the mesh; None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, P(*spec))

    def map_replicas(
        self, function: Callable[..., Any], axis: int, *, stacked: bool = False
    ) -> Callable[..., Any]:
        """Map a function of a carry, a shared tree and a tree divided along `axis` over the replicas.

        The result is the mean over replicas, or is `stacked` along a leading axis if each has its own.
        The mean of metrics is weighed by the counts of the replicas.
        """
        if not self.mapped:
            return function
        stacked = stacked and self.own

        def on_replica(carry: Any, shared: Any, part: Any) -> tuple[Any, Any]:
            carry = jax.tree.map(lambda x: x[0], carry) if self.own else carry
            carry, result = function(carry, shared, part)
            carry = jax.tree.map(lambda x: x[None], carry) if self.own else carry
            stack = jax.tree.map(lambda x: x[None], result) if stacked else None
            return carry, stack if stacked else _average_metrics(result)

        carries, parts = P(self.mapped) if self.own else P(), P(*[None] * axis, self.mapped)
        ins, names = (carries, P(), parts), set(self.mapped)
        outs = carries, P(self.mapped) if stacked else P()
        shard_map = functools.partial(jax.shard_map, mesh=self.mesh, axis_names=names)
        return shard_map(on_replica, in_specs=ins, out_specs=outs)

    def average_rows(self, rows: Any) -> Any:
        """Return rows of metrics, averaged over replicas in one exchange if replicas have their own."""
        return _average_rows(rows, self) if self.own else rows

    def put(self, leaf: Any, *spec: Any, local: bool = False) -> jax.Array:
        """Place an array on the devices; each process passes the whole array or, if local, its part."""
        sharding = self.sharding(*spec)
        if sharding is None or jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        shape = None if local else host.shape
        return jax.make_array_from_process_local_data(sharding, host, shape)

    def put_batch(self, batch: Any, *, local: bool) -> Any:
        """Place a batch, divided equally among devices or else replicas, or else on each device."""
        if self.mesh is None:
            return batch
        several = jax.process_count() if local else 1

        def put(leaf: Any) -> jax.Array:
            shape = np.shape(leaf)
            spec = self._spec(shape, several)
            if several > 1 and shape and not spec:
                says = f"A batch has {shape[0]} examples in each of {several} processes"
                raise ValueError(f"{says}, which {self.parts} devices cannot divide equally.")
            return self.put(leaf, *spec, local=local)

        return jax.tree.map(put, batch)

    def check_shares(self, name: str, batch: Any) -> None:
        """Raise a ValueError unless mapped replicas divide a process's batch equally."""
        if not self.mapped:
            return
        size = checks.count_examples(name, batch, has_scalars=True) * jax.process_count()
        if size % self.replicas:
            advice = (
                "leave out the remaining examples, or pad the batch and return (sum, count) from "
                "loss_fn, in which the padding does not count"
            )
            says = (
                f"{name} has {size} examples, which {self.replicas} replicas cannot share equally"
            )
            raise ValueError(f"{says}: {advice}.")

    def constrain(self, batch: Any) -> Any:
        """Divide a batch among the devices within a compiled step, if they divide it equally."""
        # Within a replica, only axes over which the method is not mapped remain.
        names = (
            tuple(n for n in axis_names(self.batch[0]) if n not in self.mapped)
            if self.batch
            else ()
        )
        if not names:
            return batch
        size, share = self._size(names), jax.lax.with_sharding_constraint

        def divide(leaf: jax.Array) -> jax.Array:
            is_shared = leaf.ndim and leaf.shape[0] % size == 0
            return share(leaf, P(names, *self.batch[1 : leaf.ndim]) if is_shared else P())

        return jax.tree.map(divide, batch)

    def _spec(self, shape: tuple[int, ...], several: int = 1) -> tuple[Any, ...]:
        size = shape[0] * several if shape else 0
        if size and size % self.parts == 0:
            return self.batch[: len(shape)]
        # If a replica's devices do not divide its examples equally, all devices compute all of them.
        is_of_replicas = self.mapped and size and size % self.replicas == 0
        return (self.mapped,) if is_of_replicas else ()

    def place(self, tree: Any) -> Any:
        """Place a tree on the mesh: sharded arrays stay sharded, and other arrays go to all devices."""

        def put(path: Any, leaf: Any) -> jax.Array:
            here = getattr(leaf, "sharding", None)
            if self.mesh is None or not isinstance(here, NamedSharding) or here.num_devices == 1:
                return self.put(leaf)
            if here.device_set == set(self.mesh.devices.flat):
                return jax.device_put(leaf, self.sharding(*here.spec))
            says = f"The state{jax.tree_util.keystr(path)} is on {here.mesh}"
            raise ValueError(f"{says}, but the mesh is {self.mesh}: pass the mesh of the state.")

        return jax.tree_util.tree_map_with_path(put, tree)

    def shape_stacked(self, tree: Any, rows: int) -> Any:
        """Return the shapes of stacked carries of `rows` replicas, with all rows on each device."""

        def form(leaf: Any) -> Any:
            where = self.mesh and self.sharding(None, *leaf.sharding.spec[1:])
            return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=where)

        return jax.tree.map(form, tree)

    def deal(self, tree: Any, own: bool = True) -> Any:
        """Assign stacked carries, or one carry for all replicas, in turn to the replicas of the mesh."""

        def rows(tree: Any) -> Any:
            stacked = tree if own else jax.tree.map(lambda x: x[None], tree)
            return jax.tree.map(lambda x: x[np.arange(self.replicas) % x.shape[0]], stacked)

        def where(leaf: Any) -> Any:
            return self.sharding(self.mapped, *leaf.sharding.spec[own:])

        return jax.jit(rows, out_shardings=self.mesh and jax.tree.map(where, tree))(tree)

    def bring_home(self, tree: Any) -> Any:
        """Place a tree on the user's mesh, which may have other types of axes."""
        home = self.home
        if home is None or home == self.mesh:
            return tree
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(home, x.sharding.spec)), tree)


@functools.partial(jax.jit, static_argnums=1)
def _average_rows(rows: Any, layout: Layout) -> Any:
    mean, total = functools.partial(jnp.mean, axis=0), functools.partial(jnp.sum, axis=0)
    means = [weigh_columns(row, total) or jax.tree.map(mean, row) for row in rows]
    return jax.lax.with_sharding_constraint(means, layout.sharding())


def _average_metrics(metrics: Any) -> Any:
    """Average metrics over the replicas, weighed by their counts if the metrics have counts."""
    weighed = {}
    if isinstance(metrics, dict) and (axes := tuple(varying_axes(metrics.get(COUNT, ())))):
        vary = {name: column for name, column in metrics.items() if varying_axes(column)}
        weighed = weigh_columns(vary, lambda column: jax.lax.psum(column, axes)) or {}
    return average_varying(metrics | weighed if weighed else metrics)


def weigh_columns(columns: dict[str, Any], add: Callable[[Any], Any]) -> dict[str, Any] | None:
    """Return the columns' means weighed by their counts, and the sum of the counts.

    Without counts, the result is None. Entries without a count of zero do not matter, even if they are
    not finite.
    """
    counts = columns.get(COUNT)
    if counts is None:
        return None
    total = add(counts)
    over = jnp.where(total == 0, 1, total)
    means = {
        name: add(jnp.where(counts == 0, 0, column * counts)) / over
        for name, column in columns.items()
    }
    return means | {COUNT: total}


def average_statistics(statistics: Any, average: Callable[[Any], Any]) -> Any:
    r"""Average the model state over replicas, and add to each variance the spread of its means.

    By Chan's formula, the variance over the examples of all replicas is

    .. math:: v = \overline{v_i} + \overline{(m_i - \overline{m_i})^2}

    A leaf `var` is the variance that belongs to the leaf `mean` beside it, as in BatchNorm of linen and
    nnx.

    Args:
      statistics: The model state.
      average: A function that averages a leaf over the replicas.
    """
    leaves: dict[str, Any] = dict(leaf_paths(statistics))
    averages = {path: average(leaf) for path, leaf in leaves.items()}
    for path in leaves:
        parent, _, name = path.rpartition("/")
        of_mean = f"{parent}/mean".lstrip("/")
        if name == "var" and of_mean in leaves:
            spread = average((leaves[of_mean] - averages[of_mean]) ** 2)
            averages[path] += spread.astype(averages[path].dtype)
    return jax.tree.unflatten(jax.tree.structure(statistics), list(averages.values()))


def average_varying(tree: Any) -> Any:
    """Average the leaves that vary over mapped axes; for integers and booleans, take the maximum."""

    def average(leaf: jax.Array) -> jax.Array:
        if not (axes := tuple(varying_axes(leaf))):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.lax.pmean(leaf, axes)
        return jax.lax.pmax(leaf.astype(jnp.int32), axes).astype(leaf.dtype)

    return jax.tree.map(average, tree)


def choose_layout(
    tx: optax.GradientTransformation,
    state: Any,
    mesh: Mesh | NamedSharding | None = None,
    axis_name: AxisName | None = None,
) -> Layout:
    """Return the layout for training a state, from `mesh` and `axis_name` of `fit`."""
    mapped = axis_names(axis_name)
    layout = _on_mesh(state, mesh, mapped)
    if layout.mesh is None:
        return layout
    axes = layout.mesh.axis_names
    if not set(mapped) <= set(axes):
        known = ", ".join(map(repr, axes))
        says = f"must name axes of the mesh, whose axes are {known}"
        raise ValueError(f"axis_name {axis_name!r} {says}.")
    if not set(mapped) <= set(axis_names(layout.batch[0])):
        if isinstance(mesh, NamedSharding):
            says = f"axis_name {axis_name!r} must name axes that shard the examples of a batch"
            raise ValueError(f"{says}, but the spec of mesh, their sharding, is {mesh.spec}.")
        layout = dataclasses.replace(layout, batch=(mapped,))
    layout = dataclasses.replace(layout, mapped=mapped)
    is_local, varies = _trace_init(tx, state, layout)
    if is_local and not mapped:
        known = " or ".join(map(repr, axes))
        says = "The method takes local steps, and without axis_name, replicas would never commit"
        raise ValueError(f"{says}: pass axis_name={known} to the method and to fit.")
    return dataclasses.replace(layout, own=bool(mapped) and (is_local or varies))


def _on_mesh(state: Any, mesh: Any, mapped: tuple[str, ...]) -> Layout:
    if mesh is None:
        here = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
        mesh = next(
            (s.mesh for s in here if isinstance(s, NamedSharding) and s.num_devices > 1), None
        )
    if mesh is None and (mapped or jax.process_count() > 1):
        mesh = Mesh(np.array(jax.devices()), mapped if len(mapped) == 1 else (AXIS,))
    if mesh is None:
        return Layout()
    if isinstance(mesh, Mesh):
        mesh = NamedSharding(mesh, P(mesh.axis_names[0]))
    if not isinstance(mesh, NamedSharding) or not mesh.spec or mesh.spec[0] is None:
        allowed = "a Mesh, or a NamedSharding that shards the leading axis of a batch"
        raise TypeError(f"mesh must be {allowed}, got {mesh!r}.")
    home: Any = mesh.mesh
    # Within steps, axes are automatic, so that any model runs. With explicit axes, most models would
    # have to name their shardings.
    return Layout(Mesh(home.devices, home.axis_names), tuple(mesh.spec), home=home)


def _trace_init(tx: Any, state: Any, layout: Layout) -> tuple[bool, bool]:
    """Return whether the method takes local steps, and whether its initial state varies by replica."""
    found = [(bool(find_states(state.opt_state, CommittingState)), False)]

    def init(_: Any, params: Any, __: Any) -> tuple[Any, Any]:
        opt_state = tx.init(params)
        found.append((bool(find_states(opt_state, CommittingState)), bool(varying_axes(opt_state))))
        return (), ()

    if layout.mapped or state.opt_state is None:
        params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)
        with layout.context():
            jax.eval_shape(layout.map_replicas(init, 0), (), params, ())
    return found[-1]
