"""Replicas under each way of mapping over them, and a simulation of workers and a center in NumPy."""

import functools
import pathlib
import runpy

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optperm.distributed._gossip import map_with_partner

AXIS = "replica"
_BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


def collectives(text):
    """Return the collectives of a compiled program, with their operation, bytes and is_conditional."""
    return runpy.run_path(str(_BENCHMARKS / "collectives.py"))["find_collectives"](text)


def stack(trees):
    """Return trees as one, whose leaves have them along a leading axis."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def take(tree, index):
    """Return one of them again."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def map_over(mesh, step, *, check_vma):
    """Compile a step of one replica for replicas that are spread over all axes of a mesh."""

    def on_block(*trees):
        results = step(*(take(tree, 0) for tree in trees))
        return jax.tree.map(lambda leaf: leaf[None], results)

    spec = P(mesh.axis_names)
    return jax.jit(
        jax.shard_map(on_block, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    )


def _shard_map(step, size, *, check_vma):
    return map_over(Mesh(np.array(jax.devices()[:size]), (AXIS,)), step, check_vma=check_vma)


MAPPINGS = {
    "vmap": lambda step, size: jax.jit(jax.vmap(step, axis_name=AXIS, axis_size=size)),
    "pmap": lambda step, size: jax.pmap(step, axis_name=AXIS, devices=jax.devices()[:size]),
    "shard_map": functools.partial(_shard_map, check_vma=True),
    "shard_map unchecked": functools.partial(_shard_map, check_vma=False),
}


def share(function, mapping, size):
    """Map a function of shared values and of one part for each replica.

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


@functools.cache
def partners(size, count):
    """Return the partner of each replica in the next step, as the method draws it."""
    return np.asarray(_draw(np.arange(size, dtype=np.int32), np.int32(count)))


@jax.jit
@functools.partial(jax.vmap, in_axes=(0, None), axis_name=AXIS)
def _draw(index, count):
    return map_with_partner(lambda _, theirs: theirs, index, axis_name=AXIS, count=count)


# The simulation, in NumPy and float64. Its optimizers are functions (state, gradient) -> (step, state).


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


class Workers:
    """The replicas of a simulation: a row for each of its params, and of its summed gradients."""

    def __init__(self, update, start):
        self.update, self.states = update, [None] * len(start)
        self.params, self.sums = start.copy(), np.zeros_like(start)

    def take_step(self, grads):
        """Take a local step of each; what is not finite counts as zero in it."""
        self.sums += grads
        for i, g in enumerate(np.where(np.isfinite(grads), grads, 0.0)):
            move, self.states[i] = self.update(self.states[i], g)
            self.params[i] += move


class Center:
    """A center in a simulation, which takes steps with what the replicas have sent."""

    def __init__(self, update, start):
        self.update, self.states, self.params = update, {}, start.copy()

    def take_steps(self, p, at, contributions):
        """Take a step of fragment p, at some places, for each contribution in turn."""
        for each in contributions:
            move, self.states[p] = self.update(self.states.get(p), each)
            self.params[at] += move


def combined(rows, weights, combine):
    """Return the contributions of the steps that the center takes in turn, as rows."""
    in_turn = weights[:, None] * rows
    total = in_turn.sum(axis=0, keepdims=True)
    return {"mean": total / max(weights.sum(), 1e-9), "sum": total, "sequential": in_turn}[combine]


def simulate_agn(
    updates,
    start,
    weights,
    grads_of,
    steps,
    parts,
    *,
    commits=(),
    combine="mean",
    plan=None,
    compress=None,
):
    """Simulate workers and a center as the AGN paper has them, for each fragment of the params.

    A fragment has its own sum of gradients and its own number T of steps. Both begin again when the sum
    is sent, so steps between sending and receiving belong to the next sum.

    Args:
      updates: The optimizer of the workers, and the optimizer of the center.
      start: The params with which all begin, in rows that are the same.
      weights: A weight for each worker.
      grads_of: From the params of all, in rows, and the number of a step to their gradients.
      steps: The number of steps.
      parts: For each fragment the places of its params, in arrays that are compressed one by one.
      commits: The numbers of the steps that end in a commit of all fragments, without a delay. A sum
        in flight, which has other steps in it, is received first. The first step is step 1.
      combine: As in `optperm.agn`.
      plan: The period, the number of fragments, and the steps from sending to receiving; None for
        commits alone.
      compress: The decay, and from a vector to what of it is sent; None for all of it.

    Yields:
      The params and the center after each step, in rows, and how many exchanges each one missed.
    """
    (inner, outer), size = updates, len(start)
    workers, center = Workers(inner, start), Center(outer, start[0])
    places = [np.concatenate(part) for part in parts]
    last, in_flight, held = [0] * len(parts), {}, np.zeros_like(start)
    missed = np.zeros(size, int)

    def contributions(p, step):
        at = places[p]
        is_finite = np.isfinite(workers.sums[:, at]).all(axis=1)
        n, last[p] = workers.sums / (step - last[p]), step
        workers.sums[:, at] = 0.0
        for each in parts[p] if compress else ():
            decay, encode = compress
            e = decay * held[:, each] + n[:, each]
            n[:, each] = [encode(row) if ok else row for row, ok in zip(e, is_finite, strict=True)]
            held[:, each] = np.where(is_finite[:, None], e - n[:, each], held[:, each])
        missed[:] += ~is_finite
        some = is_finite.any()
        return combined(n[is_finite][:, at], weights[is_finite], combine) if some else ()

    def receive(p):
        center.take_steps(p, places[p], in_flight.pop(p))
        workers.params[:, places[p]] = center.params[places[p]]

    def planned(step):
        period, fragments, _ = plan
        offsets = [p * period // fragments for p in range(fragments)]
        return [p for p in range(fragments) if step > 0 and (step - offsets[p]) % period == 0]

    for step in range(1, steps + 1):
        workers.take_step(grads_of(workers.params, step))
        if step in commits:
            for p in range(len(parts)):
                if p in in_flight:
                    receive(p)
                in_flight[p] = contributions(p, step)
                receive(p)
        elif plan is not None:
            for p in planned(step):
                in_flight[p] = contributions(p, step)
            for p in planned(step - plan[2]):
                if p in in_flight:
                    receive(p)
        yield workers.params.copy(), np.stack([center.params] * size), missed.copy()


def simulate_diloco(
    updates, start, weights, grads_of, steps, plan, parts, combine="mean", mixing=0.0, compress=None
):
    """Simulate workers and their centers as the papers of DiLoCo, Streaming DiLoCo and NoLoCo do.

    Args:
      updates, start, weights, grads_of, steps: As above.
      plan: The period, the number of fragments, and the steps from sending to receiving.
      parts: For each fragment the places of its params, in arrays that are compressed one by one.
      combine: As in `optperm.diloco`.
      mixing: The fraction of its own params that a worker keeps.
      compress: The decay, and from a vector to what of it is sent; None for all of it.

    Yields:
      What is yielded above: nobody misses an exchange.
    """
    (inner, outer), (period, fragments, delay), size = updates, plan, len(start)
    workers = Workers(inner, start)
    center, outer_states, in_flight, held = start.copy(), {}, {}, np.zeros_like(start)

    def sent(step):
        is_sent = [(step - p * period // fragments) % period == 0 for p in range(fragments)]
        return [(p, k) for p in range(fragments) if is_sent[p] for k in range(len(parts[p]))]

    def shares(step):
        # In row i the share of each worker in the mean that worker i gets: of all, or of two
        rows = np.tile(weights, (size, 1))
        if combine == "pairs":
            rows *= (np.eye(size) + np.eye(size)[partners(size, step - 1)]) > 0
        return rows / rows.sum(axis=1, keepdims=True)

    for step in range(1, steps + 1):
        workers.take_step(grads_of(workers.params, step))
        theta = workers.params
        for p, k in sent(step):
            at = parts[p][k]
            rows = center[:, at] - theta[:, at]
            if compress is not None:
                decay, encode = compress
                e = decay * held[:, at] + rows
                rows = np.stack([encode(row) for row in e])
                held[:, at] = e - rows
            if combine == "pairs":
                in_flight[p, k] = [center[:, at] - shares(step) @ theta[:, at]]
            else:
                in_flight[p, k] = combined(rows, weights, combine)
        for p, k in sent(step - delay) if step > delay else ():
            at = parts[p][k]
            for each in in_flight[p, k]:
                move, outer_states[p, k] = outer(outer_states.get((p, k)), each)
                center[:, at] += move
            theta[:, at] = mixing * theta[:, at] + (1 - mixing) * center[:, at]
        yield theta.copy(), center.copy(), np.zeros(size, int)
