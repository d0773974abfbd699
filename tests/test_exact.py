"""`apply_updates`: exact where a method sets exact params, Optax's own elsewhere."""

import itertools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm
from optperm.core.states import find_warnings
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


MASKED = optax.MaskedNode()
# Params, updates and targets; params plus updates do not equal the targets.
PARAMS = {"a": np.float32([1e8, 3e7]), "net": {"b": np.float32([1e8]), "c": np.float32([2e7])}}
TARGETS = {"a": np.float32([0.1, 0.3]), "net": {"b": np.float32([3.0]), "c": np.float32([0.7])}}
UPDATES = jax.tree.map(np.subtract, TARGETS, PARAMS)
MOVED = jax.tree.map(np.add, PARAMS, UPDATES)
PLACED = Placed(TARGETS, True)
A_ALONE, NET_ALONE = TARGETS | {"net": MASKED}, TARGETS | {"a": MASKED}
FIRST_HELD = Held({"a": np.array([False, True]), "net": MASKED})
FIRST_STAYS = np.float32([PARAMS["a"][0], TARGETS["a"][1]])
# States, and the params after the step.
APPLIED = {
    "placed": (PLACED, TARGETS),
    "in a chain": ((optax.EmptyState(), (PLACED,)), TARGETS),
    "in a dictionary": ({"inner": PLACED}, TARGETS),
    "not placed in this step": (Placed(TARGETS, False), MOVED),
    "a masked part": (Placed(A_ALONE, True), TARGETS | {"net": MOVED["net"]}),
    "a masked leaf": (
        Placed({"a": MASKED, "net": TARGETS["net"] | {"b": MASKED}}, True),
        {"a": MOVED["a"], "net": {"b": MOVED["net"]["b"], "c": TARGETS["net"]["c"]}},
    ),
    "each its own": ((Placed(A_ALONE, True), Placed(NET_ALONE, True)), TARGETS),
    "held": (FIRST_HELD, MOVED | {"a": np.float32([PARAMS["a"][0], MOVED["a"][1]])}),
    "held, then placed": ((FIRST_HELD, PLACED), TARGETS | {"a": FIRST_STAYS}),
    "placed, then held": ((PLACED, FIRST_HELD), TARGETS | {"a": FIRST_STAYS}),
    "held by one of two": (
        {"one": FIRST_HELD, "two": (Held({"a": np.array([True, False]), "net": MASKED}),)},
        {"a": PARAMS["a"], "net": MOVED["net"]},
    ),
}


def test_entries_of_states_are_exact_and_all_others_move():
    """Bit for bit, entry by entry, in any nesting, and where a compiled program is given the flags."""
    for moved, target in zip(jax.tree.leaves(MOVED), jax.tree.leaves(TARGETS), strict=True):
        assert not np.any(moved == target)
    states, expected = ({name: case[i] for name, case in APPLIED.items()} for i in (0, 1))

    def apply(states):
        return {name: optperm.apply_updates(PARAMS, UPDATES, s) for name, s in states.items()}

    support.assert_same_bits(apply(states), expected)
    support.assert_same_bits(jax.jit(apply)(states), expected)
    with pytest.raises(ValueError, match="Two methods set the same parameter"):
        optperm.apply_updates(PARAMS, UPDATES, (PLACED, Placed(A_ALONE, True)))


DECAY, SGD = optax.add_decayed_weights(0.1), optax.sgd(0.1)
KERNEL = {"kernel": np.float32([[0.3, -0.1], [0.2, 0.4], [-0.6, 0.5]])}
RESTARTED = {"every": 1, "num_snapshots": 2, "restart": "first"}
# What sets exact params, each with the number of steps of six that set them and are not the last.
SETTING = {
    "sgperm": (optperm.sgperm(1.0), 5),
    "laperm": (optperm.laperm(SGD, 2), 2),
    "dldr": (optperm.dldr(SGD, optperm.project(SGD, n_components=1), **RESTARTED), 1),
    "katyusha": (optperm.katyusha(0.1, 0.1, 0.5), 5),
}
AFTER = {
    "chain": lambda tx: optax.chain(tx, DECAY),
    "chain in a chain": lambda tx: optax.chain(tx, optax.chain(optax.clip(1.0), DECAY)),
    "masked chain": lambda tx: optax.masked(optax.chain(tx, DECAY), {"kernel": True}),
    "masked in a chain": lambda tx: optax.chain(tx, optax.masked(DECAY, {"kernel": True})),
    "named": lambda tx: optax.named_chain(("z", optax.clip(1.0)), ("a", tx), ("end", DECAY)),
}
# What comes before, only watches, changes nothing or holds.
SOUND = {
    "before": lambda tx: optax.chain(DECAY, tx),
    "watches": lambda tx: optax.chain(tx, optperm.record_trajectory(1, 2), optperm.swag(1)),
    "changes nothing": lambda tx: optax.chain(tx, optax.add_decayed_weights(0.0), optax.clip(99.0)),
    "holds": lambda tx: optax.chain(tx, optperm.mask_elements()),
    "pulls": lambda tx: optperm.agn(tx, every=2),
}


