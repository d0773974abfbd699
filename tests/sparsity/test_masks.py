"""Masks against NumPy's stable sort, and their bits under whatever trains beside them."""

import functools
import math
from typing import NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optperm
from optperm.contract.states import find_state, mask_like

SHAPES = {
    "a": (),
    "b": (1,),
    "c": (2,),
    "d": (3, 1),
    "e": (7,),
    "f": (50,),
    "g": (7, 11),
    "h": (0,),
}
GRID = [i / 50 for i in range(51)]


def distinct(seed=0):
    """Numbers of both signs, no two of the same magnitude."""
    total = sum(math.prod(shape) for shape in SHAPES.values())
    rng = np.random.default_rng(seed)
    numbers = iter(rng.permutation(np.arange(1, total + 1)) * rng.choice([-1, 1], total))
    return {
        name: np.array([next(numbers) for _ in range(math.prod(shape))], np.float32).reshape(shape)
        for name, shape in SHAPES.items()
    }


def with_ties():
    """Few magnitudes, many times each."""
    return jax.tree.map(lambda x: np.float32(x % 3) * np.sign(x), distinct())


def all_equal():
    return jax.tree.map(np.sign, distinct())


def with_nans():
    return jax.tree.map(lambda x: np.where(x % 4 == 0, np.float32(np.nan), x), distinct())


def lowest(scores, count):
    """Whether each is among the lowest by magnitude, by NumPy: stable, NaN last."""
    flat = np.abs(np.asarray(scores).ravel())
    chosen = np.zeros(flat.size, bool)
    chosen[np.argsort(flat, kind="stable")[:count]] = True
    return chosen.reshape(np.shape(scores))


def lowest_of_all(scores, count):
    """The same over a whole tree."""
    leaves, structure = jax.tree.flatten(scores)
    chosen = lowest(np.concatenate([leaf.ravel() for leaf in leaves]), count)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = [
        part.reshape(leaf.shape) for part, leaf in zip(np.split(chosen, ends), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


def mask_of(opt_state):
    return find_state(opt_state, optperm.MaskElementsState, method="mask_elements").mask


def held_by(opt_state):
    """Whether each entry is masked."""
    return jax.tree.map(np.logical_not, mask_of(opt_state))


def signature(tree):
    avals = [(x.shape, x.dtype, jax.typeof(x).weak_type) for x in jax.tree.leaves(tree)]
    return jax.tree.structure(tree), avals


def pruned_like(params, held):
    return jax.tree.map(lambda p, h: jnp.where(h, jnp.zeros_like(p), p), params, held)


# Which entries, and how many.


@pytest.mark.parametrize("make_scores", [distinct, with_ties, all_equal, with_nans])
@pytest.mark.parametrize("scope", ["leaf", "global"])
def test_exactly_the_lowest_are_chosen(make_scores, scope):
    """For every fraction of 0, .02, ... 1 the same entries as NumPy's, down to ties and NaN."""
    scores = make_scores()
    opt_state = optperm.mask_elements().init(scores)
    total = sum(leaf.size for leaf in scores.values())
    counts = []
    for fraction in GRID:
        if scope == "leaf":
            expected = {k: lowest(s, math.floor(fraction * s.size)) for k, s in scores.items()}
        else:
            expected = lowest_of_all(scores, math.floor(fraction * total))
        got = held_by(optperm.freeze(opt_state, fraction, scores=scores, scope=scope))
        support.assert_same_bits(got, expected)
        counts.append(sum(int(leaf.sum()) for leaf in got.values()))
    assert counts[0] == 0
    assert counts[-1] == total
    assert scope == "leaf" or counts == [math.floor(fraction * total) for fraction in GRID]


def test_python_and_traced_fractions_count_in_their_own_arithmetic():
    """.58 of 50 is 28.999... in Python's floats and 29 in float32, inside jit and out of it."""
    scores = jnp.arange(50.0)
    opt_state = optperm.mask_elements().init(scores)

    def count(fraction):
        return int(jnp.sum(~optperm.freeze(opt_state, fraction, scores=scores).mask))

    def traced_count(fraction):
        run = jax.jit(lambda f: optperm.freeze(opt_state, f, scores=scores))
        return int(jnp.sum(~run(fraction).mask))

    assert [count(0.58), count(np.float64(0.58)), count(1), count(0)] == [28, 28, 50, 0]
    assert [count(jnp.float32(0.58)), traced_count(0.58), traced_count(1)] == [29, 29, 50]
    assert count(jnp.bfloat16(0.58)) == traced_count(jnp.bfloat16(0.58)) == 28  # .578125
    with jax.enable_x64(True):
        assert traced_count(jnp.asarray(0.58, jnp.float64)) == 28
    # What cannot be refused while it is traced stays within the leaf.
    assert [traced_count(x) for x in (np.nan, -0.5, 1.5, np.inf)] == [0, 0, 50, 50]


@pytest.mark.parametrize("scope", ["leaf", "global"])
@pytest.mark.parametrize("criterion", ["magnitude", "random"])
def test_vmap_over_fractions_and_keys_gives_one_by_one(scope, criterion):
    """A sweep in one compiled call, traced fraction and key, against the single calls."""
    params = jax.tree.map(jnp.asarray, with_ties())
    opt_state = optax.chain(optax.trace(0.9), optperm.mask_elements()).init(params)
    fractions = jnp.asarray(GRID[::5], jnp.float32)
    keys = jax.random.split(jax.random.key(0), len(fractions))

    def one(fraction, key):
        return optperm.prune(params, opt_state, fraction, criterion=criterion, scope=scope, key=key)

    swept = jax.jit(jax.vmap(one))(fractions, keys)
    for index, (fraction, key) in enumerate(zip(fractions, keys, strict=True)):
        support.assert_same_bits(jax.tree.map(lambda x, i=index: x[i], swept), one(fraction, key))
    held = jax.tree.leaves(held_by(swept[1]))
    totals = sum(leaf.reshape(len(fractions), -1).sum(axis=1) for leaf in held)
    assert (np.diff(totals) > 0).all()


_MAGNITUDES = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -2.0, math.inf, math.nan])


