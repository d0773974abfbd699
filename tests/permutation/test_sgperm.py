"""SGPerm against the original's own sequences, and what its documentation promises."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest
import support

import optperm
from optperm.permutation import cycles

REFERENCE = pathlib.Path(__file__).parents[1] / "data" / "sgperm_reference.npz"
SEQUENCES = ("dense", "conv", "zero_gradients", "ties", "tiny_alpha")


@functools.cache
def load_sequence(name):
    """One run of the original: its arguments, initial params, and the steps' gradients and params."""
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
    by_step = (
        [[leaf[t] for leaf in each] for t in range(len(each[0]))] for each in (grads, params)
    )
    return arguments, init, *by_step


@pytest.mark.parametrize(
    ("sequence", "kernel"), support.in_turns(SEQUENCES, cycles.KERNELS), indirect=["kernel"]
)
@pytest.mark.usefixtures("kernel")
def test_reproduces_the_original_bit_for_bit(sequence):
    """`optperm.apply_updates` gives the original's weights, every bit at every step; what is added up by
    `optax.apply_updates` stays within 1 ulp of each weight vector's largest value."""
    arguments, init, grads, expected = load_sequence(sequence)
    # It would expose an optimizer that leaves weights where they are.
    for start, wanted in zip(init, expected[-1], strict=True):
        assert np.mean(np.asarray(wanted) != np.asarray(start)) > 0.5
    tx = optperm.sgperm(**arguments)
    exact = loops.train(tx, init, grads, init="jit")
    added = loops.train(tx, init, grads, apply=loops.by_addition, init="jit")
    for (params, opt_state), (near, _), wanted in zip(exact, added, expected, strict=True):
        support.assert_same_bits(params, wanted)
        support.assert_same_bits(optperm.permuted_params(opt_state), wanted)
        for leaf, e in zip(near, wanted, strict=True):
            error = np.abs(support.columns(leaf) - support.columns(e))
            assert np.all(error <= support.ulp_of_largest(e))


def test_ten_thousand_plain_updates_never_drift():
    """After 10,000 steps of `optax.apply_updates` the state still holds the initial multiset, and
    the params are within one rounding of it: errors do not add up."""
    params = {"kernel": support.normal((8, 2), 0)}
    tx = optperm.sgperm(aggressiveness=0.5, aggressiveness_decay=1.0, momentum=0.5)
    run_one = loops.make_step(
        tx, lambda p, key: (support.random_like_from_key(p, key), {}), loops.by_addition
    )

    def step(carry, key):
        carry = run_one(*carry, key)
        return carry, carry[1][1].share_moved

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
    ((after, opt_state),) = loops.train(tx, params, [grads], init="jit")
    support.assert_same_bits(after, optperm.permuted_params(opt_state))
    return after, opt_state[1]


def trained(tx, params, grads):
    """The weights after each step."""
    return [after for after, _ in loops.train(tx, params, grads, init="jit")]


@pytest.mark.parametrize(("sign", "expected"), [(1, [0.4, 0.2, 0.3, 0.1]), (-1, None)])
def test_negative_recommendations_rise_and_positive_fall(sign, expected):
    """A loss that wants a weight larger gets a larger one there."""
    params = jnp.array([0.1, 0.2, 0.3, 0.4])
    after, _ = one_step(params, sign * jnp.array([-1.0, 0.0, 0.0, 1.0]), aggressiveness=2.0)
    np.testing.assert_array_equal(after, params if expected is None else jnp.array(expected))


def test_the_last_axis_indexes_weight_vectors():
    """Weights stay in their column of a (..., out) parameter, of any rank."""
    params = support.normal((2, 3, 4, 5), 0)
    after, state = one_step(params, support.normal(params.shape, 1))
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
    params = support.normal((3, 4, 5), 0)
    grads = support.normal((3, 4, 5), 1)
    after, _ = one_step(params, grads, output_axes=output_axes)
    rows_params, rows_grads = jnp.asarray(to_rows(params)), jnp.asarray(to_rows(grads))
    expected, _ = one_step(rows_params.T, rows_grads.T)
    np.testing.assert_array_equal(to_rows(after), expected.T)


