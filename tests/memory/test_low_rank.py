"""low_rank against closed forms and Optax's GaLore, and with what fails; what both methods send."""

import functools
import itertools

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import support
from collectives import find_collectives
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.core.trees import without_boxes
from optperm.memory import _projections as projections

pytestmark = pytest.mark.usefixtures("lenient")
Numbers = optax.contrib.GaLoreDimensionNumbers


def grads_of(shapes, seed=0, steps=1, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(steps, *s)).astype(dtype) for k, s in shapes.items()}


def scan(tx, grads):
    """Return all updates of a sequence of gradients, and the states after them."""

    def step(state, g):
        u, state = tx.update(g, state)
        return state, (u, state)

    return jax.lax.scan(step, tx.init(jax.tree.map(lambda g: g[0], grads)), grads)[1]


@functools.lru_cache(maxsize=4)
def compiled(tx):
    return jax.jit(functools.partial(scan, tx))


def run(tx, grads):
    """Return the arrays of `scan` as those of NumPy."""
    return jax.device_get(compiled(tx)(grads))


def test_identity_with_its_residual_is_the_gradient(x64):
    """U = G for any basis and rank, and without the residual U = P P'G, which is another."""
    grads = grads_of({"a": (6, 9), "b": (9, 6)}, steps=3, dtype=np.float64)
    whole = optperm.low_rank(optax.identity(), 2, every=2, limit=None)
    chex.assert_trees_all_close(run(whole, grads)[0], grads, atol=1e-6, rtol=0)
    one = {"a": grads["a"]}
    updates, states = run(optperm.low_rank(optax.identity(), 2, residual=None), one)
    p, u, g = (tree["a"][-1] for tree in (states.basis, updates, grads))
    np.testing.assert_allclose(u, p @ (p.T @ g), rtol=0, atol=1e-12)
    np.testing.assert_allclose(p.T @ p, np.eye(2), rtol=0, atol=1e-12)


def test_bases_are_orthonormal_and_hold_what_is_largest():
    """The Gram matrix, on either side, gives the singular vectors; a power step comes near to them."""
    g = grads_of({"g": (24, 40)})["g"][0] * np.logspace(0, -2, 40, dtype=np.float32)
    u, s, vt = np.linalg.svd(g.astype(np.float64))
    start = np.linalg.qr(u[:, :4] + 0.1 * np.random.default_rng(1).normal(size=(24, 4)))[0]

    @jax.jit
    def find_bases(g, start):
        left, right = projections.gram_basis(g, 4), projections.gram_basis(g.T, 4)
        return left, right, projections.power_basis(g, start)

    left, right, near = map(np.asarray, find_bases(g, start.astype(np.float32)))
    for basis, exact in ((left, u[:, :4]), (right, vt[:4].T)):
        np.testing.assert_allclose(basis.T @ basis, np.eye(4), rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.abs(np.sum(basis * exact, 0)), 1.0, rtol=0, atol=1e-4)
    np.testing.assert_allclose(near.T @ near, np.eye(4), rtol=0, atol=1e-5)
    held = [np.sum(np.square(basis.T @ g)) for basis in (near, start)]
    assert held[1] < 0.99 * np.sum(s[:4] ** 2) < held[0]


@pytest.mark.slow
def test_optax_galore_is_the_larger_side_with_kept_moments(x64):
    """Equal up to the first refresh, within the accuracy of a decomposition in float32."""
    grads = grads_of({"wide": (8, 12), "tall": (12, 8)}, steps=5, dtype=np.float64)
    # So that no two singular values are near to each other.
    grads = jax.tree.map(lambda g: g * np.logspace(0, -2, g.shape[-1]), grads)
    inner = optax.trace(0.9)
    ours = optperm.low_rank(inner, 3, projection="svd", residual=None, carry=False, side="larger")
    theirs = optax.contrib.scale_by_galore(3, 200, base_optimizer=inner)
    (u, _), (v, _) = run(ours, grads), run(theirs, grads)
    for k, wanted in v.items():
        assert np.linalg.norm(u[k] - wanted) < 1e-6 * np.linalg.norm(wanted), k


