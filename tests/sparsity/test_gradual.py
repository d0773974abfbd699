"""Gradual pruning and keep_top: JaxPruner's sequences, the ramp's counts, zeros that stay zeros."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import jaxpruner
import loops
import numpy as np
import optax
import pytest
import replicas
import support
from flax import nnx

import optperm
from optperm.sparsity import Blocks, NOfM, Units, keep_top, prune, reset_masks

pytestmark = pytest.mark.usefixtures("lenient")


def are_kernels(params):
    """Include what JaxPruner prunes, also the convolution whose name does not say what it is."""
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, params)


# JaxPruner's axis -1, the outputs of these kernels, as the inputs.
OUTPUTS_FIRST = dict.fromkeys(("a/kernel", "c/kernel"), optperm.LeafAxes("kernel", 1, 0))


def table(values):
    """Make a schedule from numbers, one per step."""
    return lambda count: jnp.float32(values)[count]


@pytest.mark.parametrize(
    ("case", "optimizer", "options"),
    [
        ("magnitude_poly", optax.sgd(0.05, momentum=0.9), {}),
        pytest.param("magnitude_poly_erk", optax.adam(0.02), {}, marks=pytest.mark.exhaustive),
        ("saliency_poly", optax.sgd(0.05, momentum=0.9), {"criterion": "saliency"}),
        pytest.param(
            "global_magnitude", optax.adam(0.02), {"scope": "global"}, marks=pytest.mark.exhaustive
        ),
    ],
)
def test_jaxpruners_sequences_are_kept(case, optimizer, options):
    """Take JaxPruner's counts as ramps: one for all leaves, or one for each of its own."""
    z = jaxpruner.load(case)
    zeros = jaxpruner.num_zeros(z["mask"])
    sizes = {name: p.size for name, p in z["params0"].items()}

    def make(zeros, size):
        options_of_ramp = float(zeros[-1] / size), table(zeros / zeros[-1])
        own = {"every": 1, "include": are_kernels} | options
        return optperm.prune_gradually(optimizer, *options_of_ramp, **own)

    if "scope" in options:
        tx = make(sum(zeros.values()), sum(sizes.values()))
        return jaxpruner.assert_followed(case, tx)
    parts = {name: make(n, sizes[name]) for name, n in zeros.items()}
    jaxpruner.assert_followed(
        case,
        optax.partition(parts, {name: name for name in zeros}),
        lambda state: {n: s.inner_state.mask[n] for n, s in state.inner_states.items()},
    )


@pytest.mark.parametrize(
    ("case", "structure", "axes"),
    [
        ("magnitude_oneshot", None, None),
        ("nm_2_4_axis-1", NOfM(2, 4), OUTPUTS_FIRST),
        ("nm_2_4_axis-2", NOfM(2, 4), None),
        ("channel", Units(), None),
        ("block_4_4", Blocks(4, 4), None),
        ("global_magnitude_normalized", None, None),
    ],
)
def test_prune_makes_jaxpruners_choices(case, structure, axes):
    """Take JaxPruner's counts in place of its update of the masks."""
    z = jaxpruner.load(case)

    @jax.jit
    def choose(params, fraction, options):
        state = optperm.mask_elements().init(params)
        own = {"structure": structure, "axes": axes} | options
        if "scores" in own:
            own |= {"scope": "global", "include": are_kernels}
        return prune(params, state, fraction, **own)[1].mask

    for t, zeros in enumerate(zip(*jaxpruner.num_zeros(z["mask"]).values(), strict=True)):
        params = {name: p[t] for name, p in z["params"].items()}
        sizes, options = [p.size for p in params.values()], {}
        fraction = dict(zip(z["mask"], np.divide(zeros, sizes), strict=True))
        if isinstance(structure, NOfM):
            fraction = None
        if case == "global_magnitude_normalized":
            fraction = sum(zeros) / sum(sizes)
            scores = {name: np.abs(p) / np.linalg.norm(p) for name, p in params.items()}
            options = {"scores": scores}
        found = choose(params, fraction, options)
        for name, wanted in z["mask"].items():
            np.testing.assert_array_equal(found[name], wanted[t])


