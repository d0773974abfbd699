"""Where the arrays of a run lie, and how its steps are spread over devices.

Most methods are compiled once for all devices: batches are sharded, params lie as the user has put them,
and XLA moves what has to move. A method that was built with the name of a mapped axis runs by
`jax.shard_map` over that axis of the mesh, or by `jax.vmap` on one device.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
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
      mesh: The devices, its axes automatic; None for wherever JAX puts what is not yet anywhere.
      batch: How a batch is sharded over the mesh, by its PartitionSpec.
      mapped: The axes over which the method is mapped; empty for one that asks for none.
      own: Whether each replica along them has a carry of its own. Then a carry has a leading axis of
        replicas, of which each device holds its part.
      replicas: How many replicas are simulated on one device.
      home: The mesh as the user has it, perhaps with explicit axes.
    """

    mesh: Mesh | None = None
    batch: tuple[Any, ...] = ()
    mapped: tuple[str, ...] = ()
    own: bool = False
    replicas: int = 1
    home: Mesh | None = None

    @property
    def parts(self) -> int:
        """In how many equal parts a batch is taken."""
        if self.mesh is None:
            return self.replicas
        return math.prod(self.mesh.shape[name] for name in _names(self.batch[0]))

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """What steps are traced and called in."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def sharding(self, *spec: Any) -> NamedSharding | None:
        """That of a spec on the mesh; None without one."""
        return None if self.mesh is None else NamedSharding(self.mesh, P(*spec))

    def spread(self, function: Callable[..., Any], axis: int) -> Callable[..., Any]:
        """A function on every replica at once, where the method is mapped.

        Args:
          function: From a carry, what all replicas share, and what each has a part of, it makes the next
            carry, and numbers, of which the mean over replicas comes back.
          axis: Along which the replicas have their parts.
        """
        if not self.mapped:
            return function
        if self.mesh is None:
            return self._simulate(function, axis)
        carries = P(self.mapped) if self.own else P()

        def on_replica(carry: Any, shared: Any, part: Any) -> tuple[Any, Any]:
            if not self.own:
                carry, result = function(carry, shared, part)
                return carry, average_varying(result)
            carry, result = function(jax.tree.map(lambda x: x[0], carry), shared, part)
            return jax.tree.map(lambda x: x[None], carry), average_varying(result)

        return jax.shard_map(
            on_replica,
            mesh=self.mesh,
            in_specs=(carries, P(), P(*[None] * axis, self.mapped)),
            out_specs=(carries, P()),
            axis_names=set(self.mapped),
        )

    def _simulate(self, function: Callable[..., Any], axis: int) -> Callable[..., Any]:
        size = self.replicas

        def split(leaf: Any) -> jax.Array:
            return jnp.reshape(leaf, (*leaf.shape[:axis], size, -1, *leaf.shape[axis + 1 :]))

        mapped = jax.vmap(function, (0, None, axis), axis_name=self.mapped[0], axis_size=size)

        def on_all(carry: Any, shared: Any, whole: Any) -> tuple[Any, Any]:
            carry, results = mapped(carry, shared, jax.tree.map(split, whole))
            return carry, jax.tree.map(lambda result: jnp.mean(result, axis=0), results)

        return on_all

    def place(self, tree: Any) -> Any:
        """The tree on the mesh: what is spread over it stays as it is, all else goes to every device."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, tree)

        def put(path: Any, leaf: Any) -> jax.Array:
            here = getattr(leaf, "sharding", None)
            if not isinstance(here, NamedSharding) or len(here.device_set) == 1:
                return self.put(leaf)
            if here.device_set != set(self.mesh.devices.flat):  # type: ignore[union-attr]
                raise ValueError(
                    f"The state{jax.tree_util.keystr(path)} is spread over {here.mesh}, but the mesh is "
                    f"{self.mesh}: pass the mesh of the state."
                )
            return jax.device_put(leaf, self.sharding(*here.spec))

        return jax.tree_util.tree_map_with_path(put, tree)

    def put(self, leaf: Any, *spec: Any) -> jax.Array:
        """An array that every process has, on the devices of all of them."""
        sharding = self.sharding(*spec)
        if sharding is None:
            return jnp.asarray(leaf)
        if jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def put_batch(self, batch: Any, *, local: bool) -> Any:
        """A batch on the devices, which share it if they can equally; of each process all or a part."""
        if self.mesh is None:
            return batch
        several = jax.process_count() if local else 1

        def put(leaf: Any) -> jax.Array:
            is_shared = np.ndim(leaf) and np.shape(leaf)[0] * several % self.parts == 0
            spec = self.batch[: np.ndim(leaf)] if is_shared else ()
            if several == 1:
                return self.put(leaf, *spec)
            sharding = NamedSharding(self.mesh, P(*spec))  # type: ignore[arg-type]
            return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

        return jax.tree.map(put, batch)

    def bring_home(self, tree: Any) -> Any:
        """A tree that lies on the mesh, by the types of the mesh of the user."""
        home = self.home
        if home is None or home == self.mesh:
            return tree
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, NamedSharding(home, leaf.sharding.spec)), tree
        )

    def constrain(self, batch: Any) -> Any:
        """A batch within a compiled step, shared by the devices as well as they can."""
        if self.mesh is None or self.mapped:
            return batch

        def share(leaf: Any) -> Any:
            is_shared = leaf.ndim and leaf.shape[0] % self.parts == 0
            spec = self.batch[: leaf.ndim] if is_shared else ()
            return jax.lax.with_sharding_constraint(leaf, P(*spec))

        return jax.tree.map(share, batch)

    def stack(self, tree: Any) -> Any:
        """One copy of a placed tree for each replica."""
        size = self.parts

        def rows(leaf: jax.Array) -> jax.Array:
            return jnp.broadcast_to(leaf[None], (size, *leaf.shape))

        shardings = None
        if self.mesh is not None:
            shardings = jax.tree.map(lambda x: self.sharding(self.mapped, *x.sharding.spec), tree)
        return jax.jit(lambda tree: jax.tree.map(rows, tree), out_shardings=shardings)(tree)