def test_transposed_and_stacked_and_merged_leaves_step_as_their_matrices():
    """Transposed leaves, stacks of layers and kernels with heads give the updates of their matrices."""
    g = grads_of({"a": (6, 10), "b": (6, 10)}, steps=3)
    tree = g | {"turned": np.swapaxes(g["a"], 1, 2), "stack": np.stack([g["a"], g["b"]], 1)}
    tree |= {"heads": g["b"].reshape(3, 6, 2, 5)}
    numbers = dict.fromkeys(tree, Numbers(-2, -1)) | {"heads": Numbers(np.int64(0), (1, 2))}
    tx = optperm.low_rank(optax.trace(0.9), 2, projection="svd", axes=numbers)
    u, states = run(tx, tree)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    close(u["turned"], np.swapaxes(u["a"], 1, 2))
    close(u["stack"], np.stack([u["a"], u["b"]], 1))
    close(u["heads"].reshape(3, 6, 10), u["b"])
    assert states.basis["stack"].shape == (3, 2, 6, 2)


def test_axes_of_all_params_may_be_named_where_the_optimizer_sees_some():
    params = {"b": jnp.ones(4), "w": jnp.ones((6, 9))}
    numbers = {"b": None, "w": Numbers(0, 1)}
    low = optperm.low_rank(optax.scale_by_adam(), 2, axes=numbers)
    tx = optax.partition({"low": low, "other": optax.sgd(1.0)}, {"b": "other", "w": "low"})
    state = jax.eval_shape(tx.init, params)
    assert state.inner_states["low"].inner_state.basis["w"].shape == (6, 2)
    updates, _ = jax.eval_shape(tx.update, params, state, params)
    assert updates["w"].shape == (6, 9)


def test_a_gradient_that_is_zero_or_not_finite_makes_no_basis(x64):
    """At step 0, at a refresh, and between: the next one makes it, and the norm stays."""
    grads = grads_of({"w": (6, 9)}, steps=8, dtype=np.float64)["w"]
    by_svd, by_power = (
        optperm.low_rank(optax.identity(), 2, projection=each, every=3) for each in ("svd", "power")
    )
    for bad in (0.0, np.nan):
        spoiled = grads.copy()
        spoiled[[0, 3, 4, 7]] = bad
        _, s = run(by_svd, {"w": spoiled})
        basis, norm = (np.asarray(x["w"]) for x in (s.basis, s.norm))
        assert np.all(basis[0] == 0)
        same = [np.array_equal(basis[i], basis[i + 1]) for i in range(7)]
        # Step 0 has none, 1 makes it; 3 and 4 fail, 5 makes the next; 6 is due by the plan; 7 is not.
        assert same == [False, True, True, True, False, False, True]
        assert norm[0] == 0 < norm[1]
        assert norm[2] == norm[3] == norm[4]
        assert norm[7] == norm[6] > 0
        for at in (1, 5, 6):
            u = np.linalg.svd(grads[at])[0][:, :2]
            np.testing.assert_allclose(np.abs(np.sum(u * basis[at], 0)), 1.0, atol=1e-9)
        # A power step needs an earlier basis, so the SVD makes the first basis.
        _, s = run(by_power, {"w": spoiled[:2]})
        np.testing.assert_allclose(np.abs(s.basis["w"][1]), np.abs(basis[1]), atol=1e-9)


def test_random_bases_of_every_leaf_key_and_refresh_differ_and_take_turns():
    """After step 0 the j-th of J leaves changes its basis at step j * every // J, modulo `every`."""
    grads = grads_of({f"w{i}": (4, 6) for i in range(5)}, steps=7)

    @jax.jit
    def train(key):
        states = scan(optperm.low_rank(optax.identity(), 1, every=3, key=key), grads)[1]
        return jnp.stack(list(states.basis.values()))

    first, other = (np.asarray(train(jax.random.key(seed))) for seed in range(2))
    has_new = np.any(first[:, 1:] != first[:, :-1], axis=(2, 3))
    turns = np.arange(5)[:, None] * 3 // 5
    np.testing.assert_array_equal(has_new, np.arange(1, 7) % 3 == turns)
    rows = np.concatenate([first, other]).reshape(-1, 4)
    assert len(np.unique(rows, axis=0)) == 2 * (5 + 5 + 5)


