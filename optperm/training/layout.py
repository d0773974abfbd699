"""Where the arrays of a run lie, and how its steps are spread over devices.

There are two ways. Most methods are compiled once for all devices: batches are sharded, params lie as the
user has put them, and XLA moves what has to be moved. A method that was built with the name of a mapped
axis runs by `jax.shard_map` over that axis of the mesh, or by `jax.vmap` on one device.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optperm.contract import checks
from optperm.contract.mapped_axes import mark_varying, varying_axes
from optperm.contract.states import find_states
from optperm.distributed.local_steps import LocalStepsState
from optperm.evaluation import evaluate

AXIS = "replica"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where arrays lie.

    Attributes:
      mesh: The devices; None for wherever JAX puts what is not yet anywhere.
      batch: How the leading axes of a batch are sharded over the mesh.
      mapped: The axes over which the method is mapped; empty for one that asks for none.
      own: Whether each replica along them has a carry of its own. Then a carry has a leading axis of
        replicas, of which each device holds its part.
      replicas: How many replicas are simulated on one device.
    """

    mesh: Mesh | None = None
    batch: P = P()
    mapped: tuple[str, ...] = ()
    own: bool = False
    replicas: int = 1

    @property
    def parts(self) -> int:
        """In how many equal parts a batch is taken."""
        if self.mesh is None:
            return self.replicas
        return math.prod(self.mesh.shape[name] for name in batch_axes(self.batch))

    @property
    def explicit(self) -> bool:
        """Whether shardings on the mesh are a part of the types of arrays."""
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """What steps are traced and called in."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def sharding(self, *spec: Any) -> NamedSharding | None:
        """That of a spec on the mesh; None without one."""
        return None if self.mesh is None else NamedSharding(self.mesh, P(*spec))

    def spread(self, function: Callable[..., Any], axis: int) -> Callable[..., Any]:
        """A function on every replica at once.

        Args:
          function: From a carry, what all replicas share, and what each has a part of, it makes the next
            carry, and a result that is the same on every replica or, where each has its own carry, any.
          axis: Along which the replicas have their parts.

        Returns:
          A function of the whole; a result that differs between replicas has become their mean.
        """
        if not self.mapped:
            return function
        if self.mesh is None:
            return self._simulate(function, axis)
        parts = P(*[None] * axis, self.mapped)
        carry_spec = P(self.mapped) if self.own else P()

        def on_replica(carry: Any, shared: Any, part: Any) -> tuple[Any, Any]:
            if self.own:
                carry = jax.tree.map(lambda leaf: leaf[0], carry)
            carry, result = function(carry, shared, part)
            if self.own:
                carry = jax.tree.map(lambda leaf: leaf[None], carry)
            return carry, agreed(result)

        return jax.shard_map(
            on_replica,
            mesh=self.mesh,
            in_specs=(carry_spec, P(), parts),
            out_specs=(carry_spec, P()),
            axis_names=set(self.mapped),
        )

    def _simulate(self, function: Callable[..., Any], axis: int) -> Callable[..., Any]:
        size = self.replicas

        def split(leaf: jax.Array) -> jax.Array:
            shape = jnp.shape(leaf)
            return jnp.reshape(leaf, (*shape[:axis], size, -1, *shape[axis + 1 :]))

        mapped = jax.vmap(function, (0, None, axis), axis_name=self.mapped[0], axis_size=size)

        def on_all(carry: Any, shared: Any, whole: Any) -> tuple[Any, Any]:
            carry, results = mapped(carry, shared, jax.tree.map(split, whole))
            return carry, jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), results)

        return on_all

    def place(self, tree: Any) -> Any:
        """The tree on the mesh: what already lies there stays as it is, all else goes to every device.

        Raises:
          ValueError: If some of it is spread over other devices.
        """
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, tree)
        devices = set(self.mesh.devices.flat)

        def put(path: Any, leaf: Any) -> jax.Array:
            here = getattr(leaf, "sharding", None)
            if isinstance(here, NamedSharding) and len(here.device_set) > 1:
                if here.device_set == devices:
                    return leaf
                raise ValueError(
                    f"The state{jax.tree_util.keystr(path)} is spread over devices "
                    f"{sorted(device.id for device in here.device_set)}, but the mesh has "
                    f"{sorted(device.id for device in devices)}: pass the mesh of the state."
                )
            return put_whole(leaf, NamedSharding(self.mesh, P()))  # type: ignore[arg-type]

        return jax.tree_util.tree_map_with_path(put, tree)

    def put_batch(self, batch: Any, *, local: bool) -> Any:
        """A batch on the devices, which share it where they can share it equally.

        Args:
          batch: A tree of arrays.
          local: Whether this process has a part of the batch, rather than all of it.
        """
        if self.mesh is None:
            return batch
        processes = jax.process_count()

        def put(leaf: Any) -> jax.Array:
            size = np.shape(leaf)[0] * (processes if local else 1) if np.ndim(leaf) else 1
            spec = P(*self.batch[: np.ndim(leaf)]) if size % self.parts == 0 else P()
            sharding = NamedSharding(self.mesh, spec)  # type: ignore[arg-type]
            if processes == 1:
                return jax.device_put(leaf, sharding)
            if local:
                return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))
            return put_whole(leaf, sharding)

        return jax.tree.map(put, batch)

    def constrain(self, batch: Any) -> Any:
        """A batch within a compiled step, sharded over the mesh."""
        if self.mesh is None or self.mapped or self.explicit:
            return batch
        return jax.tree.map(
            lambda leaf: jax.lax.with_sharding_constraint(leaf, P(*self.batch[: leaf.ndim])), batch
        )

    def take(self, data: Any, indices: jax.Array) -> Any:
        """The examples of some indices, within a compiled step."""
        if self.explicit and not self.mapped:
            return jax.tree.map(
                lambda leaf: leaf.at[indices].get(out_sharding=P(*self.batch[: leaf.ndim])), data
            )
        return self.constrain(jax.tree.map(lambda leaf: leaf[indices], data))

    def stack(self, tree: Any) -> Any:
        """One copy of a placed tree for each replica."""
        size = self.parts

        def rows(leaf: jax.Array) -> jax.Array:
            return jnp.broadcast_to(leaf[None], (size, *leaf.shape))

        if self.mesh is None:
            return jax.jit(lambda tree: jax.tree.map(rows, tree))(tree)
        shardings = jax.tree.map(lambda leaf: self.sharding(self.mapped, *leaf.sharding.spec), tree)
        return jax.jit(lambda tree: jax.tree.map(rows, tree), out_shardings=shardings)(tree)


def batch_axes(spec: P) -> tuple[str, ...]:
    """The axes of a mesh over which the examples of a batch are sharded."""
    first = spec[0] if len(spec) else None
    return () if first is None else (first,) if isinstance(first, str) else tuple(first)


def put_whole(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has, on the devices of all of them."""
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    host = np.asarray(leaf)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def agreed(tree: Any) -> Any:
    """The mean of what differs between replicas; of whole numbers and flags, the largest."""

    def agree(leaf: jax.Array) -> jax.Array:
        axes = tuple(varying_axes(leaf))
        if not axes:
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.lax.pmean(leaf, axes)
        if leaf.dtype == jnp.bool_:
            return jax.lax.pmax(leaf.astype(jnp.int32), axes) > 0
        return jax.lax.pmax(leaf, axes)

    return jax.tree.map(agree, tree)


