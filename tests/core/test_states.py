"""Finding and replacing a method's state in any composition, and trees with masked parts."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from flax import nnx

import optperm
from optperm.core.states import (
    find_state,
    find_states,
    find_warnings,
    reached_goal,
    replace_state,
)
from optperm.core.trees import fill_masked, mask_like
from optperm.permutation._permute_by_cycles import PermuteByCyclesState


class Wanted(NamedTuple):
    value: object


class Aiming(NamedTuple):
    """A state that reaches its goal in its third step."""

    count: object
    inner: object = ()

    def reached_goal(self):
        return self.count >= 3


class Alarming(NamedTuple):
    """A state that warns, around other states."""

    text: str
    inner: object = ()

    def warnings(self, params):
        del params
        return [self.text]


class Phased(NamedTuple):
    """A state that warns, whose first part has ended."""

    first: object
    then: object

    def warnings(self, params):
        del params
        return ["phased"]

    def phases(self):
        return [(self.first, jnp.asarray(False)), (self.then, jnp.asarray(True))]


NESTINGS = [
    lambda s: s,
    lambda s: (optax.EmptyState(), s),
    lambda s: {"second": (), "first": [s, None]},
    lambda s: optax.MaskedState(inner_state=(s,)),
    lambda s: optax.MultiStepsState(jnp.int32(0), jnp.int32(0), (s,), None, None),
]


def test_a_state_in_any_nesting_is_found_and_replaced():
    """Leave everything around it, and the old state, as they were."""
    old, new = Wanted(jnp.arange(3)), Wanted(jnp.arange(3) + 1)
    for nest in NESTINGS:
        opt_state = nest(old)
        support.assert_same_bits(find_state(opt_state, Wanted, method="wanted"), old)
        replace = functools.partial(replace_state, state_type=Wanted, method="wanted", new=new)
        for function in (replace, jax.jit(replace)):
            support.assert_same_bits(function(opt_state), nest(new))
        support.assert_same_bits(opt_state, nest(Wanted(jnp.arange(3))))


def test_all_states_are_found_in_order_and_not_inside_each_other():
    first, second = Wanted(1), Wanted(Wanted(2))
    assert find_states((first, {"x": second}), Wanted) == [first, second]
    assert find_states((), Wanted) == []


def test_an_optimizer_is_at_its_goal_when_all_its_running_states_are():
    """A state at its goal does not answer for the states inside it, nor for a phase to come."""
    early, late = Aiming(jnp.int32(2)), Aiming(jnp.int32(3))
    for nest in NESTINGS:
        assert [bool(reached_goal(nest(state))) for state in (early, late)] == [False, True]
    assert bool(reached_goal(optax.adam(0.1).init(jnp.ones(2))))
    assert not reached_goal(Aiming(jnp.int32(3), inner=(early,)))
    stacked = Aiming(jnp.array([2, 3]))
    assert reached_goal((stacked, late)).tolist() == [False, True]

    def switched(after, count):
        tx = optperm.switch_after(after, optax.identity(), optax.identity())
        return tx.init(jnp.ones(2))._replace(first=early, then=Aiming(jnp.int32(count)))

    answers = [bool(reached_goal((switched(*case),))) for case in ((5, 3), (0, 2), (0, 3))]
    assert answers == [False, False, True]


def test_warnings_of_states_inside_states_that_warn_are_found():
    """Of the running phases, each once, in any nesting; a goal that is not reached keeps silent."""
    both = Phased(Alarming("ended"), (Alarming("outer", [Alarming("inner"), Aiming(1)]),))
    assert find_warnings((both,), None) == ["phased", "outer", "inner"]
    pruned = optperm.prune_gradually(optax.sgd(0.1), 0.5, 0.5, every=9)
    params = {"w": support.normal((4, 3))}
    _, state = jax.jit(lambda p: pruned.update(p, pruned.init(p), p))(params)
    state = Alarming("outer", state._replace(inner_state=Alarming("inner")))
    assert find_warnings(state, params, is_over=False) == ["outer", "inner"]
    assert len(find_warnings(state, params)) == 3


def test_only_a_state_of_the_same_form_takes_its_place():
    """Refuse another structure, shape or dtype, none and two; a weak type becomes a strong one."""
    opt_state = (Wanted({"w": jnp.ones(3)}),)

    def replace(value, state=opt_state):
        return replace_state(state, Wanted, Wanted(value), method="wanted")

    for value, state, message in (
        ({"v": jnp.ones(3)}, opt_state, "the new Wanted has a different tree structure"),
        ({"w": jnp.ones(2)}, opt_state, r"^the new Wanted.*\['w'\] is float32\[2\].*float32\[3\]"),
        ({"w": jnp.ones(3, jnp.bfloat16)}, opt_state, r"is bfloat16\[3\]"),
        (None, (), r"a Wanted \(the state of optperm.wanted\).* it has none"),
        (1, (Wanted(1), Wanted(2)), "it has 2: pass the part"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(value, state)
    weak = jax.jit(lambda: 2.0)()
    assert weak.weak_type
    assert not replace(weak, state=Wanted(jnp.float32(1.0))).value.weak_type


def test_nnx_variables_are_replaced_by_variables_of_their_kind():
    """Keep their metadata, and leave the optimizer's own variables alone."""
    find = functools.partial(find_state, state_type=PermuteByCyclesState, method="sgperm")

    class Model(nnx.Module):
        def __init__(self):
            self.kernel, self.bias = nnx.Param(support.normal((3, 2))), nnx.Param(support.bias(2))

    model = Model()
    tx = optax.chain(optperm.sgperm(), optax.identity())
    opt_state = nnx.Optimizer(model, tx, wrt=nnx.Param).opt_state
    old = find(opt_state)
    leaves = jax.tree.leaves(old, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    new = jax.tree.map(lambda leaf: np.asarray(leaf) + np.ones_like(leaf), old)
    replaced = replace_state(opt_state, PermuteByCyclesState, new, method="sgperm")
    assert jax.tree.structure(replaced) == jax.tree.structure(opt_state)
    support.assert_same_bits(find(replaced), new)
    support.assert_same_bits(find(opt_state), old)


def test_trees_are_masked_alike_and_filled_again():
    """Mask leaves and subtrees, and return a tree that does not fit as it is."""
    whole = {"a": jnp.ones(2), "b": {"c": jnp.ones(3), "d": jnp.ones(4)}, "e": jnp.ones(5)}
    mask = {"a": jnp.zeros(2), "b": optax.MaskedNode(), "e": optax.MaskedNode()}
    masked = mask_like(whole, mask)
    support.assert_same_bits(masked, mask | {"a": jnp.ones(2)})
    other = jax.tree.map(lambda x: 2.0 * x, whole)
    support.assert_same_bits(fill_masked(masked, other), other | {"a": jnp.ones(2)})
    support.assert_same_bits(mask_like(whole, whole), whole)
    for unfit in ({"a": jnp.ones(2)}, jnp.ones(2)):
        assert mask_like(unfit, mask) is unfit
        assert fill_masked(unfit, whole) is unfit