def test_a_resumed_run_takes_the_turns_of_its_own_every():
    """After step 0, a next turn that was a hundred steps away is forgotten; a nearer one is not."""
    grads = {"a": np.ones((4, 6), np.float32), "b": np.ones((4, 6), np.float32)}

    @jax.jit
    def train(periods):
        def step(state, every):
            tx = optperm.low_rank(optax.identity(), 1, every=lambda _: every)
            state = tx.update(grads, state)[1]
            return state, state.basis

        return jax.lax.scan(step, optperm.low_rank(optax.identity(), 1).init(grads), periods)[1]

    def find_new(first, second):
        bases = train(np.array([first] * 2 + [second] * 8))
        changed = {name: np.any(x[1:] != x[:-1], axis=(1, 2)) for name, x in bases.items()}
        return [(t, name) for t in range(2, 10) for name in bases if changed[name][t - 1]]

    assert find_new(100, 4) == find_new(4, 4) == [(2, "b"), (4, "a"), (6, "b"), (8, "a")]
    assert find_new(4, 100) == [(2, "b"), (4, "a")]


def test_a_python_number_among_params_begins_as_an_array_does():
    tx, b = optperm.low_rank(optax.scale_by_adam(), 1 / 2), np.ones((4, 6), np.float32)
    states = (tx.init({"a": a, "b": b}) for a in (0.5, jnp.array(0.5)))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_moments_at_a_new_basis_are_those_in_its_coordinates():
    """First ones turn by C, squares by those of its entries, and Adam's squares by LDAdam's formula,
    where decay rates of 0 stand for no bias correction."""
    inners = {
        "adam": optax.scale_by_adam(),
        "lion": optax.scale_by_lion(),
        "ema": optax.ema(0.9),
        "trace": optax.trace(0.9),
        "rms": optax.scale_by_rms(0.9),
        "corrected": optax.scale_by_rms(0.9, bias_correction=True),
    }
    # Each in a branch: a label of `optax.partition` applies to all leaves of its branch.
    labels = {name: name for name in inners}
    rng = np.random.default_rng(0)
    grads = {name: {"w": rng.normal(size=(8, 16)).astype(np.float32)} for name in inners}

    @jax.jit
    def train(b1, b2):
        inner = optax.partition(inners, labels)
        tx = optperm.low_rank(inner, 3, every=1, b1=b1, b2=b2)
        _, before = tx.update(grads, tx.init(grads))
        return before, tx.update(optax.tree.zeros_like(grads), before)[1]

    def moments(state, name, field):
        inner_state = state.inner_state.inner_states[name].inner_state
        return getattr(inner_state, field)[name]["w"]

    for b1, b2 in ((0.9, 0.999), (0.0, 0.0)):
        before, after = jax.tree.map(np.asarray, train(b1, b2))
        c = {name: after.basis[name]["w"].T @ before.basis[name]["w"] for name in inners}
        old, new = (functools.partial(moments, state) for state in (before, after))
        first = [("adam", "mu", 0.9), ("lion", "mu", 0.99)]
        for name, field, decay in [*first, ("ema", "ema", 0.9), ("trace", "trace", 0.9)]:
            wanted = decay * c[name] @ old(name, field)
            np.testing.assert_allclose(new(name, field), wanted, atol=1e-5)
        c1, c2 = 1 - b1, 1 - b2
        mean, square = old("adam", "mu"), old("adam", "nu")
        variance = c["adam"] ** 2 @ (square / c2 - (mean / c1) ** 2)
        wanted = 0.999 * c2 * np.abs(variance + (c["adam"] @ mean / c1) ** 2)
        np.testing.assert_allclose(new("adam", "nu"), wanted, rtol=1e-4, atol=1e-7)
        for name in ("rms", "corrected"):
            wanted = 0.9 * c[name] ** 2 @ old(name, "nu")
            np.testing.assert_allclose(new(name, "nu"), wanted, rtol=1e-4)


