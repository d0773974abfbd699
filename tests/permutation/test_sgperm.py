"""SGPerm against the original's own sequences, and what its documentation promises."""

import functools
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm

REFERENCE = pathlib.Path(__file__).parents[1] / "data" / "sgperm_reference.npz"
SEQUENCES = ("dense", "conv", "zero_gradients", "ties", "tiny_alpha")


@functools.cache
def load_sequence(name):
    """One run of the original: its arguments, initial params, and gradients and params."""
    with np.load(REFERENCE) as data:
        parts = {key[len(name) + 1 :]: data[key] for key in data.files if key.startswith(name)}
    h = {key.removeprefix("hyper/"): float(v) for key, v in parts.items() if "hyper" in key}
    arguments = {
        "aggressiveness": h["alpha0"],
        "aggressiveness_decay": h["beta1"],
        "min_aggressiveness": h["alpha_min"],
        "partition_ratio": h["lamda0"],
        "partition_growth": h["beta2"],
        "max_partition_ratio": h["lamda_max"],
        "learning_rate": h["momentum_lr"],
        "momentum": h["momentum"],
    }
    count = sum(key.startswith("init/") for key in parts)
    init, grads, params = (
        [jnp.asarray(parts[f"{kind}/{i}"]) for i in range(count)]
        for kind in ("init", "grads", "params")
    )
    return arguments, init, grads, params


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_reproduces_the_original_bit_for_bit(sequence, kernel):
    """`optperm.apply_updates` gives the original's weights, every bit at every step."""
    arguments, params, grads, expected = load_sequence(sequence)
    tx = optperm.sgperm(**arguments)
    opt_state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(len(grads[0])):
        updates, opt_state = update([g[step] for g in grads], opt_state, params)
        params = optperm.apply_updates(params, updates, opt_state)
        support.assert_same_bits(params, [e[step] for e in expected])
        support.assert_same_bits(optperm.permuted_params(opt_state), params)


@pytest.mark.parametrize("sequence", SEQUENCES)
def test_plain_apply_updates_is_within_one_rounding(sequence, kernel):
    """`optax.apply_updates` stays within 1 ulp of each weight vector's largest value."""
    arguments, params, grads, expected = load_sequence(sequence)
    tx = optperm.sgperm(**arguments)
    opt_state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(len(grads[0])):
        updates, opt_state = update([g[step] for g in grads], opt_state, params)
        params = optax.apply_updates(params, updates)
        for leaf, e in zip(params, expected, strict=True):
            error = np.abs(support.columns(leaf) - support.columns(e[step]))
            assert np.all(error <= support.ulp_of_largest(e[step]))


def test_the_reference_moves():
    """The sequences would expose an optimizer that leaves weights where they are."""
    for sequence in SEQUENCES:
        _, init, _, expected = load_sequence(sequence)
        for start, e in zip(init, expected, strict=True):
            assert np.mean(np.asarray(e[-1]) != np.asarray(start)) > 0.5


def test_ten_thousand_plain_updates_never_drift():
    """After 10,000 steps of `optax.apply_updates` the state still holds the initial multiset, and
    the params are within one rounding of it: errors do not add up."""
    params = {"kernel": jax.random.normal(jax.random.key(0), (8, 2))}
    tx = optperm.sgperm(aggressiveness=0.5, aggressiveness_decay=1.0, momentum=0.5)

    def step(carry, key):
        current, opt_state = carry
        grads = {"kernel": jax.random.normal(key, (8, 2))}
        updates, opt_state = tx.update(grads, opt_state, current)
        return (optax.apply_updates(current, updates), opt_state), opt_state[1].share_moved

    keys = jax.random.split(jax.random.key(1), 10_000)
    (final, opt_state), moved = jax.jit(lambda carry: jax.lax.scan(step, carry, keys))(
        (params, tx.init(params))
    )
    exact = optperm.permuted_params(opt_state)
    support.assert_permutes(exact, params)
    error = np.abs(np.asarray(final["kernel"]) - np.asarray(exact["kernel"]))
    assert np.all(error <= support.ulp_of_largest(params["kernel"]))
    assert np.mean(moved) > 0.3


def one_step(params, grads, **arguments):
    """The weights after one step of sgperm without momentum, and the state."""
    tx = optperm.sgperm(**{"momentum": 0.0, **arguments})
    _, opt_state = jax.jit(tx.update)(grads, tx.init(params), params)
    return optperm.permuted_params(opt_state), opt_state[1]