def layout_of(
    tx: optax.GradientTransformation,
    params: Any,
    leaves: list[Any],
    *,
    mesh: Any,
    devices: int | None,
    replicas: int | None,
) -> Layout:
    """Where a run is to lie, from the arguments of `fit`.

    Args:
      tx: The method.
      params: What it trains, or its shapes and dtypes.
      leaves: The arrays of the state, which may be on a mesh already.
      mesh: As in `fit`; likewise `devices` and `replicas`.

    Raises:
      TypeError: If an argument is of the wrong type.
      ValueError: If there are not enough devices, arguments exclude one another, or the method and the
        axes do not fit.
    """
    given = {"mesh": mesh, "devices": devices, "replicas": replicas}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} exclude one another: pass one of them.")
    if replicas is not None:
        checks.check_count("replicas", replicas)
        layout = Layout(replicas=int(replicas))
        return _mapped(tx, params, layout, "replicas")
    layout = _on_mesh(leaves, mesh, devices)
    if layout.mesh is None:
        return layout
    return _mapped(tx, params, layout, "mesh" if devices is None else "devices")


def _on_mesh(leaves: list[Any], mesh: Any, devices: int | None) -> Layout:
    if isinstance(mesh, NamedSharding):
        layout = Layout(mesh.mesh, mesh.spec)  # type: ignore[arg-type]
        if not batch_axes(layout.batch):
            raise ValueError(
                f"mesh={mesh} shards a batch over no axis: name one first in its PartitionSpec."
            )
        return layout
    if isinstance(mesh, Mesh):
        return Layout(mesh, P(mesh.axis_names[0]))
    if mesh is not None:
        raise TypeError(
            "mesh must be a jax.sharding.Mesh, whose first axis shards batches, or the NamedSharding of "
            f"a batch, got {type(mesh).__name__}."
        )
    if devices is not None or jax.process_count() > 1:
        return Layout(mesh_of(1 if devices is None else devices), P(AXIS))
    shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
    spread = [
        each for each in shardings if isinstance(each, NamedSharding) and each.num_devices > 1
    ]
    if spread:
        return Layout(spread[0].mesh, P(spread[0].mesh.axis_names[0]))  # type: ignore[arg-type]
    return Layout()


