"""Streaming DiLoCo and compressed contributions, against simulations in NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm
from optperm.distributed import _compression as compression
from optperm.distributed import _plans as plans
from optperm.distributed._replicas import Replicas

pytestmark = pytest.mark.usefixtures("lenient")

SIZE, STEPS = 4, 14
SHAPES = {"a": (3, 5), "b": (4,), "c": (6, 2), "d": ()}


def start_and_targets(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *lead: {k: rng.normal(size=(*lead, *v)) for k, v in SHAPES.items()}  # noqa: E731
    return draw(), [draw(SIZE) for _ in range(STEPS)]


def fragments_of(number):
    """The names of each fragment: leaves in order, cut where the middles of their sizes fall."""
    sizes = np.array([np.prod(shape, dtype=int) for shape in SHAPES.values()], float)
    middles = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    places = np.minimum((middles * number).astype(int), number - 1)
    return [[k for k, p in zip(SHAPES, places, strict=True) if p == i] for i in range(number)]


def simulate(plan, mixing, targets, start, *, rate=0.1, outer_rate=0.7, momentum=0.9, sent=None):
    """Every step's params of all replicas, and the center, by plain SGD within and Nesterov without.

    `sent(index, name, e)` is what of e travels; None for all of it.
    """
    params = [dict(start) for _ in range(SIZE)]
    center, speed = dict(start), {k: 0.0 for k in start}
    held = [{k: np.zeros_like(v) for k, v in start.items()} for _ in range(SIZE)]
    flight = {}
    for step, target in enumerate(targets, start=1):
        for index, own in enumerate(params):
            for k in own:
                own[k] = own[k] - rate * (own[k] - target[k][index])
        for p, names in enumerate(fragments_of(plan.fragments)):
            offset = p * plan.period // plan.fragments
            due = lambda s, offset=offset: s > 0 and (s - offset) % plan.period == 0  # noqa: E731
            if due(step):
                flight[p] = {}
                for k in names:
                    parts = [center[k] - own[k] for own in params]
                    if sent is not None:
                        for index, part in enumerate(parts):
                            e = sent.decay * held[index][k] + part
                            parts[index] = sent(e)
                            held[index][k] = e - parts[index]
                    flight[p][k] = sum(parts) / SIZE
            if due(step - plan.delay):
                for k in names:
                    delta = flight[p][k]
                    speed[k] = delta + momentum * speed[k]
                    center[k] = center[k] - outer_rate * (delta + momentum * speed[k])
                    for own in params:
                        own[k] = mixing * own[k] + (1 - mixing) * center[k]
        yield [dict(own) for own in params], dict(center)


def run(plan, *, flagged=False, targets, start, **options):
    """The same by the library."""
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    tx = optperm.diloco(optax.sgd(0.1), outer, every=plan, axis_name=replicas.AXIS, **options)
    step_of = {}

    def make(commit):
        def step(params, opt_state, target):
            grads = jax.tree.map(jnp.subtract, params, target)
            updates, opt_state = tx.update(grads, opt_state, params, commit=commit)
            return optperm.apply_updates(params, updates, opt_state), opt_state

        return replicas.MAPPINGS["vmap"](step, SIZE)

    params, opt_state = (replicas.stack([tree] * SIZE) for tree in (start, tx.init(start)))
    for step, target in enumerate(targets, start=1):
        commit = plan.at(step) if flagged else None
        if commit not in step_of:
            step_of[commit] = make(commit)
        params, opt_state = step_of[commit](params, opt_state, target)
        yield params, opt_state


PLANS = [
    (optperm.distributed.Every(4), 0.0),
    (optperm.distributed.Every(4, fragments=3), 0.0),
    (optperm.distributed.Every(4, fragments=2, delay=1), 0.25),
    (optperm.distributed.Every(5, fragments=4, delay=3), 0.5),
    (optperm.distributed.Every(3, delay=2), 0.0),
]


@pytest.mark.parametrize(
    ("plan", "flagged"),
    support.every_night(
        itertools.product(PLANS, [True, False]), [(PLANS[2], False), (PLANS[3], True)]
    ),
)
def test_equals_a_simulation(plan, flagged):
    """Every step of every replica and the center, explicit or counted, to 1e-12 in float64."""
    plan, mixing = plan
    with jax.enable_x64(True):
        start, targets = start_and_targets()
        ours = run(plan, flagged=flagged, targets=targets, start=start, mixing=mixing)
        for (params, opt_state), (wanted, center) in zip(
            ours, simulate(plan, mixing, targets, start), strict=True
        ):
            support.assert_close(params, replicas.stack(wanted), atol=1e-12)
            for index in range(SIZE):
                got = replicas.take(optperm.distributed.center_params(opt_state), index)
                support.assert_close(got, center, atol=1e-12)


class _TopK:
    """The largest quarter of a leaf in NumPy, at least 8 of them, not rounded."""

    decay = 0.95

    def __call__(self, e):
        flat = e.reshape(-1)
        number = min(-(-flat.size // 8) * 8, 8)
        kept = np.argsort(-np.abs(flat), kind="stable")[:number]
        sent = np.zeros_like(flat)
        sent[kept] = np.float32(flat[kept])
        return sent.reshape(e.shape)


class _Levels:
    """A leaf in NumPy on 15 evenly spaced levels between minus and plus its largest magnitude."""

    decay = 1.0

    def __call__(self, e):
        flat = np.float32(e.reshape(-1))
        scale = np.abs(flat).max()
        return (np.round(flat / scale * 7) / 7 * scale).reshape(e.shape)


COMPRESSED = {
    "top": (optperm.distributed.Compression(0.25), _TopK()),
    "quantized": (optperm.distributed.Compression(bits=4), _Levels()),
}


@pytest.mark.parametrize("method", support.every_night(COMPRESSED, ["quantized"]))
def test_compressed_contributions_equal_a_simulation(method):
    """With error feedback, over fragments and a delay; the centers of all replicas are the same bits."""
    compress, sent = COMPRESSED[method]
    start, targets = start_and_targets()
    start, targets = (jax.tree.map(np.float32, tree) for tree in (start, targets))
    plan = optperm.distributed.Every(3, fragments=2, delay=1)
    ours = run(plan, targets=targets, start=start, compress=compress, mixing=0.25)
    expected = simulate(plan, 0.25, targets, start, sent=sent)
    for (params, opt_state), (wanted, center) in zip(ours, expected, strict=True):
        support.assert_close(params, replicas.stack(wanted), atol=1e-5)
        for index in range(SIZE):
            got = replicas.take(jax.device_get(optperm.distributed.center_params(opt_state)), index)
            support.assert_close(got, center, atol=1e-5)
            support.assert_same_bits(
                got, replicas.take(jax.device_get(optperm.distributed.center_params(opt_state)), 0)
            )


def sent_of(compress, leaf):
    """What is decoded of what is sent of a leaf."""
    sent = compression.encode(compress, leaf)
    return compression.decode(compress, sent, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))


def test_bytes_say_what_was_sent():
    """What is decoded is within half a level, zero is zero, and the bytes are as few as the bits say."""
    for bits, shape in zip([2, 4, 8, 1], [(), (9, 100), (300,), (600,)], strict=True):
        leaf = np.array(np.random.default_rng(0).normal(size=shape), np.float32)
        leaf = np.where(np.arange(leaf.size).reshape(shape) % 3 == 1, np.float32(0), leaf)
        compress = optperm.distributed.Compression(bits=bits)
        encoded = compression.encode(compress, leaf)
        decoded = np.asarray(sent_of(compress, leaf))
        flat = np.abs(np.pad(leaf.reshape(-1), (0, -leaf.size % 256))).reshape(-1, 256)
        if bits == 1:  # the sign, times the mean magnitude of a run of 256
            there = np.clip(leaf.size - 256 * np.arange(len(flat)), 0, 256)
            scale = np.repeat(flat.sum(axis=1) / there, 256)[: leaf.size]
            np.testing.assert_allclose(decoded, np.where(leaf >= 0, scale, -scale), rtol=1e-5)
        else:
            half = np.repeat(flat.max(axis=1), 256)[: leaf.size] / (2 ** (bits - 1) - 1) / 2
            assert (np.abs(decoded - leaf).reshape(-1) <= half * (1 + 1e-5)).all()
            assert (decoded[leaf == 0] == 0).all()
        padded = -(-leaf.size // 256) * 256 if leaf.size > 256 else -(-leaf.size // 8) * 8
        assert sum(
            part.nbytes for part in jax.tree.leaves(encoded)
        ) == padded * bits // 8 + 4 * len(flat)


def test_one_bit_is_the_mean_magnitude_of_the_entries_there_are():
    """What is the same everywhere is sent whole, in leaves of any size: padding has no part in it."""
    dense, sparse = (
        optperm.distributed.Compression(bits=1),
        optperm.distributed.Compression(1.0, bits=1),
    )
    for compress, size in ((dense, 4), (dense, 257), (sparse, 4), (sparse, 4097)):
        leaf = np.full(size, -2.0, np.float32)
        sent = jax.jit(functools.partial(sent_of, compress))(leaf)
        np.testing.assert_allclose(sent, leaf, rtol=1e-5)


def test_the_largest_and_the_smallest_numbers_are_sent():
    """In every number of bits, within a jitted program, where a division may become a product."""
    leaf = np.float32([3e38, -3e38, 1.5e38, 0.0])
    for bits in (2, 4, 8):
        compress = optperm.distributed.Compression(bits=bits)
        sent = jax.jit(functools.partial(sent_of, compress))(jnp.asarray(leaf))
        level = 3e38 / (2 ** (bits - 1) - 1)
        assert (np.abs(np.asarray(sent, float) - leaf) <= level / 2 * (1 + 1e-5)).all()
        assert jnp.isfinite(sent_of(compress, leaf * 1e-38 * 1e-4)).all()


def test_held_back_parts_stay_bounded():
    """Over 1,000 commits of fresh noise what is sent has the size of what came in, for all bits."""

    def sizes(compress):
        def commit(e, key):
            e = e + jax.random.normal(key, e.shape)
            sent = sent_of(compress, e)
            return e - sent, jnp.sqrt(jnp.mean(sent**2))

        keys = jax.random.split(jax.random.key(0), 1000)
        return jax.lax.scan(commit, jnp.zeros(256), keys)[1]

    compressions = [optperm.distributed.Compression(bits=bits) for bits in (1, 2, 4, 8)]
    sent = np.array(jax.jit(lambda: [sizes(each) for each in compressions])())
    early, late = sent[:, 100:200].mean(axis=1), sent[:, -100:].mean(axis=1)
    assert (late < [1.1, 2.0, 1.1, 1.1]).all()
    np.testing.assert_allclose(late, early, rtol=0.1)


def test_the_largest_entries_are_sent_exactly_and_the_rest_is_held_back():
    leaf = jnp.asarray(np.random.default_rng(0).normal(size=(8192,)), jnp.float32)
    compress = optperm.distributed.Compression(1 / 32)
    own, number, rest, takes_part = compression.sum_compressed(
        compress, leaf, jnp.zeros_like(leaf), jnp.array(True), Replicas(None, ())
    )
    kept = np.flatnonzero(own)
    for chunk in (np.arange(4096), np.arange(4096, 8192)):
        largest = chunk[np.argsort(-np.abs(leaf[chunk]))[:128]]
        assert set(largest) == set(kept) & set(chunk)
    support.assert_same_bits(own[kept], leaf[kept])
    support.assert_same_bits(rest, jnp.where(own == 0, leaf, 0.0))
    assert float(number) == 1
    assert takes_part
    # With a weight of 0 nothing is sent, so nothing is taken out of what was held back.
    own, number, rest, _ = compression.sum_compressed(
        compress, leaf, jnp.ones_like(leaf), jnp.array(True), Replicas(None, ()), 0.0
    )
    assert float(number) == 0
    assert not own.any()
    support.assert_same_bits(rest, jnp.ones_like(leaf))


@pytest.mark.parametrize(
    ("compress", "per_entry"),
    [
        (optperm.distributed.Compression(1 / 32, bits=2), 0.0712),
        (optperm.distributed.Compression(bits=4), 0.516),
    ],
)
def test_what_crosses_the_axis_is_bytes(compress, per_entry):
    """The compiled step holds one collective, an all-gather of uint8."""
    tx = optperm.diloco(optax.sgd(0.1), every=2, axis_name=replicas.AXIS, compress=compress)
    params = {"a": jnp.ones((512, 512)), "b": jnp.ones(256)}
    stacked = [replicas.stack([tree] * SIZE) for tree in (params, tx.init(params), params)]
    step = replicas.MAPPINGS["pmap"](lambda p, s, g: tx.update(g, s, p, commit=True), SIZE)
    text = step.lower(*stacked).compile().as_text()
    found = [line for line in text.splitlines() if " all-gather(" in line or " all-reduce(" in line]
    assert len(found) == 1
    assert "all-gather" in found[0]
    size = int(found[0].split("= u8[")[1].split("]")[0].split(",")[-1])
    entries = sum(leaf.size for leaf in params.values())
    assert size / entries == pytest.approx(per_entry, rel=0.05)


def test_a_center_in_float32_under_bfloat16_params():
    """Outer steps too small for bfloat16 add up in the center; params are the center, rounded."""
    tx = optperm.diloco(
        optax.sgd(1.0), optax.sgd(2**-6), every=1, center_dtype=jnp.float32, axis_name=replicas.AXIS
    )
    params = jnp.ones((2, 3), jnp.bfloat16)
    opt_state = jax.vmap(tx.init)(params)
    step = replicas.MAPPINGS["vmap"](loops.make_step(tx), 2)
    for _ in range(8):
        params, opt_state = step(params, opt_state, jnp.full((2, 3), 2**-4, jnp.bfloat16))
    center = optperm.distributed.center_params(opt_state)
    assert center.dtype == jnp.float32
    assert float(center[0, 0]) < 1 - 7 * 2**-10
    support.assert_same_bits(params, center.astype(jnp.bfloat16))


def test_params_that_do_not_move_leave_a_center_of_more_digits():
    """The rounding of the params to their dtype is no displacement."""
    tx = optperm.diloco(optax.sgd(1.0), optax.sgd(0.3), every=1, center_dtype=jnp.float32)
    params = jnp.ones(3, jnp.bfloat16)
    opt_state = tx.init(params)
    centers = []
    for size in (2**-6, 0.0, 0.0):
        updates, opt_state = tx.update(jnp.full(3, size, jnp.bfloat16), opt_state, params)
        params = optperm.apply_updates(params, updates, opt_state)
        centers.append(optperm.distributed.center_params(opt_state))
    assert np.all(centers[0] != centers[0].astype(jnp.bfloat16).astype(jnp.float32))
    for center in centers[1:]:
        support.assert_same_bits(center, centers[0])


def test_fragments_are_sent_at_even_distances():
    """Fragment p of 4 at the steps that are floor(10 p / 4) modulo 10, and received a step later."""
    plan = optperm.distributed.Every(10, fragments=4, delay=1)
    sent = {step: plan.at(step).send for step in range(1, 21) if plan.at(step).send}
    assert sent == {
        **{2: (1,), 5: (2,), 7: (3,), 10: (0,)},
        **{12: (1,), 15: (2,), 17: (3,), 20: (0,)},
    }
    assert all(plan.at(step + 1).receive == fragments for step, fragments in sent.items())


def test_exchanges_that_are_in_no_plan_are_refused():
    for wrong in ({"fragments": 4}, {"delay": 3}):
        with pytest.raises(
            ValueError, match="fragments must be at most period, and delay must be below period"
        ):
            optperm.distributed.Every(3, **wrong)
    tx = optperm.diloco(optax.sgd(0.1), every=optperm.distributed.Every(4, fragments=2))
    params = {"a": jnp.ones(3), "b": jnp.ones(3)}
    opt_state = tx.init(params)
    for wrong in (plans.Exchange((3,), (3,)), plans.Exchange((1,), ()), 3):
        with pytest.raises((ValueError, TypeError), match="plan"):
            tx.update(params, opt_state, params, commit=wrong)


def run_alone(plan, flags, **options):
    """One replica that is pushed down by 1 a step, averaged with itself."""
    tx = optperm.diloco(optax.sgd(1.0), optax.sgd(1.0), every=plan, **options)
    params = jnp.zeros(1)
    opt_state = tx.init(params)
    update = jax.jit(tx.update, static_argnames="commit")
    for commit in flags:
        updates, opt_state = update(jnp.ones(1), opt_state, params, commit=commit)
        params = optperm.apply_updates(params, updates, opt_state)
        yield float(params[0])


def test_what_has_arrived_is_not_applied_again():
    """Told to exchange all between sending and arrival, a replica goes no further than its own steps."""
    plan = optperm.distributed.Every(4, 1, 2)
    for number in (5, 6):
        flags = [True if step == number else plan.at(step) for step in range(1, 10)]
        trail = list(run_alone(plan, flags))
        assert all(params >= -step for step, params in enumerate(trail, start=1))


def test_parts_that_were_held_back_decay_before_they_are_sent():
    """Of e = 0.5 * 4 + Delta the largest eighth is sent, and the rest is held back."""
    leaf = jnp.asarray(np.random.default_rng(0).normal(size=(64,)), jnp.float32)
    compress = optperm.distributed.Compression(1 / 8, decay=0.5)
    own, _, rest, _ = compression.sum_compressed(
        compress, leaf, jnp.full_like(leaf, 4.0), jnp.array(True), Replicas(None, ())
    )
    assert np.count_nonzero(own) == 8
    support.assert_close(own + rest, leaf + 2.0, rtol=1e-6)


def test_where_nothing_was_sent_nothing_is_pulled():
    """A fresh state that is given the exchanges of later steps keeps its own params."""
    plan = optperm.distributed.Every(4, 1, 2)
    assert list(run_alone(plan, map(plan.at, (5, 6, 7, 8)))) == [-1, -2, -3, -4]


@pytest.mark.parametrize("plan", support.every_night([2, optperm.distributed.Every(2, 1, 1)], [2]))
def test_mixing_brings_a_replica_back(plan):
    """One whose params are not finite is put on the center, and takes part the next time."""
    tx = optperm.diloco(
        optax.sgd(0.1), optax.sgd(1.0), every=plan, axis_name=replicas.AXIS, mixing=0.5
    )
    params = jnp.zeros((2, 2))
    opt_state = jax.vmap(tx.init)(params)
    params = params.at[1, 0].set(jnp.nan)
    step = replicas.MAPPINGS["vmap"](loops.make_step(tx), 2)
    for _ in range(8):
        params, opt_state = step(params, opt_state, jnp.ones((2, 2)))
    assert jnp.isfinite(params).all()
    assert opt_state.skipped.tolist() == [0, 1]


def test_gradients_of_fewer_digits_do_not_round_the_displacement():
    tx = optperm.diloco(optax.sgd(1.0), optax.sgd(1.0), every=2)
    grads = [jnp.full(1, grad, "bfloat16") for grad in (1.0, 2.0**-12)]
    with jax.numpy_dtype_promotion("standard"):
        params, opt_state = loops.train(tx, jnp.zeros(1), grads, how="eager")[-1]
    assert float(params[0]) == -1 - 2.0**-12
    assert int(opt_state.skipped) == 0


def test_a_residual_that_overflows_begins_again():
    """The replica sits out, counts it, and takes part again."""
    tx = optperm.diloco(
        optax.sgd(0.1),
        optax.sgd(1.0),
        every=2,
        axis_name=replicas.AXIS,
        compress=optperm.distributed.Compression(bits=8),
    )
    params = jnp.zeros((2, 1))
    opt_state = jax.vmap(tx.init)(params)
    opt_state = opt_state._replace(residual=opt_state.residual.at[1].set(3e38))
    params = params.at[1].set(-3e38)
    step = replicas.MAPPINGS["vmap"](loops.make_step(tx), 2)
    for _ in range(8):
        params, opt_state = step(params, opt_state, jnp.ones((2, 1)))
    assert jnp.isfinite(opt_state.residual).all()
    assert opt_state.skipped.tolist() == [0, 1]
    np.testing.assert_allclose(params, -0.8, atol=0.05)


def test_everything_at_once_with_donated_buffers_and_an_empty_leaf():
    tx = optperm.diloco(
        optax.sgd(0.1),
        every=optperm.distributed.Every(4, 2, 1),
        compress=optperm.distributed.Compression(0.5, bits=4),
        center_dtype="float32",
    )
    params = {"a": jnp.zeros((0, 3)), "b": jnp.arange(3.0)}
    opt_state = tx.init(params)
    step = jax.jit(loops.make_step(tx), donate_argnums=(0, 1))
    for _ in range(6):
        params, opt_state = step(params, opt_state, jax.tree.map(jnp.ones_like, params))
    assert jnp.isfinite(params["b"]).all()


def test_options_of_one_fragment_go_together():
    """A schedule of periods, an outer optimizer that reads extra arguments, few bits, a wide center."""

    def update(updates, state, params=None, *, value, **extra_args):
        return jax.tree.map(lambda p: jnp.full_like(p, -value), params), state

    reads_value = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = optperm.diloco(
        optax.sgd(0.1),
        reads_value,
        every=lambda commits: commits + 1,
        compress=optperm.distributed.Compression(bits=8),
        center_dtype="float32",
    )
    step = loops.make_step(tx, lambda p, value: (jnp.ones_like(p), {"value": value}))
    params = jnp.ones(3, jnp.bfloat16)
    opt_state, centers = tx.init(params), []
    step = jax.jit(step)
    for value in range(1, 7):
        params, opt_state = step(params, opt_state, jnp.float32(value))
        centers.append(float(optperm.distributed.center_params(opt_state)[0]))
    assert centers == [0, 0, -3, -3, -3, -9]


def test_a_method_that_places_params_within_and_without():
    """SGPerm as the inner and the outer optimizer: each replica permutes, and so does the center."""
    start = jax.tree.map(np.asarray, support.random_params())
    tx = optperm.diloco(optperm.sgperm(0.1), optperm.sgperm(0.1), every=2, axis_name=replicas.AXIS)

    def evaluate(params, batch):
        pulls = jax.tree.map(lambda p: jnp.sin(batch * jnp.arange(p.size).reshape(p.shape)), params)
        return pulls, {}

    data = list(np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2))
    trail = loops.train(tx, start, data, evaluate=evaluate, how="vmap", size=2)
    for number, (params, opt_state) in enumerate(trail, start=1):
        for index in range(2):
            support.assert_permutes(replicas.take(params, index), start)
        if number % 2 == 0:
            support.assert_same_bits(params, optperm.distributed.center_params(opt_state))
    assert not np.array_equal(trail[-1][0]["kernel"][0], start["kernel"])


@pytest.mark.parametrize(
    "compress",
    [
        *(optperm.distributed.Compression(bits=bits) for bits in (2, 4, 8)),
        *(optperm.distributed.Compression(1 / 4, bits=bits) for bits in (1, 2, 4, 8)),
    ],
)
def test_rows_that_no_batch_touches_do_not_move_when_compressed(compress):
    """A zero is decoded as zero, and chosen zeros of one bit too, within a jitted exchange."""
    tx = optperm.diloco(optax.sgd(1.0), optax.sgd(1.0), every=1, compress=compress)
    start = jnp.ones((64, 1))
    rng = np.random.default_rng(0)
    touched = np.isin(np.arange(64), [3, 17, 40])[:, None]
    grads = [jnp.float32(rng.normal(size=(64, 1)) * touched) for _ in range(4)]
    for params, opt_state in loops.train(tx, start, grads):
        assert (np.asarray(params)[~touched] == 1.0).all()
        assert (np.asarray(opt_state.residual)[~touched] == 0.0).all()
        assert (np.asarray(params)[touched] != 1.0).any()


def test_one_bit_of_the_largest_is_the_mean_magnitude_of_those_that_are_not_zero():
    leaf = np.zeros(64, np.float32)
    leaf[[3, 10, 50]] = [2.0, -1.0, 3.0]
    compress = optperm.distributed.Compression(1 / 4, bits=1)
    sent = jax.jit(functools.partial(sent_of, compress))(leaf)
    np.testing.assert_allclose(sent, 2.0 * np.sign(leaf), rtol=1e-6)
