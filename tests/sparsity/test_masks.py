"""Masks: NumPy's stable sort chooses the same entries, and what is held keeps its bits."""

import functools
import itertools
import math

import equinox as eqx
import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from flax import nnx
from stable_choice import highest

import optperm
from optperm.core.states import find_warnings
from optperm.sparsity import erk_sparsity, freeze, keep_top, prune, reset_masks
from optperm.sparsity._choice import nearest_count

MASKS = optperm.mask_elements()
EVERYWHERE = {"include": True}
SGD = optax.sgd(0.1)


def lowest(scores, fraction, scope="leaf"):
    """Return which magnitudes are the lowest in a tree: the last of equal ones, NaN at the end."""

    def lowest_of_leaf(leaf):
        return ~highest(np.abs(leaf), leaf.size - nearest_count(fraction, leaf.size))

    if scope == "leaf":
        return jax.tree.map(lowest_of_leaf, scores)
    leaves, structure = jax.tree.flatten(scores)
    flat = lowest_of_leaf(np.concatenate([np.ravel(leaf) for leaf in leaves]))
    parts = np.split(flat, np.cumsum([leaf.size for leaf in leaves])[:-1])
    shaped = [part.reshape(leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def held_by(opt_state):
    return jax.tree.map(np.logical_not, optax.tree.get(opt_state, "mask"))


def pruned_like(params, held):
    return jax.tree.map(lambda p, h: np.where(h, np.zeros_like(p), p), params, held)


def test_vmap_over_fractions_and_keys_gives_one_by_one():
    params = {"w": support.normal((10, 5)), "none": np.zeros((0, 3), np.float32)}
    opt_state = MASKS.init(params)

    @jax.jit
    def one(fraction, key):
        options = {"criterion": "random", "scope": "erk", "key": key}
        return prune(params, opt_state, fraction, **options, **EVERYWHERE)

    pairs = np.linspace(0.0, 1.0, 6, dtype=np.float32), jax.random.split(jax.random.key(0), 6)
    in_turn = jax.jit(lambda *pairs: jax.lax.map(lambda pair: one(*pair), pairs))
    support.assert_same_bits(jax.jit(jax.vmap(one))(*pairs), in_turn(*pairs))


_SCORES = st.sampled_from(
    [0.0, -0.0, 1e-45, -1e-45, 0.5, -0.5, 1.0, -2.0, 3e38, math.inf, -math.inf, math.nan]
)
_SHAPES = {"a": (10, 5), "none": (2, 0), "number": ()}


@pytest.mark.parametrize("scope", support.every_night(("leaf", "global"), ["leaf"]))
def test_any_scores_have_the_exact_number_of_masks(scope):
    """For fractions of Python and traced ones, with ties, two zeros, subnormals, infinities and NaN."""
    run = jax.jit(lambda w, fraction: prune(w, MASKS.init(w), fraction, scope=scope, **EVERYWHERE))

    @hypothesis.settings(max_examples=25)
    @hypothesis.given(drawn=st.lists(_SCORES, min_size=51, max_size=51), part=st.integers(0, 64))
    def check(drawn, part):
        params, rest = {}, np.float32(drawn)
        for name, shape in _SHAPES.items():
            leaf, rest = np.split(rest, [math.prod(shape)])
            params[name] = leaf.reshape(shape)
        expected = lowest(params, part / 64, scope)
        options = {"scores": params, "scope": scope} | EVERYWHERE
        after = freeze(MASKS.init(params), part / 64, **options)
        support.assert_same_bits(held_by(after), expected)
        pruned, after = run(params, np.float32(part / 64))
        support.assert_same_bits(held_by(after), expected)
        support.assert_same_bits(pruned, pruned_like(params, expected))

    check()


def test_traced_fractions_stay_within_the_leaf():
    """Take the nearest fraction that is allowed, and 0 for NaN."""
    params = support.bias(50)
    run = jax.jit(lambda fraction: prune(params, MASKS.init(params), fraction, **EVERYWHERE)[0])
    counts = [int(np.sum(run(x) == 0)) for x in (np.nan, -0.5, 0.58, 1.5, np.inf)]
    assert counts == [0, 0, 29, 50, 50]
    with pytest.raises(TypeError, match=r"got float32\[2\]: use jax.vmap"):
        run(jnp.array([0.5, 0.6]))
    with pytest.raises(TypeError, match=r"got bool\[\]"):
        run(True)


def test_random_choice_is_nested_and_depends_on_the_key_alone():
    """Let neither scores, nor params, nor other leaves have a say."""
    params = dict.fromkeys(("x", "y"), np.ones((10, 5), np.float32))
    key = jax.random.key(3)
    opt_state = MASKS.init(params)

    def choose(fraction, key=key, **options):
        options = {"criterion": "random", "scope": "leaf", "key": key} | EVERYWHERE | options
        held = held_by(prune(params, opt_state, fraction, **options)[1])
        support.assert_same_bits(held_by(freeze(opt_state, fraction, **options)), held)
        return held

    held = [choose(fraction) for fraction in (0.0, 0.4, 0.9)]
    for fewer, more in itertools.pairwise(held):
        assert all(np.all(more[name][fewer[name]]) for name in params)
    support.assert_same_bits(choose(0.4, key=3, scores=jax.tree.map(np.negative, params)), held[1])
    assert not np.array_equal(choose(0.4, jax.random.key(4))["x"], held[1]["x"])
    assert not np.array_equal(held[1]["x"], held[1]["y"])
    alone = choose(0.4, include={"x": False, "y": True})
    support.assert_same_bits(alone, held[1] | {"x": np.zeros((10, 5), bool)})


def test_random_choice_is_uniform():
    """Mask each of ten entries three times in ten over 2000 keys, within five deviations."""
    choose = functools.partial(freeze, criterion="random", **EVERYWHERE)

    @jax.jit
    @jax.vmap
    def draw(key):
        return choose(MASKS.init(jnp.ones(10)), 0.3, key=key).mask

    drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 2000)))
    assert (np.sum(~drawn, axis=1) == 3).all()
    np.testing.assert_allclose(np.mean(~drawn, axis=0), 0.3, atol=5 * math.sqrt(0.21 / 2000))