def test_negative_recommendations_rise_and_positive_fall():
    """A loss that wants a weight larger gets a larger one there."""
    params = jnp.array([0.1, 0.2, 0.3, 0.4])
    after, _ = one_step(params, jnp.array([-1.0, 0.0, 0.0, 1.0]), aggressiveness=2.0)
    np.testing.assert_array_equal(after, jnp.array([0.4, 0.2, 0.3, 0.1]))
    after, _ = one_step(params, jnp.array([1.0, 0.0, 0.0, -1.0]), aggressiveness=2.0)
    np.testing.assert_array_equal(after, params)


def test_the_last_axis_indexes_weight_vectors():
    """Weights stay in their column of a (..., out) parameter, of any rank."""
    params = jax.random.normal(jax.random.key(0), (2, 3, 4, 5))
    after, state = one_step(params, jax.random.normal(jax.random.key(1), params.shape))
    support.assert_permutes(after, params)
    assert state.share_moved > 0.3
    # Across columns the values do differ, so that the check above can fail.
    assert not np.array_equal(np.sort(after.reshape(24, 5)[:, 0]), np.sort(params[..., 1].ravel()))


@pytest.mark.parametrize(
    ("output_axes", "to_rows"),
    [
        (0, lambda x: x.reshape(3, -1)),
        (-2, lambda x: np.moveaxis(x, 1, 0).reshape(4, -1)),
        ((1, 2), lambda x: np.moveaxis(x, 0, -1).reshape(20, -1)),
        ((), lambda x: x.reshape(1, -1)),
        (lambda path, leaf: (0, leaf.ndim - 1), lambda x: np.moveaxis(x, 1, -1).reshape(15, -1)),
    ],
)
def test_other_output_axes(output_axes, to_rows):
    """Weight vectors are taken along the axes asked for: as if they had been laid out that way."""
    params = jax.random.normal(jax.random.key(0), (3, 4, 5))
    grads = jax.random.normal(jax.random.key(1), (3, 4, 5))
    after, _ = one_step(params, grads, output_axes=output_axes)
    rows_params, rows_grads = jnp.asarray(to_rows(params)), jnp.asarray(to_rows(grads))
    expected, _ = one_step(rows_params.T, rows_grads.T)
    np.testing.assert_array_equal(to_rows(after), expected.T)


def test_output_axes_are_told_the_path():
    """The function gets a path such as "Dense_0/kernel" and the parameter."""
    seen = []
    params = {"Dense_0": {"kernel": jax.random.normal(jax.random.key(0), (4, 3))}}
    optperm.sgperm(output_axes=lambda path, leaf: seen.append((path, leaf.shape)) or -1).init(
        params
    )
    assert set(seen) == {("Dense_0/kernel", (4, 3))}


@pytest.mark.parametrize("axes", [3, -4, (0, 3), (0, 0), (0, -3)])
def test_bad_output_axes_name_the_parameter(axes):
    """Axes that are not there, or given twice, are refused with the parameter's name."""
    params = {"kernel": jax.random.normal(jax.random.key(0), (4, 3, 2))}
    with pytest.raises(ValueError, match=r"output_axes .*kernel"):
        optperm.sgperm(output_axes=axes).init(params)


def test_scalars_and_empty_leaves_are_left_alone():
    """A scalar parameter keeps its value whatever its gradient; an empty one does no harm."""
    params = {"scale": jnp.float32(2.0), "none": jnp.zeros((0, 3)), "bias": support.bias(6)}
    grads = {"scale": jnp.float32(1.0), "none": jnp.zeros((0, 3)), "bias": support.bias(6, 1)}
    tx = optperm.sgperm(aggressiveness=1.0)
    updates, opt_state = jax.jit(tx.update)(grads, tx.init(params), params)
    after = optperm.apply_updates(params, updates, opt_state)
    assert after["scale"] == 2.0
    assert after["none"].shape == (0, 3)
    assert not np.array_equal(after["bias"], params["bias"])
    # share_moved counts what can move: the scalar is not in it.
    moved = np.sum(
        np.asarray(opt_state[1].ranks["bias"]) != np.asarray(tx.init(params)[1].ranks["bias"])
    )
    np.testing.assert_allclose(opt_state[1].share_moved, moved / 6)


