"""Finding a method's state inside whatever it was composed into."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
import support
from flax import nnx

import optperm
from optperm.core.states import find_state, find_states, replace_state, without_variables
from optperm.core.trees import fill_masked, mask_like
from optperm.permutation._permute_by_cycles import PermuteByCyclesState


class Wanted(NamedTuple):
    value: object


NESTINGS = [
    lambda s: s,
    lambda s: (optax.EmptyState(), s),
    lambda s: {"second": (), "first": [s, None]},
    lambda s: optax.MaskedState(inner_state=(s,)),
    lambda s: optax.MultiStepsState(jnp.int32(0), jnp.int32(0), (s,), None, None),
]


def test_a_state_is_found_and_replaced_in_any_nesting():
    """Of tuples, dicts and Optax states; everything around it is as it was, and so is the old one."""
    old, new = Wanted(jnp.arange(3)), Wanted(jnp.arange(3) + 1)
    replace = functools.partial(replace_state, state_type=Wanted, method="wanted")
    for nest in NESTINGS:
        opt_state = nest(old)
        found = find_state(opt_state, Wanted, method="wanted")
        assert isinstance(found, Wanted)
        support.assert_same_bits(found, old)
        for function in (replace, jax.jit(replace, static_argnames=("state_type", "method"))):
            support.assert_same_bits(function(opt_state, new=new), nest(new))
        support.assert_same_bits(opt_state, nest(Wanted(jnp.arange(3))))


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


def test_only_a_state_of_the_same_form_takes_its_place():
    """Another structure, shape or dtype is refused, and a weak type becomes a strong one."""
    opt_state = (Wanted({"w": jnp.ones(3)}),)

    def replace(value, state=opt_state):
        return replace_state(state, Wanted, Wanted(value), method="wanted")

    with pytest.raises(ValueError, match="the new Wanted has a different tree structure"):
        replace({"v": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"the new Wanted.*\['w'\] is float32\[2\].*float32\[3\]"):
        replace({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"is bfloat16\[3\]"):
        replace({"w": jnp.ones(3, jnp.bfloat16)})
    with pytest.raises(ValueError, match="found none"):
        replace(None, state=())
    with pytest.raises(ValueError, match="found 2"):
        replace(1, state=(Wanted(1), Wanted(2)))
    weak = jax.jit(lambda: 2.0)()
    assert weak.weak_type
    assert not replace(weak, state=Wanted(jnp.float32(1.0))).value.weak_type


def test_nnx_variables_are_replaced_by_variables_of_their_kind():
    """With the metadata they had; the optimizer's own ones are left alone."""
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0), bias_init=nnx.initializers.normal())
    optimizer = nnx.Optimizer(model, optax.chain(optperm.sgperm(), optax.identity()), wrt=nnx.Param)
    old = find_state(optimizer.opt_state, PermuteByCyclesState, method="sgperm")
    leaves = jax.tree.leaves(old, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert [isinstance(leaf, jax.Array) for leaf in leaves] == [True] * 8
    new = jax.tree.map(lambda leaf: leaf + jnp.ones_like(leaf), old)
    replaced = replace_state(optimizer.opt_state, PermuteByCyclesState, new, method="sgperm")
    assert jax.tree.structure(replaced) == jax.tree.structure(optimizer.opt_state)
    support.assert_same_bits(find_state(replaced, PermuteByCyclesState, method="sgperm"), new)
    support.assert_same_bits(
        find_state(optimizer.opt_state, PermuteByCyclesState, method="sgperm"), old
    )
    others = [jax.tree.leaves(without_variables(s[0][0])) for s in (replaced, optimizer.opt_state)]
    support.assert_same_bits(*others)


def test_trees_are_masked_alike_and_filled_again():
    """A mask may stand for a leaf or a subtree; what does not fit is handed back for others to name."""
    whole = {"a": jnp.ones(2), "b": {"c": jnp.ones(3), "d": jnp.ones(4)}, "e": jnp.ones(5)}
    mask = {"a": jnp.zeros(2), "b": optax.MaskedNode(), "e": optax.MaskedNode()}
    masked = mask_like(whole, mask)
    support.assert_same_bits(masked, mask | {"a": jnp.ones(2)})
    other = jax.tree.map(lambda x: 2.0 * x, whole)
    support.assert_same_bits(fill_masked(masked, other), other | {"a": jnp.ones(2)})
    support.assert_same_bits(mask_like(whole, whole), whole)
    for unfit in ({"a": jnp.ones(2)}, [jnp.ones(2)], jnp.ones(2)):
        assert mask_like(unfit, mask) is unfit
        assert fill_masked(unfit, whole) is unfit