def test_output_axes_are_told_the_path():
    """The function gets a path such as "Dense_0/kernel" and the parameter."""
    seen = []

    def last(path, leaf):
        seen.append((path, leaf.shape))
        return -1

    optperm.sgperm(output_axes=last).init({"Dense_0": {"kernel": jnp.arange(12.0).reshape(4, 3)}})
    assert set(seen) == {("Dense_0/kernel", (4, 3))}


def test_scalars_and_empty_leaves_are_left_alone():
    """A scalar parameter keeps its value whatever its gradient; an empty one does no harm."""
    params = {"scale": jnp.float32(2.0), "none": jnp.zeros((0, 3)), "bias": support.bias(6)}
    grads = {"scale": jnp.float32(1.0), "none": jnp.zeros((0, 3)), "bias": support.bias(6, 1)}
    after, state = one_step(params, grads, aggressiveness=1.0)
    assert after["scale"] == 2.0
    assert after["none"].shape == (0, 3)
    assert not np.array_equal(after["bias"], params["bias"])
    # share_moved counts what can move: the scalar is not in it.
    before = jax.jit(optperm.sgperm().init)(params)[1].ranks["bias"]
    np.testing.assert_allclose(state.share_moved, jnp.sum(state.ranks["bias"] != before) / 6)


def test_share_moved_counts_the_entries_that_changed_place():
    """The share in the state is that of the ranks that changed; where all agree none do."""
    params, grads = support.random_params(), support.random_like(support.random_params(), 1)
    before = jax.jit(optperm.sgperm().init)(params)[1].ranks
    _, after = one_step(params, grads, aggressiveness=0.3)
    changed = jax.tree.map(lambda a, b: jnp.sum(a != b), after.ranks, before)
    np.testing.assert_allclose(after.share_moved, sum(jax.tree.leaves(changed)) / 65, rtol=1e-6)
    _, all_rise = one_step(params, jax.tree.map(lambda g: -jnp.abs(g), grads), aggressiveness=0.3)
    assert all_rise.share_moved == 0.0


def decayed(step):
    return 0.4 * 0.9 ** (jnp.float32(step) + 1.0)


def test_the_decay_is_the_schedule_it_stands_for():
    """alpha_t = alpha_0 beta^(t+1): the first step already uses the decayed value."""
    params = support.normal((50, 3), 0)
    grads = support.normal((6, 50, 3), 1)
    built_in, by_schedule, other = (
        trained(tx, params, grads)
        for tx in (
            optperm.sgperm(0.4, 0.9),
            optperm.sgperm(decayed),
            optperm.sgperm(lambda step: decayed(step - 1)),
        )
    )
    support.assert_same_bits(built_in, by_schedule)
    assert not np.array_equal(built_in, other)


def test_aggressiveness_bounds_each_move():
    """No weight moves further than alpha_t + 1/s of the range, and the floor on alpha holds."""
    params = jnp.linspace(-1.0, 1.0, 200)[jax.random.permutation(jax.random.key(9), 200)]
    tx = optperm.sgperm(0.4, 0.5, 0.1, momentum=0.0)
    trail = np.stack([params, *trained(tx, params, [support.bias(200, seed) for seed in range(5)])])
    moves = np.abs(np.diff(trail, axis=0)).max(axis=1) / float(jnp.ptp(params))
    bounds = np.maximum(0.4 * 0.5 ** np.arange(1, 6), 0.1) + 1 / 200
    assert np.all(moves <= bounds * (1 + 1e-5))
    assert np.all(moves >= 0.6 * bounds)


