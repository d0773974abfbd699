"""`reflect`, an exchange in pairs, under every mapping."""

import jax.numpy as jnp
import numpy as np
import pytest
import replicas

from optperm.core.mapped_axes import reflect


@pytest.mark.parametrize("mapping", replicas.MAPPINGS)
@pytest.mark.parametrize("shift", [0, 3])
def test_reflection_gives_each_replica_the_tree_of_its_partner(mapping, shift):
    """Give index i the tree of (shift - i) modulo the number of replicas."""
    step = lambda x: reflect({"a": x}, replicas.AXIS, shift)["a"]  # noqa: E731
    found = replicas.MAPPINGS[mapping](step, 4)(jnp.arange(8.0).reshape(4, 2))
    partners = [(shift - i) % 4 for i in range(4)]
    np.testing.assert_array_equal(found, np.arange(8.0).reshape(4, 2)[partners])
