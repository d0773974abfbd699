"""SGPerm against the original's own sequences, and what its documentation promises."""

import functools
import itertools
import pathlib

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from optax.contrib import GaLoreDimensionNumbers

import optperm
from optperm import LeafAxes
from optperm.permutation import _library as library
from optperm.permutation import export_permutation, permuted_params
from optperm.permutation._permute_by_cycles import _compute_partition_size

SEQUENCES = ("dense", "conv", "zero_gradients", "ties", "tiny_alpha")


def load_sequence(name):
    """Load a run of the original: its arguments, initial params, and the steps' gradients and params."""
    with np.load(pathlib.Path(__file__).parents[1] / "data" / "sgperm_reference.npz") as data:
        parts = {key[len(name) + 1 :]: data[key] for key in data.files if key.startswith(name)}
    hyper = {"alpha_min": 0.0, "lamda_max": 1.0}
    hyper |= {key[6:]: float(parts[key]) for key in parts if key.startswith("hyper/")}

    # The schedules of the original decay and grow before the first step.
    def geometric(start, rate, end):
        return optax.exponential_decay(start * rate, 1, rate, end_value=end)

    arguments = {
        "learning_rate": hyper["momentum_lr"],
        "momentum": hyper["momentum"],
        "aggressiveness": geometric(hyper["alpha0"], hyper["beta1"], hyper["alpha_min"]),
        "partition_ratio": geometric(hyper["lamda0"], hyper["beta2"], hyper["lamda_max"]),
    }
    count = sum(key.startswith("init/") for key in parts)
    init, grads, params = (
        tuple(parts[f"{kind}/{i}"] for i in range(count)) for kind in ("init", "grads", "params")
    )
    return arguments, init, [*zip(*grads, strict=True)], [*zip(*params, strict=True)]


def last_axis_is_output(leaf):
    *inputs, output = range(leaf.ndim)
    return LeafAxes("kernel", inputs, output) if inputs else LeafAxes("bias", (), output)


@pytest.mark.parametrize(
    ("sequence", "kernel"),
    support.every_night(
        itertools.product(SEQUENCES, library.KERNELS),
        [("dense", "ffi"), ("conv", "callback"), ("ties", "numpy")],
    ),
    indirect=["kernel"],
)
@pytest.mark.usefixtures("kernel")
def test_sgperm_on_the_original_sequence_gives_its_bits(sequence):
    """`optperm.apply_updates` gives the original's weights, every bit at every step."""
    arguments, init, grads, expected = load_sequence(sequence)
    if sequence == "conv":  # the leaves have no names
        arguments["axes"] = tuple(map(last_axis_is_output, init))
    # It would expose an optimizer that leaves weights where they are.
    for start, wanted in zip(init, expected[-1], strict=True):
        assert np.mean(wanted != start) > 0.5
    trail = loops.train(optperm.sgperm(**arguments), init, grads, how="scan", init="jit")
    for (params, opt_state), wanted in zip(trail, expected, strict=True):
        support.assert_same_bits(params, wanted)
        support.assert_same_bits(permuted_params(opt_state), wanted)


def test_plain_updates_over_many_steps_never_drift():
    """After 3,000 the state is still a permutation, and params are one rounding from it at most."""
    params = support.normal((8, 2), 0)
    tx = optperm.sgperm(aggressiveness=0.5, momentum=0.5)
    step = loops.make_step(tx, apply=loops.by_addition)

    @jax.jit
    def run(grads):
        return loops.carry(step, params, tx.init(params), grads)

    final, opt_state = run(support.normal((3000, 8, 2), 1))
    exact = permuted_params(opt_state)
    support.assert_permutes(exact, params)
    assert not np.array_equal(exact, params)
    assert np.all(np.abs(final - exact) <= np.spacing(np.abs(exact).max(axis=0)))