def test_only_included_leaves_are_touched():
    """Take leaves of two axes, or those of a function, a tree or a prefix, which may name leaves that
    the masks do not see; the others do not count into a global fraction."""
    params = {"net": support.random_params(), "out": (support.bias(3), support.bias(4))}
    leaves = {"kernel": params["net"]["kernel"], "last": params["out"][1]}
    opt_state = optax.masked(MASKS, {"net": True, "out": (False, True)}).init(params)
    for names, include in (
        (("kernel",), None),
        (("kernel", "last"), {"net": {"kernel": np.True_, "bias": False}, "out": True}),
        (("kernel", "last"), lambda tree: jax.tree.map(lambda leaf: leaf.size in (60, 4), tree)),
        (("last",), {"net": False, "out": ({"no": True}, True)}),
    ):
        held = jax.tree.map(lambda leaf: np.zeros(leaf.shape, bool), leaves)
        held |= lowest({name: leaves[name] for name in names}, 0.3, "global")
        net = {"kernel": held["kernel"], "bias": np.zeros(5, bool)}
        choose = functools.partial(prune, sparsity=0.3, scope="global", include=include)
        after, state = jax.jit(choose)(params, opt_state)
        seen = {"net": net, "out": (optax.MaskedNode(), held["last"])}
        support.assert_same_bits(held_by(state), seen)
        whole = {"net": net, "out": (np.zeros(3, bool), held["last"])}
        support.assert_same_bits(after, pruned_like(params, whole))
        if not callable(include):
            choose = functools.partial(freeze, fraction=0.3, scope="global", include=include)
            frozen = jax.jit(choose)(opt_state, scores=params)
            support.assert_same_bits(held_by(frozen), seen)
    for include, place in (
        ({"net": False}, "include"),
        ({"net": {"kernel": 1, "bias": True}, "out": True}, r"include\['net'\]\['kernel'\]"),
    ):
        with pytest.raises(ValueError, match=place + " does not fit the params"):
            freeze(opt_state, 0.5, scores=params, include=include)