@pytest.mark.slow
def test_a_complete_optimizer_steps_as_its_direction_does():
    """The residual takes the sign of the inner direction; a schedule of updates is one number a step."""
    grads = grads_of({"w": (6, 9), "b": (4,)}, steps=4)
    whole = optperm.low_rank(optax.adam(0.01), 2, limit=None)
    parts = optperm.low_rank(optax.scale_by_adam(), 2, limit=None, every=lambda t: 200 + t)
    parts = optax.chain(parts, optax.scale(-0.01))
    chex.assert_trees_all_close(run(whole, grads)[0], run(parts, grads)[0], rtol=2e-4, atol=1e-6)


@pytest.mark.slow
def test_muon_inside_orthogonalizes_the_projected_gradient(x64):
    """U = P NS(R) = NS(P P'G): its polynomial of odd powers commutes with P; the axes must be given."""
    axes = dict.fromkeys(("wide", "tall"), optax.contrib.MuonDimensionNumbers())
    muon = optax.contrib.scale_by_muon(weight_dimension_numbers=axes)
    grads = grads_of({"wide": (6, 9), "tall": (9, 6)}, dtype=np.float64)
    updates, states = run(optperm.low_rank(muon, 2, projection="svd", residual=None), grads)
    p, g, u = (jax.tree.map(lambda x: x[0], tree) for tree in (states.basis, grads, updates))
    projected = {"wide": p["wide"] @ p["wide"].T @ g["wide"]}
    projected |= {"tall": g["tall"] @ p["tall"] @ p["tall"].T}
    wanted, _ = jax.jit(lambda g: muon.update(g, muon.init(g)))(projected)
    chex.assert_trees_all_close(u, wanted, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", [optperm.low_rank, optperm.apollo])
def test_an_inner_optimizer_that_reads_params_is_refused_at_its_update(method):
    params = {"w": jnp.zeros((6, 9))}
    options = {"carry": False} if method is optperm.low_rank else {}
    tx = method(optax.adamw(1e-3), rank=2, **options)
    with pytest.raises(ValueError, match="params"):
        jax.eval_shape(tx.update, params, tx.init(params), params)


def test_a_state_of_another_rank_is_refused_with_both_shapes():
    params, adam = {"w": jnp.zeros((6, 9))}, optax.scale_by_adam()
    state = optperm.low_rank(adam, 2).init(params)
    with pytest.raises(ValueError, match=r"basis of shape \(6, 2\) .* \(6, 3\)"):
        jax.eval_shape(optperm.low_rank(adam, 3).update, params, state)


class Attention(eqx.Module):
    """A model that can be called, with a field whose name nnx gives to arrays."""

    query: jax.Array
    value: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.query @ self.value + self.bias


def test_a_model_that_can_be_called_is_a_tree_of_axes_and_flags():
    model = Attention(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 96), (96, 64), (64,))))
    axes = optperm.leaf_axes(model, query=None)
    assert axes.value.kind == "kernel"
    adam = optax.scale_by_adam()
    low, of_apollo = (
        jax.eval_shape(each(adam, 4, axes=axes).init, model).inner_state.mu
        for each in (optperm.low_rank, optperm.apollo)
    )
    assert low.query.shape == of_apollo.query.shape == (64, 96)
    assert low.value.shape == of_apollo.value.shape == (96, 4)
    assert optperm.memory.rank_for(model, 1.6, axes=axes) > 0.2
    flags = Attention(query=True, value=False, bias=False)
    mu = jax.eval_shape(optperm.quantize_state(adam, include=flags).init, model).inner_state.mu
    assert mu.query.dtype == "float8_e4m3fn"
    assert mu.value.dtype == "float32"