def test_share_moved_counts_the_entries_that_changed_place():
    """The share in the state is that of the ranks that changed; where all agree none do."""
    params, grads = support.random_params(), support.random_like(support.random_params(), 1)
    tx = optperm.sgperm(0.3)
    before = tx.init(params)
    _, after = jax.jit(tx.update)(grads, before, params)
    changed = jax.tree.map(lambda a, b: jnp.sum(a != b), after[1].ranks, before[1].ranks)
    np.testing.assert_allclose(after[1].share_moved, sum(jax.tree.leaves(changed)) / 65, rtol=1e-6)
    _, all_rise = jax.jit(tx.update)(jax.tree.map(lambda g: -jnp.abs(g), grads), before, params)
    assert all_rise[1].share_moved == 0.0


def decayed(step):
    return 0.4 * 0.9 ** (jnp.float32(step) + 1.0)


def test_the_decay_is_the_schedule_it_stands_for():
    """alpha_t = alpha_0 beta^(t+1): the first step already uses the decayed value."""
    params = jax.random.normal(jax.random.key(0), (50, 3))
    grads = jax.random.normal(jax.random.key(1), (6, 50, 3))
    built_in = optperm.sgperm(0.4, 0.9)
    by_schedule = optperm.sgperm(decayed)
    other = optperm.sgperm(lambda step: decayed(step - 1))
    trails = []
    for tx in (built_in, by_schedule, other):
        opt_state, update, trail = tx.init(params), jax.jit(tx.update), []
        for g in grads:
            _, opt_state = update(g, opt_state, params)
            trail.append(np.asarray(optperm.permuted_params(opt_state)))
        trails.append(np.stack(trail))
    np.testing.assert_array_equal(trails[0], trails[1])
    assert not np.array_equal(trails[0], trails[2])


def largest_move(tx, params, steps):
    """The largest share of the range that a weight moves, in each step."""
    opt_state, update, moves = tx.init(params), jax.jit(tx.update), []
    for step in range(steps):
        before = optperm.permuted_params(opt_state)
        _, opt_state = update(
            jax.random.normal(jax.random.key(step), params.shape), opt_state, params
        )
        moves.append(float(jnp.max(jnp.abs(optperm.permuted_params(opt_state) - before))))
    return np.array(moves) / float(jnp.ptp(params))


def test_aggressiveness_bounds_each_move():
    """No weight moves further than alpha_t + 1/s of the range, and the floor on alpha holds."""
    params = jnp.linspace(-1.0, 1.0, 200)[jax.random.permutation(jax.random.key(9), 200)]
    tx = optperm.sgperm(0.4, 0.5, 0.1, momentum=0.0)
    moves = largest_move(tx, params, 5)
    bounds = np.maximum(0.4 * 0.5 ** np.arange(1, 6), 0.1) + 1 / 200
    assert np.all(moves <= bounds * (1 + 1e-5))
    assert np.all(moves >= 0.6 * bounds)


def test_partitions_grow_to_their_limit():
    """lambda_t = min(lambda_0 beta^(t+1), lambda_max), seen in the state's share of whole rows."""
    params = jax.random.normal(jax.random.key(0), (40, 3))
    grown = optperm.sgperm(0.2, 1.0, 0.0, 0.25, 2.0, 0.9, momentum=0.0)
    steps = optperm.sgperm(
        0.2, 1.0, partition_ratio=lambda step: jnp.array([0.5, 0.9, 0.9])[step], momentum=0.0
    )
    states = [grown.init(params), steps.init(params)]
    updates = [jax.jit(grown.update), jax.jit(steps.update)]
    for step in range(3):
        grads = jax.random.normal(jax.random.key(step), params.shape)
        states = [
            update(grads, state, params)[1] for update, state in zip(updates, states, strict=True)
        ]
        support.assert_same_bits(*(optperm.permuted_params(state) for state in states))


def test_small_partitions_have_their_least_size():
    """partition_ratio=0 means subsets of min_partition_size; with size 1 nothing can move."""
    params, grads = support.bias(40), support.bias(40, 1)
    after, state = one_step(params, grads, partition_ratio=0.0, min_partition_size=1)
    np.testing.assert_array_equal(after, params)
    assert state.share_moved == 0.0
    _, state = one_step(params, grads, partition_ratio=0.0, min_partition_size=2)
    assert state.share_moved > 0.05
    whole, _ = one_step(params, grads, partition_ratio=0.0, min_partition_size=1000)
    expected, _ = one_step(params, grads, partition_ratio=1.0)
    np.testing.assert_array_equal(whole, expected)
    # A share that is no whole number of entries is rounded down.
    quarters, _ = one_step(params, grads, partition_ratio=0.26, min_partition_size=1)
    expected, _ = one_step(params, grads, partition_ratio=0.25, min_partition_size=1)
    np.testing.assert_array_equal(quarters, expected)


