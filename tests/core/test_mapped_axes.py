"""`when`, a change under a condition, and `reflect`, an exchange in pairs, whatever maps them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replicas

from optperm.core.control import when
from optperm.core.mapped_axes import reflect


def double(tree):
    return jax.tree.map(lambda x: 2 * x, tree)


def test_a_tree_is_changed_where_the_predicate_holds():
    """Once, by one flag for all rows, by one of each row, and by a Python bool."""
    rows, flags = jnp.ones((3, 2)), jnp.array([True, False, True])
    for flag in (True, False, jnp.bool_(True), jnp.bool_(False)):
        found = jax.jit(lambda rows, flag=flag: when(flag, double, {"a": rows}))(rows)
        np.testing.assert_array_equal(found["a"], rows * (2 if flag else 1))
    found = jax.vmap(lambda flag, row: when(flag, double, row))(flags, rows)
    np.testing.assert_array_equal(found[:, 0], [2, 1, 2])


def test_it_sums_over_replicas():
    """What does not vary over them, and what varies only once it is changed."""

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


def test_what_is_not_due_is_not_computed():
    """Nor moved out of the loop as what no turn of it changes."""
    calls = []

    def seen(x):
        calls.append(None)
        return x

    @jax.jit
    def steps(x):
        def step(total, count):
            def add(total):
                return total + jax.pure_callback(seen, jax.ShapeDtypeStruct((), x.dtype), x)

            return when(count % 4 == 0, add, total), None

        return jax.lax.scan(step, jnp.zeros(()), jnp.arange(12))[0]

    assert float(steps(jnp.float32(2))) == 6
    assert len(calls) == 3


@pytest.mark.parametrize("mapping", replicas.MAPPINGS)
@pytest.mark.parametrize("shift", [0, 3])
def test_reflection_gives_each_replica_the_tree_of_its_partner(mapping, shift):
    """Index i gets that of (shift - i) modulo the number of replicas, whatever maps them."""
    step = lambda x: reflect({"a": x}, replicas.AXIS, shift)["a"]  # noqa: E731
    found = replicas.MAPPINGS[mapping](step, 4)(jnp.arange(8.0).reshape(4, 2))
    partners = [(shift - i) % 4 for i in range(4)]
    np.testing.assert_array_equal(found, np.arange(8.0).reshape(4, 2)[partners])