def test_keep_top_is_jaxpruners_and_lets_gradients_through():
    """Give forward what its straight-through estimator gives, and backward the identity."""
    z = jaxpruner.load("magnitude_ste")
    for t in range(4):
        params, forward = ({n: x[t] for n, x in z[kind].items()} for kind in ("params", "forward"))
        fractions = {name: (x == 0).mean() for name, x in forward.items()}
        found = jax.jit(keep_top)(params, fractions)
        for name, x in forward.items():
            np.testing.assert_array_equal(found[name], x)
    pulls = support.random_like(params, 0)

    @jax.jit
    @jax.grad
    def gradient(params, fraction):
        kept = keep_top(params, fraction, scope="leaf")
        return sum(jnp.sum(kept[n] * pulls[n]) for n in params)

    support.assert_same_bits(gradient(params, 0.9), pulls)
    w, wanted = jnp.array([[[3.0], [-4.0], [1.0], [2.0]], [[0.0], [-4.0], [0.0], [2.0]]])
    mixed = {"b": support.bias(3), "count": jnp.arange(2)}
    kept = keep_top(mixed | {"w": w}, None, structure=NOfM(1, 2))
    support.assert_same_bits(kept, mixed | {"w": wanted})


def test_keep_top_takes_and_returns_a_state_of_flax():
    """Return a gradient that is a state too, which `nnx.merge` and the optimizer take."""
    graph, params = nnx.split(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Param)
    top = keep_top(params, 0.5)
    plain = keep_top(nnx.to_pure_dict(params), 0.5)
    support.assert_same_bits(nnx.to_pure_dict(top), plain)
    assert int((nnx.merge(graph, top).kernel[...] == 0).sum()) == 16
    kernel = lambda p: keep_top(p, 0.5)["kernel"].get_value()  # noqa: E731
    grads = jax.grad(lambda p: jnp.sum(kernel(p)))(params)
    assert (grads["kernel"].get_value() == 1).all()


def test_counts_of_the_ramp_are_exact():
    """Change masks at multiples of `every` alone, to Zhu and Gupta's count of that very step."""
    shape, final = (13, 11), 0.83
    ramp = optax.polynomial_schedule(0.0, 1.0, 3, 9, 2)
    tx = optperm.prune_gradually(optax.sgd(0.0), final, ramp, every=4)
    params = support.normal(shape)
    grads = [np.zeros(shape, np.float32)] * 16
    trail = loops.train(tx, params, grads, how="scan", init="jit")
    last = math.floor(Fraction("0.83") * 143 + Fraction(1, 2))
    for t, (p, state) in enumerate(trail):
        at = t - t % 4
        r = 1 - (1 - Fraction(min(max(at - 2, 0), 9), 9)) ** 3
        wanted = math.floor(r * last + Fraction(1, 2))
        assert (np.asarray(p) == 0).sum() == (~np.asarray(state.mask)).sum() == wanted
    assert wanted == last


@pytest.mark.slow
def test_masks_stay_where_the_ramp_falls_or_a_hand_prunes():
    """Only shrink masks, also where `prune` prunes more, until `reset_masks` frees all."""
    tx = optperm.prune_gradually(optax.sgd(0.1), 0.8, table([0.5, 0.0, 0.25, 1.0, 1.0]), every=1)
    params, zeros = support.normal((5, 4)), []
    opt_state, step = tx.init(params), loops.compiled(tx)
    for t in range(5):
        if t == 2:
            params, opt_state = prune(params, opt_state, 0.6)
        params, opt_state = step(params, opt_state, jnp.ones((5, 4)))
        zeros.append(int((params == 0).sum()))
    assert zeros == [8, 8, 12, 16, 16]
    # What is pruned by hand does not come back where another leaf is due.
    both = {"a": params, "b": support.normal((5, 4), 1)}
    tx = optperm.prune_gradually(optax.sgd(0.1), 0.5, 1.0, every=1)
    both, state = prune(both, tx.init(both), {"a": 1.0, "b": 0.0})
    _, state = tx.update(both, state, both)
    assert [int(m.sum()) for m in state.mask.values()] == [0, 10]
    opt_state = reset_masks(opt_state)
    assert opt_state.mask.all()
    assert int((step(params, opt_state, jnp.ones((5, 4)))[0] == 0).sum()) == 16


def test_dead_entries_take_no_place_of_live_ones():
    """Keep two of three live entries, and not the dead one with the highest score."""
    tx = optperm.prune_gradually(optax.sgd(0.0), 0.5, 1.0, every=1, criterion="movement")
    w = np.float32([[0.0, 1.0, 2.0, 3.0]])
    state = jax.jit(tx.init)(w)._replace(
        mask=np.array([[False, True, True, True]]), scores=np.float32([[9.0, 1.0, 2.0, 3.0]])
    )
    _, state = jax.jit(tx.update)(np.zeros_like(w), state, w)
    assert state.mask.tolist() == [[False, False, True, True]]


