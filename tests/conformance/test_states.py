"""The shape and dtype that a state's class says of each field, against what `init` and `update` give."""

import typing

import jax
import jaxtyping
import pytest
import support
from transformations import TRANSFORMATIONS

# What the modules of the methods import for type checkers alone.
NAMES = {
    name: getattr(jaxtyping, name)
    for name in ("Array", "Bool", "Float", "Float32", "Int32", "PyTree", "Shaped", "UInt32")
}


def states_in(node):
    """The states of this library's own types anywhere in an optimizer state."""
    if isinstance(node, dict):
        node = tuple(node.values())
    if not isinstance(node, tuple | list):
        return
    if type(node).__module__.startswith("optperm."):
        yield node
    for child in node:
        yield from states_in(child)


@pytest.mark.parametrize("ours", TRANSFORMATIONS, ids=str)
def test_states_are_what_their_types_say(ours, request):
    """Each field of each state has the shape and dtype of its annotation, before and after a step."""
    if ours.lenient:
        request.getfixturevalue("lenient")
    params = support.random_params()
    tx = ours.make()
    start = tx.init(params)
    _, after = tx.update(params, start, params)
    of_params = NAMES["PyTree"][NAMES["Shaped"][jax.Array, "?*shape"], "Params"]
    for opt_state in (start, after):
        for state in states_in(opt_state):
            hints = typing.get_type_hints(type(state), localns=NAMES)
            with jaxtyping.jaxtyped("context"):
                assert isinstance(params, of_params)
                for name, hint in hints.items():
                    assert hint is not jax.Array, f"{type(state).__name__}.{name} says no shape"
                    if hint is not typing.Any:
                        assert isinstance(getattr(state, name), hint), f"{name} is not {hint}"
