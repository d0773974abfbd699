"""`apply_updates`: exact where a method sets exact params, Optax's own elsewhere."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.exact import Exact


class Placed(NamedTuple):
    """A state that places what is not masked, if its last update did."""

    targets: object
    is_placed: jax.Array | bool

    def exact(self):
        where = jax.tree.map(lambda _: self.is_placed, self.targets)
        return [Exact(self.targets, where, is_target=True)]

    def replace_targets(self, other):
        return self._replace(targets=other.targets)


class Held(NamedTuple):
    """A state that holds what its mask says."""

    mask: object

    def exact(self):
        return [Exact(None, jax.tree.map(jnp.logical_not, self.mask))]


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


DECAY, SGD = optax.add_decayed_weights(0.1), optax.sgd(0.1)
KERNEL = {"kernel": jnp.float32([[0.3, -0.1], [0.2, 0.4], [-0.6, 0.5]])}
DIM_REDUCE, PHASES = optperm.dim_reduce(n_components=1), {"every": 1, "num_snapshots": 2}
PLACES, CURVATURE = (
    "follows a method that sets exact params.*not applied",
    "follows dim_reduce.*curvature",
)
FOLLOWED = [
    (optax.chain(optperm.sgperm(), DECAY), PLACES),
    (optax.chain(optperm.sgperm(), optax.chain(optax.clip(1.0), DECAY)), PLACES),
    (optax.masked(optax.chain(optperm.sgperm(), DECAY), {"kernel": True}), PLACES),
    (optax.chain(optperm.laperm(SGD, 1), DECAY), PLACES),
    (optax.chain(optperm.sgperm(), optperm.proximal(0.1, l1=0.1)), PLACES),
    (optax.named_chain(("z", optax.clip(1.0)), ("perm", optperm.sgperm()), ("end", DECAY)), PLACES),
    (optax.chain(optperm.sgperm(), optax.masked(DECAY, {"kernel": True})), PLACES),
    (optax.chain(optperm.sgperm(), optperm.switch_after(9, SGD, SGD)), PLACES),
    (optax.chain(DIM_REDUCE, optax.scale(0.1)), CURVATURE),
    (optax.chain(optperm.dldr(SGD, DIM_REDUCE, **PHASES), optax.scale(0.1)), CURVATURE),
]
# What comes before, only watches, holds, or changes other params.
SOUND = [
    optax.chain(DECAY, optperm.sgperm()),
    optax.chain(optperm.sgperm(), optperm.mask_elements()),
    optax.chain(optperm.sgperm(), optperm.record_trajectory(1, 2)),
    optax.chain(
        optax.masked(optperm.sgperm(), {"kernel": True, "bias": False}),
        optax.masked(DECAY, {"kernel": False, "bias": True}),
    ),
    optax.chain(optax.trace(0.9), DECAY),
    optax.chain(optax.clip(1.0), DIM_REDUCE),
    optax.chain(optperm.dldr(SGD, optperm.twa(SGD, n_components=1), **PHASES), optax.clip(1.0)),
]


def test_what_follows_a_method_that_must_be_last_is_warned_of():
    """Its changes to the updates are lost, or make the method's curvature that of other steps."""
    for tx, says in FOLLOWED:
        state = tx.init(KERNEL)
        for apply in (optperm.apply_updates, jax.jit(optperm.apply_updates)):
            with pytest.warns(UserWarning, match=says):
                apply(KERNEL, KERNEL, state)


def test_what_may_follow_is_not_warned_of():
    """Warnings are errors here."""
    for tx in SOUND:
        params = KERNEL | ({"bias": jnp.ones(2)} if tx is SOUND[3] else {})
        optperm.apply_updates(params, params, tx.init(params))


def test_targets_that_are_followed_are_exact_all_the_same():
    tx = FOLLOWED[0][0]
    updates, state = tx.update(KERNEL, tx.init(KERNEL), KERNEL)
    with pytest.warns(UserWarning, match=PLACES):
        placed = optperm.apply_updates(KERNEL, updates, state)
    support.assert_permutes(placed, KERNEL)


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
    with pytest.raises(ValueError, match="Two methods set the same parameter"):
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
    state = optperm.sgperm().init(params)
    updates = {"scale": jnp.float32(0.5), "bias": jnp.zeros(4)}
    assert optperm.apply_updates(params, updates, state)["scale"] == 1.5


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


def test_an_entry_that_one_of_several_states_holds_does_not_move():
    params, _, updates = far_apart()
    one = Held({"a": jnp.array([True, False]), "b": jnp.array([True])})
    two = Held({"a": jnp.array([True, True]), "b": jnp.array([False])})
    got = optperm.apply_updates(params, updates, {"one": one, "two": (two,)})
    moved = optax.apply_updates(params, updates)
    expected = {"a": jnp.stack([moved["a"][0], params["a"][1]]), "b": params["b"]}
    support.assert_same_bits(got, expected)


