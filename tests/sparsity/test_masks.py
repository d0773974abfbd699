"""Masks: NumPy's stable sort chooses the same entries, and what is held keeps its bits."""

import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
from stable_choice import highest

import optperm
from optperm.core.states import find_state
from optperm.sparsity._choice import nearest_count

EVERYWHERE = {"include": True}


def lowest(scores, count):
    """Return whether each is among the lowest magnitudes: the last of equal ones, NaN at the end."""
    return ~highest(np.abs(scores), np.size(scores) - count)


def lowest_of_tree(scores, fraction, scope):
    """Return the same fraction of each leaf, or of the whole tree."""
    if scope == "leaf":
        return jax.tree.map(lambda s: lowest(s, nearest_count(fraction, np.size(s))), scores)
    leaves, structure = jax.tree.flatten(scores)
    flat = np.concatenate([np.ravel(leaf) for leaf in leaves])
    chosen = lowest(flat, nearest_count(fraction, flat.size))
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    parts = zip(np.split(chosen, ends), leaves, strict=True)
    return jax.tree.unflatten(structure, [part.reshape(leaf.shape) for part, leaf in parts])


def mask_of(opt_state):
    return find_state(opt_state, optperm.sparsity.MaskElementsState, method="mask_elements").mask


def held_by(opt_state):
    return jax.tree.map(np.logical_not, mask_of(opt_state))


def pruned_like(params, held):
    return jax.tree.map(lambda p, h: jnp.where(h, jnp.zeros_like(p), p), params, held)


# Which entries, and how many.


def test_vmap_over_fractions_and_keys_gives_one_by_one():
    params = {"w": support.normal((7, 11)), "none": jnp.zeros((0, 3))}
    opt_state = optperm.mask_elements().init(params)
    options = {"criterion": "random", "scope": "erk"} | EVERYWHERE

    @jax.jit
    def one(fraction, key):
        return optperm.sparsity.prune(params, opt_state, fraction, key=key, **options)

    pairs = jnp.linspace(0.0, 1.0, 6), jax.random.split(jax.random.key(0), 6)
    swept = jax.jit(jax.vmap(one))(*pairs)
    for index, pair in enumerate(zip(*pairs, strict=True)):
        support.assert_same_bits(replicas.take(swept, index), one(*pair))


_MAGNITUDES = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -2.0, math.inf, math.nan])


@pytest.mark.parametrize("scope", ["leaf", "global"])
def test_any_scores_have_the_exact_number_of_masks(scope):
    """Take fractions of Python and traced ones, and ties, zeros of both signs, infinities and NaN."""
    run = jax.jit(
        lambda params, fraction: optperm.sparsity.prune(
            params, optperm.mask_elements().init(params), fraction, scope=scope, **EVERYWHERE
        )
    )

    @hypothesis.settings(max_examples=20)
    @hypothesis.given(data=st.data(), part=st.integers(0, 64))
    def check(data, part):
        def draw(size):
            return data.draw(st.lists(_MAGNITUDES, min_size=size, max_size=size))

        params = {"a": np.float32(draw(50)), "b": np.float32([draw(4)] * 3)}
        expected = lowest_of_tree(params, part / 64, scope)
        opt_state = optperm.mask_elements().init(params)
        after = optperm.sparsity.freeze(
            opt_state, part / 64, scores=params, scope=scope, **EVERYWHERE
        )
        support.assert_same_bits(held_by(after), expected)
        pruned, after = run(params, np.float32(part / 64))
        support.assert_same_bits(held_by(after), expected)
        support.assert_same_bits(pruned, pruned_like(params, expected))

    check()


def test_traced_fractions_stay_within_the_leaf():
    """Take the nearest fraction that is allowed, and 0 for NaN."""
    params = support.bias(50)
    opt_state = optperm.mask_elements().init(params)
    prune = jax.jit(
        lambda fraction: optperm.sparsity.prune(params, opt_state, fraction, **EVERYWHERE)
    )
    counts = [int(np.sum(prune(x)[0] == 0)) for x in (np.nan, -0.5, 0.58, 1.5, np.inf)]
    assert counts == [0, 0, 29, 50, 50]
    with pytest.raises(TypeError, match=r"got float32\[2\]: use jax.vmap"):
        prune(jnp.array([0.5, 0.6]))
    with pytest.raises(TypeError, match=r"got bool\[\]"):
        prune(True)