def test_mismatches_are_counted_relative_to_the_largest_weight_and_said():
    """A rounding of weights of any size is none, a ten-thousandth of the largest, a NaN or a rollback is
    one, and of weights that are not finite none is known. Scalars are not its own."""
    tx, grads = optperm.sgperm(1.0), support.normal((4, 40, 3), 1)
    init, update = jax.jit(tx.init), jax.jit(tx.update)
    apply = jax.jit(optax.apply_updates)
    usual = np.asarray(support.normal((40, 3), 0))
    not_finite = np.array(usual)
    not_finite[3, 0], not_finite[5, 1] = np.inf, np.nan
    for w, number in ((1e-6 * usual, 1), (usual, 1), (1e6 * usual, 1), (not_finite, 0)):
        params = start = jax.device_put({"w": w, "scale": np.float32(1.0)})
        opt_state = init(start)
        for g in grads:
            updates, opt_state = update(start | {"w": g}, opt_state, params)
            params = apply(params, updates | {"scale": 0.5})
        exact = permuted_params(opt_state)
        assert not np.array_equal(params["w"], exact["w"])  # by rounding
        assert opt_state[1].mismatches == 0
        ten_thousandth = 1e-4 * np.max(w, where=np.isfinite(w), initial=0)
        for change in (ten_thousandth, np.nan, None):
            other = np.array(w if change is None else params["w"])
            other[9, 1] += np.float32(0.0 if change is None else change)
            _, after = update(start, opt_state, params | {"w": other})
            assert after[1].mismatches == number
            if number:
                with pytest.warns(
                    UserWarning, match="Steps began at params that sgperm had not set"
                ):
                    permuted_params(after)
                with pytest.warns(
                    UserWarning, match="Steps began at params that sgperm had not set"
                ):
                    jax.eval_shape(functools.partial(export_permutation, start, after))


@functools.partial(jax.jit, static_argnames=("axes", "include_remainder"))
def one_step(params, grads, axes=None, include_remainder=True, **numbers):
    """The weights after one step without momentum, the state, and the ranks before."""
    usual = {"aggressiveness": 0.1, "partition_ratio": 1.0, "momentum": 0.0}
    options = {"axes": axes, "include_remainder": include_remainder}
    tx = optperm.sgperm(**options, **usual | numbers)
    before = tx.init(params)
    updates, after = tx.update(grads, before, params)
    return optperm.apply_updates(params, updates, after), after[1], before[1].ranks


@pytest.mark.slow
def test_axes_of_any_kind_choose_the_weight_vectors():
    """Weight vectors are taken along the axes asked for, as if they had been laid out that way."""
    # Axes of each leaf, all axes with the counting ones first, and the number of weight vectors.
    layouts = {
        "a": (LeafAxes("kernel", (1, 2), 0), (0, 1, 2), 3),
        "b": (GaLoreDimensionNumbers((0, 2), -2), (1, 0, 2), 4),
        "c": (LeafAxes("embedding", 0, 2, 1), (1, 2, 0), 20),
        "d": (LeafAxes("bias", (), (0, 1, 2)), (0, 1, 2), 1),
        "e": (LeafAxes("kernel", 1, 2, 0), (0, 2, 1), 15),
        "f": (LeafAxes("scale", (), (0, 1), 2), (2, 0, 1), 5),
        "g": (LeafAxes("kernel", 2, 1, 0), (0, 1, 2), 12),
    }

    def choose(params):
        return {"layer": {name: layouts[name][0] for name in params["layer"]}}

    def lay_out(name, leaf):
        _, order, number = layouts[name]
        return np.transpose(leaf, order).reshape(number, -1).T

    drawn = support.normal((2, 3, 4, 5), 0)
    after, _, _ = one_step(*({"layer": dict.fromkeys(layouts, each)} for each in drawn), choose)
    laid_out = [{name: lay_out(name, each) for name in layouts} for each in drawn]
    expected, _, _ = one_step(*laid_out)
    for name, wanted in expected.items():
        np.testing.assert_array_equal(lay_out(name, after["layer"][name]), wanted)
        assert not np.array_equal(wanted, laid_out[0][name])


