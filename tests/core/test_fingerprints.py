"""The fingerprint of the arguments in a state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optperm.core import fingerprints
from optperm.core.transformation import transformation
from optperm.sparsity import Blocks, NOfM


class ScaledState(NamedTuple):
    scale: Any
    inner_state: Any = None
    fingerprint: Any = fingerprints.UNSET

    def shaped_by(self):
        return ("axes", "power")


def scaled(axes=0, power=1, learning_rate=0.1, inner=None):
    """Return a method whose `axes` and `power` determine what its state means."""

    def init(params) -> ScaledState:
        inner_state = None if inner is None else inner.init(params)
        return ScaledState(jax.tree.map(jnp.ones_like, params), inner_state)

    def update(updates, state, params, **_):
        return jax.tree.map(lambda u: -learning_rate * u, updates), state

    def shape_arguments(params):
        return {"axes": jax.tree.map(lambda _: axes, params), "power": power}

    return transformation(init, update, method="scaled", shape_arguments=shape_arguments)


PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}


@pytest.mark.parametrize("argument", [{"axes": 1}, {"power": 2}])
@pytest.mark.parametrize("replicas", [0, 2])
def test_a_state_made_with_another_argument_is_refused_by_name(argument, replicas):
    state = scaled().init(PARAMS)
    if replicas:
        state = state._replace(fingerprint=jnp.stack([state.fingerprint] * replicas))
    scaled(learning_rate=0.2).update(PARAMS, state, PARAMS)
    with pytest.raises(
        ValueError, match=f"scaled got .* made with another {next(iter(argument))}="
    ):
        scaled(**argument).update(PARAMS, state, PARAMS)
    # The numbers of a traced state cannot be read.
    jax.jit(scaled(**argument).update)(PARAMS, state, PARAMS)


def test_differences_are_found_in_any_nesting_and_stack():
    def make(power, inner_axes, outer_axes):
        inner = optax.chain(scaled(inner_axes), optax.trace(0.9))
        return optax.masked(scaled(outer_axes, power, inner=inner), {"w": True, "b": False})

    saved = jax.vmap(lambda _: make(1, 0, 0).init(PARAMS))(jnp.arange(2))
    for arguments, names in {
        (1, 0, 0): [],
        (2, 0, 0): ["power"],
        (1, 1, 0): ["axes"],
        (2, 1, 1): ["axes", "power", "axes"],
    }.items():
        fresh = make(*arguments).init(PARAMS)
        lists = map(fingerprints.list_fingerprints, (saved, fresh))
        assert fingerprints.compare_fingerprints(*lists) == names


VALUES = [
    *(
        None,
        0,
        1,
        0.1,
        0.2,
        "a",
        "b",
        (0, 1),
        (1, 0),
        ((0, 1),),
        {"a": 1},
        {"b": 1},
        [],
        jnp.arange(2),
    ),
    *(NOfM(2, 4), NOfM(1, 4), Blocks(1, 2), Blocks(2, 1), optax.MaskedNode()),
]


def test_different_values_have_different_numbers():
    numbers = [fingerprints._hash({"x": value}) for value in VALUES]
    # A masked part and an empty list both contain nothing.
    assert len({*numbers}) == len(VALUES) - 1
    assert all(0 <= number < 2**32 for number in numbers)


def test_a_number_is_the_same_in_each_process_type_and_library():
    assert fingerprints._hash({"w": (0, 1), "b": 0.1}) == 3848038900
    for same in (0.5, np.float32(0.5), jnp.float16(0.5), np.array(0.5)):
        assert fingerprints._hash(same) == fingerprints._hash(0.5)
    with pytest.raises(TypeError, match="cannot contain <function"):
        fingerprints._hash(lambda path: 0)


def test_signed_numbers_are_read_and_means_of_states_count_as_any_value():
    """Means of numbers are rounded, so they no longer tell how the states were made."""
    params, tx = jnp.ones(2), scaled(power=4)
    state = tx.init(params)
    signed = state._replace(fingerprint=state.fingerprint.astype(jnp.int32))
    assert (np.asarray(signed.fingerprint) < 0).any()
    for same in (
        signed,
        jax.tree.map(lambda *leaves: jnp.mean(jnp.stack(leaves), 0), state, state),
    ):
        tx.update(params, same, params)
    with pytest.raises(ValueError, match="made with another power="):
        scaled(power=2).update(params, signed, params)


def test_a_traced_value_counts_as_any_value():
    state = jax.jit(lambda power: scaled(power=power).init(PARAMS))(2)
    scaled(power=3).update(PARAMS, state, PARAMS)
    with pytest.raises(ValueError, match="another axes="):
        scaled(axes=1, power=3).update(PARAMS, state, PARAMS)