@hypothesis.settings(max_examples=30)
@hypothesis.given(data=st.data())
def test_any_tree_has_the_exact_number_of_masks(data):
    """Trees of any shapes, with ties, zeros of both signs, infinities and NaN."""
    shapes = data.draw(st.lists(st.lists(st.integers(1, 4), max_size=2).map(tuple), min_size=1))
    scores = [
        np.array(
            data.draw(st.lists(_MAGNITUDES, min_size=math.prod(shape), max_size=math.prod(shape))),
            np.float32,
        ).reshape(shape)
        for shape in shapes
    ]
    fraction = data.draw(st.floats(0.0, 1.0))
    scope = data.draw(st.sampled_from(["leaf", "global"]))
    opt_state = optperm.mask_elements().init(scores)
    params, after = optperm.prune(scores, opt_state, fraction, scope=scope)
    if scope == "leaf":
        expected = [lowest(leaf, math.floor(fraction * leaf.size)) for leaf in scores]
    else:
        expected = lowest_of_all(scores, math.floor(fraction * sum(leaf.size for leaf in scores)))
    support.assert_same_bits(held_by(after), expected)
    support.assert_same_bits(params, pruned_like(scores, expected))


def test_random_choice_is_nested_and_depends_on_the_key_alone():
    """With one key a larger fraction takes in the smaller; the scores and the params have no say."""
    params, key = jax.tree.map(jnp.asarray, distinct()), jax.random.key(3)
    opt_state = optperm.mask_elements().init(params)
    for scope in ("leaf", "global"):
        choose = functools.partial(
            optperm.freeze, opt_state, criterion="random", scope=scope, key=key
        )
        before = held_by(choose(0.0))
        for fraction in GRID[5::5]:
            now = held_by(choose(fraction))
            assert all(jax.tree.leaves(jax.tree.map(lambda b, n: np.all(n[b]), before, now)))
            before = now
    held = held_by(choose(0.4))
    _, opt_state_pruned = optperm.prune(
        params, opt_state, 0.4, criterion="random", scope="global", key=key, scores=params
    )
    support.assert_same_bits(held_by(opt_state_pruned), held)
    other = held_by(
        optperm.freeze(opt_state, 0.4, criterion="random", key=jax.random.key(4), scope="global")
    )
    assert not np.array_equal(other["f"], held["f"])
    # Leaves of one size draw apart, and what else is included does not matter.
    twins = {"x": jnp.ones(50), "y": jnp.ones(50)}
    twin_state = optperm.mask_elements().init(twins)
    both = held_by(optperm.freeze(twin_state, 0.5, criterion="random", key=key))
    assert not np.array_equal(both["x"], both["y"])
    alone = optperm.freeze(
        twin_state, 0.5, criterion="random", key=key, include={"x": False, "y": True}
    )
    support.assert_same_bits(held_by(alone), both | {"x": np.zeros(50, bool)})