def test_functions_of_params_see_no_variables_and_must_select_something():
    """The same paths and arrays as in a tree of arrays, in `init` and in `update`."""
    plain = {"up": {"kernel": np.ones((64, 96), np.float32), "value": np.ones(3, np.float32)}}
    state = nnx.State({"up": nnx.State(jax.tree.map(nnx.Param, plain["up"]))})
    adam, seen = optax.scale_by_adam(), set()
    low, apollo = (functools.partial(each, adam, 4) for each in (optperm.low_rank, optperm.apollo))
    quantize = functools.partial(optperm.quantize_state, adam)

    def choose(chosen, other):
        def see(path, leaf):
            assert isinstance(leaf, jax.Array)
            seen.add(jax.tree_util.keystr(path, simple=True, separator="/"))
            return chosen if path[-1].key == "kernel" else other

        return lambda params: jax.tree_util.tree_map_with_path(see, params)

    for make, name, chosen, other in (
        (low, "axes", Numbers(), None),
        (apollo, "axes", Numbers(), None),
        (quantize, "include", True, False),
    ):
        for params in (plain, state):
            tx = make(**{name: choose(chosen, other)})
            jax.eval_shape(lambda p, tx=tx: tx.update(p, tx.init(p), p), params)
            with pytest.raises(ValueError, match=f"{name} (names no kernels|selects no params)"):
                jax.eval_shape(make(**{name: choose(other, other)}).init, params)
    assert seen == {"up/kernel", "up/value"}


KNOWN = (
    optax.scale_by_lion(),
    optax.scale_by_yogi(),
    optax.chain(optax.clip(0.1), optax.scale_by_adam(mu_dtype=jnp.bfloat16)),
    optax.chain(optax.scale_by_sign(), optax.scale_by_adam()),
    optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio()),
)
UNKNOWN = (
    (optax.scale_by_amsgrad(), "ScaleByAmsgradState"),
    (optax.flatten(optax.scale_by_amsgrad()), "ScaleByAmsgradState"),
    (optax.scale_by_sm3(), "ScaleBySM3State"),
    (optax.flatten(optax.scale_by_adam()), "ScaleByAdamState whose mu is not like"),
    (optax.scale_by_lbfgs(), "ScaleByLBFGSState"),
)


def test_a_state_that_cannot_be_carried_over_is_refused_in_any_container():
    """Also where `init` is traced or mapped."""
    w, b, c = (np.zeros(shape, np.float32) for shape in ((6, 9), (3,), ()))
    linear = eqx.filter_eval_shape(eqx.nn.Linear, 6, 9, key=jax.random.key(0))
    containers = (
        {"w": w, "b": b, "c": c},
        [w, b],
        eqx.filter(linear, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct)),
        nnx.state(nnx.eval_shape(lambda: nnx.Linear(6, 9, rngs=nnx.Rngs(0))), nnx.Param),
        w,
    )
    for params in containers:
        stack = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), params
        )
        for inner, message in UNKNOWN:
            init = optperm.low_rank(inner, 2).init
            calls = [(functools.partial(jax.eval_shape, init), params)]
            calls += [(functools.partial(jax.eval_shape, jax.vmap(init)), stack)]
            if params is w:
                calls += [(init, params)]
            for call, given in calls:
                says = f"inner contains the state {message}.* pass carry=False"
                with pytest.raises(ValueError, match=says):
                    call(given)
            jax.eval_shape(optperm.low_rank(inner, 2, carry=False).init, params)
        for inner in KNOWN:
            jax.eval_shape(optperm.low_rank(inner, 2).init, params)


def test_codes_of_projected_leaves_are_refused_with_the_way_out():
    """The other order, leaves at full rank, and moments that stay as they are, are trained."""
    params = {"w": np.ones((64, 96), np.float32), "b": np.ones(96, np.float32)}
    adam, low = optax.scale_by_adam(), functools.partial(optperm.low_rank, rank=4)
    for bits in (8, 4):
        quantize = functools.partial(optperm.quantize_state, bits=bits, min_size=64)
        parts = {"codes": quantize(adam), "plain": adam}
        for inner in (
            quantize(adam),
            optax.chain(optax.clip(1.0), quantize(optax.scale_by_lion())),
            optax.partition(parts, {"w": "codes", "b": "plain"}),
        ):
            way = r"QuantizedState.*quantize_state\(low_rank\(\.\.\.\)\), or pass carry=False"
            with pytest.raises(ValueError, match=way):
                jax.eval_shape(low(inner).init, params)
        for tx in (
            quantize(low(adam)),
            low(quantize(adam), carry=False),
            low(optax.partition(parts, {"w": "plain", "b": "codes"})),
        ):
            jax.eval_shape(lambda p, tx=tx: tx.update(p, tx.init(p)), params)


