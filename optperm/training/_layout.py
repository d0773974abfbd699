"""The placement of a run's arrays, and the mapping of its steps over devices.

Most methods are compiled as one program for all devices: batches are sharded, params stay where the user
placed them, and XLA inserts the communication. A method that was built with the name of a mapped axis
runs in `jax.shard_map` over that axis of the mesh.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from optperm.core import checks
from optperm.core.mapped_axes import axis_names, mark_varying, varying_axes
from optperm.core.states import find_states
from optperm.distributed._center import LOCAL_STATES
from optperm.evaluation import evaluate

AXIS = "replica"


@dataclasses.dataclass(frozen=True)
class Layout:
    """The placement of arrays on a mesh. With `own`, a carry has a leading axis of replicas."""

    # A mesh of automatic axes; None for the default device.
    mesh: Mesh | None = None
    batch: tuple[Any, ...] = ()  # the PartitionSpec of a batch
    mapped: tuple[str, ...] = ()  # the axes over which the method is mapped
    own: bool = False  # True if each replica steps by its own gradient, and has its own carry
    home: Mesh | None = None  # the mesh of the user, perhaps with explicit axes

    @property
    def parts(self) -> int:
        """The number of equal parts of a batch."""
        names = axis_names(self.batch[0]) if self.mesh is not None else ()
        return math.prod(self.mesh.shape[name] for name in names)  # type: ignore[union-attr]

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes of the mesh along which replicas have their own carries."""
        return self.mapped if self.own else ()

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which steps are traced and called."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def sharding(self, *spec: Any) -> Any:
        """Return the sharding of a spec on the mesh; None without a mesh."""
        return None if self.mesh is None else NamedSharding(self.mesh, P(*spec))

    def map_replicas(self, function: Callable[..., Any], axis: int) -> Callable[..., Any]:
        """Map a function of a carry, a shared tree and a tree divided along `axis` over the replicas."""
        if not self.mapped:
            return function

        def on_replica(carry: Any, shared: Any, part: Any) -> tuple[Any, Any]:
            carry = jax.tree.map(lambda x: x[0], carry) if self.own else carry
            carry, result = function(carry, shared, part)
            carry = jax.tree.map(lambda x: x[None], carry) if self.own else carry
            return carry, average_varying(result)

        carries, parts = P(self.mapped) if self.own else P(), P(*[None] * axis, self.mapped)
        ins, outs, names = (carries, P(), parts), (carries, P()), set(self.mapped)
        shard_map = functools.partial(jax.shard_map, mesh=self.mesh, axis_names=names)
        return shard_map(on_replica, in_specs=ins, out_specs=outs)

    def put(self, leaf: Any, *spec: Any, local: bool = False) -> jax.Array:
        """Place an array on the devices; each process passes all of it or, if local, its part."""
        sharding = self.sharding(*spec)
        if sharding is None or jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        shape = None if local else host.shape
        return jax.make_array_from_process_local_data(sharding, host, shape)

    def put_batch(self, batch: Any, *, local: bool) -> Any:
        """Place a batch, divided among the devices if they divide it equally, else on every device."""
        if self.mesh is None:
            return batch
        several, put = jax.process_count() if local else 1, functools.partial(self.put, local=local)
        return jax.tree.map(lambda leaf: put(leaf, *self._spec(np.shape(leaf), several)), batch)

    def check_shares(self, name: str, batch: Any) -> None:
        """Raise a ValueError unless mapped replicas divide a process's batch equally."""
        if not self.mapped:
            return
        size = checks.count_examples(name, batch, has_scalars=True) * jax.process_count()
        if size % self.parts:
            advice = "leave the rest of an epoch out, or fill it up with examples of weight 0"
            says = f"{name} has {size} examples, of which {self.parts} replicas need equally many"
            raise ValueError(f"{says}: {advice}.")

    def constrain(self, batch: Any) -> Any:
        """Divide a batch among the devices within a compiled step, where they divide it equally."""
        if self.mesh is None or self.mapped:
            return batch
        share = jax.lax.with_sharding_constraint
        return jax.tree.map(lambda leaf: share(leaf, P(*self._spec(leaf.shape))), batch)

    def _spec(self, shape: tuple[int, ...], several: int = 1) -> tuple[Any, ...]:
        is_shared = shape and shape[0] * several % self.parts == 0
        return self.batch[: len(shape)] if is_shared else ()

    def place(self, tree: Any) -> Any:
        """Place a tree on the mesh: sharded arrays stay sharded, all others go to every device."""

        def put(path: Any, leaf: Any) -> jax.Array:
            here = getattr(leaf, "sharding", None)
            if self.mesh is None or not isinstance(here, NamedSharding) or here.num_devices == 1:
                return self.put(leaf)
            if here.device_set == set(self.mesh.devices.flat):
                return jax.device_put(leaf, self.sharding(*here.spec))
            says = f"The state{jax.tree_util.keystr(path)} lies on {here.mesh}"
            raise ValueError(f"{says}, but the mesh is {self.mesh}: pass the mesh of the state.")

        return jax.tree_util.tree_map_with_path(put, tree)

    def shape_stacked(self, tree: Any, rows: int) -> Any:
        """Return the shapes of the stacked carries of `rows` replicas, with all rows on each device."""

        def form(leaf: Any) -> Any:
            where = self.mesh and self.sharding(None, *leaf.sharding.spec[1:])
            return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=where)

        return jax.tree.map(form, tree)

    def deal(self, tree: Any, own: bool = True) -> Any:
        """Deal stacked carries, or one carry of all replicas, in turn to the replicas of this mesh."""

        def rows(tree: Any) -> Any:
            stacked = tree if own else jax.tree.map(lambda x: x[None], tree)
            return jax.tree.map(lambda x: x[np.arange(self.parts) % x.shape[0]], stacked)

        def where(leaf: Any) -> Any:
            return self.sharding(self.mapped, *leaf.sharding.spec[own:])

        return jax.jit(rows, out_shardings=self.mesh and jax.tree.map(where, tree))(tree)

    def bring_home(self, tree: Any) -> Any:
        """Place a tree on the user's mesh, which may have other types of axes."""
        home = self.home
        if home is None or home == self.mesh:
            return tree
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(home, x.sharding.spec)), tree)


