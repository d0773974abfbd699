"""RigL, SET and static masks: JaxPruner's sequences, NumPy's choices, and steps by hand."""

import jax
import jax.numpy as jnp
import jaxpruner
import loops
import numpy as np
import optax
import pytest
import support
from stable_choice import highest

import optperm
from optperm.core.states import find_states
from optperm.sparsity import _rigl as module
from optperm.sparsity import prune
from optperm.sparsity._choice import nearest_count

pytestmark = pytest.mark.usefixtures("lenient")


def drop_fractions(*values):
    """Make the schedule with these values at the steps 5, 10, ... 30."""
    return lambda count: jnp.float32([0.0, *values, 0.0, 0.0])[count // 5]


SGD, ADAM = optax.sgd(0.05, momentum=0.9), optax.adam(0.02)
ERK = drop_fractions(0.29, 0.223, 0.155, 0.078, 0.02, 0.0)
# The optimizer, the drop fractions, and whether a step that moves the mask skips the optimizer's.
CASES = {
    "rigl_erk_sgd_momentum": (SGD, ERK, True),
    "rigl_erk_adam": (ADAM, ERK, True),
    "rigl_uniform_noskip": (ADAM, drop_fractions(0.28, 0.235, 0.14, 0.07, 0.03, 0.0), False),
    "set_erk": (SGD, lambda count: 0.3 + 0.0 * count, True),
    "static_random": (ADAM, 0.0, False),
}


@pytest.mark.parametrize("case", support.every_night(CASES, ["rigl_erk_sgd_momentum"]))
def test_jaxpruners_sequences_are_kept(case, monkeypatch):
    """Start from its first mask, and take its gradients and, for SET, its random scores."""
    optimizer, drop_fraction, skip_step = CASES[case]
    z, grow = jaxpruner.load(case), "random" if case == "set_erk" else "gradient"
    if grow == "random":
        scores = [jax.device_put(z["growscore"][name]) for name in sorted(z["growscore"])]
        drawn = lambda leaves, raw, t: [module.order_codes(s[t]) for s in scores]  # noqa: E731
        monkeypatch.setattr(module, "_draw_codes", drawn)
    options = {"drop_fraction": drop_fraction, "grow": grow, "skip_step": skip_step}
    tx = optperm.rigl(optimizer, 0.8, end=31, every=5, **options)
    start = jax.jit(tx.init)(z["params0"])
    mask = start.mask | z["mask0"]
    jaxpruner.assert_followed(case, tx, opt_state=start._replace(mask=mask))
    moved = sum((m[0] != m[-1]).sum() for m in z["mask"].values())
    assert (moved > 4) == (case != "static_random")


def test_each_leaf_moves_as_numpy_says():
    """Drop the lowest of the live entries of each leaf, and grow the highest of all others."""
    rng = np.random.default_rng(0)
    shapes = {"a": (5, 4), "b": (5, 4), "c": (3, 2, 4), "number": (), "none": (0, 3)}

    def draw(name):  # with ties
        dtype = "bfloat16" if name in ("b", "number") else "float32"
        return jax.device_put(rng.normal(size=shapes[name]).round(1).astype(dtype))

    params, grads = ({name: draw(name) for name in shapes} for _ in range(2))
    fractions = {name: 0.6 if leaf.ndim else 0.0 for name, leaf in params.items()}
    options = {"drop_fraction": lambda t: 0.5, "include": True}
    tx = optperm.rigl(optax.sgd(0.1), fractions, end=9, every=2, **options)

    @jax.jit
    def step(params, grads):
        state = tx.init(params)._replace(count=jnp.int32(2))
        return state.mask, tx.update(grads, state, params)[1].mask

    start, moved = step(params, grads)
    for name, before in start.items():
        live = np.asarray(before)
        number = live.size - nearest_count(fractions[name], live.size)
        moving = nearest_count(0.5, number)
        assert live.sum() == number
        kept = highest(np.where(live, np.abs(np.float64(params[name])), -1.0), number - moving)
        grown = highest(np.where(kept, -1.0, np.abs(np.float64(grads[name]))), moving)
        np.testing.assert_array_equal(moved[name], kept | grown, err_msg=name)


@pytest.mark.parametrize(
    ("drop_fraction", "shares"),
    [
        (0.4, {t: 0.4 / 2 * (1 + np.cos(np.pi * t / 100)) for t in (10, 30, 50, 90)}),
        (lambda t: 0.4, {0: 0.0, 10: 0.4, 15: 0.0, 100: 0.0, 110: 0.0}),
    ],
    ids=["number", "schedule"],
)
def test_share_that_moves_falls_as_the_cosine_and_is_0_from_the_end_on(drop_fraction, shares):
    """Move alpha / 2 (1 + cos(pi t / T)) of the live weights, or what a schedule says."""
    options = {"end": 100, "every": 10, "drop_fraction": drop_fraction}
    tx = optperm.rigl(optax.sgd(0.1), 0.5, **options)
    params = support.normal((20, 20), 0)
    opt_state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    mask = np.asarray(opt_state.mask)
    grads = np.where(mask, np.float32(0.0), support.normal((20, 20), 1))
    for t, share in shares.items():
        _, after = update(grads, opt_state._replace(count=jnp.int32(t)), params)
        assert np.count_nonzero(mask & ~np.asarray(after.mask)) == round(share * mask.sum())


def test_one_drop_and_grow_by_hand():
    """Drop 1 of the live weights 3 and 1, and grow the steepest weight from 0, not from its 7."""
    options = {"end": 3, "every": 1, "drop_fraction": lambda t: 0.5}
    tx = optperm.rigl(optax.sgd(0.1, momentum=0.5), 0.5, **options)
    w, grads = np.float32([[3.0, 1.0, 7.0, 7.0]]), np.float32([[1.0, 2.0, 2.0, -3.0]])
    start = jax.jit(tx.init)(w)
    start = start._replace(count=np.int32(1), mask=np.array([[True, True, False, False]]))
    # A momentum of 1 everywhere counts at live entries alone.
    start = start._replace(inner_state=jax.tree.map(np.ones_like, start.inner_state))
    ((after, state),) = loops.train(tx, w, [grads], opt_state=start)
    np.testing.assert_allclose(state.inner_state[0].trace, [[1.5, 0.5, 0.0, -3.0]], rtol=1e-6)
    np.testing.assert_allclose(after, [[2.85, 0.0, 0.0, 0.3]], rtol=1e-6)
    # Nonfinite gradients are no reason to grow: the mask stays.
    start = start._replace(mask=np.array([[False, False, True, True]]))
    bad = np.full((1, 4), np.nan, np.float32)
    ((_, state),) = loops.train(tx, w, [bad], opt_state=start)
    assert state.mask.tolist() == [[False, False, True, True]]


def test_a_gradient_of_zero_moves_no_mask_of_its_leaf():
    """Move the weights of the other leaf, since only zeros would be ranked by their positions."""
    params = {"a": support.normal((8, 6)), "b": support.normal((8, 6), 1)}
    tx = optperm.rigl(optax.sgd(0.1), 0.5, end=20, every=1)
    grads = params | {"a": np.zeros((8, 6), np.float32)}

    @jax.jit
    def step(params, grads):
        start = tx.init(params)._replace(count=jnp.int32(1))
        return start.mask, tx.update(grads, start, params)[1].mask

    before, after = jax.device_get(step(params, grads))
    assert (after["a"] == before["a"]).all()
    assert (after["b"] != before["b"]).any()


def test_entry_that_grows_begins_where_init_of_the_optimizer_does():
    """Begin the sum of squares of AdaGrad at 0.1, and keep it elsewhere."""
    params, grads = support.normal((8, 6)), support.normal((8, 6), 1)
    tx = optperm.rigl(optax.adagrad(0.1), 0.7, end=20, every=2)

    @jax.jit
    def step(params, grads):
        state = tx.init(params)
        old = jax.tree.map(jnp.ones_like, state.inner_state)
        state = state._replace(count=jnp.int32(2), inner_state=old)
        _, after = tx.update(grads, state, params)
        return state.mask, after.mask, after.inner_state[0].sum_of_squares

    before, now, sums = map(np.asarray, step(params, grads))
    assert (now & ~before).any()
    wanted = np.where(before, 1.0, 0.1) + np.where(now, np.asarray(grads) ** 2, 0.0)
    np.testing.assert_allclose(sums, wanted, rtol=1e-6)


def test_a_dense_leaf_whose_path_ends_like_a_sparse_leafs_keeps_its_state():
    """Tell a/w, which has a mask, from b/a/w, which shares its shape and the end of its path."""
    sgd = optax.sgd(0.1, momentum=0.9)
    labels = {"a": {"w": "x"}, "b": {"a": {"w": "y"}}, "c": "x"}
    w = np.ones((4, 3), np.float32)
    params = {"a": {"w": w}, "b": {"a": {"w": w}}, "c": np.ones((2, 2), np.float32)}
    include = {"a": True, "b": False, "c": False}
    optimizer = optax.partition({"x": sgd, "y": sgd}, labels)
    tx = optperm.rigl(optimizer, 0.5, end=9, every=8, include=include)
    state, zeros = jax.jit(tx.init)(params), jax.tree.map(np.zeros_like, params)
    ones = jax.tree.map(np.ones_like, state.inner_state)
    _, after = jax.jit(tx.update)(zeros, state._replace(inner_state=ones), params)
    leaves = [np.asarray(x) for x in jax.tree.leaves(after.inner_state) if x.ndim]
    sums = sorted(round(float(x.sum()), 3) for x in leaves)
    assert sums == [3.6, 5.4, 10.8]  # 0.9 of 4 entries, of the 6 live ones of 12, and of 12


def test_a_state_that_cannot_be_restarted_is_refused():
    """Refuse arrays of another form than params, unless they belong to dense leaves alone."""
    params = {"a": np.ones((4, 6), np.float32), "b": np.ones((2, 4), np.float32)}
    low = optperm.low_rank(optax.scale_by_adam(), 2)
    for optimizer, named in (
        (optax.flatten(optax.sgd(0.1, momentum=0.9)), r"\(\d+,\) in a TraceState"),
        (low, "in a LowRankState"),
        (optax.sm3(0.1), "in a ScaleBySM3State"),
        (
            optax.chain(optax.trace(0.9), optax.flatten(optax.trace(0.9))),
            r"\(\d+,\) in a TraceState",
        ),
    ):
        for given in (params, params["a"]):
            with pytest.raises(ValueError, match=f"an array of shape .*{named}, .*leave out"):
                jax.eval_shape(optperm.rigl(optimizer, 0.5, end=200).init, given)
    parts = optax.partition({"low": low, "full": optax.adam(0.1)}, {"a": "low", "b": "full"})
    tx = optperm.rigl(parts, 0.5, end=200, include={"a": False, "b": True})
    updates, _ = jax.jit(lambda p: tx.update(p, tx.init(p), p))(params)
    assert np.all(np.asarray(updates["a"]) != 0)


@pytest.mark.parametrize("is_single", support.every_night((False, True), (True,)))
def test_constants_beside_moments_like_params_are_kept(is_single):
    """Restart the moments of Muon at dead entries, but not its three coefficients."""
    params = {"a": support.normal((4, 3)), "b": support.normal((3, 5), 1)}
    params = params["a"] if is_single else params
    tx = optperm.rigl(optax.contrib.muon(0.1), 0.5, end=9, every=8)
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(params, state, params)
    (moments,) = (s for s in find_states(state.inner_state, optax.contrib.MuonState))
    np.testing.assert_array_equal(moments.ns_coeffs, np.float32([3.4445, -4.775, 2.0315]))
    for mu, mask in zip(jax.tree.leaves(moments.mu), jax.tree.leaves(state.mask), strict=True):
        np.testing.assert_array_equal(np.asarray(mu) != 0, mask)


def test_pruned_params_are_zero_where_the_mask_is_off():
    """Set dead weights to zero before the first step too."""
    tx, start = optperm.rigl(optax.sgd(0.1), 0.5, end=9, every=3), support.normal((6, 5))

    @jax.jit
    def prune_first(params):
        state = tx.init(params)
        return state, prune(params, state, 0.5, criterion="random", key=0)

    state, (params, pruned) = prune_first(start)
    assert int(pruned.mask.sum()) < int(state.mask.sum()) == 15
    np.testing.assert_array_equal(params, np.where(pruned.mask, start, 0.0))


def test_first_mask_and_random_growth_are_uniform():
    """Let each of 12 entries live in a quarter of 1000 masks, before and after a growth."""
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    options = {"end": 9, "every": 1, "grow": "random", "drop_fraction": lambda t: 1.0}

    @jax.jit
    @jax.vmap
    def masks(key):
        tx = optperm.rigl(optax.sgd(0.0), 0.75, key=key, **options)
        state = tx.init(w)
        return state.mask, tx.update(w, state._replace(count=jnp.int32(1)), w)[1].mask

    for found in map(np.asarray, masks(jax.random.split(jax.random.key(0), 1000))):
        assert (found.sum(axis=(1, 2)) == 3).all()
        np.testing.assert_allclose(
            np.mean(found, axis=0), 0.25, atol=5 * np.sqrt(0.25 * 0.75 / 1000)
        )
