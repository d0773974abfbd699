"""A rare change: its result, and how XLA compiles it."""

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core.control import cond, when


def test_a_change_is_made_where_it_is_due_and_not_compiled_as_one_function():
    """XLA's CPU compiles a loop that it takes for small as one function, with all that is in it."""
    tree = [jnp.arange(4096.0) + i for i in range(3)]
    program = jax.jit(lambda due, tree: when(due, lambda xs: [2 * x for x in xs], tree))
    for due in (False, True):
        found = program(jnp.asarray(due), tree)
        for x, y in zip(tree, found, strict=True):
            np.testing.assert_array_equal(y, 2 * x if due else x)
    text = program.lower(jnp.asarray(True), tree).compile().as_text()
    assert "while(" in text
    assert "small_call" not in text


def test_each_of_a_batch_is_changed_where_it_is_due():
    due, x = jnp.array([True, False, True]), jnp.arange(3.0)
    found = jax.vmap(lambda due, x: when(due, lambda x: x + 10, x))(due, x)
    np.testing.assert_array_equal(found, [10, 1, 12])


def test_what_is_not_due_outside_of_jit_compiles_nothing():
    """Each call of `jax.lax.cond` outside of `jax.jit` compiles: its branches are new functions."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
    )
    for scale in (2.0, 3.0):
        compiled.clear()
        found = when(jnp.asarray(False), lambda x, scale=scale: scale * x, jnp.arange(3.0))
        other = cond(
            np.bool_(False), lambda x, scale=scale: scale * x, lambda x: x + 1, jnp.arange(3.0)
        )
        np.testing.assert_array_equal(found, [0, 1, 2])
        np.testing.assert_array_equal(other, [1, 2, 3])
    assert not compiled


def test_what_is_due_outside_of_jit_is_done():
    np.testing.assert_array_equal(cond(jnp.asarray(True), lambda: 1, lambda: 2), 1)
    np.testing.assert_array_equal(when(jnp.asarray(True), lambda x: x + 1, jnp.ones(2)), 2)
