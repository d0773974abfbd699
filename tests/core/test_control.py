"""A change under a condition: its result under every mapping, and how XLA compiles it."""

import jax
import jax.numpy as jnp
import numpy as np
import replicas

from optperm.core.control import cond, when


def double(tree):
    return jax.tree.map(lambda x: 2 * x, tree)


def test_a_tree_is_changed_where_the_predicate_holds():
    """Change it once, for one flag of all rows, for one of each row, and for a Python bool."""
    rows, flags = jnp.ones((3, 2)), jnp.array([True, False, True])
    for flag in (True, False, jnp.bool_(True), jnp.bool_(False)):
        found = jax.jit(lambda rows, flag=flag: when(flag, double, {"a": rows}))(rows)
        np.testing.assert_array_equal(found["a"], rows * (2 if flag else 1))
    found = jax.vmap(lambda flag, row: when(flag, double, row))(flags, rows)
    np.testing.assert_array_equal(found[:, 0], [2, 1, 2])


def test_a_change_sums_over_replicas_under_each_mapping():
    """Take what does not vary over them, and what varies only once it is changed."""

    def step(x):
        zero, is_due = jnp.zeros(()), jnp.int32(3) > 2
        return (
            when(is_due, lambda total: total + jax.lax.psum(x[0], replicas.AXIS), zero),
            when(is_due, lambda total: total + x[0], zero),
        )

    for mapping in replicas.MAPPINGS.values():
        total, own = mapping(step, 4)(jnp.arange(4.0)[:, None])
        np.testing.assert_array_equal(total, [6] * 4)
        np.testing.assert_array_equal(own, range(4))


def test_a_change_that_is_not_due_is_not_computed():
    """Do not move it out of the loop either, as what no turn of it changes."""
    calls = []

    @jax.jit
    def steps(x):
        def seen(x):
            calls.append(None)
            return x

        def add(total):
            return total + jax.pure_callback(seen, jax.typeof(x), x)

        step = lambda count, total: when(count % 4 == 0, add, total)  # noqa: E731
        return jax.lax.fori_loop(0, 12, step, jnp.zeros(()))

    assert float(steps(jnp.float32(2))) == 6
    assert len(calls) == 3


def test_a_change_is_not_compiled_as_one_function():
    """XLA's CPU compiles a loop that it takes for small as one function, with all that is in it."""
    shapes = [jax.ShapeDtypeStruct((4096,), jnp.float32)] * 3
    program = jax.jit(lambda due, tree: when(due, double, tree))
    text = program.lower(jax.ShapeDtypeStruct((), bool), shapes).compile().as_text()
    assert "while(" in text
    assert "small_call" not in text


def test_a_change_outside_of_jit_is_compiled_only_if_it_is_due():
    """Each call of `jax.lax.cond` outside of `jax.jit` compiles: its branches are new functions."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
    )
    x = jnp.arange(3.0)
    for is_due in (False, True):
        for scale in (2.0, 3.0):
            compiled.clear()
            found = when(jnp.asarray(is_due), lambda x, scale=scale: scale * x, x)
            other = cond(np.bool_(is_due), lambda x, scale=scale: scale * x, lambda x: x + 1, x)
            np.testing.assert_array_equal(found, scale * x if is_due else x)
            np.testing.assert_array_equal(other, scale * x if is_due else x + 1)
        # The last one: the operation of the false branch is compiled once.
        assert is_due or not compiled
