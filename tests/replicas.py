"""Replicas under each way of mapping over them, and a simulation of workers and a center in NumPy."""

import functools
import pathlib
import runpy

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optperm

AXIS = "replica"
# The methods whose replicas train each by itself, without their optimizer. AGN's sum, its mean by a
# factor, is compared with the simulation and on each mapping.
PERIOD = 3
METHODS = {
    f"agn {rule}": functools.partial(optperm.agn, every=PERIOD, combine=rule)
    for rule in ("mean", "sequential")
} | {"diloco": functools.partial(optperm.diloco, every=PERIOD)}
_BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


def collectives(text):
    """The collectives of a compiled program, with their operation, bytes and is_conditional."""
    return runpy.run_path(str(_BENCHMARKS / "collectives.py"))["find_collectives"](text)


def stack(trees):
    """Trees as one, whose leaves have them along a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def take(tree, index):
    """One of them again."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def own(array):
    """The part of a stacked array that lies on the devices of this process."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start)
    return np.concatenate([shard.data for shard in shards])


def _shard_map(step, size, *, check_vma):
    def on_block(*trees):
        results = step(*(take(tree, 0) for tree in trees))
        return jax.tree.map(lambda leaf: leaf[None], results)

    mesh = Mesh(np.array(jax.devices()[:size]), (AXIS,))
    return jax.jit(
        jax.shard_map(on_block, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=check_vma)
    )


MAPPINGS = {
    "vmap": lambda step, size: jax.jit(jax.vmap(step, axis_name=AXIS, axis_size=size)),
    "pmap": lambda step, size: jax.pmap(step, axis_name=AXIS, devices=jax.devices()[:size]),
    "shard_map": functools.partial(_shard_map, check_vma=True),
    "shard_map unchecked": functools.partial(_shard_map, check_vma=False),
}


def share(function, mapping, size):
    """A function of what all replicas have alike and of parts of their own, under a mapping.

    `function(shared, part)` gives a pair: what is alike on all replicas, which the checked mode of
    `shard_map` holds it to, and what is each one's own.

    Returns:
      A function of `shared` and of the parts, stacked, that gives both results, stacked.
    """
    if mapping == "pmap":
        return jax.pmap(function, axis_name=AXIS, in_axes=(None, 0), devices=jax.devices()[:size])
    if mapping == "vmap":
        return jax.jit(jax.vmap(function, axis_name=AXIS, in_axes=(None, 0)))
    is_checked = mapping == "shard_map"

    def on_block(shared, parts):
        same, own = function(shared, take(parts, 0))
        lead = functools.partial(jax.tree.map, lambda leaf: leaf[None])
        return same if is_checked else lead(same), lead(own)

    mapped = jax.shard_map(
        on_block,
        mesh=Mesh(np.array(jax.devices()[:size]), (AXIS,)),
        in_specs=(P(), P(AXIS)),
        out_specs=(P() if is_checked else P(AXIS), P(AXIS)),
        check_vma=is_checked,
    )

    def run(shared, parts):
        same, own = jax.jit(mapped)(shared, parts)
        return stack([same] * size) if is_checked else same, own

    return run


# The optimizers of the simulation, in NumPy and float64: (state, gradient) -> (step, state).


def sgd(rate, momentum=0.0, *, nesterov=False):
    def update(state, g):
        state = g + momentum * (0.0 if state is None else state)
        return -rate * (g + momentum * state if nesterov else state), state

    return update


def adam(rate, b1=0.9, b2=0.999, eps=1e-8):
    def update(state, g):
        count, m, v = state or (0, 0.0, 0.0)
        count, m, v = count + 1, b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        m_hat, v_hat = m / (1 - b1**count), v / (1 - b2**count)
        return -rate * m_hat / (np.sqrt(v_hat) + eps), (count, m, v)

    return update


class Worker:
    """A replica of the simulation: its params, its optimizer's state, its accumulated gradient."""

    def __init__(self, params):
        self.params, self.state, self.total = params, None, 0.0


def simulate_agn(update, start, grads_of, steps, *, size, every, combine):
    """Workers and a center as the AGN paper has them: yields all params and the center."""
    workers, center, center_state = [Worker(start) for _ in range(size)], start, None
    for step in range(1, steps + 1):
        for index, worker in enumerate(workers):
            g = grads_of(worker.params, step - 1, index)
            worker.total = worker.total + g
            move, worker.state = update(worker.state, g)
            worker.params = worker.params + move
        if step % every == 0:
            parts = [worker.total / every for worker in workers]
            rules = {"mean": [sum(parts) / size], "sum": [sum(parts)], "sequential": parts}
            for n in rules[combine]:
                move, center_state = update(center_state, n)
                center = center + move
            for worker in workers:
                worker.params, worker.total = center, 0.0
        yield np.stack([worker.params for worker in workers]), center


def simulate_diloco(inner, outer, start, grads_of, steps, *, size, every):
    """Workers and a center as the DiLoCo paper has them: yields all params and the center."""
    workers, center, center_state = [Worker(start) for _ in range(size)], start, None
    for step in range(1, steps + 1):
        for index, worker in enumerate(workers):
            move, worker.state = inner(worker.state, grads_of(worker.params, step - 1, index))
            worker.params = worker.params + move
        if step % every == 0:
            delta = sum(center - worker.params for worker in workers) / size
            move, center_state = outer(center_state, delta)
            center = center + move
            for worker in workers:
                worker.params = center
        yield np.stack([worker.params for worker in workers]), center