@pytest.mark.usefixtures("lenient")
def test_a_placement_of_another_step_is_not_applied():
    """Where the updates lead elsewhere than to the targets, by more than rounding, they are applied,
    entry by entry and in each dtype; one that overflows on its way to its target gets there."""
    for dtype in (each for each in support.DTYPES.values() if each is not np.float64):
        top = jnp.finfo(dtype).max
        params = jnp.array([1.0, 2.0, -0.5, 0.0, -top, jnp.nan, 3.0], dtype)
        targets = jnp.array([1.0, 2.5, 0.1, 1e-3, top, 1.0, 4.0], dtype)
        updates = (
            (targets - params).at[jnp.array([0, 1, 6])].set(jnp.array([0.05, 0, jnp.nan], dtype))
        )
        for apply in (optperm.apply_updates, jax.jit(optperm.apply_updates)):
            got = apply(params, updates, Placed(targets, True))
            expected = jnp.where(jnp.array([0, 0, 1, 1, 1, 1, 0]), targets, params + updates)
            support.assert_same_bits(got, expected)


def test_sam_takes_its_ascent_around_a_method_that_places():
    """Its steps are those of `optax.apply_updates`, and the params it leaves are exact."""
    start = jnp.array([0.3, -0.8, 0.9, 0.1, -0.2, 0.6])
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.3))

    def descend(tx, apply):
        """The params after each of nine steps on a quadratic, and the state."""

        def step(carry, _):
            w, state = carry
            updates, new = tx.update(w - jnp.linspace(-1.0, 1.0, 6), state, w)
            w = apply(w, updates, new)
            # SAM takes its choice by arithmetic, which makes integers of booleans.
            return (w, jax.tree.map(lambda x, old: x.astype(old.dtype), new, state)), w

        with jax.numpy_dtype_promotion("standard"):
            (_, state), ws = jax.lax.scan(step, (start, tx.init(start)), length=9)
        return ws, state

    agn = optperm.agn(optax.sgd(0.2, momentum=0.9), every=2)
    for method in (agn, optperm.sgperm(1.0)):
        tx = optax.contrib.sam(method, ascent, sync_period=2)
        added, _ = descend(tx, lambda w, u, _: optax.apply_updates(w, u))
        placed, state = descend(tx, optperm.apply_updates)
        np.testing.assert_allclose(placed, added, atol=1e-6)
        ascents = np.linalg.norm(placed[2::2] - placed[1:-1:2], axis=1)
        np.testing.assert_allclose(ascents, 0.3, rtol=1e-4)
        assert not np.array_equal(placed[7], start)
        if method is agn:
            support.assert_same_bits(placed[7], optperm.distributed.center_params(state))
        else:
            support.assert_same_bits(jnp.sort(placed[1::2]), jnp.tile(jnp.sort(start), (4, 1)))
    # A transformation that follows does not make its ascents placements.
    with pytest.warns(UserWarning, match="follows a method that sets exact params"):
        followed, _ = descend(optax.chain(tx, optax.identity()), optperm.apply_updates)
    np.testing.assert_allclose(followed, placed, atol=1e-6)


def test_wrappers_that_move_params_elsewhere_are_refused_by_name():
    """No exact weights come of averages and of scaled steps."""
    lookahead = {"w": jnp.float32([0.3, -0.1])}
    for base in (optperm.sgperm(), optperm.agn(optax.sgd(0.1), every=1)):
        for name, tx in {
            "schedule_free": optax.contrib.schedule_free(base, 0.1),
            "mechanize": optax.contrib.mechanize(base),
            "lookahead": optax.lookahead(base, 2, 0.5),
        }.items():
            params = lookahead
            if name == "lookahead":
                params = optax.LookaheadParams.init_synced(params)
            state = optax.chain(tx, optax.scale(1.0)).init(params)
            with pytest.raises(ValueError, match=f"{name} .* method that sets exact params"):
                optperm.apply_updates(params, params, state)
    around = optax.contrib.mechanize(optax.sgd(0.1)).init(lookahead)
    optperm.apply_updates(lookahead, lookahead, around)


def test_where_all_params_are_scalars_permuting_is_warned_of():
    """Beside others a scalar is left alone, and no word is said of it."""
    scalars = {"lengthscale": jnp.float32(1.0), "variance": jnp.float32(2.0), "none": jnp.zeros(0)}
    for tx in (optperm.sgperm(), optperm.laperm(optax.sgd(0.1), 2)):
        with pytest.warns(UserWarning, match="All params are scalars"):
            tx.init(scalars)
        tx.init(scalars | {"kernel": support.bias(3)})
        tx.init({})


@pytest.mark.usefixtures("lenient")
def test_wrappers_that_change_the_tree_are_named():
    """The state's tree is not that of the params; `optax.apply_updates` needs no state."""
    w = {"w": jnp.array([0.3 + 1j, -0.1 + 0.2j])}
    for tx, params in (
        (optax.contrib.split_real_and_imaginary(optperm.sgperm()), w),
        (optax.contrib.split_real_and_imaginary(optperm.mask_elements()), w),
        (optax.flatten(optperm.sgperm()), KERNEL),
    ):
        updates, state = tx.update(params, tx.init(params), params)
        with pytest.raises(ValueError, match=r"split_real_and_imaginary .* optax\.apply_updates"):
            optperm.apply_updates(params, updates, state)
        optax.apply_updates(params, updates)
