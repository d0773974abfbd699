"""`apply_updates`: exact where a method places weights, Optax's own elsewhere."""

import contextlib
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


DECAY = optax.add_decayed_weights(0.1)
AFTER = {
    "weight decay": (optperm.sgperm(), DECAY),
    "schedule": (optperm.sgperm(), optax.scale_by_schedule(lambda _: 0.5)),
    "chain": (optperm.sgperm(), optax.chain(optax.clip(1.0), DECAY)),
    "inside": (optax.masked(optax.chain(optperm.sgperm(), DECAY), {"kernel": True}),),
    "laperm": (optperm.laperm(optax.sgd(0.1), 1), DECAY),
    "prox": (optperm.sgperm(), optperm.proximal(0.1, l1=0.1)),
    "named chain": (
        optax.named_chain(("z", optax.clip(1.0)), ("perm", optperm.sgperm()), ("decay", DECAY)),
    ),
    "masked": (optperm.sgperm(), optax.masked(DECAY, {"kernel": True})),
    "switch": (optperm.sgperm(), optperm.switch_after(9, optax.sgd(0.1), optax.sgd(0.1))),
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

        with pytest.warns(UserWarning, match="follows a method that places weights.*not applied"):
            placed = transform(step)(KERNEL, tx.init(KERNEL))
        support.assert_same_bits(np.sort(placed["kernel"], 0), np.sort(KERNEL["kernel"], 0))


def test_what_follows_dim_reduce_is_warned_of():
    """Its curvature is that of the steps that it made; a gradient may be clipped before it."""
    loss = {"value": 1.0, "value_fn": lambda params: jnp.float32(0.5)}
    method = optperm.dim_reduce(n_components=1)
    clip, phases = optax.clip(1.0), {"every": 1, "num_snapshots": 2}
    for parts, is_wrong in (
        ((method, optax.scale(0.1)), True),
        ((optperm.dldr(optax.sgd(0.1), method, **phases), optax.scale(0.1)), True),
        ((clip, method), False),
        (
            (
                optperm.dldr(optax.sgd(0.1), optperm.twa(optax.sgd(0.1), n_components=1), **phases),
                clip,
            ),
            False,
        ),
    ):
        tx = optax.chain(*parts)
        updates, state = tx.update(KERNEL, tx.init(KERNEL), KERNEL, **loss)
        context = pytest.warns(UserWarning, match="follows dim_reduce.*curvature")
        with context if is_wrong else contextlib.nullcontext():
            optperm.apply_updates(KERNEL, updates, state)


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
    with pytest.raises(ValueError, match="Two methods place the same parameter"):
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


def descend(tx, apply, num_steps):
    """The params after each step on a quadratic."""

    def step(carry, _):
        w, state = carry
        updates, new = tx.update(w - jnp.linspace(-1.0, 1.0, 6), state, w)
        w = apply(w, updates, new)
        # SAM takes its choice by arithmetic, which makes integers of booleans.
        return (w, jax.tree.map(lambda x, old: x.astype(old.dtype), new, state)), w

    w = jnp.array([0.3, -0.8, 0.9, 0.1, -0.2, 0.6])
    with jax.numpy_dtype_promotion("standard"):
        (_, state), ws = jax.lax.scan(step, (w, tx.init(w)), length=num_steps)
    return w, ws, state


def test_sam_takes_its_ascent_around_a_method_that_places():
    """Its steps are those of `optax.apply_updates`, and the params it leaves are exact."""
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.3))
    methods = (
        optperm.agn(optax.sgd(0.2, momentum=0.9), every=2),
        optperm.laperm(optax.sgd(0.5), 1),
        optperm.sgperm(1.0),
    )
    for method in methods:
        tx = optax.contrib.sam(method, ascent, sync_period=2)
        _, added, _ = descend(tx, lambda w, u, _: optax.apply_updates(w, u), 9)
        start, placed, state = descend(tx, optperm.apply_updates, 9)
        np.testing.assert_allclose(placed, added, atol=1e-6)
        lengths = np.linalg.norm(np.diff(placed[1::2], axis=0, prepend=start[None]), axis=1)
        ascents = np.linalg.norm(placed[2::2] - placed[1:-1:2], axis=1)
        np.testing.assert_allclose(ascents, 0.3, rtol=1e-4)
        assert lengths.max() > 0.1
        if method is methods[0]:
            support.assert_same_bits(placed[7], optperm.distributed.center_params(state))
        else:
            support.assert_same_bits(jnp.sort(placed[1::2]), jnp.tile(jnp.sort(start), (4, 1)))
    # A transformation that follows does not make its ascents placements.
    with pytest.warns(UserWarning, match="follows a method that places weights in an optax.chain"):
        followed = descend(optax.chain(tx, optax.identity()), optperm.apply_updates, 9)[1]
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
            with pytest.raises(ValueError, match=f"{name} .* method that places weights"):
                optperm.apply_updates(params, params, state)
    around = optax.contrib.mechanize(optax.sgd(0.1)).init(lookahead)
    optperm.apply_updates(lookahead, lookahead, around)


def test_params_that_sgperm_did_not_lead_to_are_counted_and_said():
    """Rounding is not counted, and what a wrapper or a rollback does is; scalars are not its own."""
    tx = optperm.sgperm(1.0)
    start = {"w": support.normal((6, 2), 0), "scale": jnp.float32(1.0)}

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates | {"scale": 0.5}), state

    params, state = start, jax.jit(tx.init)(start)
    for index in range(6):
        params, state = step(params, state, support.random_like(start, index))
    assert not np.array_equal(
        params["w"], optperm.permutation.permuted_params(state)["w"]
    )  # by rounding
    assert state[1].mismatches == 0
    rolled_back = {
        "moved": params | {"w": start["w"]},
        "one": params | {"w": params["w"].at[3, 1].add(1e-4)},
        "lost": params | {"w": params["w"].at[3, 1].set(jnp.nan)},
    }
    for name, other in rolled_back.items():
        after = step(other, state, start)[1]
        assert after[1].mismatches == 1, name
        with pytest.warns(UserWarning, match="1 step .* other params than"):
            optperm.permutation.permuted_params(after)
    with pytest.warns(UserWarning, match="1 step .* other params than"):
        optperm.permutation.export_permutation(start, after)


def test_a_wrapper_that_interpolates_is_counted_where_it_cannot_be_refused():
    """Other libraries call `optax.apply_updates`, to which no state is given."""
    for wrap in (lambda tx: optax.contrib.schedule_free(tx, 0.1, b1=0.9), optax.contrib.mechanize):
        tx = wrap(optperm.sgperm(1.0))
        _, _, state = descend(tx, lambda w, u, _: optax.apply_updates(w, u), 4)
        with pytest.warns(UserWarning, match="other params than"):
            optperm.permutation.permuted_params(state)


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