def test_a_given_mask_is_a_tree_a_prefix_or_a_function():
    """Hold from the first step on; each boolean is for one entry, one leaf or a part of the tree."""
    start = {"a": {"w": support.normal((2, 3), 0), "b": support.bias(3, 1)}, "c": jnp.ones(2)}
    whole, above = np.array([[True, False, True], [False, True, False]]), start["a"]["w"] > 0
    for mask, expected in (
        (None, (True, True, True)),
        (False, (False, False, False)),
        ({"a": {"w": whole, "b": False}, "c": True}, (False, whole, True)),
        ({"a": False, "c": jnp.array([True, False])}, (False, False, [True, False])),
        (lambda p: {"a": {"w": p["a"]["w"] > 0, "b": True}, "c": False}, (True, above, False)),
    ):
        tx = optax.chain(optax.sgd(0.1), optperm.mask_elements(mask))
        params, _ = loops.train(tx, start, [start, start], how="eager")[-1]
        leaves = zip(jax.tree.leaves(params), jax.tree.leaves(start), expected, strict=True)
        for after, before, wanted in leaves:
            assert np.array_equal(after != before, np.broadcast_to(wanted, before.shape))


def test_masks_accumulate_and_are_reset():
    """Rank all entries each time, and free none but by `reset_masks`."""
    params = jnp.array([[5.0], [1.0], [-2.0], [4.0], [-3.0]])
    opt_state = freeze(MASKS.init(params), 0.4, scores=params[::-1])
    assert held_by(opt_state).ravel().tolist() == [False, False, True, True, False]
    pruned, opt_state = prune(params, opt_state, 0.4)
    assert pruned.ravel().tolist() == [5.0, 0.0, 0.0, 4.0, -3.0]
    assert held_by(opt_state).ravel().tolist() == [False, True, True, True, False]
    again, opt_state = prune(pruned, opt_state, 0.6)
    assert again.ravel().tolist() == [5.0, 0.0, 0.0, 4.0, 0.0]
    support.assert_same_bits(prune(again, opt_state, 0.2), (again, opt_state))
    support.assert_same_bits(freeze(opt_state, 0.0, scores=params), opt_state)
    support.assert_same_bits(reset_masks(opt_state), MASKS.init(params))


def test_scores_decide_with_their_signs():
    """Drop the lowest scores, and not those nearest to 0."""
    params, scores = np.float32([9, 0.1, -8, 3, 4]), np.float32([0, 1, -2, 3, 4])
    for options, expected in (
        ({"scores": scores[:, None]}, [9, 0.1, 0, 3, 4]),
        ({}, [9, 0, -8, 3, 4]),
    ):
        pruned, _ = prune(params[:, None], MASKS.init(params[:, None]), 0.2, **options)
        support.assert_same_bits(pruned, np.float32(expected)[:, None])