def test_random_choice_is_uniform():
    """Over 2000 keys every entry of ten is masked three times in ten, within five deviations."""
    opt_state = optperm.mask_elements().init(jnp.ones(10))
    keys = jax.random.split(jax.random.key(0), 2000)
    drawn = jax.vmap(lambda key: optperm.freeze(opt_state, 0.3, criterion="random", key=key).mask)(
        keys
    )
    assert (np.sum(~drawn, axis=1) == 3).all()
    np.testing.assert_allclose(np.mean(~drawn, axis=0), 0.3, atol=5 * math.sqrt(0.21 / 2000))


@pytest.mark.parametrize(
    "include",
    [
        {"net": {"kernel": True, "bias": False}, "out": (False, True)},
        {"net": {"kernel": True, "bias": False}, "out": (np.bool_(False), True)},
        lambda tree: {
            "net": jax.tree.map(lambda leaf: leaf.ndim > 1, tree["net"]),
            "out": (False, True),
        },
    ],
)
def test_only_included_leaves_are_touched(include):
    """A tree of booleans, or a function to one; the others do not count into a global fraction."""
    params = {"net": support.random_params(), "out": (support.bias(3), support.bias(4))}
    opt_state = optperm.mask_elements().init(params)
    taking_part = {"kernel": params["net"]["kernel"], "bias": params["out"][1]}
    expected = lowest_of_all(
        [taking_part["kernel"], taking_part["bias"]], math.floor(0.3 * (60 + 4))
    )
    after, state = optperm.prune(params, opt_state, 0.3, scope="global", include=include)
    held = {
        "net": {"kernel": expected[0], "bias": np.zeros(5, bool)},
        "out": (np.zeros(3, bool), expected[1]),
    }
    support.assert_same_bits(held_by(state), held)
    support.assert_same_bits(after, pruned_like(params, held))
    frozen = optperm.freeze(opt_state, 0.3, scores=params, scope="global", include=include)
    support.assert_same_bits(held_by(frozen), held)


def test_include_may_be_a_prefix_and_may_say_more_than_the_masks_see():
    """One boolean for a part of the tree; under `optax.masked` flags of the params it leaves out."""
    params = {"net": support.random_params(), "out": (support.bias(3), support.bias(4))}
    sees = {"net": True, "out": (False, True)}
    opt_state = optax.masked(optperm.mask_elements(), sees).init(params)
    for include in (
        {"net": False, "out": True},
        {"net": {"kernel": False, "bias": False}, "out": (True, True)},
        {"net": False, "out": ({"no": True}, True)},
    ):
        held = held_by(optperm.freeze(opt_state, 1.0, scores=params, include=include))
        assert isinstance(held["out"][0], optax.MaskedNode)
        assert held["out"][1].all()
        assert not held["net"]["kernel"].any()
    for include in (
        {"net": False},
        {"net": False, "out": (True,)},
        {"net": {"kernel": [True], "bias": True}, "out": True},
        {"net": {"kernel": 1, "bias": True}, "out": True},
    ):
        with pytest.raises(ValueError, match=r"include.* does not fit the params"):
            optperm.freeze(opt_state, 0.5, scores=params, include=include)
    with pytest.raises(ValueError, match=r"include\['net'\]\['kernel'\] does not fit"):
        optperm.freeze(opt_state, 0.5, scores=params, include=include)


def test_masks_accumulate_and_are_reset():
    """All entries stand for election each time; none becomes free but by `reset_masks`."""
    params = jnp.array([5.0, 1.0, -2.0, 4.0, -3.0])
    opt_state = optperm.mask_elements().init(params)
    opt_state = optperm.freeze(opt_state, 0.4, scores=params[::-1])
    np.testing.assert_array_equal(held_by(opt_state), lowest(params[::-1], 2))
    pruned, opt_state = optperm.prune(params, opt_state, 0.4)
    assert pruned.tolist() == [5.0, 0.0, 0.0, 4.0, -3.0]
    np.testing.assert_array_equal(held_by(opt_state), lowest(params[::-1], 2) | lowest(params, 2))
    again, opt_state = optperm.prune(pruned, opt_state, 0.6)
    assert again.tolist() == [5.0, 0.0, 0.0, 4.0, 0.0]
    same, opt_state_same = optperm.prune(again, opt_state, 0.2)
    support.assert_same_bits((same, opt_state_same), (again, opt_state))
    support.assert_same_bits(optperm.reset_masks(opt_state), optperm.mask_elements().init(params))