def test_random_choice_is_nested_and_depends_on_the_key_alone():
    """Let neither scores, nor params, nor other leaves have a say."""
    params, key = {"x": jnp.ones(50), "y": jnp.ones((10, 5))}, jax.random.key(3)
    opt_state = optperm.mask_elements().init(params)

    def choose(fraction, key=key, **options):
        options = {"criterion": "random", "scope": "leaf", "key": key} | EVERYWHERE | options
        held = held_by(optperm.sparsity.prune(params, opt_state, fraction, **options)[1])
        frozen = optperm.sparsity.freeze(opt_state, fraction, **options)
        support.assert_same_bits(held_by(frozen), held)
        return held

    held = [choose(fraction) for fraction in (0.0, 0.4, 0.9)]
    for fewer, more in itertools.pairwise(held):
        assert all(np.all(more[name][fewer[name]]) for name in params)
    support.assert_same_bits(choose(0.4, key=3, scores=jax.tree.map(jnp.negative, params)), held[1])
    assert not np.array_equal(choose(0.4, jax.random.key(4))["x"], held[1]["x"])
    assert not np.array_equal(held[1]["x"], held[1]["y"].ravel())
    alone = choose(0.4, include={"x": False, "y": True})
    support.assert_same_bits(alone, held[1] | {"x": np.zeros(50, bool)})


def test_random_choice_is_uniform():
    """Mask each of ten entries three times in ten over 2000 keys, within five deviations."""
    opt_state, options = optperm.mask_elements().init(jnp.ones(10)), {"criterion": "random"}
    keys = jax.random.split(jax.random.key(0), 2000)
    freeze = functools.partial(optperm.sparsity.freeze, opt_state, 0.3, **options, **EVERYWHERE)
    drawn = jax.vmap(lambda key: freeze(key=key))(keys).mask
    assert (np.sum(~drawn, axis=1) == 3).all()
    np.testing.assert_allclose(np.mean(~drawn, axis=0), 0.3, atol=5 * math.sqrt(0.21 / 2000))


def test_only_included_leaves_are_touched():
    """Take leaves of two axes, or those of a function, a tree or a prefix, which may name leaves that
    the masks do not see; the others do not count into a global fraction."""
    params = {"net": support.random_params(), "out": (support.bias(3), support.bias(4))}
    sees = {"net": True, "out": (False, True)}
    opt_state = optax.masked(optperm.mask_elements(), sees).init(params)
    for kernel, last, include in (
        (True, False, None),
        (True, True, {"net": {"kernel": np.True_, "bias": False}, "out": True}),
        (True, True, lambda tree: jax.tree.map(lambda leaf: leaf.size in (60, 4), tree)),
        (False, True, {"net": False, "out": ({"no": True}, True)}),
    ):
        parts = [p for p, f in ((params["net"]["kernel"], kernel), (params["out"][1], last)) if f]
        chosen = iter(lowest_of_tree(parts, 0.3, "global"))
        net = {
            "kernel": next(chosen) if kernel else np.zeros((12, 5), bool),
            "bias": np.zeros(5, bool),
        }
        end = next(chosen) if last else np.zeros(4, bool)
        options = {"scope": "global", "include": include}
        after, state = optperm.sparsity.prune(params, opt_state, 0.3, **options)
        support.assert_same_bits(held_by(state), {"net": net, "out": (optax.MaskedNode(), end)})
        whole = {"net": net, "out": (np.zeros(3, bool), end)}
        support.assert_same_bits(after, pruned_like(params, whole))
        if not callable(include):
            frozen = optperm.sparsity.freeze(opt_state, 0.3, scores=params, **options)
            support.assert_same_bits(held_by(frozen), held_by(state))
    for include, place in (
        ({"net": False}, "include"),
        ({"net": {"kernel": 1, "bias": True}, "out": True}, r"include\['net'\]\['kernel'\]"),
    ):
        with pytest.raises(ValueError, match=place + " does not fit the params"):
            optperm.sparsity.freeze(opt_state, 0.5, scores=params, include=include)