def test_the_remainder_sits_out_if_asked():
    """Of ten entries in subsets of six, four can move only with include_remainder."""
    grads = jnp.where(jnp.arange(10) < 5, -1.0, 1.0)
    params = jnp.linspace(0.0, 1.0, 10)
    arguments = {"aggressiveness": 2.0, "partition_ratio": 0.6, "min_partition_size": 1}
    shares = {True: [], False: []}
    for seed in range(8):
        for include, seen in shares.items():
            _, state = one_step(params, grads, include_remainder=include, seed=seed, **arguments)
            seen.append(float(state.share_moved))
    assert max(shares[False]) <= 0.6 + 1e-6
    assert max(shares[True]) > 0.6 + 1e-6


def test_rows_steps_leaves_and_seeds_draw_partitions_of_their_own():
    """The same weights and gradients move otherwise in each row, step, leaf and for each seed."""
    column, pull = support.bias(40), support.bias(40, 1)
    params = [jnp.stack([column] * 2, axis=1)] * 2
    grads = [jnp.stack([pull] * 2, axis=1)] * 2
    arguments = {"partition_ratio": 0.25}
    after, _ = one_step(params, grads, **arguments)
    other_seed, _ = one_step(params, grads, seed=1, **arguments)
    again, _ = one_step(params, grads, **arguments)
    tx = optperm.permute_by_cycles(0.1 * 0.99, 0.25)
    later = tx.init(params)._replace(count=jnp.int32(1))
    _, later = jax.jit(tx.update)(grads, later, params)
    support.assert_same_bits(after, again)
    for first, second in [
        (after[0][:, 0], after[0][:, 1]),
        (after[0], after[1]),
        (after[0], other_seed[0]),
        (after[0], later.weights[0]),
    ]:
        assert not np.array_equal(first, second)


def test_the_recommendation_stays_with_the_location():
    """Momentum accumulates by place: m <- lr * g + momentum * m, whatever weight is there."""
    params = jax.random.normal(jax.random.key(0), (30, 2))
    grads = jax.random.normal(jax.random.key(1), (4, 30, 2))
    tx = optperm.sgperm(0.3, learning_rate=0.5, momentum=0.8)
    opt_state, expected = tx.init(params), np.zeros((30, 2), np.float32)
    for g in grads:
        _, opt_state = jax.jit(tx.update)(g, opt_state, params)
        expected = np.float32(0.5) * np.asarray(g) + np.float32(0.8) * expected
    np.testing.assert_allclose(opt_state[0].recommendation, expected, rtol=1e-6)


def test_entries_without_a_finite_gradient_sit_out_and_training_goes_on():
    """NaN and infinite gradients move nothing there and do not poison the momentum."""
    params = jax.random.normal(jax.random.key(0), (30, 2))
    good = jax.random.normal(jax.random.key(1), (30, 2))
    bad = good.at[3, 0].set(jnp.nan).at[7, 1].set(jnp.inf).at[9, 1].set(-jnp.inf)
    out = ~np.isfinite(np.asarray(bad))
    tx = optperm.sgperm(0.5)
    update = jax.jit(tx.update)
    _, before = update(good, tx.init(params), params)
    _, during = update(bad, before, params)
    ranks = np.asarray(before[1].ranks), np.asarray(during[1].ranks)
    np.testing.assert_array_equal(ranks[0][out], ranks[1][out])
    assert during[1].share_moved > 0.3
    recommendations = [np.asarray(state[0].recommendation) for state in (before, during)]
    np.testing.assert_array_equal(recommendations[0][out], recommendations[1][out])
    assert np.all(recommendations[0][~out] != recommendations[1][~out])
    # As if their gradients had been zero without momentum: the others see them drop out.
    _, after = update(good, during, params)
    support.assert_permutes(optperm.permuted_params(after), params)
    assert np.all(np.asarray(after[0].recommendation)[out] != recommendations[1][out])


def test_a_gradient_of_nothing_but_nan_moves_nothing():
    """The weights are those of the step before."""
    params = support.random_params()
    after, state = one_step(params, jax.tree.map(lambda p: jnp.full_like(p, jnp.nan), params))
    support.assert_same_bits(after, params)
    assert state.share_moved == 0.0