def mesh_of(devices: int) -> Mesh:
    """A mesh of as many devices of each process, along the axis `replica`.

    They are of JAX's own choice if that has enough, else processors.

    Raises:
      ValueError: If there are not so many.
    """
    checks.check_count("devices", devices)
    counts = []
    for platform in (None, "cpu"):
        of_process: list[list[jax.Device]] = [[] for _ in range(jax.process_count())]
        for device in jax.devices(platform):
            of_process[device.process_index].append(device)
        counts.append(min(map(len, of_process)))
        if counts[-1] >= devices:
            chosen = [device for some in of_process for device in some[:devices]]
            return Mesh(np.array(chosen), (AXIS,))
    raise ValueError(
        f"devices must be at most {max(counts)}, the number that JAX has, got {devices}. For more "
        "virtual ones on the processor start with the environment variable "
        f"JAX_NUM_CPU_DEVICES={devices}, or simulate replicas on one device with replicas={devices}."
    )


def _mapped(tx: Any, params: Any, layout: Layout, argument: str) -> Layout:
    """The layout with the axes that the method asks for, where it asks for any."""
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    names = (AXIS,) if layout.mesh is None else layout.mesh.axis_names
    first = batch_axes(layout.batch)
    candidates = [(), first, *((name,) for name in names), *itertools.combinations(names, 2), names]
    for axes in candidates if layout.mesh is not None else [(), (AXIS,)]:
        found = _traces(tx, like, dataclasses.replace(layout, mapped=tuple(axes)))
        if found is None:
            continue
        keeps_local = find_states(found[0], LocalStepsState)
        if not axes and (keeps_local or layout.mesh is None):
            known = f"{names[0]!r}" if len(names) == 1 else f"one of {names}"
            why = (
                "the method keeps a state on each replica, but was built without axis_name, so the "
                "replicas would never meet: pass"
                if keeps_local
                else "the method keeps no state on each replica: use devices or mesh instead, or pass"
            )
            raise ValueError(f"With {argument} {why} axis_name={known} to it.")
        if not axes:
            return layout
        batch = layout.batch if set(axes) == set(first) else P(tuple(axes))
        own = layout.mesh is None or bool(keeps_local) or found[1]
        return dataclasses.replace(layout, mapped=tuple(axes), batch=batch, own=own)
    raise ValueError(
        f"The method asks for a mapped axis that is not there: with {argument} fit maps over "
        f"{' or '.join(map(repr, names))}. Pass one of these as its axis_name."
    )


def _traces(tx: Any, like: Any, layout: Layout) -> tuple[Any, bool] | None:
    """The form of the method's state, and whether it varies over the mapped axes.

    None if it asks for an axis that is not among these. The loss is one that depends on nothing.
    """
    seen: list[Any] = [None]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)) * jnp.mean(batch)

    def step(_: Any, params: Any, batch: jax.Array) -> tuple[Any, Any]:
        own = bool(find_states(tx.init(params), LocalStepsState))
        params = mark_varying(params, layout.mapped if own and layout.mesh is not None else ())
        state = tx.init(params)
        seen[:] = [state]
        axes = layout.mapped or None
        with contextlib.suppress(TypeError):  # params that have no gradient
            e = evaluate(loss_fn, params, batch, axis_name=None if own else axes)
            update = optax.with_extra_args_support(tx).update
            state = update(e.grad, state, params, **e.extra_args)[1]
        seen[:] = [state, bool(layout.mapped and varying_axes(state))]
        return (), ()

    batch = jax.ShapeDtypeStruct((2 * max(layout.parts, 1),), jnp.float32)
    try:
        with layout.context():
            jax.eval_shape(layout.spread(step, 0), (), like, batch)
    except (ValueError, NameError) as error:
        if "bound" in str(error):
            return None
    return seen[0], bool(seen[1:] and seen[1])
