"""Where the arrays of a run lie, and how its steps are spread over devices.

Most methods are compiled once for all devices: batches are sharded, params lie as the user has put them,
and XLA moves what has to move. A method that was built with the name of a mapped axis runs by
`jax.shard_map` over that axis of the mesh.
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

from optperm.contract import checks
from optperm.contract.mapped_axes import axis_names, mark_varying, varying_axes
from optperm.contract.states import find_states
from optperm.distributed.center import LOCAL_STATES
from optperm.evaluation import evaluate

AXIS = "replica"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where arrays lie.

    With `own` each replica along the mapped axes takes steps by its own gradient, and has a carry of its
    own: then a carry has a leading axis of replicas, of which each device holds its part.
    """

    # Its axes are automatic. None is for wherever JAX puts what is not yet anywhere.
    mesh: Mesh | None = None
    batch: tuple[Any, ...] = ()  # the PartitionSpec of a batch
    mapped: tuple[str, ...] = ()  # the axes over which the method is mapped
    own: bool = False
    home: Mesh | None = None  # the mesh as the user has it, perhaps with explicit axes

    @property
    def parts(self) -> int:
        """In how many equal parts a batch is taken."""
        names = axis_names(self.batch[0]) if self.mesh is not None else ()
        return math.prod(self.mesh.shape[name] for name in names)  # type: ignore[union-attr]

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes of the mesh along which replicas have carries of their own."""
        return self.mapped if self.own else ()

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """What steps are traced and called in."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def sharding(self, *spec: Any) -> Any:
        """That of a spec on the mesh; None without one."""
        return None if self.mesh is None else NamedSharding(self.mesh, P(*spec))

    def spread(self, function: Callable[..., Any], axis: int) -> Callable[..., Any]:
        """A function on every replica at once, where the method is mapped.

        From a carry, what all replicas share, and what each has a part of, along `axis`, the function
        makes the next carry, and numbers, of which the mean over replicas comes back.
        """
        if not self.mapped:
            return function

        def on_replica(carry: Any, shared: Any, part: Any) -> tuple[Any, Any]:
            carry = jax.tree.map(lambda x: x[0], carry) if self.own else carry
            carry, result = function(carry, shared, part)
            carry = jax.tree.map(lambda x: x[None], carry) if self.own else carry
            return carry, average_varying(result)

        carries, parts = P(self.mapped) if self.own else P(), P(*[None] * axis, self.mapped)
        ins, outs, names = (carries, P(), parts), (carries, P()), set(self.mapped)
        spread = functools.partial(jax.shard_map, mesh=self.mesh, axis_names=names)
        return spread(on_replica, in_specs=ins, out_specs=outs)

    def put(self, leaf: Any, *spec: Any, local: bool = False) -> jax.Array:
        """An array on the devices of all processes, of which each has it all or, if local, a part."""
        sharding = self.sharding(*spec)
        if sharding is None or jax.process_count() == 1:
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        shape = None if local else host.shape
        return jax.make_array_from_process_local_data(sharding, host, shape)

    def put_batch(self, batch: Any, *, local: bool) -> Any:
        """A batch on the devices, which share it if they can equally; of each process all or a part."""
        if self.mesh is None:
            return batch
        several, put = jax.process_count() if local else 1, functools.partial(self.put, local=local)
        return jax.tree.map(lambda leaf: put(leaf, *self._spec(np.shape(leaf), several)), batch)

    def constrain(self, batch: Any) -> Any:
        """A batch within a compiled step, shared by the devices as well as they can."""
        if self.mesh is None or self.mapped:
            return batch
        share = jax.lax.with_sharding_constraint
        return jax.tree.map(lambda leaf: share(leaf, P(*self._spec(leaf.shape))), batch)

    def _spec(self, shape: tuple[int, ...], several: int = 1) -> tuple[Any, ...]:
        is_shared = shape and shape[0] * several % self.parts == 0
        return self.batch[: len(shape)] if is_shared else ()

    def place(self, tree: Any) -> Any:
        """The tree on the mesh: what is spread over it stays as it is, all else goes to every device."""

        def put(path: Any, leaf: Any) -> jax.Array:
            here = getattr(leaf, "sharding", None)
            if self.mesh is None or not isinstance(here, NamedSharding) or here.num_devices == 1:
                return self.put(leaf)
            if here.device_set == set(self.mesh.devices.flat):
                return jax.device_put(leaf, self.sharding(*here.spec))
            says = f"The state{jax.tree_util.keystr(path)} is spread over {here.mesh}"
            raise ValueError(f"{says}, but the mesh is {self.mesh}: pass the mesh of the state.")

        return jax.tree_util.tree_map_with_path(put, tree)

    def lead(self, tree: Any, rows: int) -> Any:
        """The forms of stacked carries of so many replicas, of which every device holds all."""

        def form(leaf: Any) -> Any:
            where = self.mesh and self.sharding(None, *leaf.sharding.spec[1:])
            return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=where)

        return jax.tree.map(form, tree)

    def deal(self, tree: Any, own: bool = True) -> Any:
        """Carries of some replicas, or one of all, in turn for those here: the first ones, for fewer."""

        def rows(tree: Any) -> Any:
            stacked = tree if own else jax.tree.map(lambda x: x[None], tree)
            return jax.tree.map(lambda x: x[np.arange(self.parts) % x.shape[0]], stacked)

        def where(leaf: Any) -> Any:
            return self.sharding(self.mapped, *leaf.sharding.spec[own:])

        return jax.jit(rows, out_shardings=self.mesh and jax.tree.map(where, tree))(tree)

    def bring_home(self, tree: Any) -> Any:
        """A tree that lies on the mesh, by the types of the mesh of the user."""
        home = self.home
        if home is None or home == self.mesh:
            return tree
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(home, x.sharding.spec)), tree)