def test_each_leaf_may_have_a_share_of_its_own():
    """Take a tree of fractions, or a prefix of one; by default the fractions of `erk_sparsity`."""
    params = {"a": support.normal((20, 5)), "b": [support.normal((4, 2)), support.bias(9)]}
    for fraction, zeros in (
        ({"a": 0.1, "b": 0.5}, [10, 4, 0]),
        (erk_sparsity(params, 0.5), [54, 0, 0]),
        (0.5, [54, 0, 0]),
    ):
        choose = functools.partial(prune, sparsity=fraction)
        pruned = jax.jit(lambda p, choose=choose: choose(p, MASKS.init(p))[0])(params)
        assert [np.sum(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(pruned)] == zeros


# Numbers that careless arithmetic changes
STRANGE = np.float32([-0.0, 0.0, 1e-45, -1e-40, math.inf, -math.inf, math.nan, 1.0, 3e38, -0.3] * 2)


def test_frozen_weights_keep_their_bits():
    """Hold also -0.0, subnormal numbers and NaN, under updates that are NaN or infinite."""
    params, tx = STRANGE, optax.chain(optax.scale(1.0), optperm.mask_elements())
    start = freeze(tx.init(params), 0.5, scores=np.arange(20, dtype=np.float32), **EVERYWHERE)
    step, plain_step = jax.jit(tx.update), jax.jit(optax.apply_updates)
    for update in map(np.float32, (math.nan, math.inf, 1.0, -0.0)):
        given = np.full(20, update)
        (_, once), (after, _) = loops.train(tx, params, [given] * 2, opt_state=start)
        after, updates = np.asarray(after), np.asarray(step(given, once, params)[0])
        support.assert_same_bits(after[:10], params[:10])
        support.assert_same_bits(updates[:10], np.full(10, np.float32(-0.0)))
        support.assert_same_bits(updates[10:], given[10:])
        # Plain addition may flush a subnormal weight to zero, and the bits of NaN are its own.
        normal = np.array([0, 1, 4, 5, 7, 8, 9])
        with np.errstate(invalid="ignore"):
            expected = params[10:][normal] + update + update
        support.assert_same_bits(after[10:][normal], expected)
        plain = np.asarray(plain_step(params, updates))
        support.assert_same_bits(plain[normal], params[normal])


@pytest.mark.usefixtures("lenient")
def test_negative_zero_stays_in_a_step_that_is_not_finite():
    """`optax.apply_if_finite` turns the whole update into 0.0, which would make 0.0 of -0.0."""
    tx = optax.apply_if_finite(optax.chain(optax.sgd(0.1), optperm.mask_elements()), 3)
    params = np.float32([-0.0, 1.0])
    opt_state = freeze(tx.init(params), 0.5, scores=params, **EVERYWHERE)
    after, _ = loops.compiled(tx)(params, opt_state, np.float32([0.0, np.nan]))
    support.assert_same_bits(after, params)


def test_every_dtype_keeps_its_own():
    """Rank float16, bfloat16, float32 and float64 of one tree together, in float64."""
    with jax.enable_x64(True):
        params = {n: support.normal((9,), i, n) for i, n in enumerate(support.DTYPES)}
        params["float64"] = 1 + np.arange(9) * 2.0**-50  # one number in float32

        @jax.jit
        def choose_and_move(params):
            options = {"scope": "global"} | EVERYWHERE
            after, opt_state = prune(params, MASKS.init(params), 0.7, **options)
            updates, new_state = MASKS.update(params, opt_state)
            moved = optperm.apply_updates(after, updates, new_state)
            return after, opt_state, updates, moved

        after, opt_state, updates, moved = choose_and_move(params)
        params = jax.tree.map(np.asarray, params)
        held = lowest({n: np.asarray(p, np.float64) for n, p in params.items()}, 0.7, "global")
        assert 0 < held["float64"].sum() < 9
        support.assert_same_bits(held_by(opt_state), held)
        support.assert_same_bits(after, pruned_like(params, held))
        minus_zero = jax.tree.map(lambda p: np.full_like(p, -0.0), params)
        support.assert_same_bits(updates, jax.tree.map(np.where, held, minus_zero, params))
        doubled = jax.tree.map(lambda p: p + p, params)
        support.assert_same_bits(moved, pruned_like(doubled, held))


def test_nothing_to_choose_from_is_no_error():
    """Take trees without leaves or without entries, and selections of nothing for a fraction of 0."""
    trees = ({}, {"absent": None}, {"empty": jnp.zeros((0, 3))})
    cases = *((tree, True, 1.0) for tree in trees), (support.random_params(), False, 0.0)
    for params, include, fraction in cases:
        opt_state = MASKS.init(params)
        for scope in ("leaf", "global", "erk", "unit"):
            got = prune(params, opt_state, fraction, scope=scope, include=include)
            support.assert_same_bits(got, (params, opt_state))
    # Neither are params that the transformation does not see.
    v, sgd = jnp.ones(3), optax.sgd(0.1)
    for tx in (optperm.rigl(sgd, 0.5, end=200), optperm.prune_gradually(sgd, 0.5, 1.0)):
        assert not jax.tree.leaves(optax.masked(tx, False).init(v).inner_state.mask)


VECTORS = {"layer": {"coef": jnp.arange(1.0, 11.0)}}
SELECTORS = {
    "prune": lambda p, **given: prune(p, MASKS.init(p), 0.5, **given),
    "freeze": lambda p, **given: freeze(MASKS.init(p), 0.5, scores=p, **given),
    "erk_sparsity": lambda p, **given: erk_sparsity(p, 0.5, **given),
    "keep_top": lambda p, **given: keep_top(p, 0.5, **given),
    "gradual": lambda p, **given: optperm.prune_gradually(SGD, 0.5, 1.0, **given).init(p),
    "rigl": lambda p, **given: optperm.rigl(SGD, 0.5, end=200, **given).init(p),
}


@pytest.mark.parametrize("call", SELECTORS.values(), ids=SELECTORS)
def test_a_selection_of_nothing_is_refused_by_name(call):
    """Name the argument and the paths, whether it is left out, a tree or a function of the params."""
    with pytest.raises(
        ValueError, match=r"no leaf is a kernel\. Pass include=True .* layer/coef \(10,\) \(bias\)"
    ):
        call(VECTORS)
    for include in (False, {"layer": False}, lambda p: jax.tree.map(lambda leaf: False, p)):
        with pytest.raises(ValueError, match=r"include= selects no leaf, .* layer/coef \(10,\)"):
            call(VECTORS, include=include)
    call(VECTORS, include=True)


@pytest.mark.parametrize("name", ["gradual", "rigl", "mask_elements"])
def test_functions_see_the_paths_of_flax_as_those_of_dicts(name):
    """Select the same leaves of nnx, of linen with boxes, whose arrays are a "value", and of a dict."""
    plain = {"a": {"bias": jnp.ones((2, 2)), "kernel": support.normal((4, 3))}}
    model = nnx.State({"a": nnx.State(jax.tree.map(nnx.Param, plain["a"]))})
    boxed = jax.tree.map(lambda leaf: nn.Partitioned(leaf, (None, "m")), plain)

    def is_kernel(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/") == "a/kernel",
            params,
        )

    def init(params):
        if name == "mask_elements":
            return optperm.mask_elements(is_kernel).init(params)
        return SELECTORS[name](params, include=is_kernel)

    wanted = jax.tree.leaves(init(plain))
    for got in (init(model), init(boxed)):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(got), wanted)