def test_learning_on_real_numbers():
    """A linear teacher with the same multiset is found again by permuting alone."""
    x = jax.random.normal(jax.random.key(0), (256, 16))
    teacher = jax.random.normal(jax.random.key(1), (16, 3))
    student = jax.random.permutation(jax.random.key(2), teacher, axis=0)

    def loss_fn(w):
        return jnp.mean((x @ w - x @ teacher) ** 2)

    tx = optperm.sgperm(0.3, 0.98, momentum=0.0)
    start, opt_state, w = loss_fn(student), tx.init(student), student

    @jax.jit
    def step(w, opt_state):
        updates, opt_state = tx.update(jax.grad(loss_fn)(w), opt_state, w)
        return optperm.apply_updates(w, updates, opt_state), opt_state

    for _ in range(200):
        w, opt_state = step(w, opt_state)
    assert loss_fn(w) < 0.1 * start
    support.assert_permutes(w, teacher)


NUMBERS = {
    "aggressiveness": (0.0, np.inf),
    "aggressiveness_decay": (0.0, np.inf),
    "min_aggressiveness": (0.0, np.inf),
    "partition_ratio": (0.0, 1.0),
    "partition_growth": (0.0, np.inf),
    "max_partition_ratio": (0.0, 1.0),
    "learning_rate": (0.0, np.inf),
    "momentum": (0.0, 1.0),
}


def bad_arguments():
    for name, (low, high) in NUMBERS.items():
        yield name, low - 0.1, ValueError
        if np.isfinite(high):
            yield name, high + 0.1, ValueError
        yield name, float("nan"), ValueError
        yield name, jnp.array([0.1, 0.2]), ValueError
        for wrong in (True, "0.1", None, 1j):
            yield name, wrong, TypeError
    for low in (0, -3):
        yield "min_partition_size", low, ValueError
    for wrong in (2.0, True, "2", None, jnp.float32(2.0)):
        yield "min_partition_size", wrong, TypeError
    yield "seed", -1, ValueError
    for wrong in (0.5, True, "0", None, jnp.float32(1.0)):
        yield "seed", wrong, TypeError
    for wrong in (1, 0.0, "yes", None):
        yield "include_remainder", wrong, TypeError


@pytest.mark.parametrize(("name", "value", "error"), tuple(bad_arguments()), ids=str)
def test_bad_arguments_are_refused_by_name(name, value, error):
    """Each argument out of range, NaN, a bool or of the wrong type raises and is named."""
    with pytest.raises(error, match=name):
        optperm.sgperm(**{name: value})
    if name in {"aggressiveness", "partition_ratio", "min_partition_size", "seed"}:
        needed = {"aggressiveness": 0.1, "partition_ratio": 1.0}
        with pytest.raises(error, match=name):
            optperm.permute_by_cycles(**needed | {name: value})


@pytest.mark.parametrize("name", NUMBERS)
def test_limits_themselves_are_allowed(name):
    """The ends of each range are fine, as NumPy and JAX scalars too, and in bfloat16."""
    low, high = NUMBERS[name]
    for value in (low, min(high, 5.0), np.float64(low), jnp.bfloat16(min(high, 1.0)), int(low)):
        optperm.sgperm(**{name: value})


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_, jnp.uint8])
def test_params_that_are_not_real_floating_are_refused_by_name(dtype):
    """Integer, boolean and complex leaves raise at init, with their path and what to do."""
    params = {"bias": support.bias(3), "table": jnp.ones((4, 2), dtype)}
    with pytest.raises(TypeError, match=r"params\['table'\] has dtype .*optax.partition"):
        optperm.sgperm().init(params)


def test_constant_rows_are_warned_of_once_by_name():
    """One warning for all zero-initialized leaves names those and no other."""
    params = {
        "kernel": support.bias(6).reshape(3, 2),
        "bias": jnp.zeros(4),
        "norm": {"scale": jnp.ones(4)},
        "half": jnp.stack([jnp.arange(3.0), jnp.ones(3)], axis=1),
        "gain": jnp.float32(1.0),
    }
    with pytest.warns(UserWarning, match="optax.partition") as caught:
        optperm.sgperm().init(params)
    (warning,) = caught
    message = str(warning.message)
    assert message.startswith("In bias, half, norm/scale all weights")
    # As constants of a program, and not of one that is given its params.
    with pytest.warns(UserWarning, match="In bias, half"):
        jax.jit(lambda: optperm.sgperm().init(params))()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.jit(optperm.sgperm().init)(params)


def test_other_params_are_not_warned_of():
    """Rows with at least two values, scalars and empty leaves give no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        params = {"a": jnp.array([0.0, 0.0, 1.0]), "b": jnp.float32(0.0), "c": jnp.zeros((0, 2))}
        tx = optperm.sgperm()
        tx.update(params, tx.init(params), params)