def average_varying(tree: Any) -> Any:
    """The mean of what differs between the replicas of a mesh; of whole numbers the largest."""

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
    """Return where a train state is to be trained by a method, from `mesh` or `devices` of `fit`."""
    layout = _on_mesh(state, mesh, devices)
    if layout.mesh is None:
        return layout
    axes = [axis_names(layout.batch[0]), *((name,) for name in layout.mesh.axis_names)]
    known = " or ".join(sorted({repr(each[0] if len(each) == 1 else each) for each in axes}))
    there = f"On several devices there is the axis {known}"
    for mapped in ((), *axes):
        batch = layout.batch if mapped in ((), axes[0]) else (mapped,)
        candidate = dataclasses.replace(layout, mapped=mapped, batch=batch)
        if (found := _trace(tx, state.params, candidate)) is None:
            continue
        is_local, varies = found
        if is_local and not mapped:
            says = "the method was built without axis_name, so that replicas would never meet"
            raise ValueError(f"{there}, but {says}: pass axis_name={known} to it.")
        return dataclasses.replace(candidate, own=bool(mapped and varies))
    raise ValueError(f"{there}, but the method asks for another: pass that as its axis_name.")


def _on_mesh(state: Any, mesh: Any, devices: int | None) -> Layout:
    if mesh is not None and devices is not None:
        raise ValueError("mesh and devices exclude one another: pass one of them.")
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
        wanted = (
            "a jax.sharding.Mesh, whose first axis shards batches, or the NamedSharding of a batch"
        )
        raise TypeError(f"mesh must be {wanted}, whose first axis it shards, got {mesh!r}.")
    home: Any = mesh.mesh
    # Within steps XLA decides, so that any model runs; on explicit axes most would have to say more.
    return Layout(Mesh(home.devices, home.axis_names), tuple(mesh.spec), home=home)


def make_mesh(devices: int) -> Mesh:
    """A mesh of devices of each process, of JAX's own choice if that has enough, else processors."""
    checks.check_count("devices", devices)
    most = 0
    for platform in (None, "cpu"):
        here = [jax.local_devices(index, platform) for index in range(jax.process_count())]
        if (most := max(most, min(map(len, here)))) >= devices:
            return Mesh(np.array([each[:devices] for each in here]).ravel(), (AXIS,))
    raise ValueError(
        f"devices must be at most {most}, the number that JAX has, got {devices}. For more virtual "
        f"ones on the processor start with the environment variable JAX_NUM_CPU_DEVICES={devices}."
    )


def _trace(tx: Any, params: Any, layout: Layout) -> tuple[bool, bool] | None:
    """Whether a method takes local steps, and its state varies; None if it asks for another axis."""
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
            jax.eval_shape(layout.spread(step, 0), (), params, batch)
    except Exception as error:  # whatever a loss that says nothing leads to
        if "is not bound" in str(error) or "unbound axis" in str(error):
            return None
    return is_local, varies