def test_movement_drops_first_what_moves_towards_zero():
    """Sum S <- S - w g by hand; nonfinite gradients are left out."""
    options = {"every": 1, "criterion": "movement"}
    tx = optperm.prune_gradually(optax.sgd(0.1), 0.5, table([0.0, 0.0, 1.0]), **options)
    w = np.float32([[1.0, -1.0], [0.1, 2.0]])
    grads = np.float32([[[1.0, 1.0], [-3.0, 0.0]], [[1.0, np.nan], [-3.0, 0.0]], np.zeros((2, 2))])
    trail = loops.train(tx, w, [*grads])
    np.testing.assert_allclose(trail[0][1].scores, [[-1.0, 1.0], [0.3, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(trail[1][1].scores, [[-1.9, 1.0], [1.5, 0.0]], rtol=1e-6)
    assert trail[2][1].mask.tolist() == [[False, True], [True, False]]


def test_movement_of_params_in_bfloat16_is_summed_in_float32():
    """In bfloat16, 1 + 1 / 1024 is 1."""
    tx = optperm.prune_gradually(optax.sgd(0.0), 0.5, 0.0, criterion="movement")
    w = np.ones((2, 2), jnp.bfloat16)
    grads = [-w, *[-w / jnp.bfloat16(1024)] * 2]
    _, state = loops.train(tx, w, grads, init="jit")[-1]
    np.testing.assert_array_equal(state.scores, np.full((2, 2), 1 + 2 / 1024))


@pytest.mark.parametrize("criterion", ["saliency", "movement"])
def test_a_gradient_that_is_not_finite_prunes_nothing(criterion):
    """Let the count catch up at the next change with a finite gradient."""
    optimizer = optax.apply_if_finite(optax.sgd(0.0), 5)
    tx = optperm.prune_gradually(optimizer, 0.5, 1.0, every=2, criterion=criterion)
    w = {"a": np.ones((2, 2), np.float32), "b": np.ones(2, np.float32)}
    good = w | {"a": np.float32([[0.0, 0.0], [-2.0, -1.0]])}
    bad = w | {"a": np.full((2, 2), np.nan, np.float32)}
    masks = [s.mask["a"].tolist() for _, s in loops.train(tx, w, [bad, good, bad, good, good])]
    assert masks == [[[True, True], [True, True]]] * 4 + [[[False, False], [True, True]]]


ADAMW = optax.adamw(0.05, weight_decay=0.1)


# A transformation, the dtype of params, and the first step after which all zeros are there.
ZEROING = {
    "gradual": (
        *(optperm.prune_gradually(ADAMW, 0.6, table([0, 0.3, 0.6, 1, 1]), every=1), "float32", 3),
    ),
    "rigl": (optperm.rigl(ADAMW, 0.6, end=6, every=2), "bfloat16", 0),
}
APPLY = {"exactly": optperm.apply_updates, "by addition": loops.by_addition}


@pytest.mark.parametrize(("name", "how"), support.in_turns(ZEROING, APPLY))
def test_zeros_are_zero_bit_for_bit(name, how):
    """Make 0.0 of -0.0 too, after every step, by both ways of applying updates."""
    tx, dtype, first_full = ZEROING[name]
    params = support.random_params(dtype=dtype)
    kernel = np.array(params["kernel"])
    kernel[0, 0] = -0.0
    params["kernel"] = jax.device_put(kernel)
    grads = [support.random_like(params, seed) for seed in range(5)]
    trail = loops.train(tx, params, grads, apply=APPLY[how], how="scan", init="jit")
    for t, (p, state) in enumerate(trail):
        dead = ~np.asarray(state.mask["kernel"])
        assert (support.as_integers(np.asarray(p["kernel"]))[dead] == 0).all()
        assert (dead.sum() == 36) == (t >= first_full)


@pytest.mark.parametrize(
    ("method", "mapping"),
    support.every_night([("saliency", "shard_map"), ("rigl", "pmap")], [("saliency", "shard_map")]),
)
def test_replicas_with_gradients_of_their_own_agree_on_masks(method, mapping):
    """Average scores over `axis_name`, though each replica's params go their own way."""
    sgd, options = optax.sgd(0.1), {"every": 1, "axis_name": replicas.AXIS}
    tx = optperm.rigl(sgd, 0.5, end=9, **options)
    if method == "saliency":
        ramp = optax.linear_schedule(0.0, 1.0, 3)
        tx = optperm.prune_gradually(sgd, 0.5, ramp, criterion=method, **options)
    params = {"kernel": support.normal((6, 4)), "bias": support.bias(4)}
    grads = [
        replicas.stack([support.random_like(params, 4 * t + i) for i in range(2)]) for t in range(5)
    ]
    for p, state in loops.train(tx, params, grads, how=mapping, size=2):
        mask = np.asarray(state.mask["kernel"])
        assert (mask[0] == mask[1]).all()
        assert ((np.asarray(p["kernel"]) == 0) == ~mask).all()
    assert mask.sum() == 24
    assert not np.array_equal(*np.asarray(p["kernel"]))