def test_a_given_mask_is_a_tree_a_prefix_or_a_function():
    """Hold from the first step on; each boolean is for one entry, one leaf or a part of the tree."""
    start = {"a": {"w": support.normal((2, 3), 0), "b": support.bias(3, 1)}, "c": jnp.ones(2)}
    whole = np.array([[True, False, True], [False, True, False]])
    for mask, expected in (
        (None, (True, True, True)),
        (False, (False, False, False)),
        ({"a": {"w": whole, "b": False}, "c": True}, (False, whole, True)),
        ({"a": False, "c": jnp.array([True, False])}, (False, False, [True, False])),
        (
            lambda p: {"a": {"w": p["a"]["w"] > 0, "b": True}, "c": False},
            (True, start["a"]["w"] > 0, False),
        ),
    ):
        tx = optax.chain(optax.sgd(0.1), optperm.mask_elements(mask))
        params, _ = loops.train(tx, start, [start, start], how="eager")[-1]
        leaves = zip(jax.tree.leaves(params), jax.tree.leaves(start), expected, strict=True)
        for after, before, wanted in leaves:
            assert np.array_equal(after != before, np.broadcast_to(wanted, before.shape))


def test_masks_accumulate_and_are_reset():
    """Rank all entries each time, and free none but by `reset_masks`."""
    params = jnp.array([[5.0], [1.0], [-2.0], [4.0], [-3.0]])
    opt_state = optperm.mask_elements().init(params)
    opt_state = optperm.sparsity.freeze(opt_state, 0.4, scores=params[::-1])
    np.testing.assert_array_equal(held_by(opt_state), lowest(params[::-1], 2))
    pruned, opt_state = optperm.sparsity.prune(params, opt_state, 0.4)
    assert pruned.ravel().tolist() == [5.0, 0.0, 0.0, 4.0, -3.0]
    np.testing.assert_array_equal(held_by(opt_state), lowest(params[::-1], 2) | lowest(params, 2))
    again, opt_state = optperm.sparsity.prune(pruned, opt_state, 0.6)
    assert again.ravel().tolist() == [5.0, 0.0, 0.0, 4.0, 0.0]
    same, opt_state_same = optperm.sparsity.prune(again, opt_state, 0.2)
    support.assert_same_bits((same, opt_state_same), (again, opt_state))
    support.assert_same_bits(optperm.sparsity.freeze(opt_state, 0.0, scores=params), opt_state)
    support.assert_same_bits(
        optperm.sparsity.reset_masks(opt_state), optperm.mask_elements().init(params)
    )


def test_scores_decide_with_their_signs():
    """Drop the lowest scores, and not those nearest to 0."""
    params, scores = jnp.array([[9.0, 0.1, -8.0]]), jnp.array([[0.0, 1.0, -2.0]])
    opt_state = optperm.mask_elements().init(params)
    for options, expected in (({"scores": scores}, [9.0, 0.1, 0.0]), ({}, [9.0, 0.0, -8.0])):
        pruned, _ = optperm.sparsity.prune(params, opt_state, 1 / 3, **options)
        support.assert_same_bits(pruned, jnp.float32([expected]))


def test_each_leaf_may_have_a_share_of_its_own():
    """Take a tree of fractions, or a prefix of one; by default the fractions of `erk_sparsity`."""
    params = {
        "a": support.normal((20, 5)),
        "b": {"c": support.normal((4, 2)), "d": support.bias(9)},
    }
    opt_state = optperm.mask_elements().init(params)

    def zeros(fraction):
        pruned = optperm.sparsity.prune(params, opt_state, fraction)[0]
        return [int(np.sum(leaf == 0)) for leaf in jax.tree.leaves(pruned)]

    assert zeros({"a": 0.1, "b": 0.5}) == [10, 4, 0]
    assert zeros(optperm.sparsity.erk_sparsity(params, 0.5)) == zeros(0.5) == [54, 0, 0]


# What is held stays, bit for bit.

# Numbers that careless arithmetic changes
STRANGE = np.float32([-0.0, 0.0, 1e-45, -1e-40, math.inf, -math.inf, math.nan, 1.0, 3e38, -0.3] * 2)


