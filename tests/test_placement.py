"""`apply_updates`: exact where a method places weights, Optax's own elsewhere."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm


class Placed(NamedTuple):
    """A state that places what is not masked, if its last update did."""

    targets: object
    is_placed: jax.Array | bool

    def placements(self):
        return [(self.targets, self.is_placed)]

    def replace_targets(self, other):
        return self._replace(targets=other.targets)


class Held(NamedTuple):
    """A state that holds what its mask says."""

    mask: object

    def trainable_masks(self):
        return [self.mask]


def far_apart():
    """Params, targets and updates for which params + updates is not the target."""
    params = {"a": jnp.float32([1e8, 1.0]), "b": jnp.float32([1.0])}
    targets = {"a": jnp.float32([0.1, 0.3]), "b": jnp.float32([3.0])}
    updates = jax.tree.map(lambda t, p: t - p, targets, params)
    assert not np.array_equal(optax.apply_updates(params, updates)["a"], targets["a"])
    return params, targets, updates


def test_targets_replace_what_rounding_would_lose():
    """The params become the targets bit for bit, however the state is nested."""
    params, targets, updates = far_apart()
    state = Placed(targets, True)
    for nested in (state, (optax.EmptyState(), (state,)), {"inner": state}):
        support.assert_same_bits(optperm.apply_updates(params, updates, nested), targets)


DECAY = optax.add_decayed_weights(0.1)
AFTER = {
    "weight decay": (optperm.sgperm(), DECAY),
    "schedule": (optperm.sgperm(), optax.scale_by_schedule(lambda _: 0.5)),
    "chain": (optperm.sgperm(), optax.chain(optax.clip(1.0), DECAY)),
    "inside": (optax.masked(optax.chain(optperm.sgperm(), DECAY), {"kernel": True}),),
    "laperm": (optperm.laperm(optax.sgd(0.1), 1), DECAY),
}
KERNEL = {"kernel": jnp.float32([[0.3, -0.1], [0.2, 0.4], [-0.6, 0.5]])}


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_what_follows_a_method_that_places_is_warned_of(transform):
    """Its changes to the updates are lost, and the params are the exact targets all the same."""
    for parts in AFTER.values():
        tx = optax.chain(*parts)

        def step(params, state, tx=tx):
            updates, state = tx.update(params, state, params)
            return optperm.apply_updates(params, updates, state)

        with pytest.warns(UserWarning, match="after a method that places weights.*not applied"):
            placed = transform(step)(KERNEL, tx.init(KERNEL))
        support.assert_same_bits(np.sort(placed["kernel"], 0), np.sort(KERNEL["kernel"], 0))


NOT_AFTER = {
    "before": (DECAY, optperm.sgperm()),
    "masks": (optperm.sgperm(), optperm.mask_elements()),
    "record": (optperm.sgperm(), optperm.record_trajectory(1, 2)),
    "other leaves": (
        optax.masked(optperm.sgperm(), {"kernel": True, "bias": False}),
        optax.masked(DECAY, {"kernel": False, "bias": True}),
    ),
    "nothing placed": (optax.trace(0.9), DECAY),
}


def test_what_may_follow_is_not_warned_of():
    """What only watches, holds, or changes other params; warnings are errors here."""
    for name, parts in NOT_AFTER.items():
        params = KERNEL if name != "other leaves" else KERNEL | {"bias": jnp.ones(2)}
        tx = optax.chain(*parts)
        updates, state = tx.update(params, tx.init(params), params)
        optperm.apply_updates(params, updates, state)


def test_nothing_is_placed_when_the_last_update_did_not():
    """Where the state says so, as a Python or a traced boolean, params move by their updates."""
    params, targets, updates = far_apart()
    moved = optax.apply_updates(params, updates)
    support.assert_same_bits(optperm.apply_updates(params, updates, Placed(targets, False)), moved)
    run = jax.jit(lambda flag: optperm.apply_updates(params, updates, Placed(targets, flag)))
    support.assert_same_bits(run(False), moved)
    support.assert_same_bits(run(True), targets)


def test_masked_leaves_and_subtrees_move_by_their_updates():
    """MaskedNode stands for a leaf, or a whole part of the tree, that the method does not place."""
    params, targets, updates = far_apart()
    state = Placed({"a": targets["a"], "b": optax.MaskedNode()}, True)
    got = optperm.apply_updates(params, updates, state)
    support.assert_same_bits(got, {"a": targets["a"], "b": params["b"] + updates["b"]})
    nested, steps = {"net": params, "x": params["b"]}, {"net": updates, "x": updates["b"]}
    state = Placed({"net": optax.MaskedNode(), "x": targets["b"]}, True)
    got = optperm.apply_updates(nested, steps, state)
    support.assert_same_bits(got, {"net": optax.apply_updates(params, updates), "x": targets["b"]})


def test_two_methods_may_share_a_tree_but_not_a_leaf():
    """Each places its own leaves; claiming one twice raises."""
    params, targets, updates = far_apart()
    one = Placed({"a": targets["a"], "b": optax.MaskedNode()}, True)
    two = Placed({"a": optax.MaskedNode(), "b": targets["b"]}, True)
    support.assert_same_bits(optperm.apply_updates(params, updates, (one, two)), targets)
    with pytest.raises(ValueError, match=r"Two methods .* same parameter"):
        optperm.apply_updates(params, updates, (one, one))


@pytest.mark.usefixtures("lenient")
def test_other_optimizers_are_optax_apply_updates():
    """Without a placing method it does what `optax.apply_updates` does, casts and None included."""
    params = {"w": jnp.bfloat16([1.0, 2.0]), "none": None}
    updates = {"w": jnp.float32([0.1, 0.2]), "none": None}
    support.assert_same_bits(
        optperm.apply_updates(params, updates, optax.adam(0.1).init(params)),
        optax.apply_updates(params, updates),
    )


def test_scalars_move_by_their_updates_beside_placed_weights():
    """A chain before sgperm cannot move a scalar, nor does placing overwrite one."""
    params = {"scale": jnp.float32(1.0), "bias": support.bias(4)}
    tx = optperm.sgperm()
    updates, opt_state = tx.update(support.random_like(params, 1), tx.init(params), params)
    got = optperm.apply_updates(params, updates | {"scale": jnp.float32(0.5)}, opt_state)
    assert got["scale"] == 1.5


@pytest.mark.parametrize("held_first", [False, True])
def test_held_entries_keep_their_bits_wherever_they_were_placed(held_first):
    """Inside a leaf each entry for itself; a masked node holds nothing of what is below it."""
    params, targets, updates = far_apart()
    held = Held({"a": jnp.array([True, False]), "b": optax.MaskedNode()})
    expected = {"a": jnp.stack([targets["a"][0], params["a"][1]]), "b": targets["b"]}
    states = (held, Placed(targets, True)) if held_first else (Placed(targets, True), held)
    support.assert_same_bits(optperm.apply_updates(params, updates, states), expected)
    nested = {"net": params, "x": params["a"]}
    moves = {"net": updates, "x": updates["a"]}
    states = (Held({"net": optax.MaskedNode(), "x": jnp.array([False, True])}), optax.EmptyState())
    got = jax.jit(optperm.apply_updates)(nested, moves, states)
    moved = optax.apply_updates(nested, moves)
    expected = moved | {"x": jnp.stack([params["a"][0], moved["x"][1]])}
    support.assert_same_bits(got, expected)


def test_all_states_that_hold_are_heard():
    """An entry that one of them holds does not move."""
    params, _, updates = far_apart()
    one = Held({"a": jnp.array([True, False]), "b": jnp.array([True])})
    two = Held({"a": jnp.array([True, True]), "b": jnp.array([False])})
    got = optperm.apply_updates(params, updates, {"one": one, "two": (two,)})
    moved = optax.apply_updates(params, updates)
    expected = {"a": jnp.stack([moved["a"][0], params["a"][1]]), "b": params["b"]}
    support.assert_same_bits(got, expected)