def test_scores_of_another_source_decide_in_place_of_the_params():
    """With `scores` a large weight goes and a small one stays."""
    params, scores = jnp.array([9.0, 0.1, -8.0]), jnp.array([0.0, 1.0, 2.0])
    opt_state = optperm.mask_elements().init(params)
    pruned, _ = optperm.prune(params, opt_state, 0.4, scores=scores)
    support.assert_same_bits(pruned, jnp.float32([0.0, 0.1, -8.0]))
    pruned, _ = optperm.prune(params, opt_state, 0.4)
    support.assert_same_bits(pruned, jnp.float32([9.0, 0.0, -8.0]))


# The preconditioned gradient.


class Preconditioner(NamedTuple):
    """The state of a preconditioner that multiplies each entry by a number."""

    h: object

    def preconditioned(self, grads):
        return jax.tree.map(jnp.multiply, self.h, mask_like(grads, self.h))


def preconditioner(h):
    """Something that keeps `h`, for the params that it sees."""

    def init(params):
        return Preconditioner(mask_like(h, params))

    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def test_preconditioned_gradient_asks_the_preconditioner_in_the_state():
    """|H g| decides, not |g|, wherever the two states are; masked parts of either are left out."""
    params = support.random_params()
    h = jax.tree.map(lambda x: jnp.exp(2 * x), support.random_like(params, 1))
    scores = support.random_like(params, 2)
    expected = {k: lowest(h[k] * scores[k], scores[k].size // 2) for k in params}
    assert not np.array_equal(expected["kernel"], lowest(scores["kernel"], 30))
    freeze = functools.partial(
        optperm.freeze, fraction=0.5, scores=scores, criterion="preconditioned_gradient"
    )
    tx = optax.chain(preconditioner(h), optax.chain(optax.sgd(0.1), optperm.mask_elements()))
    support.assert_same_bits(held_by(freeze(tx.init(params))), expected)
    both = optax.chain(preconditioner(h), optperm.mask_elements())
    tx = optax.partition(
        {"ours": both, "other": optax.sgd(0.1)}, {"kernel": "ours", "bias": "other"}
    )
    held = held_by(freeze(tx.init(params)))
    np.testing.assert_array_equal(held["kernel"], expected["kernel"])
    assert isinstance(held["bias"], optax.MaskedNode)


def test_preconditioned_gradient_needs_exactly_one_preconditioner():
    """None and two are named, with what to build; so is one that does not see all that is masked."""
    params = support.random_params()

    def freeze(*transformations):
        tx = optax.chain(*transformations, optperm.mask_elements())
        return optperm.freeze(
            tx.init(params), 0.5, scores=params, criterion="preconditioned_gradient"
        )

    wanted = r"PreconditioningState .*optperm.scale_by_gradient_noise or optperm.constant_sgd.*"
    with pytest.raises(ValueError, match=wanted + "found none"):
        freeze(optax.sgd(0.1))
    with pytest.raises(ValueError, match=wanted + "found 2"):
        freeze(preconditioner(params), preconditioner(params))
    half = optax.masked(preconditioner(params), {"kernel": True, "bias": False})
    with pytest.raises(ValueError, match="the preconditioned scores has another tree structure"):
        freeze(half)


# What is held stays, bit for bit.


def strange():
    """Numbers that careless arithmetic changes."""
    numbers = [-0.0, 0.0, 1e-45, -1e-40, math.inf, -math.inf, math.nan, 1.0, 3e38, -0.3]
    return jnp.array(np.float32(numbers * 2))


@pytest.mark.parametrize("update", [math.nan, math.inf, -math.inf, 1.0, -0.0])
def test_frozen_weights_keep_their_bits(update):
    """Whatever the update is: NaN, infinite; and whatever the weight is: -0.0, subnormal, NaN."""
    params = strange()
    scores = jnp.arange(20.0)
    tx = optax.chain(optax.scale(1.0), optperm.mask_elements())
    opt_state = optperm.freeze(tx.init(params), 0.5, scores=scores)

    @jax.jit
    def step(params, opt_state):
        updates, opt_state = tx.update(jnp.full(20, update), opt_state, params)
        return optperm.apply_updates(params, updates, opt_state), updates, opt_state

    after, updates, opt_state = step(*step(params, opt_state)[::2])
    support.assert_same_bits(after[:10], params[:10])
    support.assert_same_bits(updates[:10], jnp.full(10, -0.0))
    support.assert_same_bits(updates[10:], jnp.full(10, update))
    # Plain addition may flush a subnormal weight to zero, and the bits of NaN are its own.
    normal = np.array([0, 1, 4, 5, 7, 8, 9])
    free = params[10:][normal]
    support.assert_same_bits(after[10:][normal], free + jnp.float32(update) + jnp.float32(update))
    plain = jax.jit(optax.apply_updates)(params, updates)
    support.assert_same_bits(plain[normal], params[normal])


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("apply", ["optperm", "optax"])
def test_pruned_weights_stay_zero_through_a_thousand_steps_of_adam(apply):
    """With momentum from before and weight decay in front of the mask; the others train on."""
    target = support.random_params(seed=1)
    tx = optax.chain(optax.adamw(0.01, weight_decay=0.1), optperm.mask_elements())

    def step(carry, _):
        params, opt_state = carry
        grads = jax.tree.map(jnp.subtract, params, target)
        updates, opt_state = tx.update(grads, opt_state, params)
        if apply == "optax":
            return (optax.apply_updates(params, updates), opt_state), None
        return (optperm.apply_updates(params, updates, opt_state), opt_state), None

    @jax.jit
    def train(params):
        (params, opt_state), _ = jax.lax.scan(step, (params, tx.init(params)), length=100)
        params, opt_state = optperm.prune(params, opt_state, 0.6)
        held = jax.tree.map(jnp.logical_not, mask_of(opt_state))
        (params, _), _ = jax.lax.scan(step, (params, opt_state), length=1000)
        return params, held

    params, held = train(support.random_params())
    for name, size in (("kernel", 60), ("bias", 5)):
        bits = np.asarray(params[name]).view(np.int32)[held[name]]
        assert bits.size == math.floor(0.6 * size)
        assert (bits == 0).all()
        free = ~np.asarray(held[name])
        np.testing.assert_allclose(params[name][free], target[name][free], atol=0.3)


def nest(name):
    """An optimizer with `mask_elements` somewhere in it, and the leaves that it masks."""
    adam = optax.chain(optax.adam(0.1), optperm.mask_elements())
    only_kernel = {"kernel": True, "bias": False}
    labels = {"kernel": "masked", "bias": "other"}
    both = ("kernel", "bias")
    injected = optax.inject_hyperparams(
        lambda rate: optax.chain(optax.adamw(rate), optperm.mask_elements())
    )
    return {
        "chain": (adam, both),
        "nested chains": (optax.chain(optax.clip(1.0), optax.chain(adam)), both),
        "named_chain": (
            optax.named_chain(("adam", optax.adam(0.1)), ("mask", optperm.mask_elements())),
            both,
        ),
        "masked": (
            optax.chain(optax.adam(0.1), optax.masked(optperm.mask_elements(), only_kernel)),
            ("kernel",),
        ),
        "partition": (
            optax.partition({"masked": adam, "other": optax.sgd(0.1)}, labels),
            ("kernel",),
        ),
        "inject_hyperparams": (injected(0.1), both),
        "apply_if_finite": (optax.apply_if_finite(adam, 3), both),
        "MultiSteps": (optax.MultiSteps(adam, 2).gradient_transformation(), both),
        "around MultiSteps": (
            optax.chain(
                optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
                optperm.mask_elements(),
            ),
            both,
        ),
        "sgperm": (optax.chain(optperm.sgperm(0.5), optperm.mask_elements()), both),
        "agn": (
            optax.chain(optperm.agn(optax.adam(0.1), 2), optperm.mask_elements()),
            both,
        ),
        "agn of sgperm": (
            optax.chain(optperm.agn(optperm.sgperm(0.5), 2), optperm.mask_elements()),
            both,
        ),
        "diloco": (
            optax.chain(optperm.diloco(optax.sgd(0.1), sync_every=2), optperm.mask_elements()),
            both,
        ),
        "dim_reduce": (
            optax.chain(optperm.dim_reduce(n_components=2), optperm.mask_elements()),
            both,
        ),
    }[name]


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    "name",
    [
        "chain",
        "nested chains",
        "named_chain",
        "masked",
        "partition",
        "inject_hyperparams",
        "apply_if_finite",
        "MultiSteps",
        "around MultiSteps",
        "sgperm",
        "agn",
        "agn of sgperm",
        "diloco",
        "dim_reduce",
    ],
)
def test_held_under_whatever_it_is_composed_with(name):
    """In a scan through a first training, pruning and freezing: what is held keeps its bits, -0.0
    included, the rest trains on, and the state keeps its form."""
    tx, masked = nest(name)
    start = support.random_params()
    start = start | {"kernel": start["kernel"].at[0, 0].set(-0.0)}
    pulls = support.random_like(start, 5)

    def step(carry, scale):
        params, opt_state = carry
        grads = jax.tree.map(lambda p, g: p + scale * g, params, pulls)
        extras = {"value": jnp.float32(0.0), "value_fn": lambda at: jnp.float32(0.0)}
        updates, opt_state = optax.with_extra_args_support(tx).update(
            grads, opt_state, params, **extras
        )
        return (optperm.apply_updates(params, updates, opt_state), opt_state), None

    @jax.jit
    def train(params):
        scales = jnp.array([1.0, -2.0, 3.0])
        (params, opt_state), _ = jax.lax.scan(step, (params, tx.init(params)), scales)
        params = params | {"kernel": params["kernel"].at[0, 0].set(-0.0)}
        before, opt_state = optperm.prune(params, opt_state, 0.4)
        opt_state = optperm.freeze(opt_state, 0.5, scores=pulls)
        before = before | {"kernel": before["kernel"].at[0, 0].set(-0.0)}
        (after, last), _ = jax.lax.scan(step, (before, opt_state), scales)
        return params, before, after, opt_state, last

    params, before, after, opt_state, last = train(start)
    assert signature(opt_state) == signature(last) == signature(tx.init(start))
    mask = mask_of(last)
    for leaf in ("kernel", "bias"):
        free = np.ones(start[leaf].shape, bool)
        if leaf in masked:
            size = start[leaf].size
            pruned = lowest(params[leaf], math.floor(0.4 * size))
            held = pruned | lowest(pulls[leaf], math.floor(0.5 * size))
            np.testing.assert_array_equal(~mask[leaf], held)
            assert (np.asarray(before[leaf])[pruned] == 0).all()
            support.assert_same_bits(after[leaf][held], before[leaf][held])
            free = ~held
        # A permutation does not move every weight in three steps.
        share = np.mean(np.asarray(after[leaf])[free] != np.asarray(before[leaf])[free])
        assert share > (0.2 if "sgperm" in name else 0.95)


@pytest.mark.usefixtures("lenient")
def test_a_step_that_is_not_finite_leaves_negative_zero_alone():
    """`optax.apply_if_finite` turns the whole update into 0.0, which would make 0.0 of -0.0."""
    tx = optax.apply_if_finite(optax.chain(optax.sgd(0.1), optperm.mask_elements()), 3)
    params = jnp.array([-0.0, 1.0])
    opt_state = optperm.freeze(tx.init(params), 0.5, scores=params)
    updates, opt_state = tx.update(jnp.array([0.0, jnp.nan]), opt_state, params)
    support.assert_same_bits(optperm.apply_updates(params, updates, opt_state), params)


@pytest.mark.parametrize("make", [lambda: optperm.agn(optax.sgd(0.5), 2), optperm.sgperm])
def test_placed_weights_are_held_too(make):
    """The target of a placing method for a pruned weight is not zero; `apply_updates` holds it there."""
    params = support.random_params()
    tx = optax.chain(make(), optperm.mask_elements())
    pruned, opt_state = optperm.prune(params, tx.init(params), 0.5)
    p = pruned
    step = jax.jit(tx.update)
    for seed in range(4):
        updates, opt_state = step(support.random_like(params, seed), opt_state, p)
        p = optperm.apply_updates(p, updates, opt_state)
        without = optperm.apply_updates(p, updates, opt_state[0])
    for name, is_held in held_by(opt_state).items():
        assert is_held.sum() == params[name].size // 2
        support.assert_same_bits(p[name][is_held], jnp.zeros(is_held.sum()))
        assert (np.asarray(without[name])[is_held] != 0).any()
    assert not np.array_equal(p["kernel"], pruned["kernel"])


def test_replicas_of_agn_agree_on_what_is_pruned():
    """Four replicas, pruned at random with one key, are pulled together and stay pruned."""
    tx = optax.chain(optperm.agn(optax.sgd(0.1), 2, axis_name="replica"), optperm.mask_elements())
    params = jnp.broadcast_to(support.bias(20), (4, 20))
    params, opt_state = jax.vmap(
        lambda p: optperm.prune(p, tx.init(p), 0.5, criterion="random", key=jax.random.key(0))
    )(params)

    def on_replica(p, s, target):
        updates, s = tx.update(p - target, s, p)
        return optperm.apply_updates(p, updates, s), s

    step = jax.jit(jax.vmap(on_replica, axis_name="replica"))
    targets = jax.random.normal(jax.random.key(1), (4, 20))
    for _ in range(4):
        params, opt_state = step(params, opt_state, targets)
    assert ((np.asarray(params) == 0).sum(axis=1) == 10).all()
    assert (np.asarray(params) == np.asarray(params)[:1]).all()


@pytest.mark.parametrize("checked", [True, False])
def test_a_model_per_device(checked):
    """Under shard_map each device prunes its own params, and the choice is that of a single one."""
    tx = optax.chain(optax.sgd(0.1), optperm.mask_elements())
    stacked = jax.random.normal(jax.random.key(0), (4, 9))

    def train(params, fraction):
        params, opt_state = optperm.prune(params, tx.init(params), fraction)
        for _ in range(2):
            updates, opt_state = tx.update(params + 1.0, opt_state, params)
            params = optperm.apply_updates(params, updates, opt_state)
        return params

    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    mapped = jax.shard_map(
        lambda p: train(p[0], 0.5)[None],
        mesh=mesh,
        in_specs=P("model"),
        out_specs=P("model"),
        check_vma=checked,
    )
    got = jax.jit(mapped)(stacked)
    np.testing.assert_allclose(got, jax.vmap(lambda p: train(p, 0.5))(stacked), rtol=1e-6)
    assert ((np.asarray(got) == 0).sum(axis=1) == 4).all()


def test_every_dtype_keeps_its_own():
    """float16, bfloat16, float32 and float64 in one tree, compared with each other in float64."""
    with jax.enable_x64(True):
        names = ("float16", "bfloat16", "float32", "float64")
        params = {n: jax.random.normal(jax.random.key(i), (9,), n) for i, n in enumerate(names)}
        opt_state = optperm.mask_elements().init(params)
        after, opt_state = optperm.prune(params, opt_state, 0.5, scope="global")
        wide = {n: np.asarray(leaf, np.float64) for n, leaf in params.items()}
        held = lowest_of_all(wide, 18)
        support.assert_same_bits(held_by(opt_state), held)
        support.assert_same_bits(after, pruned_like(params, held))
        updates, new_state = optperm.mask_elements().update(params, opt_state)
        expected = jax.tree.map(
            lambda p, h: jnp.where(h, jnp.asarray(-0.0, p.dtype), p), params, held
        )
        support.assert_same_bits(updates, expected)
        support.assert_same_bits(
            optperm.apply_updates(after, updates, new_state),
            jax.tree.map(lambda p, h: jnp.where(h, jnp.zeros_like(p), p + p), params, held),
        )


def test_weak_updates_become_strong():
    """An update from a Python number must not make the params after it weak."""
    tx = optperm.mask_elements()
    opt_state = tx.init(jnp.ones(()))
    updates, _ = jax.jit(lambda: tx.update(1.0, opt_state))()
    assert updates.dtype == jnp.float32
    assert not updates.weak_type


# What users pass.


@pytest.mark.parametrize(
    ("fraction", "error", "message"),
    [
        (-0.1, ValueError, r"fraction must be in \[0, 1\], got -0.1"),
        (1.1, ValueError, r"got 1.1"),
        (math.nan, ValueError, "got nan"),
        (jnp.float32(2.0), ValueError, r"got 2.0"),
        (True, TypeError, "fraction must be a number"),
        ("half", TypeError, "fraction must be a number"),
        (None, TypeError, "fraction must be a number"),
        (optax.constant_schedule(0.5), TypeError, "call the schedule first"),
        (np.array([0.5, 0.6]), ValueError, r"an array of shape \(2,\)"),
    ],
)
def test_fractions_that_make_no_sense(fraction, error, message):
    params = support.bias(4)
    opt_state = optperm.mask_elements().init(params)
    with pytest.raises(error, match=message):
        optperm.prune(params, opt_state, fraction)
    with pytest.raises(error, match=message):
        optperm.freeze(opt_state, fraction, scores=params)


def test_traced_fractions_that_make_no_sense():
    """What can be seen of a tracer is looked at."""
    params = support.bias(4)
    opt_state = optperm.mask_elements().init(params)
    prune = jax.jit(lambda fraction: optperm.prune(params, opt_state, fraction))
    with pytest.raises(TypeError, match=r"got float32\[2\]: use jax.vmap"):
        prune(jnp.array([0.5, 0.6]))
    with pytest.raises(TypeError, match=r"got bool\[\]"):
        prune(True)


def test_unknown_names_and_missing_arguments():
    params = support.random_params()
    opt_state = optperm.mask_elements().init(params)
    with pytest.raises(ValueError, match="criterion must be one of 'magnitude', 'random', got 'x'"):
        optperm.prune(params, opt_state, 0.5, criterion="x")
    with pytest.raises(ValueError, match=r"criterion must be one of 'gradient', .*got 'magnitude'"):
        optperm.freeze(opt_state, 0.5, scores=params, criterion="magnitude")
    with pytest.raises(ValueError, match="scope must be one of 'leaf', 'global', got 'layer'"):
        optperm.freeze(opt_state, 0.5, scores=params, scope="layer")
    for call in (functools.partial(optperm.prune, params), optperm.freeze):
        with pytest.raises(ValueError, match=r"needs a key: pass key=jax.random.key\(0\)"):
            call(opt_state, 0.5, criterion="random")
    for criterion in ("gradient", "preconditioned_gradient"):
        with pytest.raises(ValueError, match=r"needs scores.*pass scores=optperm.full_gradient\("):
            optperm.freeze(opt_state, 0.5, criterion=criterion)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: {"kernel": p["kernel"]}, "tree structure"),
        (lambda p: p | {"bias": p["bias"][:3]}, r"\['bias'\] is float32\[3\]"),
    ],
)
def test_trees_of_other_params_are_named(spoil, message):
    """Other params or scores than the masks are for raise, and nothing is broadcast."""
    params = support.random_params()
    opt_state = optperm.mask_elements().init(params)
    with pytest.raises(ValueError, match=f"params.*{message}"):
        optperm.prune(spoil(params), opt_state, 0.5)
    with pytest.raises(ValueError, match=f"scores.*{message}"):
        optperm.prune(params, opt_state, 0.5, scores=spoil(params))
    with pytest.raises(ValueError, match=f"scores.*{message}"):
        optperm.freeze(opt_state, 0.5, scores=spoil(params))


