"""A step's program, and what it takes to compile, grow slowly with the number of leaves."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support

import optperm
from optperm import sparsity, subspace

# The most equations that one more leaf adds to a step; `optax.adam` adds 16.
USUAL = 90
MOST = {
    "dldr": 192,
    "dldr-twa": 175,
    "low_rank": 112,
    "mandt_sgd": 93,
    "rigl": 143,
    "set": 140,
    "sghmc": 159,
    "sgld": 165,
    "sgperm": 92,
}


def num_equations(program, seen):
    """Return the number of equations, including branches and bodies of loops.

    A program that leaves of one shape share, by an inner `jax.jit`, is traced once and counts once.
    """
    if id(program) in seen:
        return 0
    seen.add(id(program))
    values = jax.tree.leaves([list(eqn.params.values()) for eqn in program.eqns])
    inner = (getattr(value, "jaxpr", value) for value in values)
    parts = [num_equations(each, seen) for each in inner if hasattr(each, "eqns")]
    return len(program.eqns) + sum(parts)


def size_of_step(tx, num_leaves):
    """The number of equations of an update that is applied, half of the leaves matrices."""
    shapes = [(8, 6), (6,)] * (num_leaves // 2)
    params = {f"p{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}
    given = params, jax.eval_shape(tx.init, params), params
    return num_equations(jax.make_jaxpr(loops.make_step(tx))(*given).jaxpr, set())


def test_one_more_leaf_adds_few_equations(ours):
    """Leaves that are worked on one by one, each with many operations, take minutes to compile."""
    few, many = (size_of_step(ours.make(), size) for size in (4, 8))
    assert many - few <= 4 * MOST.get(ours.name, USUAL)


AXIS = "replica"
STEPS = {
    "dim_reduce": optperm.dim_reduce(n_components=2),
    "agn": optperm.agn(optax.sgd(0.1, 0.9), every=5, combine="sequential", axis_name=AXIS),
    "diloco": optperm.diloco(
        optax.sgd(0.1, 0.9),
        every=optperm.distributed.Every(8, 2, 1),
        compress=optperm.distributed.Compression(bits=4),
        axis_name=AXIS,
    ),
}


def compiled_step(name, num_leaves):
    """The text of a compiled step; of methods that exchange, of three replicas."""
    tx = STEPS[name]
    params = {f"p{i}": jax.ShapeDtypeStruct((8, 6), jnp.float32) for i in range(num_leaves)}

    def loss_fn(params, _):
        # The parts are one vector: a sum of them would be a kernel that grows.
        return jnp.sum(jnp.stack([jnp.sum(leaf**2) for leaf in params.values()]))

    step, init = loops.make_step(tx, loops.evaluation(loss_fn)), tx.init
    if name != "dim_reduce":
        step, init = jax.vmap(step, axis_name=AXIS), jax.vmap(init, axis_name=AXIS)
        params = {k: jax.ShapeDtypeStruct((3, 8, 6), jnp.float32) for k in params}
    batch = jax.ShapeDtypeStruct((3, 1), jnp.float32)
    return jax.jit(step).lower(params, jax.eval_shape(init, params), batch).compile().as_text()


def num_kernels(text):
    """The number of fused computations that differ by more than names."""
    found = set()
    for body in re.findall(r"^%(?:fused|wrapped)_[^\n]*\{\n(.*?)^\}", text, re.M | re.S):
        numbers = collections.defaultdict(itertools.count().__next__)
        plain = re.sub(r", metadata=\{[^}]*\}", "", body)
        found.add(re.sub(r"%[\w.-]+", lambda name, numbers=numbers: f"%{numbers[name[0]]}", plain))
    return len(found)


@pytest.mark.parametrize(
    "name", support.every_night(STEPS, ["dim_reduce"], mark=pytest.mark.entries)
)
def test_leaves_of_one_shape_share_their_kernels_and_no_loop_is_one_function(name):
    """A kernel takes XLA about 20 ms; a loop without a sort that it takes for a small one, minutes."""
    few, many = (compiled_step(name, number) for number in (4, 12))
    assert num_kernels(many) - num_kernels(few) < 8
    assert "xla_cpu_small_call" not in few


EVENTS = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: EVENTS.append(event))


def basis_of(params):
    """One row of length 1 over the params."""
    each = (12 * len(params)) ** -0.5
    return jax.tree.map(lambda p: np.full((1, *p.shape), each, np.float32), params)


MASKS, DIM_REDUCE = optperm.mask_elements(), optperm.dim_reduce(n_components=1)
# Calls outside of `jax.jit` that look at all leaves.
FIRST_CALLS = {
    "prune": lambda params: sparsity.prune(params, MASKS.init(params), 0.5),
    "freeze": lambda params: sparsity.freeze(MASKS.init(params), 0.5, scores=params),
    "rigl": optperm.rigl(optax.sgd(0.1), 0.5, end=30, every=5).init,
    "set_basis": lambda params: subspace.set_basis(DIM_REDUCE.init(params), basis_of(params)),
    "diloco": STEPS["diloco"].init,
}


@pytest.mark.parametrize(
    "name", support.every_night(FIRST_CALLS, ["prune"], mark=pytest.mark.entries)
)
def test_the_first_call_compiles_as_many_programs_for_any_number_of_leaves(name):
    def count(number):
        params = {f"p{i}": jnp.full((4, 3), 1.0 + i) for i in range(number)}
        jax.clear_caches()
        EVENTS.clear()
        FIRST_CALLS[name](params)
        return sum("backend_compile" in event for event in EVENTS)

    few, many = count(4), count(12)
    assert 0 < many <= few