def test_fraction_moved_counts_the_entries_that_changed_place():
    """Scalars and empty leaves do not count, and stay; where all recommendations agree none moves."""
    params = {"kernel": support.normal((12, 5)), "bias": support.bias(6), "scale": jnp.float32(2.0)}
    params |= {"none": np.zeros((0, 3), np.float32)}
    grads = support.random_like(params, 1)
    falling = jax.tree.map(lambda g: -np.abs(np.asarray(g)), grads)
    for pulls, least in ((grads, 0.3), (falling, 0.0)):
        after, state, before = one_step(params, pulls, aggressiveness=0.3)
        ranks, before = jax.tree.map(np.asarray, (state.ranks, before))
        changed = sum(np.sum(ranks[name] != before[name]) for name in ("kernel", "bias"))
        np.testing.assert_allclose(state.fraction_moved, changed / 66, rtol=1e-6)
        assert state.fraction_moved > least if least else state.fraction_moved == 0.0
        support.assert_same_bits(after | {k: params[k] for k in ("scale", "none")}, after)


def test_numbers_of_schedules_are_those_of_the_steps_done():
    """Of both schedules, also where `optax.inject_hyperparams` gives them as numbers."""
    build = functools.partial(optperm.sgperm, momentum=0.0)

    @jax.jit
    def step(w, opt_state, g, *numbers):
        # The state knows nothing of the numbers.
        return loops.make_step(build(*numbers))(w, opt_state, g)

    params, grads = (np.asarray(support.normal((*n, 50, 3), len(n))) for n in ((), (5,)))
    alphas, ratios = np.float32([[0.3, 0.1, 0.4, 0.2, 0.5], [0.5, 0.9, 0.3, 0.9, 0.4]])
    by_step, w, opt_state = [], params, jax.jit(build().init)(params)
    for each in zip(grads, alphas, ratios, strict=True):
        w, opt_state = step(w, opt_state, *each)
        by_step.append(w)
    schedules = (lambda t: jnp.asarray(alphas)[t]), (lambda t: jnp.asarray(ratios)[t])
    for tx in (build(*schedules), optax.inject_hyperparams(build)(*schedules)):
        trail = loops.train(tx, params, grads, how="scan", init="jit")
        support.assert_same_bits([w for w, _ in trail], by_step)


def test_partition_size_is_the_larger_of_fraction_and_minimum():
    """P = max(P_min, floor(lambda n)), at most n; subsets of one entry move nothing."""
    for ratio, n, least, size in (
        (0.0, 40, 1, 1),
        (0.0, 40, 2, 2),
        (0.0, 40, 1000, 40),
        (0.26, 40, 1, 10),
        (0.275, 40, 1, 11),
        (0.5, 101, 10, 50),
        *((1.0, n, 10, n) for n in (7, 2**24 + 1, 2**25 + 1)),  # which float32 rounds
    ):
        assert int(_compute_partition_size(jnp.float32(ratio), n, least)) == size
    for least in (1, 2):
        numbers = {"partition_ratio": 0.0, "min_partition_size": least}
        _, state, _ = one_step(support.bias(40), support.bias(40, 1), **numbers)
        assert (state.fraction_moved > 0.05) == (least > 1)


def test_remainder_that_is_left_out_sits_out():
    """Of ten entries in subsets of six, four can move only with include_remainder."""
    grads = np.where(np.arange(10) < 5, np.float32(-1.0), np.float32(1.0))
    params = np.linspace(0.0, 1.0, 10, dtype=np.float32)
    numbers = {"aggressiveness": 2.0, "partition_ratio": 0.6, "min_partition_size": 1}
    for include in (True, False):
        each = (one_step(params, grads, None, include, key=seed, **numbers) for seed in range(8))
        assert (max(state.fraction_moved for _, state, _ in each) > 0.6 + 1e-6) == include


