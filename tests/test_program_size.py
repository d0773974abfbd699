"""A step's program grows slowly with the number of leaves."""

import jax
import jax.numpy as jnp

import optperm

# The most equations that one more leaf adds to a step; `optax.adam` adds 16.
USUAL = 90
MOST = {
    "constant_sgd": 630,
    "dldr": 192,
    "dldr-twa": 175,
    "low_rank": 112,
    "rigl": 143,
    "set": 140,
    "sghmc": 159,
    "sgld": 165,
    "sgperm": 92,
}


def inner_programs(value):
    """The programs among the parameters of an equation."""
    if isinstance(value, tuple | list):
        return [program for each in value for program in inner_programs(each)]
    program = getattr(value, "jaxpr", value)
    return [program] if hasattr(program, "eqns") else []


def num_equations(program, seen=None):
    """The number of equations, with those of branches and bodies of loops.

    A program that leaves of one shape share, by an inner `jax.jit`, is traced once and counts once.
    """
    seen = set() if seen is None else seen
    if id(program) in seen:
        return 0
    seen.add(id(program))
    inner = [each for eqn in program.eqns for each in inner_programs(list(eqn.params.values()))]
    return len(program.eqns) + sum(num_equations(each, seen) for each in inner)


def size_of_step(tx, num_leaves):
    """The number of equations of an update that is applied, half of the leaves matrices."""
    params = {f"w{i}": jax.ShapeDtypeStruct((8, 6), jnp.float32) for i in range(num_leaves // 2)}
    params |= {f"b{i}": jax.ShapeDtypeStruct((6,), jnp.float32) for i in range(num_leaves // 2)}

    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    opt_state = jax.eval_shape(tx.init, params)
    return num_equations(jax.make_jaxpr(step)(params, opt_state, params).jaxpr)


def test_one_more_leaf_adds_few_equations(ours):
    """Leaves that are worked on one by one, each with many operations, take minutes to compile."""
    few, many = (size_of_step(ours.make(), size) for size in (8, 16))
    assert many - few <= 8 * MOST.get(ours.name, USUAL)