def test_frozen_weights_keep_their_bits():
    """Hold also -0.0, subnormal numbers and NaN, under updates that are NaN or infinite."""
    params, tx = jnp.array(STRANGE), optax.chain(optax.scale(1.0), optperm.mask_elements())
    start = optperm.sparsity.freeze(tx.init(params), 0.5, scores=jnp.arange(20.0), **EVERYWHERE)
    for update in (math.nan, math.inf, 1.0, -0.0):
        given = jnp.full(20, update)
        (_, once), (after, _) = loops.train(tx, params, [given] * 2, opt_state=start)
        updates, _ = jax.jit(tx.update)(given, once, params)
        support.assert_same_bits(after[:10], params[:10])
        support.assert_same_bits(updates[:10], jnp.full(10, -0.0))
        support.assert_same_bits(updates[10:], jnp.full(10, update))
        # Plain addition may flush a subnormal weight to zero, and the bits of NaN are its own.
        normal = np.array([0, 1, 4, 5, 7, 8, 9])
        free = params[10:][normal]
        expected = free + jnp.float32(update) + jnp.float32(update)
        support.assert_same_bits(after[10:][normal], expected)
        plain = jax.jit(optax.apply_updates)(params, updates)
        support.assert_same_bits(plain[normal], params[normal])


@pytest.mark.usefixtures("lenient")
def test_negative_zero_stays_in_a_step_that_is_not_finite():
    """`optax.apply_if_finite` turns the whole update into 0.0, which would make 0.0 of -0.0."""
    tx = optax.apply_if_finite(optax.chain(optax.sgd(0.1), optperm.mask_elements()), 3)
    params = jnp.array([-0.0, 1.0])
    opt_state = optperm.sparsity.freeze(tx.init(params), 0.5, scores=params, **EVERYWHERE)
    after, _ = loops.make_step(tx)(params, opt_state, jnp.array([0.0, jnp.nan]))
    support.assert_same_bits(after, params)


def test_every_dtype_keeps_its_own():
    """Rank float16, bfloat16, float32 and float64 of one tree together, in float64."""
    with jax.enable_x64(True):
        params = {n: support.normal((9,), i, n) for i, n in enumerate(support.DTYPES)}
        tx = optperm.mask_elements()
        after, opt_state = optperm.sparsity.prune(
            params, tx.init(params), 0.5, scope="global", **EVERYWHERE
        )
        wide = {n: np.asarray(leaf, np.float64) for n, leaf in params.items()}
        held = lowest_of_tree(wide, 0.5, "global")
        support.assert_same_bits(held_by(opt_state), held)
        support.assert_same_bits(after, pruned_like(params, held))
        updates, new_state = tx.update(params, opt_state)
        minus_zero = jax.tree.map(lambda p: jnp.full_like(p, -0.0), params)
        support.assert_same_bits(updates, jax.tree.map(jnp.where, held, minus_zero, params))
        doubled = jax.tree.map(lambda p: p + p, params)
        moved = optperm.apply_updates(after, updates, new_state)
        support.assert_same_bits(moved, pruned_like(doubled, held))


# What users pass.


def test_a_function_among_params_is_refused_by_name():
    params = {"w": jnp.ones((2, 2)), "activation": jax.nn.relu}
    opt_state = optperm.mask_elements().init({"w": jnp.ones((2, 2)), "activation": jnp.ones(())})
    for call in (
        lambda: optperm.sparsity.prune(params, opt_state, 0.5),
        lambda: optperm.sparsity.keep_top(params, 0.5),
        lambda: optperm.sparsity.erk_sparsity(params, 0.5),
    ):
        with pytest.raises(TypeError, match=r"params\['activation'\] must be an array"):
            call()


def test_nothing_to_choose_from_is_no_error():
    """Take trees without leaves or without entries, and trees of which no leaf is included."""
    trees = ({}, {"absent": None}, {"empty": jnp.zeros((0, 3))})
    for params, include in (*((tree, True) for tree in trees), (support.random_params(), False)):
        opt_state = optperm.mask_elements().init(params)
        for scope in ("leaf", "global", "erk", "unit"):
            got = optperm.sparsity.prune(params, opt_state, 1.0, scope=scope, include=include)
            support.assert_same_bits(got, (params, opt_state))
    v, sgd = jnp.ones(3), optax.sgd(0.1)
    with pytest.raises(ValueError, match="there is no leaf of rank 2 or more: pass include="):
        optperm.sparsity.prune(v, optperm.mask_elements().init(v), 0.5)
    # Neither are params that the transformation does not see.
    for tx in (optperm.rigl(sgd, 0.5, end=200), optperm.prune_gradually(sgd, 0.5, 1.0)):
        assert not jax.tree.leaves(optax.masked(tx, False).init(v).inner_state.mask)