def test_a_state_made_with_another_argument_is_refused():
    """If its shapes show it, also in a trace; a rate, a period or a kind of basis may change."""
    params = {"w": np.ones((6, 6), np.float32), "s": np.ones((6, 6, 6), np.float32)}
    numbers = {"w": Numbers(0, 1), "s": Numbers(-2, -1)}
    adam = optax.scale_by_adam()
    low = functools.partial(optperm.low_rank, adam, 2, axes=numbers)
    apollo = functools.partial(optperm.apollo, adam, axes=numbers)
    quantize = functools.partial(optperm.quantize_state, adam, min_size=6)
    other = {"axes": lambda p: numbers | {"s": Numbers(0, 1)}}
    fewer = {"axes": numbers | {"w": None}}
    made = {"low": low(), "fewer": low(**fewer), "kept": low(carry=False), "codes": quantize()}
    made |= {f"apollo {rank}": apollo(rank) for rank in (1, 2, 4)}
    states = jax.jit(lambda params: {name: tx.init(params) for name, tx in made.items()})(params)
    for state, used, name, is_static in (
        (states["low"], optperm.low_rank(adam, 3, axes=numbers), "rank", 1),
        (states["low"], low(side="larger"), "side", 0),
        (states["low"], low(**other), "axes", 0),
        (states["kept"], low(), "carry", 0),
        (states["low"], low(**fewer), "axes", 1),
        (states["fewer"], low(), "axes", 1),
        (states["apollo 1"], apollo(4), "rank", 1),
        (states["apollo 4"], apollo(2), "rank", 1),
        (states["apollo 2"], apollo(2, **other), "axes", 0),
        (states["codes"], quantize(include={"w": True, "s": False}), "include", 0),
        (states["codes"], quantize(min_size=7), "min_size", 0),
        (states["low"], low(every=3, projection="svd", scale=2.0, limit=None, key=1), "", 1),
        (states["apollo 2"], apollo(2, every=3, by="tensor", scale=1.0, limit=None, key=1), "", 1),
        (states["codes"], quantize(include=True, key=1), "", 1),
    ):
        # The state of the first call is read, and the state of the second one is traced.
        calls = [functools.partial(jax.eval_shape, functools.partial(used.update, state=state))]
        calls += [functools.partial(jax.eval_shape, used.update, state=state)]
        for call in calls[: 1 + is_static]:
            if not name:
                call(params, params=params)
                continue
            with pytest.raises(ValueError, match=f"made with another {name}=|change .*{name}"):
                call(params, params=params)


def boxed_by_linen():
    def box(value, *names):
        return nn.Partitioned(value, names)

    return {
        "embedding": box(jnp.ones((32, 66)), "x", None),
        "query": {"kernel": box(jnp.ones((66, 2, 14)), None, None, "x")},
        "up": {"kernel": box(jnp.ones((66, 130)), None, "x"), "bias": box(jnp.ones(130), "x")},
    }


def boxed_by_nnx():
    def box(leaf):
        return nnx.Param(nnx.with_partitioning(lambda: leaf.value, leaf.names)())

    is_box = lambda node: isinstance(node, nn.Partitioned)  # noqa: E731
    return nnx.State(jax.tree.map(box, boxed_by_linen(), is_leaf=is_box))