def pull(w, _):
    """A loss with an own gradient at each entry."""
    return 0.5 * jnp.sum((w["kernel"] - jnp.linspace(-1.0, 1.0, 6).reshape(3, 2)) ** 2)


def take_steps(tx, apply=optperm.apply_updates):
    """Return the params and the states after each of six steps, and the updates to them."""

    def step(carried, _):
        params, opt_state = carried
        e = optperm.evaluate(pull, params, jnp.ones(1))
        extras = e.extra_args | {"full_grad_fn": e.extra_args["grad_fn"]}
        updates, opt_state = tx.update(e.grad, opt_state, params, **extras)
        params = apply(params, updates, opt_state)
        return (params, opt_state), (params, opt_state, updates)

    @jax.jit
    def run(params):
        return jax.lax.scan(step, (params, tx.init(params)), length=6)[1]

    trail = jax.tree.map(np.asarray, run(KERNEL))
    return [replicas.take(trail, index) for index in range(6)]


# One method in each chain, and each method in one chain.
CHANGED = [("sgperm", after) for after in AFTER] + [(name, "chain") for name in [*SETTING][1:]]
USUAL = [
    each for each in CHANGED if each[0] != "sgperm" or each[1] not in ("chain", "chain in a chain")
]


@pytest.mark.parametrize(("name", "after"), support.every_night(CHANGED, USUAL))
def test_what_changes_updates_to_exact_params_is_applied_counted_and_said(name, after):
    """A target is applied if and only if the update leads to it; the next step sees where it begins."""
    method, number = SETTING[name]
    before, said, counts = KERNEL, [], []
    for params, opt_state, updates in take_steps(AFTER[after](method)):
        chex.assert_trees_all_close(params, jax.tree.map(np.add, before, updates), rtol=1e-6)
        before = params
        said.append(find_warnings(opt_state, params, is_over=False))
        counts.append(int(optax.tree.get(opt_state, "mismatches")))
    assert counts[-1] == number
    assert [len(each) for each in said] == [min(count, 1) for count in counts]
    assert said[-1][0].startswith(f"Steps began at params that {name} had not set")


HOW = {"exactly": optperm.apply_updates, "by addition": loops.by_addition}


@pytest.mark.parametrize(
    ("name", "before", "how"),
    support.every_night(
        [
            each
            for each in itertools.product(SETTING, SOUND, HOW)
            if each[:2] != ("katyusha", "pulls")
        ],
        [
            *(("sgperm", "watches", "by addition"), ("sgperm", "changes nothing", "exactly")),
            *(("laperm", "changes nothing", "by addition"), ("laperm", "pulls", "exactly")),
            *(("dldr", "before", "by addition"), ("katyusha", "holds", "exactly")),
        ],
    ),
)
def test_what_changes_no_update_to_exact_params_is_not_said(name, before, how):
    """Also with `optax.apply_updates`, which rounds."""
    for params, opt_state, _ in take_steps(SOUND[before](SETTING[name][0]), HOW[how]):
        assert find_warnings(opt_state, params) == []


@pytest.mark.usefixtures("lenient")
def test_other_optimizers_are_optax_apply_updates():
    """Without a placing method it does what `optax.apply_updates` does, casts and None included."""
    params = {"w": jnp.bfloat16([1.0, 2.0]), "none": None}
    updates = {"w": jnp.float32([0.1, 0.2]), "none": None}
    support.assert_same_bits(
        optperm.apply_updates(params, updates, optax.adam(0.1).init(params)),
        optax.apply_updates(params, updates),
    )


