"""low_rank against the authors' sequences, closed forms, Optax's GaLore, and gradients that fail."""

import functools
import pathlib
import sys

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import support
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.memory import _low_rank as module
from optperm.memory import _moments as moments
from optperm.memory import _projections as projections
from optperm.memory._matrices import plan_matrices

sys.path.append(str(pathlib.Path(__file__).parent))
import low_rank_sequences as sequences
from low_rank_sequences import EVERY, LEAVES, RANK, adam

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
from collectives import find_collectives

pytestmark = pytest.mark.usefixtures("lenient")
Numbers = optax.contrib.GaLoreDimensionNumbers
svd = functools.partial(optperm.low_rank, rank=RANK, every=EVERY, projection="svd")
SEQUENCES = {
    "galore_sgd_params": lambda: svd(optax.identity(), residual=None, scale=0.25),
    "galore_adam_params": lambda: svd(adam(), residual=None, carry=False, scale=0.25),
    "galore_adam_one_basis": lambda: svd(adam(), residual=None, carry=False, scale=0.25, every=100),
    "fira_adam_corrected": lambda: svd(adam(), carry=False),
    "fira_adam_corrected_scale_quarter": lambda: svd(adam(), carry=False, scale=0.25),
    "fira_adam_no_limiter": lambda: svd(adam(), carry=False, limit=None),
    "fira_adam_official": lambda: sequences.in_official_order(
        svd(sequences.without_correction(), carry=False)
    ),
    "fira_adam_official_no_bias_correction": lambda: svd(
        sequences.without_correction(), carry=False
    ),
    "rotate_plain": lambda: svd(adam(), residual=None),
    "rotate_fira": lambda: svd(adam()),
    "rotate_fira_scale_half": lambda: svd(adam(), scale=0.5),
}
USUAL = [("galore_adam_params", "tall"), ("fira_adam_official", "square"), ("rotate_fira", "wide")]


@pytest.mark.parametrize(
    ("name", "leaf"),
    support.every_night([(name, leaf) for name in SEQUENCES for leaf in LEAVES], USUAL),
)
def test_sequences_of_the_authors(name, leaf, x64):
    """GaLore, Fira and carried moments step for step, in float64."""
    found = sequences.sequence(SEQUENCES[name](), leaf)
    support.assert_close(found, sequences.of_leaf(name, leaf), atol=1e-9)


def carried(state, change, b1, b2):
    """The state of an optimizer of one leaf after a change of its basis."""
    structure = jax.tree.structure({"w": 0})
    (before,) = moments.split_moments(state, structure)
    formulas = moments.find_formulas(
        state, lambda *_: ["squares"] * len(before), lambda: None, b1=b1, b2=b2
    )
    after = moments.carry_moments(formulas, change, before)
    return moments.join_moments(state, [after])


@pytest.mark.parametrize("kind", ["svd", "power"])
def test_sequence_of_ldadam(kind, x64):
    """Its parts, with a basis of the momentum and the gradient: power step and carried moments."""
    data, rho, b1, b2 = sequences.reference(), 0.908, 0.908, 0.99
    matrix = plan_matrices({"w": jnp.zeros((8, 12))}, RANK, "smaller", None)["w"]

    def step(carry, g):
        w, state, basis = carry
        t = state.count
        mean = state.mu["w"] / jnp.where(t > 0, 1 - b1**t, 1.0)
        target = jnp.where(t > 0, rho * basis @ mean + (1 - rho) * g, g)
        new = projections.gram_basis(target, RANK)
        if kind == "power":
            new = jnp.where(t > 0, projections.power_basis(target, basis), new)
        change = moments.Change(matrix, basis, new, t > 0)
        state = carried(state, change, b1, b2)
        u, state = optax.scale_by_adam(b1, b2, 1e-30).update({"w": new.T @ g}, state)
        w = w - sequences.RATE * new @ u["w"]
        return (w, state, new), w

    start = jnp.asarray(data["params0_wide"])
    state = optax.scale_by_adam().init({"w": jnp.zeros((RANK, 12))})
    carry = (start, state, jnp.zeros((8, RANK)))
    _, trail = jax.jit(lambda carry, g: jax.lax.scan(step, carry, g))(
        carry, jnp.asarray(data["grads_wide"])
    )
    np.testing.assert_allclose(
        trail[data["steps"]], data[f"ldadam_{kind}_wide"], rtol=0.0, atol=1e-9
    )