def test_rows_steps_leaves_and_keys_draw_partitions_of_their_own():
    """The same weights and gradients move otherwise in each row, step, leaf and for each key."""
    params, grads = ([np.stack([support.bias(40, seed)] * 2, axis=1)] * 2 for seed in range(2))
    after, *_ = one_step(params, grads, partition_ratio=0.25, key=0)
    other_key, *_ = one_step(params, grads, partition_ratio=0.25, key=1)
    tx = optperm.permute_by_cycles(0.1, 0.25)
    update, start = jax.jit(tx.update), jax.jit(tx.init)(params)
    states = [start._replace(count=jnp.int32(count)) for count in (0, 1)]
    first, later = (update(grads, state, params)[1] for state in states)
    support.assert_same_bits(first.weights, after)
    after, other_key, later = jax.tree.map(np.asarray, (after, other_key, later))
    for one, other in [
        (after[0][:, 0], after[0][:, 1]),
        (after[0], after[1]),
        (after[0], other_key[0]),
        (after[0], later.weights[0]),
    ]:
        assert not np.array_equal(one, other)


def test_recommendation_of_gradients_that_are_not_finite_stays_with_its_location():
    """m <- lr * g + momentum * m by place, whatever weight is there; an entry whose gradient is not
    finite sits out the step and keeps its recommendation."""
    params, grads = support.normal((30, 2), 0), support.normal((4, 30, 2), 1)
    grads = np.array(grads)
    grads[1, 3, 0], grads[1, 7, 1], grads[1, 9, 1] = np.nan, np.inf, -np.inf
    out = ~np.isfinite(grads[1])
    tx = optperm.sgperm(0.5, learning_rate=0.5, momentum=0.8)
    trail = loops.train(tx, params, grads, how="scan", init="jit")
    expected = np.zeros((30, 2), np.float32)
    for g, (_, (recommended, permuted)) in zip(grads, trail, strict=True):
        new = np.float32(0.5) * np.asarray(g) + np.float32(0.8) * expected
        expected = np.where(np.isfinite(new), new, expected)
        np.testing.assert_allclose(recommended.recommendation, expected, rtol=1e-6)
        assert permuted.fraction_moved > 0.3
    ranks = [np.asarray(state[1].ranks) for _, state in trail]
    np.testing.assert_array_equal(ranks[0][out], ranks[1][out])
    support.assert_permutes(trail[-1][0], params)


def test_centralized_recommendation_sorts_the_weights_by_it():
    """Nearly the order in which sum(m w) is least, which signs alone do not find: of weights that all
    should rise none can pass another. What a weight vector's entries have in common moves nothing."""
    params, draw = np.asarray(support.normal((18, 3), 0)), np.random.default_rng(1)
    m = np.stack([draw.permutation(18) for _ in range(3)], axis=1).astype(np.float32) - 40.0
    least = np.sum(np.sort(m, axis=0) * -np.sort(-np.asarray(params), axis=0), axis=0)

    @functools.partial(jax.jit, static_argnums=1)
    def trained(wishes, centralize):
        tx = optperm.permute_by_cycles(2.0, 1.0, centralize=centralize)
        wishes = jnp.broadcast_to(wishes, (100, *wishes.shape))
        return loops.carry(loops.make_step(tx), params, tx.init(params), wishes)

    to_go = np.sum(m * params, axis=0) - least
    for shift in (0.0, 60.0):
        w = np.asarray(trained(m + np.float32(shift), True)[0])
        assert np.all(np.sum(m * w, axis=0) - least < 0.05 * to_go)
    support.assert_same_bits(trained(m, False)[0], params)
    # An entry that is not finite sits out, and is not in the pivot.
    m[0] = np.nan
    w, state = jax.tree.map(np.asarray, trained(m, True))
    support.assert_same_bits(w[0], params[0])
    assert not np.array_equal(w[1:], params[1:])
    assert np.isfinite(state.fraction_moved)