@pytest.mark.usefixtures("lenient")
def test_a_placement_of_another_step_is_not_applied():
    """Where the updates lead elsewhere than to the targets, by more than rounding, they are applied,
    entry by entry and in each dtype; one that overflows on its way to its target gets there."""
    for dtype in (each for each in support.DTYPES.values() if each is not np.float64):
        top = float(jnp.finfo(dtype).max)
        params = np.array([1.0, 2.0, -0.5, 0.0, -top, np.nan, 3.0], dtype)
        targets = np.array([1.0, 2.5, 0.1, 1e-3, top, 1.0, 4.0], dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            updates = targets - params
            updates[[0, 1, 6]] = np.array([0.05, 0.0, np.nan], dtype)
            expected = np.where([0, 0, 1, 1, 1, 1, 0], targets, params + updates)
        for apply in (optperm.apply_updates, jax.jit(optperm.apply_updates)):
            got = apply(jnp.asarray(params), jnp.asarray(updates), Placed(targets, True))
            support.assert_same_bits(got, expected)


PLACING = {"agn": optperm.agn(optax.sgd(0.2, momentum=0.9), every=2), "sgperm": optperm.sgperm(1.0)}


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("name", support.every_night(PLACING, ["sgperm"]))
def test_sam_takes_its_ascent_around_a_method_that_places(name):
    """Its steps equal those with `optax.apply_updates`, and the final params are exact."""
    start = np.float32([0.3, -0.8, 0.9, 0.1, -0.2, 0.6])
    ascent = optax.chain(optax.contrib.normalize(), optax.sgd(0.3))

    def descend(tx, apply=optperm.apply_updates):
        """Return the params after each of nine steps on a quadratic, and the state."""
        evaluate = loops.gradient(lambda w, goal: 0.5 * jnp.sum((w - goal) ** 2))
        step = loops.make_step(tx, evaluate, apply)

        def body(carried, goal):
            carried = step(*carried, goal)
            return carried, carried[0]

        @jax.jit
        def run(goals):
            state = tx.init(start)
            # SAM turns the booleans of a state into integers, but a carry keeps its types.
            types = jax.eval_shape(step, start, state, goals[0])[1]
            state = optax.tree.cast_like(state, types)
            (_, state), trail = jax.lax.scan(body, (start, state), goals)
            return trail, state

        return jax.tree.map(
            np.asarray, run(np.tile(np.linspace(-1, 1, 6, dtype=np.float32), (9, 1)))
        )

    tx = optax.contrib.sam(PLACING[name], ascent, sync_period=2)
    added, _ = descend(tx, loops.by_addition)
    placed, state = descend(tx)
    np.testing.assert_allclose(placed, added, atol=1e-6)
    ascents = np.linalg.norm(placed[2::2] - placed[1:-1:2], axis=1)
    np.testing.assert_allclose(ascents, 0.3, rtol=1e-4)
    assert not np.array_equal(placed[7], start)
    if name == "agn":
        support.assert_same_bits(placed[7], optperm.distributed.center_params(state))
    else:
        np.testing.assert_array_equal(np.sort(placed[1::2]), [np.sort(start)] * 4)
    # A transformation that follows does not make its ascents placements.
    followed, _ = descend(optax.chain(tx, optax.identity()))
    support.assert_same_bits(followed, placed)


def test_wrappers_that_move_params_elsewhere_are_refused_by_name():
    """No exact weights come of averages and of scaled steps."""
    w = {"w": jnp.float32([0.3, -0.1])}
    synced = optax.LookaheadParams.init_synced(w)
    for base in (optperm.sgperm(), optperm.agn(optax.sgd(0.1), every=1)):
        for name, tx, params in (
            ("schedule_free", optax.contrib.schedule_free(base, 0.1), w),
            ("mechanize", optax.contrib.mechanize(base), w),
            ("lookahead", optax.lookahead(base, 2, 0.5), synced),
        ):
            state = optax.chain(tx, optax.scale(1.0)).init(params)
            with pytest.raises(ValueError, match=f"{name} .* method that sets exact params"):
                optperm.apply_updates(params, params, state)
    optperm.apply_updates(w, w, optax.contrib.mechanize(optax.sgd(0.1)).init(w))


def test_scalars_alone_are_warned_of_and_beside_weights_move_by_their_updates():
    """A method in front of one that permutes may train them."""
    scalars = {"lengthscale": jnp.float32(1.0), "variance": jnp.float32(2.0), "none": jnp.zeros(0)}
    params = scalars | {"kernel": support.bias(3)}
    updates = jax.tree.map(jnp.zeros_like, params) | {"variance": jnp.float32(0.5)}
    for tx in (optperm.sgperm(), optperm.laperm(optax.sgd(0.1), 2)):
        with pytest.warns(UserWarning, match="All params are scalars"):
            tx.init(scalars)
        tx.init({})
        after = optperm.apply_updates(params, updates, tx.init(params))
        support.assert_same_bits(after, params | {"variance": jnp.float32(2.5)})


@pytest.mark.usefixtures("lenient")
def test_wrappers_that_change_the_tree_are_named():
    """The trees of state and params differ; `optax.apply_updates` needs no state."""
    w = {"w": np.complex64([0.3 + 1j, -0.1 + 0.2j])}
    for tx, params in (
        (optax.contrib.split_real_and_imaginary(optperm.sgperm()), w),
        (optax.contrib.split_real_and_imaginary(optperm.mask_elements()), w),
        (optax.flatten(optperm.sgperm()), KERNEL),
    ):
        updates, state = jax.jit(lambda p, tx=tx: tx.update(p, tx.init(p), p))(params)
        with pytest.raises(ValueError, match=r"split_real_and_imaginary .* optax\.apply_updates"):
            optperm.apply_updates(params, updates, state)
        optax.apply_updates(params, updates)
