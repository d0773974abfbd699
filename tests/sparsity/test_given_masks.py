"""`mask_elements(mask=)`: masks that stand from the first step, for loops that make the state."""

import jax.numpy as jnp
import numpy as np
import optax
import support

import optperm

PARAMS = {"a": {"w": support.normal((2, 3), 0), "b": support.normal((3,), 1)}, "c": jnp.ones(2)}
WHOLE = np.array([[True, False, True], [False, True, False]])


def moves(mask):
    """Which entries two steps move."""
    tx = optax.chain(optax.sgd(0.1), optperm.mask_elements(mask))
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
        updates, state = tx.update(PARAMS, state, params)
        params = optperm.apply_updates(params, updates, state)
    a, c = params["a"], params["c"]
    return a["w"] != PARAMS["a"]["w"], a["b"] != PARAMS["a"]["b"], c != PARAMS["c"]


def test_a_mask_is_a_tree_a_prefix_or_a_function():
    """Each boolean is for one entry, one leaf or a part of the tree."""
    cases = (
        (None, (True, True, True)),
        (False, (False, False, False)),
        ({"a": {"w": WHOLE, "b": False}, "c": True}, (WHOLE, False, True)),
        ({"a": False, "c": jnp.array([True, False])}, (False, False, [True, False])),
        (
            lambda p: {"a": {"w": p["a"]["w"] > 0, "b": True}, "c": False},
            (PARAMS["a"]["w"] > 0, True, False),
        ),
    )
    for mask, expected in cases:
        for got, wanted in zip(moves(mask), expected, strict=True):
            assert np.array_equal(got, np.broadcast_to(wanted, got.shape))