def average_varying(tree: Any) -> Any:
    """Average the leaves that vary over mapped axes; of integers and booleans take the largest."""

    def average(leaf: jax.Array) -> jax.Array:
        if not (axes := tuple(varying_axes(leaf))):
            return leaf
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.lax.pmean(leaf, axes)
        return jax.lax.pmax(leaf.astype(jnp.int32), axes).astype(leaf.dtype)

    return jax.tree.map(average, tree)


def choose_layout(
    tx: optax.GradientTransformation, state: Any, mesh: Any = None, devices: int | None = None
) -> Layout:
    """Return the layout in which a method trains a state, from `mesh` or `devices` of `fit`."""
    layout = _on_mesh(state, mesh, devices)
    if layout.mesh is None:
        return layout
    # The axis of batches comes first, then each axis of the mesh by itself.
    axes = [axis_names(layout.batch[0]), *((name,) for name in layout.mesh.axis_names)]
    known = " or ".join(sorted({repr(each[0] if len(each) == 1 else each) for each in axes}))
    for mapped in ((), *axes):  # the first mapping under which the method can be traced
        batch = layout.batch if mapped in ((), axes[0]) else (mapped,)
        candidate = dataclasses.replace(layout, mapped=mapped, batch=batch)
        if (found := _trace(tx, state.params, candidate)) is None:
            continue
        is_local, varies = found
        if is_local and not mapped:
            says = f"without axis_name replicas would never meet: pass axis_name={known} to it"
            raise ValueError(f"The method takes local steps, and {says}.")
        return dataclasses.replace(candidate, own=bool(mapped and varies))
    raise ValueError(f"The method needs another mapped axis: pass axis_name={known} to it.")


def _on_mesh(state: Any, mesh: Any, devices: int | None) -> Layout:
    if mesh is not None and devices is not None:
        raise ValueError("Pass mesh or devices, not both.")
    if mesh is None and (devices is not None or jax.process_count() > 1):
        return Layout(make_mesh(1 if devices is None else devices), (AXIS,))
    if mesh is None:
        here = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
        mesh = next(
            (s.mesh for s in here if isinstance(s, NamedSharding) and s.num_devices > 1), None
        )
    if mesh is None:
        return Layout()
    if isinstance(mesh, Mesh):
        mesh = NamedSharding(mesh, P(mesh.axis_names[0]))
    if not isinstance(mesh, NamedSharding) or not mesh.spec or mesh.spec[0] is None:
        raise TypeError(f"mesh must be a Mesh, or a NamedSharding of a batch, got {mesh!r}.")
    home: Any = mesh.mesh
    # Within steps the axes are automatic, so that any model runs: on explicit axes most models would
    # have to name their shardings.
    return Layout(Mesh(home.devices, home.axis_names), tuple(mesh.spec), home=home)


def make_mesh(devices: int) -> Mesh:
    """Make a mesh of `devices` devices of each process: of the default platform, else of the CPU."""
    most = 0
    for platform in (None, "cpu"):
        here = [jax.local_devices(index, platform) for index in range(jax.process_count())]
        if (most := max(most, min(map(len, here)))) >= devices:
            return Mesh(np.array([each[:devices] for each in here]).ravel(), (AXIS,))
    advice = f"JAX_NUM_CPU_DEVICES={devices} in the environment makes virtual ones"
    raise ValueError(f"devices must be at most {most}, got {devices}: {advice}.")


def _trace(tx: Any, params: Any, layout: Layout) -> tuple[bool, bool] | None:
    """Return whether a method takes local steps and its state varies; None if an axis is missing."""
    is_local, varies = False, False

    def step(_: Any, params: Any, batch: jax.Array) -> tuple[Any, Any]:
        nonlocal is_local, varies
        is_local = bool(find_states(tx.init(params), LOCAL_STATES))
        own = layout.mapped if is_local else ()
        params = mark_varying(params, own)
        state, update = tx.init(params), optax.with_extra_args_support(tx).update
        varies = bool(varying_axes(state))

        def loss_fn(params: Any, batch: Any) -> jax.Array:
            return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params)) * jnp.mean(batch)

        e = evaluate(loss_fn, params, batch, axis_name=None if own else layout.mapped or None)
        varies |= bool(varying_axes(update(e.grad, state, params, **e.extra_args)[1]))
        return (), ()

    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    batch = jax.ShapeDtypeStruct((2 * layout.parts,), jnp.float32)
    try:
        with layout.context():
            jax.eval_shape(layout.map_replicas(step, 0), (), params, batch)
    # This loss is not the user's, so a method may refuse it for reasons that do not matter here.
    except Exception as error:
        if "is not bound" in str(error) or "unbound axis" in str(error):
            return None
    return is_local, varies