@pytest.mark.filterwarnings("ignore:apollo leaves")
@pytest.mark.parametrize(
    ("method", "boxed"),
    support.every_night(
        itertools.product((optperm.low_rank, optperm.apollo), (boxed_by_linen, boxed_by_nnx)),
        [(optperm.apollo, boxed_by_linen)],
    ),
)
def test_flax_shards_the_state_by_the_names_of_axes(method, boxed):
    """As in its guides, by the specs of an abstract state: leaves at full rank keep those of params, and
    arrays of other shapes have none. The updates are those without boxes."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    tx, how = method(optax.scale_by_adam(), 3), nn if boxed is boxed_by_linen else nnx

    def include(params):
        is_included = lambda path, _: path[0].key != "embedding"  # noqa: E731
        return jax.tree_util.tree_map_with_path(is_included, params)

    included = optperm.quantize_state(tx, min_size=1, include=include)

    def init():
        params = boxed()
        return params, tx.init(params)

    with jax.set_mesh(mesh):
        specs = how.get_partition_spec(jax.eval_shape(init))
        is_spec = lambda node: isinstance(node, P)  # noqa: E731
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
        params, state = jax.jit(init, out_shardings=shardings)()
    mu = without_boxes(state.inner_state.mu)
    assert mu["embedding"].sharding.spec == P("x", None)
    assert mu["up"]["kernel"].shape == (3, 130)
    assert mu["up"]["kernel"].sharding.is_fully_replicated
    updates, state = jax.jit(tx.update)(params, state, params)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    plain = jax.tree.map(np.asarray, without_boxes(params))
    wanted, _ = jax.jit(lambda g: tx.update(g, tx.init(g), g))(plain)
    chex.assert_trees_all_close(without_boxes(updates), wanted, rtol=1e-5, atol=1e-6)
    mu = without_boxes(jax.eval_shape(included.init, params).inner_state.inner_state.mu)
    assert mu["embedding"].dtype == "float32"
    assert mu["up"]["kernel"].dtype == "float8_e4m3fn"
    report = optperm.memory.state_report(tx, params)
    assert report.words == optperm.memory.state_report(tx, plain).words
    assert "rank 3 of" in report.leaves[-1].treatment


ALONG_K, ALONG_BOTH = (P(None, "x"), 16), (P("x", "y"), 4 * 64 * 4)


@pytest.mark.parametrize(
    ("kind", "spec", "largest"),
    support.every_night(
        [(kind, *cut) for kind in ("random", "svd", "apollo") for cut in (ALONG_K, ALONG_BOTH)],
        [("svd", *ALONG_K), ("apollo", *ALONG_BOTH)],
    ),
)
def test_a_sharded_gradient_is_not_gathered(kind, spec, largest):
    """Along k it costs a few numbers a step; along both, R is summed, and nothing is gathered but for a
    new Gram matrix."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    inner = optax.scale_by_adam()
    tx = optperm.apollo(inner, 4)
    if kind != "apollo":
        tx = optperm.low_rank(inner, 4, projection=kind, every=2)
    params = jax.device_put({"w": np.zeros((32, 64), np.float32)}, NamedSharding(mesh, spec))
    text = jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text()
    found = find_collectives(text)
    always = found if kind == "apollo" else [each for each in found if not each.is_conditional]
    assert always
    assert max(each.bytes for each in always) <= largest
    assert {each.operation for each in always} == {"all-reduce"}
    rare = {each.operation for each in found} - {"all-reduce"}
    assert not rare or (kind == "svd" and spec[0] == "x")


def test_a_column_nearly_outside_of_the_subspace_gets_a_bounded_step():
    """By Fira's formula, its first step would be 1e5 times as long as the steps of other columns."""
    rng = np.random.default_rng(0)
    large = rng.normal(size=(16, 4)) @ rng.normal(size=(4, 63))
    outside = np.linalg.qr(large, mode="complete")[0][:, -1:]
    g = np.concatenate([large, 1e-2 * outside + 1e-7 * large[:, :1]], axis=1)[None]
    grads = {"w": g.astype(np.float32)}
    tx = optperm.low_rank(optax.scale_by_adam(), 4, projection="svd", limit=None)
    updates, _ = run(tx, grads)
    norms = np.linalg.norm(updates["w"][0], axis=0)
    assert norms[-1] < 1.1 * 10 * (16 / 4) ** 0.5 * 4**0.5