class Layer(eqx.Module):
    """A model that can be called."""

    kernel: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.kernel + self.bias


def test_a_stack_of_states_is_pruned_and_frozen_within_vmap():
    """Outside, the replicas would share their zeros, and biases would count as matrices."""
    params = {"a": support.normal((2, 4, 3)), "b": support.normal((2, 6))}
    state = jax.jit(jax.vmap(MASKS.init))(params)
    for call in (lambda: prune(params, state, 0.5), lambda: freeze(state, 0.5, scores=params)):
        with pytest.raises(ValueError, match=r"a stack of states: call it within jax.vmap"):
            call()
    pruned, state = jax.jit(jax.vmap(lambda p, s: prune(p, s, 0.5)))(params, state)
    assert (np.asarray(pruned["a"]) == 0).sum(axis=(1, 2)).tolist() == [6, 6]
    again, _ = jax.jit(lambda p, s: prune(p, s, 0.0))(params, state)
    assert again["a"].tolist() == pruned["a"].tolist()


@pytest.mark.parametrize("tx", [MASKS, optperm.rigl(SGD, 0.5, end=200)], ids=["masks", "rigl"])
def test_zeros_of_a_state_count_in_params_that_are_dense(tx):
    """Make as many zeros as asked for, since the zeros of the state rank below all weights."""
    params, other = support.normal((10, 5)), support.normal((10, 5), 1)
    _, state = prune(params, tx.init(params), 0.5)
    before = ~np.asarray(state.mask)
    pruned, state = prune(other, state, 0.8)
    zeros = np.asarray(pruned) == 0
    assert zeros.sum() == (~np.asarray(state.mask)).sum() == 40
    assert zeros[before].all()


