"""Finding a method's state inside whatever it was composed into."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
import support
from flax import nnx

import optperm
from optperm.composition import find_state, find_states
from optperm.permutation.sgperm import PermuteByCyclesState


class Wanted(NamedTuple):
    value: object


@pytest.mark.parametrize(
    "nest",
    [
        lambda s: s,
        lambda s: (optax.EmptyState(), s),
        lambda s: {"first": (), "second": [s]},
        lambda s: optax.MaskedState(inner_state=(s,)),
        lambda s: optax.MultiStepsState(0, 0, (s,), None, None),
    ],
)
def test_found_wherever_it_is(nest):
    """The state comes back as it is, from any nesting of tuples, dicts and Optax states."""
    state = Wanted(jnp.arange(3))
    found = find_state(nest(state), Wanted, method="wanted")
    assert isinstance(found, Wanted)
    support.assert_same_bits(found, state)


def test_all_are_found_in_order_and_not_inside_each_other():
    """Several are listed; one inside another counts as its part."""
    first, second = Wanted(1), Wanted(Wanted(2))
    assert find_states((first, {"x": second}), Wanted) == [first, second]
    assert find_states((), Wanted) == []


def test_absence_and_plurality_name_the_state_and_the_method():
    """The two errors say what was looked for, how many there were, and what to pass instead."""
    with pytest.raises(ValueError, match=r"a Wanted \(the state of optperm.wanted\).* found none"):
        find_state(optax.EmptyState(), Wanted, method="wanted")
    with pytest.raises(ValueError, match=r"Wanted .* found 2: pass the part"):
        find_state((Wanted(1), Wanted(2)), Wanted, method="wanted")


def test_nnx_optimizer_states_come_out_as_plain_arrays():
    """What `nnx.Optimizer` wraps into variables is unwrapped."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0), bias_init=nnx.initializers.normal())
    optimizer = nnx.Optimizer(model, optperm.sgperm(), wrt=nnx.Param)
    found = find_state(optimizer.opt_state, PermuteByCyclesState, method="sgperm")
    leaves = jax.tree.leaves(found, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert len(leaves) == 7
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
