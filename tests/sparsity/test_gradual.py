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

pytestmark = pytest.mark.usefixtures("lenient")
OPTIMIZERS = {"adam": optax.adam(0.02), "sgd": optax.sgd(0.05, momentum=0.9)}


def table(values):
    """A schedule from numbers, one a step."""
    return lambda count: jnp.float32(values)[count]


def masks_of(opt_state):
    """All masks of the state as one tree."""
    return opt_state.mask


def follow(case, tx, masks, params, opt_state=None):
    """Train on the gradients of a case; params and masks are those of JaxPruner."""
    z = jaxpruner.load(case)
    grads = [{name: g[t] for name, g in z["grad"].items()} for t in range(40)]
    trail = loops.train(tx, params, grads, how="scan", opt_state=opt_state)
    for t, (found, state) in enumerate(trail):
        for name, wanted in z["mask"].items():
            np.testing.assert_array_equal(masks(state)[name], wanted[t], err_msg=f"{name} at {t}")
        if t % 10 == 9:
            expected = {name: p[t // 10] for name, p in z["params"].items()}
            support.assert_close(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("case", "criterion", "optimizer"),
    [
        ("magnitude_poly", "magnitude", "sgd"),
        ("magnitude_poly_erk", "magnitude", "adam"),
        ("saliency_poly", "saliency", "sgd"),
    ],
)
def test_jaxpruners_sequences(case, criterion, optimizer):
    """Each leaf with a ramp of its own, through JaxPruner's counts."""
    z = jaxpruner.load(case)
    zeros = jaxpruner.num_zeros(z["mask"])
    tx = optax.partition(
        {
            name: optperm.prune_gradually(
                OPTIMIZERS[optimizer],
                float(Fraction(int(n[-1]), z["mask"][name][0].size)),
                table(n / n[-1]),
                every=1,
                criterion=criterion,
            )
            for name, n in zeros.items()
        },
        {name: name for name in zeros},
    )

    def masks(state):
        return {n: s.inner_state.mask[n] for n, s in state.inner_states.items()}

    follow(case, tx, masks, z["params0"])


def test_jaxpruners_global_sequence():
    z = jaxpruner.load("global_magnitude")
    zeros = sum(jaxpruner.num_zeros(z["mask"]).values())
    total = sum(p.size for p in z["params0"].values())
    tx = optperm.prune_gradually(
        OPTIMIZERS["adam"],
        float(zeros[-1] / total),
        table(zeros / zeros[-1]),
        every=1,
        scope="global",
    )
    follow("global_magnitude", tx, masks_of, z["params0"])


STRUCTURES = {
    "magnitude_oneshot": None,
    "nm_2_4_axis-1": optperm.sparsity.NOfM(2, 4, axis=-1),
    "nm_2_4_axis-2": optperm.sparsity.NOfM(2, 4),
    "channel": optperm.sparsity.Units(),
    "block_4_4": optperm.sparsity.Blocks(4, 4),
    "global_magnitude_normalized": None,
}


@pytest.mark.parametrize("case", STRUCTURES)
def test_jaxpruners_choices(case):
    """By `prune`, in the place of JaxPruner's update of the masks, with its counts."""
    z, structure = jaxpruner.load(case), STRUCTURES[case]
    zeros = jaxpruner.num_zeros(z["mask"])
    for t in range(len(next(iter(z["mask"].values())))):
        params = {name: p[t] for name, p in z["params"].items()}
        options, fraction = {}, {name: n[t] / params[name].size for name, n in zeros.items()}
        if isinstance(structure, optperm.sparsity.NOfM):
            fraction = None
        if case == "global_magnitude_normalized":
            fraction = sum(n[t] for n in zeros.values()) / sum(p.size for p in params.values())
            scores = {name: np.abs(p) / np.linalg.norm(p) for name, p in params.items()}
            options = {"scope": "global", "scores": scores}
        opt_state = optperm.mask_elements().init(params)
        _, after = optperm.sparsity.prune(
            params, opt_state, fraction, structure=structure, **options
        )
        for name, wanted in z["mask"].items():
            np.testing.assert_array_equal(after.mask[name], wanted[t])


def test_keep_top_is_jaxpruners_and_lets_gradients_through():
    """Forward what its straight-through estimator gives; backward the identity, or one of ramps too."""
    z = jaxpruner.load("magnitude_ste")
    for t in range(4):
        params, forward = ({n: x[t] for n, x in z[kind].items()} for kind in ("params", "forward"))
        fractions = {name: (x == 0).mean() for name, x in forward.items()}
        found = optperm.sparsity.keep_top(params, fractions)
        for name, x in forward.items():
            np.testing.assert_array_equal(found[name], x)
    pulls = support.random_like(params, 0)

    @jax.jit
    @jax.grad
    def gradient(params, fraction):
        kept = optperm.sparsity.keep_top(params, fraction, scope="leaf")
        return sum(jnp.sum(kept[n] * pulls[n]) for n in params)

    support.assert_same_bits(gradient(params, 0.9), pulls)
    pair = optperm.sparsity.keep_top(
        jnp.array([[3.0, -4.0, 1.0, 2.0]]).T, None, structure=optperm.sparsity.NOfM(1, 2)
    )
    assert pair.ravel().tolist() == [0.0, -4.0, 0.0, 2.0]
    assert optperm.sparsity.keep_top(support.bias(3), 1.0).tolist() == support.bias(3).tolist()
    mixed = {"w": jnp.array([[1.0, 2.0]]), "count": jnp.arange(2)}
    kept = optperm.sparsity.keep_top(mixed, 0.5)
    support.assert_same_bits(kept, mixed | {"w": jnp.array([[0.0, 2.0]])})


def test_the_counts_of_the_ramp_are_exact():
    """Zhu and Gupta's, rounded as fractions say, and exact at its end, whatever it divides."""
    shape, final = (13, 11), 0.83
    ramp = optax.polynomial_schedule(0.0, 1.0, 3, 9, 2)
    tx = optperm.prune_gradually(optax.sgd(0.0), final, ramp, every=4)
    params = support.normal(shape)
    trail = loops.train(tx, params, [jnp.zeros(shape)] * 16, how="scan")
    last = math.floor(Fraction("0.83") * 143 + Fraction(1, 2))
    for t, (p, state) in enumerate(trail):
        at = t - t % 4
        r = 1 - (1 - Fraction(min(max(at - 2, 0), 9), 9)) ** 3
        wanted = math.floor(r * last + Fraction(1, 2))
        assert int((p == 0).sum()) == int((~state.mask).sum()) == wanted
    assert wanted == last


def test_a_ramp_that_falls_and_a_hand_that_prunes():
    """Masks only shrink; `prune` prunes more; `reset_masks` frees all, and the ramp prunes anew."""
    tx = optperm.prune_gradually(optax.sgd(0.1), 0.8, table([0.5, 0.0, 0.25, 1.0, 1.0]), every=1)
    params, zeros = support.normal((5, 4)), []
    opt_state, step = tx.init(params), loops.compiled(tx)
    for t in range(5):
        if t == 2:
            params, opt_state = optperm.sparsity.prune(params, opt_state, 0.6)
        params, opt_state = step(params, opt_state, jnp.ones((5, 4)))
        zeros.append(int((params == 0).sum()))
    assert zeros == [8, 8, 12, 16, 16]
    # What is pruned by hand does not come back where another leaf is due.
    both = {"a": params, "b": support.normal((5, 4), 1)}
    tx = optperm.prune_gradually(optax.sgd(0.1), 0.5, 1.0, every=1)
    both, state = optperm.sparsity.prune(both, tx.init(both), {"a": 1.0, "b": 0.0})
    _, state = tx.update(both, state, both)
    assert [int(m.sum()) for m in state.mask.values()] == [0, 10]
    opt_state = optperm.sparsity.reset_masks(opt_state)
    assert opt_state.mask.all()
    assert int((step(params, opt_state, jnp.ones((5, 4)))[0] == 0).sum()) == 16


def test_masks_change_at_multiples_of_every_alone():
    """With the ramp of that very step, also if the ramp rises in each step."""
    tx = optperm.prune_gradually(optax.sgd(0.0), 1.0, lambda t: 0.05 * (t + 1), every=3)
    params = support.normal((10, 10), 0)
    grads = [jnp.zeros_like(params)] * 8
    trail = loops.train(tx, params, grads, how="scan")
    zeros = [int(jnp.sum(~state.mask)) for _, state in trail]
    assert zeros == [5, 5, 5, 20, 20, 20, 35, 35]


def test_dead_entries_take_no_place_of_live_ones():
    """Two of four live entries are asked for, and the dead one with the highest score is not one."""
    tx = optperm.prune_gradually(optax.sgd(0.0), 0.5, 1.0, every=1, criterion="movement")
    w = jnp.array([[0.0, 1.0, 2.0, 3.0]])
    state = tx.init(w)._replace(
        mask=jnp.array([[False, True, True, True]]), scores=jnp.array([[9.0, 1.0, 2.0, 3.0]])
    )
    _, state = tx.update(jnp.zeros((1, 4)), state, w)
    assert state.mask.tolist() == [[False, False, True, True]]


def test_movement_by_hand():
    """S <- S - w g: what moves towards zero goes first; a gradient that is not finite says nothing."""
    tx = optperm.prune_gradually(
        optax.sgd(0.1), 0.5, table([0.0, 0.0, 1.0]), every=1, criterion="movement"
    )
    w = jnp.array([[1.0, -1.0], [0.1, 2.0]])
    grads = [jnp.array([[1.0, 1.0], [-3.0, 0.0]]), jnp.array([[1.0, jnp.nan], [-3.0, 0.0]])]
    trail = loops.train(tx, w, [*grads, jnp.zeros((2, 2))])
    np.testing.assert_allclose(trail[0][1].scores, [[-1.0, 1.0], [0.3, 0.0]], rtol=1e-6)
    np.testing.assert_allclose(trail[1][1].scores, [[-1.9, 1.0], [1.5, 0.0]], rtol=1e-6)
    assert trail[2][1].mask.tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize("criterion", ["saliency", "movement"])
def test_a_gradient_that_is_not_finite_prunes_nothing(criterion):
    """Its scores would rank by place; the count catches up at the next change, with a finite one."""
    optimizer = optax.apply_if_finite(optax.sgd(0.0), 5)
    tx = optperm.prune_gradually(optimizer, 0.5, 1.0, every=2, criterion=criterion)
    w = {"a": jnp.ones((2, 2)), "b": jnp.ones(2)}
    good = {"a": jnp.array([[0.0, 0.0], [-2.0, -1.0]]), "b": jnp.ones(2)}
    bad = {"a": jnp.full((2, 2), jnp.nan), "b": jnp.ones(2)}
    masks = [s.mask["a"].tolist() for _, s in loops.train(tx, w, [bad, good, bad, good, good])]
    assert masks == [[[True, True], [True, True]]] * 4 + [[[False, False], [True, True]]]


def adamw(rate=0.05):
    return optax.adamw(rate, weight_decay=0.1)


def gradual(optimizer):
    ramp = optax.linear_schedule(0.0, 1.0, 3)
    return optperm.prune_gradually(optimizer, 0.6, ramp, every=1)


def moving(optimizer):
    return optperm.rigl(optimizer, 0.6, end=6, key=jax.random.key(0), every=2)


def test_keep_top_takes_and_returns_a_state_of_flax():
    """Its gradient is a state too, which `nnx.merge` and the optimizer take."""
    graph, params = nnx.split(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Param)
    top = optperm.sparsity.keep_top(params, 0.5)
    assert jax.tree.structure(top) == jax.tree.structure(params)
    plain = optperm.sparsity.keep_top(nnx.to_pure_dict(params), 0.5)
    support.assert_same_bits(nnx.to_pure_dict(top), plain)
    assert int((nnx.merge(graph, top).kernel[...] == 0).sum()) == 16
    grads = jax.grad(lambda p: jnp.sum(optperm.sparsity.keep_top(p, 0.5)["kernel"].get_value()))(
        params
    )
    assert (grads["kernel"].get_value() == 1).all()


@pytest.mark.parametrize(
    ("wrap", "dtype"), support.in_turns([gradual, moving], ["float32", "bfloat16"])
)
def test_zeros_are_zero_bit_for_bit(wrap, dtype):
    """After every step, by both ways of applying updates; the products have what is around it."""
    tx, params = wrap(adamw()), support.random_params(dtype=dtype)
    params = params | {"kernel": params["kernel"].at[0, 0].set(-0.0)}
    grads = [support.random_like(params, seed) for seed in range(8)]
    for apply in (optperm.apply_updates, loops.by_addition):
        for t, (p, state) in enumerate(loops.train(tx, params, grads, apply=apply, how="scan")):
            dead = ~np.asarray(state.mask["kernel"])
            assert (support.as_integers(np.asarray(p["kernel"]))[dead] == 0).all()
            assert dead.sum() == 36 or (wrap is gradual and t < 7)


def test_sparsity_0_is_the_optimizer():
    params = support.random_params()
    grads = [support.random_like(params, seed) for seed in range(4)]
    plain = loops.train(adamw(), params, grads)
    for tx in (
        optperm.prune_gradually(adamw(), 0.0, 1.0, every=1),
        optperm.rigl(adamw(), 0.0, end=3, key=jax.random.key(0), every=1),
    ):
        trail = loops.train(tx, params, grads)
        for (p, state), (expected, inner) in zip(trail, plain, strict=True):
            support.assert_close((p, state.inner_state), (expected, inner), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("wrap", "mapping"), support.in_turns(["saliency", "rigl"], ["shard_map", "pmap"])
)
def test_replicas_with_gradients_of_their_own_agree_on_masks(wrap, mapping):
    """With `axis_name` scores are averaged, though each replica's params go their own way."""
    options = {"every": 1, "axis_name": replicas.AXIS}
    tx = optperm.rigl(optax.sgd(0.1), 0.5, end=9, key=jax.random.key(0), **options)
    if wrap == "saliency":
        ramp = optax.linear_schedule(0.0, 1.0, 3)
        tx = optperm.prune_gradually(optax.sgd(0.1), 0.5, ramp, criterion=wrap, **options)
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