def test_partitions_grow_to_their_limit():
    """lambda_t = min(lambda_0 beta^(t+1), lambda_max), seen in the state's share of whole rows."""
    params = support.normal((40, 3), 0)
    grads = [support.normal(params.shape, step) for step in range(3)]
    grown = optperm.sgperm(0.2, 1.0, 0.0, 0.25, 2.0, 0.9, momentum=0.0)
    steps = optperm.sgperm(
        0.2, 1.0, partition_ratio=lambda step: jnp.array([0.5, 0.9, 0.9])[step], momentum=0.0
    )
    support.assert_same_bits(trained(grown, params, grads), trained(steps, params, grads))


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
    later = jax.jit(tx.init)(params)._replace(count=jnp.int32(1))
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
    params = support.normal((30, 2), 0)
    grads = support.normal((4, 30, 2), 1)
    tx = optperm.sgperm(0.3, learning_rate=0.5, momentum=0.8)
    expected = np.zeros((30, 2), np.float32)
    for g in grads:
        expected = np.float32(0.5) * np.asarray(g) + np.float32(0.8) * expected
    _, opt_state = loops.train(tx, params, grads, init="jit")[-1]
    np.testing.assert_allclose(opt_state[0].recommendation, expected, rtol=1e-6)


def test_entries_without_a_finite_gradient_sit_out_and_training_goes_on():
    """NaN and infinite gradients move nothing there and do not poison the momentum."""
    params = support.normal((30, 2), 0)
    good = support.normal((30, 2), 1)
    bad = good.at[3, 0].set(jnp.nan).at[7, 1].set(jnp.inf).at[9, 1].set(-jnp.inf)
    out = ~np.isfinite(np.asarray(bad))
    trail = loops.train(optperm.sgperm(0.5), params, [good, bad, good], init="jit")
    ranks = [np.asarray(state[1].ranks) for _, state in trail]
    np.testing.assert_array_equal(ranks[0][out], ranks[1][out])
    assert trail[1][1][1].share_moved > 0.3
    before, during, after = (np.asarray(state[0].recommendation) for _, state in trail)
    np.testing.assert_array_equal(before[out], during[out])
    assert np.all(before[~out] != during[~out])
    # As if their gradients had been zero without momentum: the others see them drop out.
    support.assert_permutes(trail[-1][0], params)
    assert np.all(after[out] != during[out])


def test_learning_on_real_numbers():
    """A linear teacher with the same multiset is found again by permuting alone."""
    x = support.normal((256, 16), 0)
    teacher = support.normal((16, 3), 1)
    student = jax.random.permutation(jax.random.key(2), teacher, axis=0)

    def loss_fn(w, batch):
        return jnp.mean((batch @ w - batch @ teacher) ** 2)

    tx = optperm.sgperm(0.3, 0.99, momentum=0.0)
    w, _ = loops.train(tx, student, [x] * 200, evaluate=loops.gradient(loss_fn))[-1]
    assert loss_fn(w, x) < 0.1 * loss_fn(student, x)
    support.assert_permutes(w, teacher)


def test_constant_rows_are_warned_of_once_by_name():
    """One warning for all zero-initialized leaves names those and no other: not rows of two values or
    more, scalars and empty leaves."""
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
    # pytest makes an error of any other warning.
    jax.jit(optperm.sgperm().init)(params)
    varied = {"a": jnp.array([0.0, 0.0, 1.0]), "b": jnp.float32(0.0), "c": jnp.zeros((0, 2))}
    tx = optperm.sgperm()
    tx.update(varied, tx.init(varied), varied)


@pytest.mark.parametrize("shape", [(2000, 20), (20, 100, 20), (40_000,)], ids=str)
def test_a_donated_state_is_written_in_place(shape):
    """Beside its arguments XLA holds no copy of what is donated; nothing that is not donated changes.

    In jax 0.10 XLA drops optimization barriers before it fuses, and copies three arrays.
    """
    params, grads = support.normal((2, *shape), 0)
    tx = optperm.sgperm(0.3)
    state = jax.jit(tx.init)(params)
    compiled = jax.jit(tx.update, donate_argnums=(0, 1)).lower(grads, state, params).compile()
    bytes_a_weight = compiled.memory_analysis().temp_size_in_bytes / params.size
    assert bytes_a_weight < (1 if jax.__version_info__ >= (0, 12) else 13)

    kept = jax.device_get((grads, state, params))
    expected = jax.jit(tx.update)(grads, state, params)
    support.assert_same_bits(jax.device_get((grads, state, params)), kept)
    support.assert_permutes(expected[1][1].weights, params)
    support.assert_same_bits(compiled(grads, state, params), expected)
