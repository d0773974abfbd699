"""RigL, SET and static masks: JaxPruner's sequences, invariants, and steps by hand."""

import jax
import jax.numpy as jnp
import jaxpruner
import loops
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.sparsity import _rigl as module

pytestmark = pytest.mark.usefixtures("lenient")
KEY = jax.random.key(0)


def drop_fractions(*values):
    """Those of the steps 5, 10, ... 30."""
    return lambda count: jnp.float32([0.0, *values, 0.0, 0.0])[count // 5]


ERK = drop_fractions(0.29, 0.223, 0.155, 0.078, 0.02, 0.0)
CASES = {
    "rigl_erk_sgd_momentum": (optax.sgd(0.05, momentum=0.9), ERK, True),
    "rigl_erk_adam": (optax.adam(0.02), ERK, True),
    "rigl_uniform_noskip": (
        optax.adam(0.02),
        drop_fractions(0.28, 0.235, 0.14, 0.07, 0.03, 0.0),
        False,
    ),
    "set_erk": (optax.sgd(0.05, momentum=0.9), 0.3, True),
    "static_random": (optax.adam(0.02), 0.0, False),
}


@pytest.mark.parametrize("case", CASES)
def test_jaxpruners_sequences(case, monkeypatch):
    """From its first mask, with its gradients and, for SET, its random scores."""
    optimizer, drop_fraction, skip_step = CASES[case]
    if case == "set_erk":
        drop_fraction = lambda count: 0.3 + 0.0 * count  # noqa: E731
    z = jaxpruner.load(case)
    if case == "set_erk":
        scores = [jnp.asarray(z["growscore"][name]) for name in sorted(z["growscore"])]
        drawn = lambda leaves, raw, t: [module.order_codes(s[t]) for s in scores]  # noqa: E731
    tx = optperm.rigl(
        optimizer,
        0.8,
        end=31,
        key=KEY,
        every=5,
        drop_fraction=drop_fraction,
        grow="random" if case == "set_erk" else "gradient",
        skip_step=skip_step,
    )
    opt_state = tx.init(z["params0"])
    mask = {
        n: jnp.asarray(z["mask0"][n]) if n in z["mask0"] else m for n, m in opt_state.mask.items()
    }
    if case == "set_erk":
        monkeypatch.setattr(module, "_draw_codes", drawn)
    grads = [{name: g[t] for name, g in z["grad"].items()} for t in range(40)]
    start = opt_state._replace(mask=mask)
    trail = loops.train(tx, z["params0"], grads, how="scan", opt_state=start)
    for t, (found, state) in enumerate(trail):
        for name, wanted in z["mask"].items():
            np.testing.assert_array_equal(state.mask[name], wanted[t], err_msg=f"{name} at {t}")
        if t % 10 == 9:
            expected = {name: p[t // 10] for name, p in z["params"].items()}
            support.assert_close(found, expected, atol=1e-5)
    moved = sum((m[0] != m[-1]).sum() for m in z["mask"].values())
    assert (moved > 4) == (case != "static_random")


def test_share_that_moves_falls_as_the_cosine():
    """alpha_t = alpha / 2 (1 + cos(pi t / T)), of the live weights; all grow where none was live."""
    tx = optperm.rigl(optax.sgd(0.1), 0.5, end=100, key=KEY, every=10, drop_fraction=0.4)
    params = support.normal((20, 20), 0)
    opt_state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    mask = np.asarray(opt_state.mask)
    grads = jnp.where(mask, 0.0, support.normal((20, 20), 1))
    for t in (10, 30, 50, 90):
        _, after = update(grads, opt_state._replace(count=jnp.int32(t)), params)
        share = 0.4 / 2 * (1 + np.cos(np.pi * t / 100))
        assert np.count_nonzero(mask & ~np.asarray(after.mask)) == round(share * mask.sum())


def test_masks_of_a_schedule_do_not_move_from_the_end_on():
    """Neither at the step `end` itself, where a schedule of the share need not be zero."""
    tx = optperm.rigl(optax.sgd(0.1), 0.5, end=20, key=KEY, every=10, drop_fraction=lambda t: 0.4)
    params = support.normal((20, 20), 0)
    opt_state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    grads = jnp.where(opt_state.mask, 0.0, support.normal((20, 20), 1))
    for t, is_moved in ((0, False), (10, True), (15, False), (20, False), (30, False)):
        _, after = update(grads, opt_state._replace(count=jnp.int32(t)), params)
        assert np.any(after.mask != opt_state.mask) == is_moved


def test_state_of_masked_entries_is_that_of_a_first_step():
    """Momentum of before an entry was masked is not the momentum with which it grows again."""
    tx = optperm.rigl(optax.sgd(0.1, momentum=0.5), 0.5, end=9, key=KEY, every=5)
    w = jnp.array([[3.0, 1.0, 0.0, 0.0]])
    opt_state = tx.init(w)._replace(mask=jnp.array([[True, True, False, False]]))
    opt_state = opt_state._replace(inner_state=jax.tree.map(jnp.ones_like, opt_state.inner_state))
    _, after = tx.update(jnp.ones((1, 4)), opt_state, w)
    np.testing.assert_allclose(after.inner_state[0].trace, [[1.5, 1.5, 0.0, 0.0]])


def test_entry_that_grows_begins_from_zero_whatever_the_params_hold_there():
    """Params that were never pruned have numbers at masked entries, which are no part of the model."""
    tx = optperm.rigl(optax.sgd(0.1), 0.5, end=3, key=KEY, every=1, drop_fraction=lambda t: 0.5)
    w = jnp.array([[3.0, 1.0, 7.0, 7.0]])
    opt_state = tx.init(w)._replace(
        mask=jnp.array([[True, True, False, False]]), count=jnp.int32(1)
    )
    updates, opt_state = tx.update(jnp.array([[0.0, 0.0, 1.0, -3.0]]), opt_state, w)
    after = optperm.apply_updates(w, updates, opt_state)
    np.testing.assert_allclose(after, [[3.0, 0.0, 0.0, 0.3]], rtol=1e-5)


def test_one_drop_and_grow_by_hand():
    """Of 3, 1 and two zeros the 1 goes and the steepest comes, from 0 and without momentum."""
    tx = optperm.rigl(
        optax.sgd(0.1, momentum=0.5), 0.5, end=3, key=KEY, every=1, drop_fraction=lambda t: 0.5
    )
    w = jnp.array([[3.0, 1.0, 7.0, 7.0]])
    start = tx.init(w)._replace(mask=jnp.array([[True, True, False, False]]))
    w, start = optperm.sparsity.prune(w, start, 0.0)
    assert w.tolist() == [[3.0, 1.0, 0.0, 0.0]]
    grads = [jnp.array([[1.0, 2.0, 9.0, 9.0]]), jnp.array([[1.0, 0.0, 2.0, -3.0]])]
    (first, _), (second, state) = loops.train(tx, w, grads, opt_state=start)
    np.testing.assert_allclose(first, [[2.9, 0.8, 0.0, 0.0]], rtol=1e-6)
    # Momentum .5 * 1 + 1 of the first weight, and none of the last.
    np.testing.assert_allclose(second, [[2.75, 0.0, 0.0, 0.3]], rtol=1e-6)
    np.testing.assert_allclose(state.inner_state[0].trace, [[1.5, 1.0, 0.0, -3.0]], rtol=1e-6)
    # What is not finite is no reason to grow: nothing moves, whatever goes and comes first.
    grads[1] = jnp.full((1, 4), jnp.nan)
    start = start._replace(mask=jnp.array([[False, False, True, True]]))
    _, (_, state) = loops.train(tx, w, grads, opt_state=start)
    assert state.mask.tolist() == [[False, False, True, True]]


def test_a_fresh_entry_under_adam_moves_further():
    """(1 - b1^j) / sqrt(1 - b2^j) times as far as an old one: 1.985 at count 500."""
    tx = optperm.rigl(
        optax.adam(0.1), 0.5, end=501, key=KEY, every=500, drop_fraction=lambda t: 0.5
    )
    w = jnp.array([[5.0, -300.0, 0.0, 0.0]])
    start = tx.init(w)._replace(mask=jnp.array([[True, True, False, False]]))
    grads = jnp.ones((501, 1, 4)) * jnp.array([[1.0, 1.0, 0.0, 2.0]])

    @jax.jit
    def train(w, state):
        w, state = loops.carry(loops.make_step(tx), w, state, grads[:500])
        return w, *loops.make_step(tx)(w, state, grads[500])

    before, after, state = train(w, start)
    dropped = int(np.argmin(np.abs(np.asarray(before)[0, :2])))
    steps = np.asarray(after - before)[0]
    assert state.mask.tolist() == [[dropped != 0, dropped != 1, False, True]]
    # Old: 1 - b1^501 over sqrt(1 - b2^501), which the common correction makes 1.
    np.testing.assert_allclose(steps[3] / steps[1 - dropped], 1.985, rtol=2e-3)


def test_masks_keep_their_number_and_fresh_entries_start_anew():
    """For gradients with NaN and infinities too, whatever the optimizer's `init` gives."""
    params = {"a": support.normal((8, 6)), "b": {"c": support.normal((5, 4)), "d": support.bias(3)}}
    optimizer = optax.adagrad(0.1)  # begins at .1
    tx = optperm.rigl(optimizer, 0.7, end=20, key=KEY, every=2)
    grads = [support.random_like(params, seed) for seed in range(9)]
    grads[4]["a"] = grads[4]["a"].at[:4].set(jnp.nan)
    grads[6]["a"] = grads[6]["a"].at[:].set(jnp.nan)
    trail = loops.train(tx, params, grads, how="scan")
    counts = [[int(m.sum()) for m in jax.tree.leaves(state.mask)] for _, state in trail]
    fractions = jax.tree.leaves(optperm.sparsity.erk_sparsity(params, 0.7))
    assert counts == [[round(48 * (1 - fractions[0])), round(20 * (1 - fractions[1]))]] * 9
    moved = 0
    for t in (2, 8):
        old, new = (trail[s][1].mask["a"] for s in (t - 1, t))
        fresh = ~old & new
        moved += int(fresh.sum())
        sums = trail[t][1].inner_state[0].sum_of_squares["a"]
        np.testing.assert_allclose(sums[fresh], 0.1 + grads[t]["a"][fresh] ** 2, rtol=1e-6)
    assert moved > 4
    # A gradient that is not finite moves nothing.
    for t in (4, 6):
        support.assert_same_bits(trail[t][1].mask, trail[t - 1][1].mask)
    assert isinstance(trail[-1][1].mask["b"]["d"], optax.MaskedNode)


def test_a_static_mask_is_the_optimizer_on_masked_gradients():
    params = support.random_params()
    tx = optperm.rigl(optax.adam(0.1), 0.5, end=1, key=KEY, drop_fraction=0)
    opt_state = tx.init(params)
    params, opt_state = optperm.sparsity.prune(params, opt_state, 0.0)
    grads = [support.random_like(params, seed) for seed in range(4)]
    hidden = [g | {"kernel": jnp.where(opt_state.mask["kernel"], g["kernel"], 0)} for g in grads]
    trail = loops.train(tx, params, grads, opt_state=opt_state)
    plain = loops.train(optax.adam(0.1), params, hidden)
    for (p, state), (expected, inner) in zip(trail, plain, strict=True):
        support.assert_close((p, state.inner_state), (expected, inner), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["sgd", "partition", "chain"])
def test_a_dense_leaf_whose_path_ends_like_a_sparse_leafs_keeps_its_state(name):
    """The leaves a/w and b/a/w share a shape and the end of their paths; only a/w has a mask."""
    sgd = optax.sgd(0.1, momentum=0.9)
    labels = {"a": {"w": "x"}, "b": {"a": {"w": "y"}}, "c": "x"}
    optimizer = {
        "sgd": sgd,
        "partition": optax.partition({"x": sgd, "y": sgd}, labels),
        "chain": optax.chain(optax.trace(0.9), optax.scale(-0.1)),
    }[name]
    w = support.normal((4, 3))
    params = {"a": {"w": w}, "b": {"a": {"w": w}}, "c": support.normal((2, 2))}
    include = {"a": True, "b": False, "c": False}
    tx = optperm.rigl(optimizer, 0.5, end=9, key=KEY, every=8, include=include)
    params, state = optperm.sparsity.prune(params, tx.init(params), 0.0)
    grads = [support.random_like(params, seed) for seed in range(3)]
    hidden = [g | {"a": {"w": jnp.where(state.mask["a"]["w"], g["a"]["w"], 0.0)}} for g in grads]
    trail = loops.train(tx, params, grads, opt_state=state)
    plain = loops.train(optimizer, params, hidden)
    for (p, s), (expected, inner) in zip(trail, plain, strict=True):
        support.assert_close((p, s.inner_state), (expected, inner), rtol=1e-6, atol=1e-7)
    # Of a momentum of 1 everywhere, the momentum of dead entries is dropped in the next step.
    ones, zeros = (
        jax.tree.map(jnp.ones_like, state.inner_state),
        jax.tree.map(jnp.zeros_like, params),
    )
    _, after = tx.update(zeros, state._replace(inner_state=ones), params)
    sums = sorted(round(float(x.sum()), 3) for x in jax.tree.leaves(after.inner_state) if x.ndim)
    assert sums == [3.6, 5.4, 10.8]  # .9 of 4 entries, of the 6 live ones of 12, and of 12


@pytest.mark.parametrize(
    ("optimizer", "named"),
    [
        (optax.flatten(optax.sgd(0.1, momentum=0.9)), r"\(32,\) in a TraceState"),
        (optax.adafactor(0.1, min_dim_size_to_factor=2), r"\(4,\) in a FactoredState"),
        (optax.sm3(0.1), r"in a ScaleBySM3State"),
        (optperm.low_rank(optax.scale_by_adam(), 2), "in a LowRankState"),
        (optperm.apollo(rank=2), r"\(2, 6\) in a ScaleByAdamState"),
    ],
)
def test_a_state_that_cannot_be_restarted_is_refused(optimizer, named):
    """A mask says nothing about arrays of another form than params."""
    params = {"a": jnp.ones((4, 6)), "b": jnp.ones((2, 4))}
    tx = optperm.rigl(optimizer, 0.5, end=200, key=KEY)
    with pytest.raises(ValueError, match=f"an array of shape .*{named}, .*leave out optax.flatten"):
        tx.init(params)


def test_a_low_rank_state_of_dense_leaves_alone_is_accepted():
    """Nothing has to be restarted there."""
    low = optperm.low_rank(optax.scale_by_adam(), 2)
    inner = optax.partition(
        {"low": low, "full": optax.adam(0.1)}, {"dense": "low", "sparse": "full"}
    )
    params = {"dense": jnp.ones((4, 6)), "sparse": jnp.ones((2, 4))}
    include = {"dense": False, "sparse": True}
    tx = optperm.rigl(inner, 0.5, end=200, key=KEY, include=include)
    updates, _ = tx.update(params, tx.init(params), params)
    assert bool(jnp.all(updates["dense"] != 0))


def test_pruned_params_are_zero_where_the_mask_is_off():
    """Before the first step too, when the optimizer has not yet set the dead weights to zero."""
    tx, start = optperm.rigl(optax.sgd(0.1), 0.5, end=9, every=3, key=KEY), support.normal((6, 5))
    state = tx.init(start)
    params, pruned = optperm.sparsity.prune(start, state, 0.5, criterion="random", key=KEY)
    assert int(pruned.mask.sum()) < int(state.mask.sum()) == 15
    np.testing.assert_array_equal(params, np.where(pruned.mask, start, 0.0))


def test_the_first_mask_is_uniform_and_random_growth_too():
    """Over 1000 keys each of 12 entries lives in a quarter of the masks, before and after a growth."""
    w = jnp.arange(12.0).reshape(3, 4)

    @jax.jit
    @jax.vmap
    def masks(key):
        tx = optperm.rigl(
            optax.sgd(0.0),
            0.75,
            end=9,
            key=key,
            every=1,
            grow="random",
            drop_fraction=lambda t: 1.0,
        )
        state = tx.init(w)
        first = state.mask
        for _ in range(2):
            _, state = tx.update(w, state, w)
        return first, state.mask

    for found in masks(jax.random.split(KEY, 1000)):
        assert (found.sum(axis=(1, 2)) == 3).all()
        np.testing.assert_allclose(
            np.mean(found, axis=0), 0.25, atol=5 * np.sqrt(0.25 * 0.75 / 1000)
        )


def test_an_int_seeds_the_key():
    w = {"a": jnp.ones((6, 4))}
    options = {"sparsity": 0.5, "end": 200, "grow": "random"}
    states = [
        optperm.rigl(optax.sgd(0.1), key=key, **options).init(w) for key in (7, jax.random.key(7))
    ]
    support.assert_same_bits(*states)