def grads_of(shapes, seed=0, steps=1, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {k: jnp.asarray(rng.normal(size=(steps, *s)).astype(dtype)) for k, s in shapes.items()}


def run(tx, grads, state=None):
    """All updates of a sequence of gradients, and the states after them."""

    def step(state, g):
        u, state = tx.update(g, state)
        return state, (u, state)

    @jax.jit
    def scan(grads):
        first = tx.init(jax.tree.map(lambda g: g[0], grads))
        return jax.lax.scan(step, first, grads)[1]

    return scan(grads)


def test_signs_of_basis_vectors_do_not_matter(x64, monkeypatch):
    """Carried moments turn with them: the sequence stays when LAPACK gives others."""
    gram_basis = projections.gram_basis
    flips = jnp.array([-1.0, 1.0, -1.0])
    calls = []

    def flipped(g, rank):
        calls.append(g)
        sign = jnp.where(jnp.sum(g) > 0, flips, -flips)
        return gram_basis(g, rank) * sign

    monkeypatch.setattr(module, "gram_basis", flipped)
    found = sequences.sequence(SEQUENCES["rotate_fira"](), "tall")
    support.assert_close(found, sequences.of_leaf("rotate_fira", "tall"), atol=1e-9)
    assert calls


def test_signs_of_basis_vectors_do_not_matter_to_kept_moments(x64, monkeypatch):
    """Each new vector has the sign of the old one: the sequence stays when LAPACK gives others."""
    gram_basis = projections.gram_basis
    grads = grads_of({"a": (6, 9)}, steps=6, dtype=np.float64)

    def flipped(g, rank):
        return gram_basis(g, rank) * jnp.where(jnp.sum(g) > 0, 1.0, -1.0)

    def train():
        tx = optperm.low_rank(adam(), 2, projection="svd", carry=False, every=1)
        return run(tx, grads)[0]

    known = train()
    assert len(set((jnp.sum(grads["a"], axis=(1, 2)) > 0).tolist())) == 2
    monkeypatch.setattr(module, "gram_basis", flipped)
    support.assert_close(train(), known, atol=1e-9)


def test_identity_with_its_residual_is_the_gradient(x64):
    """U = G for any basis and rank, and without the residual U = P P'U, which is another."""
    grads = grads_of({"a": (6, 9), "b": (9, 6)}, steps=3, dtype=np.float64)
    whole = optperm.low_rank(optax.identity(), 2, every=2, limit=None)
    support.assert_close(run(whole, grads)[0], grads, atol=1e-6)
    updates, states = run(optperm.low_rank(optax.identity(), 2, residual=None), grads)
    p, u, g = states.basis["a"][-1], updates["a"][-1], grads["a"][-1]
    np.testing.assert_allclose(u, p @ (p.T @ g), rtol=0, atol=1e-12)
    np.testing.assert_allclose(p.T @ p, np.eye(2), rtol=0, atol=1e-12)
    assert np.linalg.matrix_rank(u) == 2


def test_bases_are_orthonormal_and_hold_what_is_largest():
    """The Gram matrix, on either side, gives the singular vectors; a power step comes near to them."""
    g = grads_of({"g": (24, 40)})["g"][0] * jnp.logspace(0, -2, 40)
    make = jax.jit(
        lambda g, start: (
            projections.gram_basis(g, 4),
            projections.gram_basis(g.T, 4),
            projections.power_basis(g, start),
        )
    )
    u, s, vt = np.linalg.svd(np.asarray(g, np.float64))
    start = np.linalg.qr(u[:, :4] + 0.1 * np.random.default_rng(1).normal(size=(24, 4)))[0]
    left, right, near = make(g, jnp.float32(start))
    for basis, exact in ((left, u[:, :4]), (right, vt[:4].T)):
        np.testing.assert_allclose(basis.T @ basis, np.eye(4), rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.abs(np.sum(basis * exact, 0)), 1.0, rtol=0, atol=1e-4)
    np.testing.assert_allclose(near.T @ near, np.eye(4), rtol=0, atol=1e-5)
    held = [np.sum(np.square(basis.T @ g)) for basis in (near, start)]
    assert held[1] < 0.99 * np.sum(s[:4] ** 2) < held[0]


def test_optax_galore_is_the_larger_side_with_kept_moments(x64):
    """Equal up to the first refresh, as far as their decomposition in float32 tells."""
    grads = grads_of({"wide": (8, 12), "tall": (12, 8)}, steps=5, dtype=np.float64)
    # So that no two singular values are near to each other.
    grads = jax.tree.map(lambda g: g * jnp.logspace(0, -2, g.shape[-1]), grads)
    inner = optax.trace(0.9)
    ours = optperm.low_rank(inner, 3, projection="svd", residual=None, carry=False, side="larger")
    theirs = optax.contrib.scale_by_galore(3, 200, base_optimizer=inner)
    (u, _), (v, _) = run(ours, grads), run(theirs, grads)
    for k, wanted in v.items():
        assert np.linalg.norm(u[k] - wanted) < 1e-6 * np.linalg.norm(wanted), k


def test_transposed_and_stacked_and_merged_leaves():
    """A transposed leaf gives the transposed update, a stack that of its layers, heads their matrix."""
    g = grads_of({"a": (6, 10), "b": (6, 10), "heads": (6, 2, 5)}, steps=3)
    tree = {
        "a": g["a"],
        "turned": jnp.swapaxes(g["a"], 1, 2),
        "stack": jnp.stack([g["a"], g["b"]], 1),
        "b": g["b"],
        "heads": g["heads"],
        "merged": g["heads"].reshape(3, 6, 10),
    }
    numbers = dict.fromkeys(tree, Numbers(-2, -1)) | {"heads": Numbers(np.int64(0), (1, 2))}
    make = functools.partial(
        optperm.low_rank, optax.scale_by_adam(), 2, projection="svd", dimension_numbers=numbers
    )
    u, states = run(make(), tree)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    close(u["turned"], jnp.swapaxes(u["a"], 1, 2))
    close(u["stack"], jnp.stack([u["a"], u["b"]], 1))
    close(u["heads"].reshape(3, 6, 10), u["merged"])
    assert states.basis["stack"].shape == (3, 2, 6, 2)


def test_turned_and_scaled_gradients_give_turned_and_equal_updates(x64):
    """QG gives QU and cG gives U, with another basis in each step; a leaf too small keeps its rank."""
    g = grads_of({"w": (6, 9), "small": (4, 4)}, steps=3, dtype=np.float64)
    q = jnp.linalg.qr(jnp.asarray(np.random.default_rng(1).normal(size=(6, 6))))[0]
    tree = {"w": g["w"], "turned": q @ g["w"], "scaled": 1e3 * g["w"], "small": g["small"]}
    tx = optperm.low_rank(adam(), 3, projection="svd", every=1)
    u, states = run(tx, tree)
    np.testing.assert_allclose(u["turned"], q @ u["w"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(u["scaled"], u["w"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(u["small"], run(adam(), {"small": g["small"]})[0]["small"])
    assert states.basis["small"].shape == (3,)
    assert not np.allclose(u["w"], run(adam(), {"w": g["w"]})[0]["w"], atol=0.1)


def test_axes_of_leaves_may_be_named_under_a_mask():
    """A tree of axes for all params serves an optimizer that sees some of them."""
    params = {"b": jnp.ones(4), "w": jnp.ones((6, 9))}
    low = optperm.low_rank(
        optax.scale_by_adam(), 2, dimension_numbers={"b": None, "w": Numbers(0, 1)}
    )
    tx = optax.partition({"low": low, "other": optax.sgd(1.0)}, {"b": "other", "w": "low"})
    state = tx.init(params)
    assert state.inner_states["low"].inner_state.basis["w"].shape == (6, 2)
    updates, _ = jax.eval_shape(tx.update, params, state, params)
    assert updates["w"].shape == (6, 9)


@pytest.mark.parametrize("bad", [0.0, np.nan])
def test_a_gradient_that_is_zero_or_not_finite_makes_no_basis(bad, x64):
    """At step 0, at a refresh, and between: the next one makes it, and the norm stays."""
    grads = grads_of({"w": (6, 9)}, steps=8, dtype=np.float64)
    tx = optperm.low_rank(optax.identity(), 2, projection="svd", every=3)
    spoiled = {"w": grads["w"].at[jnp.array([0, 3, 4, 7])].set(bad)}
    _, s = run(tx, spoiled)
    basis, norm = (np.asarray(x["w"]) for x in (s.basis, s.norm))
    assert np.all(basis[0] == 0)
    same = [np.array_equal(basis[i], basis[i + 1]) for i in range(7)]
    # Step 0 has none, 1 makes it; 3 and 4 fail, 5 makes the next; 6 is due by the plan; 7 is not.
    assert same == [False, True, True, True, False, False, True]
    assert norm[0] == 0 < norm[1]
    assert norm[3] == norm[4] == norm[2]
    assert norm[7] == norm[6] > 0
    for at in (1, 5, 6):
        u = np.linalg.svd(grads["w"][at])[0][:, :2]
        np.testing.assert_allclose(np.abs(np.sum(u * basis[at], 0)), 1.0, atol=1e-9)
    # A power step needs a basis before it, so the first one that is made is that of the SVD.
    power = optperm.low_rank(optax.identity(), 2, projection="power", every=3)
    _, s = run(power, jax.tree.map(lambda g: g[:2], spoiled))
    np.testing.assert_allclose(np.abs(s.basis["w"][1]), np.abs(basis[1]), atol=1e-9)


def test_refreshes_are_staggered(monkeypatch):
    """After the first step no step makes more bases than leaves over `every`, rounded up."""
    made = []
    make = module._make_basis

    def counted(*arguments):
        jax.debug.callback(lambda: made.append(None))
        return make(*arguments)

    monkeypatch.setattr(module, "_make_basis", counted)
    shapes = {f"w{i}": (4, 6) for i in range(5)}
    tx = optperm.low_rank(optax.identity(), 1, projection="svd", every=3)
    grads, numbers = grads_of(shapes), []
    take = jax.jit(tx.update)
    g = jax.tree.map(lambda x: x[0], grads)
    state = tx.init(g)
    for _ in range(7):
        _, state = jax.block_until_ready(take(g, state))
        jax.effects_barrier()
        numbers.append(len(made))
        made.clear()
    assert numbers[0] == 5
    assert max(numbers[1:]) == 2
    assert sum(numbers[1:4]) == sum(numbers[4:7]) == 5

    # In one jax.vmap of two trainings, which call back once
    g = {"w": jnp.stack([g["w0"], g["w1"]])}
    state, take = jax.vmap(tx.init)(g), jax.jit(jax.vmap(tx.update))
    for number in (1, 0, 0, 1):
        _, state = jax.block_until_ready(take(g, state))
        jax.effects_barrier()
        assert len(made) == number
        made.clear()


INNERS = {
    "adam": (optax.scale_by_adam, ("mu", "nu")),
    "lion": (optax.scale_by_lion, ("mu",)),
    "ema": (lambda: optax.ema(0.9), ("ema",)),
    "trace": (lambda: optax.trace(0.9), ("trace",)),
    "muon": (optax.contrib.scale_by_muon, ("mu",)),
    "rms": (optax.scale_by_rms, ("nu",)),
}


def test_an_int_seeds_the_key():
    grads = {"w": support.normal((6, 9))}
    bases = []
    for key in (7, jax.random.key(7), 8):
        tx = optperm.low_rank(optax.identity(), 2, key=key)
        bases.append(tx.update(grads, tx.init(grads))[1].basis["w"])
    np.testing.assert_array_equal(bases[0], bases[1])
    assert not np.array_equal(bases[0], bases[2])


def test_a_python_number_among_params_begins_as_an_array_does():
    tx = optperm.low_rank(optax.scale_by_adam(), 1 / 2)
    states = (tx.init({"a": a, "b": jnp.ones((4, 6))}) for a in (0.5, jnp.array(0.5)))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_moments_are_carried_over():
    """First ones by C, squares by those of its entries; the same basis changes nothing."""
    rng = np.random.default_rng(0)
    old, new = (np.linalg.qr(rng.normal(size=(6, 2)))[0].astype(np.float32) for _ in range(2))
    matrix = plan_matrices({"w": jnp.zeros((6, 9))}, 2, "smaller", None)["w"]
    m, v = (jnp.float32(rng.uniform(0.1, 1, size=(2, 9))) for _ in range(2))
    c = new.T @ old
    c1, c2 = 1 - 0.9**4, 1 - 0.999**4
    squares = c2 * np.abs(c**2 @ (v / c2 - (m / c1) ** 2) + (c @ m / c1) ** 2)
    for name, (make, fields) in INNERS.items():
        state = make().init({"w": m})
        state = state._replace(**{k: {"w": v if k == "nu" else m} for k in fields})
        if "count" in state._fields:
            state = state._replace(count=jnp.int32(4))
        for basis, is_new in ((new, True), (old, True), (new, False)):
            change = moments.Change(matrix, jnp.asarray(old), jnp.asarray(basis), jnp.array(is_new))
            found = carried(state, change, 0.9, 0.999)
            moved = is_new and basis is new
            for k in fields:
                of_squares = squares if name == "adam" else c**2 @ v
                wanted = (of_squares if k == "nu" else c @ m) if moved else getattr(state, k)["w"]
                np.testing.assert_allclose(getattr(found, k)["w"], wanted, rtol=2e-4, atol=1e-6)
    # Decay rates of 0 stand for no bias correction.
    state = optax.ScaleByAdamState(jnp.int32(4), {"w": m}, {"w": v})
    change = moments.Change(matrix, jnp.asarray(old), jnp.asarray(new), jnp.array(True))
    wanted = np.abs(c**2 @ (v - m**2) + (c @ m) ** 2)
    np.testing.assert_allclose(carried(state, change, 0.0, 0.0).nu["w"], wanted, rtol=1e-4)


def test_a_complete_optimizer_steps_as_its_direction_does():
    """The residual takes the sign of the inner direction; a schedule of updates is one number a step."""
    grads = grads_of({"w": (6, 9), "b": (4,)}, steps=4)
    whole = optperm.low_rank(optax.adam(0.01), 2, limit=None)
    parts = optax.chain(
        optperm.low_rank(optax.scale_by_adam(), 2, limit=None, every=lambda t: 200 + t),
        optax.scale(-0.01),
    )
    support.assert_close(run(whole, grads)[0], run(parts, grads)[0], rtol=2e-4, atol=1e-6)


def test_muon_inside_orthogonalizes_the_projected_gradient(x64):
    """U = P NS(R) = NS(P P'G): its polynomial of odd powers commutes with P; the axes must be given."""
    muon = optax.contrib.scale_by_muon(
        weight_dimension_numbers=lambda tree: jax.tree.map(
            lambda _: optax.contrib.MuonDimensionNumbers(), tree
        )
    )
    grads = grads_of({"wide": (6, 9), "tall": (9, 6)}, dtype=np.float64)
    updates, states = run(optperm.low_rank(muon, 2, projection="svd", residual=None), grads)
    for name, g in grads.items():
        p, u = states.basis[name][0], updates[name][0]
        projected = {"w": p @ (p.T @ g[0]) if name == "wide" else g[0] @ p @ p.T}
        wanted, _ = muon.update(projected, muon.init(projected))
        np.testing.assert_allclose(u, wanted["w"], rtol=0, atol=1e-6)
        sizes = np.linalg.svd(u)[1]
        assert np.all((sizes[:2] > 0.6) & (sizes[:2] < 1.3))
        assert np.all(sizes[2:] < 1e-6)


@pytest.mark.filterwarnings("ignore:low_rank leaves 67%")
def test_arguments_that_cannot_work_are_refused():
    params = {"w": jnp.zeros((6, 9)), "s": jnp.zeros((2, 6, 9))}
    adam = optax.scale_by_adam()

    def init(inner=adam, rank=2, **options):
        return lambda: optperm.low_rank(inner, rank, **options).init(params)

    def update(inner):
        tx = optperm.low_rank(inner, 2, carry=False)
        return lambda: jax.eval_shape(tx.update, params, tx.init(params), params)

    cases = [
        (init(rank=0), ValueError, "rank must be at least 1, got 0"),
        (
            init(rank=1.0),
            ValueError,
            r"rank must be an integer, or a ratio in \(0, 1\), got 1.0",
        ),
        (init(rank=True), TypeError, "rank must be an integer"),
        (init(rank="1/8"), TypeError, r"an integer, or a ratio in \(0, 1\), got '1/8'"),
        (
            lambda: optperm.low_rank(adam, 2).update(params, adam.init(params)),
            ValueError,
            "low_rank needs a LowRankState, .*, got ScaleByAdamState",
        ),
        (
            init(rank=7, dimension_numbers=Numbers(-2, -1)),
            ValueError,
            r"rank=7 .* side 6 of params",
        ),
        (init(rank=7), ValueError, "rank=7 is above the smaller side of every matrix, 6"),
        (init(dimension_numbers=Numbers(0, 0)), ValueError, r"distinct axes of params\['s'\]"),
        (init(dimension_numbers=Numbers(0, 2)), ValueError, r"distinct axes of params\['w'\]"),
        (init(residual="plain"), ValueError, "residual must be one of 'scaled'"),
        (init(b1=1.0), ValueError, r"b1 must be in \[0, 1\) in float32, got 1.0"),
        (init(b2=1 - 1e-9), ValueError, r"b2 must be in \[0, 1\)"),
        (init(b2=(0.9, 0.999)), ValueError, "b2 must be a single number"),
        (init(None), TypeError, "inner must be an optax.GradientTransformation, got None"),
        (init(optax.scale_by_adam), TypeError, "inner must be an optax.GradientTransformation"),
        (
            init(dimension_numbers={"w": True, "s": False}),
            TypeError,
            r"dimension_numbers must be .*, got (True|False) for params\['.'\]",
        ),
        (init(dimension_numbers=(0, 1)), ValueError, "dimension_numbers must be .* like params"),
        (init(dimension_numbers={"w": Numbers()}), ValueError, "dimension_numbers .* like params"),
        (init(optax.scale_by_amsgrad()), ValueError, "keeps a ScaleByAmsgradState.* carry=False"),
        (
            init(optax.scale_by_factored_rms(min_dim_size_to_factor=2)),
            ValueError,
            "keeps a FactoredState",
        ),
        (
            lambda: optperm.low_rank(adam, 3).update(
                params, optperm.low_rank(adam, 2).init(params)
            ),
            ValueError,
            r"params\['w'\] has a basis of shape \(6, 2\) in the state, but .* give \(6, 3\): do not",
        ),
        (
            update(optax.adamw(1e-3)),
            ValueError,
            r"inner of low_rank needs params.*scale_by_adam\(\) instead of .*add_decayed_weights after",
        ),
        (
            update(optax.contrib.muon(1e-3)),
            ValueError,
            r"inner of low_rank needs params.*scale_by_muon\(weight_.* instead of optax.contrib.muon",
        ),
        (
            update(optax.contrib.scale_by_muon()),
            ValueError,
            r"inner of low_rank needs params, or weight_dimension_numbers \(Muon\)",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
    init(optax.scale_by_amsgrad(), carry=False)()
    init(optax.sgd(0.1))()


SHARING_ADAMS_STATE = {
    "adamax": optax.scale_by_adamax(),
    "adopt": optax.contrib.scale_by_adopt(),
    "clipped adamax": optax.chain(optax.clip_by_global_norm(0.1), optax.scale_by_adamax()),
    "yogi": optax.scale_by_yogi(),
    "radam": optax.scale_by_radam(),
    "clipped adam": optax.chain(optax.clip(0.1), optax.scale_by_adam(mu_dtype=jnp.bfloat16)),
    "signs": optax.chain(optax.scale_by_sign(), optax.scale_by_adam()),
    "with params": optax.chain(optax.scale_by_adam(), optax.scale_by_trust_ratio()),
}


@pytest.mark.parametrize("name", SHARING_ADAMS_STATE)
def test_adopt_is_refused_though_its_state_is_adams(name):
    """By one step of a few numbers, also where `init` is traced or mapped."""
    params = {"w": jnp.zeros((6, 9)), "b": jnp.zeros(3), "c": jnp.zeros([])}
    inner = SHARING_ADAMS_STATE[name]
    init = optperm.low_rank(inner, 2).init
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
    for call, given in (
        (init, params),
        (jax.jit(init), params),
        (functools.partial(jax.eval_shape, init), params),
        (jax.vmap(init), stack),
    ):
        if name == "adopt":
            with pytest.raises(
                ValueError, match=r"ScaleByAdamState that is not Adam's.*carry=False"
            ):
                call(given)
        else:
            call(given)
    optperm.low_rank(inner, 2, carry=False).init(params)


@pytest.mark.parametrize("jit", [False, True])
def test_adamax_at_a_new_basis_has_the_root_of_rotated_squares(jit):
    """Sizes are of the units of gradients, so that their squares turn as Adam's second moments."""
    grads = {"w": jax.random.normal(jax.random.key(0), (8, 64))}
    tx = optperm.low_rank(optax.scale_by_adamax(b2=1 - 1e-6), 3, every=1)
    update = jax.jit(tx.update) if jit else tx.update
    _, before = update(grads, tx.init(grads))
    _, after = update({"w": 0 * grads["w"]}, before)
    change = after.basis["w"].T @ before.basis["w"]
    expected = jnp.sqrt(change**2 @ before.inner_state.nu["w"] ** 2)
    support.assert_close(after.inner_state.nu["w"], expected, rtol=1e-4)
    support.assert_close(
        after.inner_state.mu["w"], 0.9 * change @ before.inner_state.mu["w"], atol=1e-5
    )


def make_trees():
    arrays = {"kernel": jnp.zeros((6, 9)), "bias": jnp.zeros(9)}
    linear = eqx.nn.Linear(6, 9, key=jax.random.key(0))
    return {
        "list": list(arrays.values()),
        "equinox": eqx.filter(linear, eqx.is_inexact_array),
        "frozen": flax.core.freeze(arrays),
        "nnx": nnx.state(nnx.Linear(6, 9, rngs=nnx.Rngs(0)), nnx.Param),
        "array": arrays["kernel"],
    }


UNKNOWN = {
    "amsgrad": (optax.scale_by_amsgrad(), "a ScaleByAmsgradState"),
    "belief": (optax.scale_by_belief(), "a ScaleByBeliefState"),
    "sm3": (optax.scale_by_sm3(), "a ScaleBySM3State"),
    "flat amsgrad": (optax.flatten(optax.scale_by_amsgrad()), "a ScaleByAmsgradState"),
    "flat adam": (optax.flatten(optax.scale_by_adam()), "a ScaleByAdamState whose mu is not like"),
    "lbfgs": (optax.scale_by_lbfgs(), "a ScaleByLBFGSState"),
}


@pytest.mark.parametrize("tree", ["list", "equinox", "frozen", "nnx", "array"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_a_state_that_cannot_be_carried_over_is_refused_in_any_container(name, tree):
    inner, message = UNKNOWN[name]
    params = make_trees()[tree]
    with pytest.raises(ValueError, match=f"inner keeps {message}.* pass carry=False"):
        jax.eval_shape(optperm.low_rank(inner, 2).init, params)
    jax.eval_shape(optperm.low_rank(inner, 2, carry=False).init, params)
    jax.eval_shape(optperm.low_rank(optax.scale_by_lion(), 2).init, params)


def test_labels_and_masks_inside_may_be_prefixes():
    """A leaf that a part of `inner` does not see is `MaskedNode` there, alone or with its branch."""
    grads = {"a": grads_of({"w": (6, 9)}, steps=4), "b": grads_of({"w": (9, 6), "c": (3,)}, 1, 4)}
    labels = {"a": "x", "b": "y"}
    whole = {"a": {"w": "x"}, "b": {"w": "y", "c": "y"}}
    parts = {"x": optax.scale_by_adam(), "y": optax.scale_by_lion()}
    low = functools.partial(optperm.low_rank, rank=2, every=2, residual=None)
    found, _ = run(low(optax.partition(parts, labels)), grads)
    support.assert_close(found, run(low(optax.partition(parts, whole)), grads)[0])
    masked, _ = run(low(optax.masked(optax.scale_by_adam(), {"a": True, "b": False})), grads)
    support.assert_close(masked["a"], found["a"])


@pytest.mark.parametrize("projection", ["random", "svd"])
def test_a_sharded_gradient_is_not_gathered(projection):
    """Along k it costs a few numbers a step; along both, R is summed, and nothing is gathered but for a
    new Gram matrix."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    tx = optperm.low_rank(optax.scale_by_adam(), 4, projection=projection, every=2)
    whole = jnp.zeros((32, 64))
    for spec, largest in ((P(None, "x"), 16), (P("x", "y"), 4 * 64 * 4)):
        params = jax.device_put({"w": whole}, NamedSharding(mesh, spec))
        text = jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text()
        found = find_collectives(text)
        always = [each for each in found if not each.is_conditional]
        assert always
        assert max(each.bytes for each in always) <= largest
        assert {each.operation for each in always} == {"all-reduce"}
        rare = {each.operation for each in found} - {"all-reduce"}
        assert not rare or (projection == "svd" and spec[0] == "x")


def test_inside_of_agn_and_diloco_and_multi_steps():
    """With an outer step that is the mean, local steps of one replica are the optimizer's own."""
    params = {"w": support.normal((6, 9)), "b": support.bias(4)}
    low = optax.chain(optperm.low_rank(optax.scale_by_adam(), 2), optax.scale(-0.01))
    ways = {
        "alone": low,
        "diloco": optperm.diloco(low, optax.sgd(1.0), every=2),
        "accumulated": optax.MultiSteps(low, 1).gradient_transformation(),
        "agn": optperm.agn(low, every=2),
    }

    def train(name, params):
        tx = ways[name]

        @jax.jit
        def step(params, state):
            updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
            return optperm.apply_updates(params, updates, state), state

        state = jax.jit(tx.init)(params)
        for _ in range(4):
            params, state = step(params, state)
        return params

    alone = train("alone", params)
    for name in ("diloco", "accumulated"):
        support.assert_close(train(name, params), alone, atol=2e-6)
    moved = jax.tree.map(lambda a, b: jnp.any(a != b), train("agn", params), params)
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize("projection", ["svd", "power"])
def test_a_column_nearly_outside_of_the_subspace_gets_a_bounded_step(projection):
    """By Fira's formula its first step would be 1e5 times as long as those of other columns."""
    parts = (
        jax.random.normal(jax.random.key(0), (16, 4)),
        jax.random.normal(jax.random.key(1), (4, 63)),
    )
    large = parts[0] @ parts[1]
    outside = jnp.linalg.qr(large, mode="complete")[0][:, -1:]
    grads = {"w": jnp.concatenate([large, 1e-2 * outside + 1e-7 * large[:, :1]], axis=1)}
    tx = optperm.low_rank(optax.scale_by_adam(), 4, projection=projection, limit=None)
    updates, _ = tx.update(grads, tx.init(grads))
    norms = jnp.linalg.norm(updates["w"], axis=0)
    assert norms[-1] < 1.1 * 10 * (16 / 4) ** 0.5 * 4**0.5