def test_a_model_that_can_be_called_is_a_tree_of_fractions():
    model = Layer(support.normal((10, 5)), support.bias(5))
    fractions = jax.tree.map(lambda leaf: 0.5 * (leaf.ndim > 1), model)
    assert (prune(model, MASKS.init(model), fractions)[0].kernel == 0).sum() == 25
    assert (keep_top(model, fractions).kernel == 0).sum() == 25
    assert (~optperm.rigl(SGD, fractions, end=200).init(model).mask.kernel).sum() == 25
    assert optperm.prune_gradually(SGD, fractions, 1.0).init(model).zeros.asked.tolist() == [25]


def test_a_mask_function_that_selects_all_or_nothing_is_refused():
    """Name the paths; entries that depend on values, and flags given as a tree, may be all the same."""
    for flag, says in (
        (True, "True for all leaves, so it masks nothing"),
        (False, "False for all"),
    ):
        with pytest.raises(ValueError, match=f"mask= returns {says}.*layer/coef"):
            optperm.mask_elements(lambda p, flag=flag: {"layer": {"coef": flag}}).init(VECTORS)
        mask = {"layer": flag}
        assert optperm.mask_elements(mask).init(VECTORS).mask["layer"]["coef"].all() == flag
    optperm.mask_elements(lambda p: jax.tree.map(lambda w: w != 0, p)).init(VECTORS)


def test_zeros_are_put_back_into_other_params():
    """Prune a rewound network as the trained one, from every state with zeros; hold frozen weights."""
    start, other = {"w": support.normal((10, 5))}, {"w": support.normal((10, 5), 1)}
    ramped, grown = (
        optperm.prune_gradually(SGD, 0.5, 1.0, every=1),
        optperm.rigl(SGD, 0.5, end=200),
    )
    _, masked = prune(start, optax.chain(SGD, MASKS).init(start), 0.5)
    given = optperm.mask_elements(lambda p: jax.tree.map(lambda w: w != 0, p))
    step = lambda tx: jax.jit(lambda p: tx.update(p, tx.init(p), p)[1])(start)  # noqa: E731
    for opt_state in (
        masked,
        step(ramped),
        step(grown),
        given.init(prune(start, masked, 0.0)[0]),
    ):
        rewound, after = jax.jit(prune, static_argnums=2)(other, opt_state, 0.0)
        support.assert_same_bits(after, opt_state)
        support.assert_same_bits(rewound, pruned_like(other, held_by(opt_state)))
        assert np.sum(np.asarray(rewound["w"]) == 0) == 25
        free, _ = prune(other, reset_masks(opt_state), 0.0)
        support.assert_same_bits(free, other)
    # What is frozen keeps its value, even if it is 0 or if the bias of a layer starts at 0.
    frozen = freeze(masked, 0.8, scores=start)
    rewound, after = prune(other, frozen, 0.0)
    assert np.sum(np.asarray(after[1].mask["w"])) < 25
    support.assert_same_bits(rewound, pruned_like(other, held_by(masked)))
    dense = {"w": start["w"], "b": jnp.zeros(5)}
    state = optperm.mask_elements({"w": True, "b": False}).init(dense)
    loaded = dense | {"b": jnp.ones(5)}
    support.assert_same_bits(prune(loaded, state, 0.0)[0], loaded)


def test_a_leaf_that_a_global_choice_removes_is_named():
    """Warn of it, unless all leaves go, or the choice is traced, or each leaf has its own fraction."""
    small = jax.device_put(np.float32(1e-4) * np.asarray(support.normal((10, 5))))
    params = {"small": small, "b": support.normal((10, 5), 1)}
    opt_state = MASKS.init(params)
    with pytest.warns(UserWarning, match=r"scope='global', all weights of small are zero") as said:
        prune(params, opt_state, 0.5, scope="global")
    assert said[0].filename == __file__
    tx = optperm.prune_gradually(SGD, 0.5, 1.0, every=1, scope="global")
    state = jax.jit(lambda p: tx.update(p, tx.init(p), p)[1])(params)
    (text,) = find_warnings(state, params)
    assert "all weights of small are zero" in text
    prune(params, opt_state, 1.0, scope="global")
    prune(params, opt_state, {"small": 1.0, "b": 0.0})
    jax.eval_shape(lambda p: prune(p, opt_state, 0.5, scope="global"), params)