def test_params_and_scores_that_are_not_real_numbers():
    with pytest.raises(TypeError, match=r"params\['n'\] has dtype int32"):
        optperm.mask_elements().init({"n": jnp.arange(3)})
    opt_state = optperm.mask_elements().init(jnp.ones(3))
    with pytest.raises(TypeError, match="scores has dtype complex64"):
        optperm.freeze(opt_state, 0.5, scores=jnp.ones(3, jnp.complex64))


def test_no_mask_and_two_masks_are_named():
    params = support.random_params()
    wanted = r"a MaskElementsState \(the state of optperm.mask_elements\).*"
    two = optax.chain(optperm.mask_elements(), optperm.mask_elements())
    for tx, found in ((optax.adam(0.1), "found none"), (two, "found 2")):
        opt_state = tx.init(params)
        for call in (
            functools.partial(optperm.prune, params, opt_state, 0.5),
            functools.partial(optperm.freeze, opt_state, 0.5, scores=params),
            functools.partial(optperm.reset_masks, opt_state),
        ):
            with pytest.raises(ValueError, match=wanted + found):
                call()


def test_nothing_to_choose_from():
    """Trees without leaves, none included, and zero steps of everything are no errors."""
    for params in ({}, {"absent": None}, {"empty": jnp.zeros((0, 3))}):
        opt_state = optperm.mask_elements().init(params)
        for scope in ("leaf", "global"):
            pruned, after = optperm.prune(params, opt_state, 1.0, scope=scope)
            support.assert_same_bits((pruned, after), (params, opt_state))
    params = support.random_params()
    opt_state = optperm.mask_elements().init(params)
    for scope in ("leaf", "global"):
        got = optperm.prune(params, opt_state, 1.0, scope=scope, include=False)
        support.assert_same_bits(got, (params, opt_state))