def average_varying(tree: Any) -> Any:
    """The mean of what differs between the replicas of a mesh; of whole numbers the largest."""

    def average(leaf: jax.Array) -> jax.Array:
        if not (axes := tuple(varying_axes(leaf))):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.lax.pmean(leaf, axes)
        return jax.lax.pmax(leaf.astype(jnp.int32), axes).astype(leaf.dtype)

    return jax.tree.map(average, tree)


def layout_of(
    tx: optax.GradientTransformation,
    state: Any,
    *,
    mesh: Any = None,
    devices: int | None = None,
    replicas: int | None = None,
) -> Layout:
    """Where a train state is to be trained by a method, from the arguments of `fit`."""
    given = {"mesh": mesh, "devices": devices, "replicas": replicas}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} exclude one another: pass one of them.")
    if replicas is not None:
        checks.check_count("replicas", replicas)
        layout = Layout(replicas=int(replicas))
        axes: tuple[tuple[str, ...], ...] = ((AXIS,),)
    elif (layout := _on_mesh(state, mesh, devices)).mesh is None:
        return layout
    else:
        axes = (_names(layout.batch[0]), *((name,) for name in layout.mesh.axis_names))
    argument = names[0] if names else "several devices"
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state.params)
    known = " or ".join(sorted({repr(each[0] if len(each) == 1 else each) for each in axes}))
    for mapped in ((), *axes):
        batch = layout.batch if mapped in ((), axes[0]) else (mapped,)
        candidate = dataclasses.replace(layout, mapped=mapped, batch=batch)
        if (found := _trace(tx, params, candidate)) is None:
            continue
        is_local, varies = found
        if not mapped and is_local:
            raise ValueError(
                f"With {argument} each replica keeps a state of its own, but the method was built "
                f"without axis_name, so they would never meet: pass axis_name={known} to it."
            )
        if not mapped and layout.mesh is None:
            raise ValueError(
                f"replicas={replicas} simulates those of a method with axis_name={known}, which this one"
                " was built without. On several devices pass devices or mesh."
            )
        return dataclasses.replace(candidate, own=bool(mapped) and (varies or layout.mesh is None))
    raise ValueError(
        f"The method asks for a mapped axis that is not there. With {argument} there is {known}: pass "
        "that as its axis_name."
    )


def _on_mesh(state: Any, mesh: Any, devices: int | None) -> Layout:
    if mesh is None and (devices is not None or jax.process_count() > 1):
        return Layout(mesh_of(1 if devices is None else devices), (AXIS,))
    if mesh is None:
        leaves = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
        spread = [x for x in leaves if isinstance(x, NamedSharding) and x.num_devices > 1]
        mesh = spread[0].mesh if spread else None
    if mesh is None:
        return Layout()
    if isinstance(mesh, Mesh):
        mesh = NamedSharding(mesh, P(mesh.axis_names[0]))
    if isinstance(mesh, NamedSharding) and mesh.spec and mesh.spec[0] is not None:
        home: Any = mesh.mesh
        # Within steps XLA decides, so that any model runs; on explicit axes most would have to say more.
        return Layout(Mesh(home.devices, home.axis_names), tuple(mesh.spec), home=home)
    raise TypeError(
        "mesh must be a jax.sharding.Mesh, whose first axis shards batches, or the NamedSharding of a "
        f"batch, whose first axis it shards, got {mesh!r}."
    )


def mesh_of(devices: int) -> Mesh:
    """A mesh of devices of each process, of JAX's own choice if that has enough, else processors."""
    checks.check_count("devices", devices)
    most = 0
    for platform in (None, "cpu"):
        known = jax.devices(platform)
        of_process = [
            [device for device in known if device.process_index == index][:devices]
            for index in range(jax.process_count())
        ]
        most = max(most, min(map(len, of_process)))
        if most == devices:
            return Mesh(np.array(of_process).ravel(), (AXIS,))
    raise ValueError(
        f"devices must be at most {most}, the number that JAX has, got {devices}. For more "
        "virtual ones on the processor start with the environment variable "
        f"JAX_NUM_CPU_DEVICES={devices}."
    )


def _trace(tx: Any, like: Any, layout: Layout) -> tuple[bool, bool] | None:
    """Whether a method takes local steps, and its state varies; None if it asks for another axis."""
    is_local, varies = False, False

    def step(_: Any, params: Any, batch: jax.Array) -> tuple[Any, Any]:
        nonlocal is_local, varies
        is_local = bool(find_states(tx.init(params), LocalStepsState))
        own = layout.mapped if is_local and layout.mesh is not None else ()
        params = mark_varying(params, own)
        state = tx.init(params)
        varies = bool(varying_axes(state))

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)) * jnp.mean(batch)

        e = evaluate(loss_fn, params, batch, axis_name=None if own else layout.mapped or None)
        update = optax.with_extra_args_support(tx).update
        varies |= bool(varying_axes(update(e.grad, state, params, **e.extra_args)[1]))
        return (), ()

    batch = jax.ShapeDtypeStruct((2 * layout.parts,), jnp.float32)
    try:
        with layout.context():
            jax.eval_shape(layout.spread(step, 0), (), like, batch)
    except Exception as error:  # whatever a loss that says nothing leads to
        if "is not bound" in str(error) or "unbound axis" in str(error):
            return None
    return is_local, varies


def _names(entry: Any) -> tuple[str, ...]:
    """The axes in an entry of a PartitionSpec."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