@pytest.mark.parametrize("centralize", support.every_night((False, True), [True]))
def test_recommendations_of_any_scale_permute_alike(centralize):
    """A power of two is exact: the order stays, and so do the bits of the weights."""
    tx, w = optperm.permute_by_cycles(0.4, 0.7, centralize=centralize), support.normal((40, 4), 0)
    m, start, update = support.normal((40, 4), 1), jax.jit(tx.init)(w), jax.jit(tx.update)
    _, expected = update(m, start, w)
    assert float(expected.fraction_moved) > 0.5
    for exponent in (-110, -70, -1, 70, 120):
        _, scaled = update(np.ldexp(m, exponent), start, w)
        support.assert_same_bits(scaled.weights, expected.weights)


def test_constant_rows_are_warned_of_once_by_name():
    """One warning names all zero-initialized leaves and no other: not rows of two values or more,
    however small, scalars and empty leaves."""
    params = {
        "kernel": support.normal((3, 2)),
        "bias": np.zeros(4, np.float32),
        "norm": {"scale": np.ones(4, np.float32)},
        "half": np.float32([[0, 1], [1, 1], [2, 1]]),
        "varied": np.float32([0, 0, 1, 0]),
        "subnormal": np.arange(1, 5, dtype=np.float32) * np.float32(1e-44),
        "gain": np.float32(1.0),
        "none": np.zeros((0, 2), np.float32),
    }
    tx = optperm.sgperm()
    for each in (optperm.laperm(optax.sgd(0.1), 2), tx):
        with pytest.warns(UserWarning, match="optax.partition") as caught:
            opt_state = each.init(params)
        (warning,) = caught
        assert str(warning.message).startswith("In bias, half, norm/scale, all weights")
    # As constants of a program, and not of one that is given its params, nor in an update.
    with pytest.warns(UserWarning, match="In bias, half"):
        jax.eval_shape(lambda: tx.init(params))
    jax.eval_shape(tx.init, params)
    jax.eval_shape(lambda: tx.update(params, opt_state, params))


LARGE = {
    "window": ((20, 100, 20), LeafAxes("kernel", (0, 1), 2)),
    "stack": ((20, 100, 20), LeafAxes("kernel", 1, 2, 0)),
    "vector": ((40_000,), None),
}


@pytest.mark.parametrize("of", support.every_night(LARGE, ["stack"]))
def test_donated_state_is_written_in_place(of):
    # In jax 0.10 XLA drops optimization barriers before it fuses, and copies three arrays.
    shape, axes = LARGE[of]
    w = jax.ShapeDtypeStruct(shape, jnp.float32)
    tx = optperm.sgperm(0.3, axes=axes)
    lowered = jax.jit(tx.update, donate_argnums=(0, 1)).lower(w, jax.eval_shape(tx.init, w), w)
    bytes_held = lowered.compile().memory_analysis().temp_size_in_bytes
    assert bytes_held / w.size < (1 if jax.__version_info__ >= (0, 12) else 13)


@pytest.mark.exhaustive
@pytest.mark.parametrize("centralize", [False, True])
def test_one_generator_draws_the_partitions_of_all_leaves(centralize):
    tx = optperm.sgperm(num_steps=10, centralize=centralize)

    def count_loops(number):
        shapes = [jax.ShapeDtypeStruct((6, 4), jnp.float32)] * number
        program = jax.jit(tx.update).lower(shapes, jax.eval_shape(tx.init, shapes), shapes)
        return program.compile().as_text().count(" while(")

    assert count_loops(4) == count_loops(2)


def test_ties_move_only_where_a_weight_changes():
    """No zero changes its sign; two equal weights that should fall and a larger riser stay."""
    for values, pulls in (
        ([0.0, -0.0, 0.0, -0.0, -0.0], [1.0, -1.0, 1.0, -1.0, 1.0]),
        ([1.0, 1.0, 2.0], [1.0, 1.0, -1.0]),
    ):
        after, _, _ = one_step(np.float32(values), np.float32(pulls), aggressiveness=10.0)
        support.assert_same_bits(after, np.float32(values))
