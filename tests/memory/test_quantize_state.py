"""Optimizers with moments in 8 and 4 bits, against the same optimizers in float32."""

import itertools
import math
import re
import warnings
from typing import Any, NamedTuple

import chex
import flax.core
import flax.nnx
import flax.struct
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.memory import _register_moments, dequantize, quantize

pytestmark = pytest.mark.usefixtures("lenient")

INNERS = {
    "adamw": optax.adamw(1e-2),
    "nadam": optax.nadam(1e-2),
    "adamax": optax.adamax(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "yogi": optax.yogi(1e-2),
    "lion": optax.lion(1e-2),
    "sgd": optax.sgd(1e-2, 0.9),
    "ema": optax.ema(0.99),
    "rmsprop": optax.rmsprop(1e-2, decay=0.99),
    "rmsprop_corrected": optax.rmsprop(1e-2, decay=0.99, bias_correction=True),
    "rmsprop_centered": optax.rmsprop(1e-2, decay=0.99, centered=True),
    "adan": optax.adan(1e-2),
    "adadelta": optax.adadelta(1.0),
    "simplified_ademamix": optax.contrib.simplified_ademamix(1e-4),
    "adagrad": optax.adagrad(1e-2),
    "ademamix": optax.contrib.ademamix(1e-2),
    "muon": optax.contrib.muon(1e-2),
    "adafactor": optax.adafactor(1e-2, factored=False),
    "low_rank": optperm.low_rank(optax.scale_by_adam(), 1 / 4, every=3),
    "apollo": optperm.apollo(optax.adam(1e-2), 1 / 4, every=3),
    "partition": optax.partition(
        {"a": optax.adam(1e-2), "b": optax.sgd(1e-2, 0.9)}, {"w": "a", "b": "b"}
    ),
    "switch_after": optperm.switch_after(2, optax.sgd(1e-2, 0.9), optax.adam(1e-2)),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
    "masked": optax.masked(optax.adam(1e-2), {"w": True, "b": False}),
    "schedule_free": optax.contrib.schedule_free(optax.adam(1e-2), 1e-2),
}
# The form of each array in 8 bits
FORMS = {
    "adamw": {"Random", "Root"},
    "adamax": {"Random", "Root"},
    "amsgrad": {"Random", "Root", "Largest"},
    "lion": {"Random"},
    "ema": {"Random"},
    "rmsprop": {"Root"},
    "rmsprop_corrected": {"Root"},
    "rmsprop_centered": {"Random", "Root"},
    "adan": {"Random", "Root"},
    "adadelta": {"Root"},
    "simplified_ademamix": {"Random", "Root"},
    "adagrad": {"Root"},
    "ademamix": {"Random", "Root"},
    "adafactor": {"Root"},
    "muon": {"Linear", "Random", "Root"},
}


def params_of(seed=0, shapes=None):
    rng = np.random.default_rng(seed)
    shapes = shapes or {"w": (16, 70), "b": (40,)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_each_moment_has_the_form_of_what_it_is():
    for name, forms in FORMS.items():
        state = jax.eval_shape(optperm.quantize_state(INNERS[name], min_size=2).init, params_of())
        assert {type(blocks).__name__ for blocks in state.exponents} == forms
        assert {blocks.like.dtype.name for blocks in state.exponents} == {"float32"}


@pytest.mark.filterwarnings("ignore:quantize_state does not know the moments")
@pytest.mark.filterwarnings("ignore:(low_rank|apollo) leaves .* alone")
@pytest.mark.parametrize(
    ("name", "bits"),
    support.every_night(
        itertools.product(INNERS, (8, 4)),
        [("adamw", 4), ("amsgrad", 8)],
        slow=[("low_rank", 8)],
    ),
)
def test_an_update_is_that_of_the_decoded_state(name, bits):
    inner, params = INNERS[name], params_of()
    tx = optperm.quantize_state(inner, min_size=2, bits=bits)

    def step(state, grads):
        expected, after = inner.update(grads, dequantize(state), params)
        updates, state = tx.update(grads, state, params)
        return state, (updates, expected, dequantize(state), after)

    @jax.jit
    def run(grads):
        return jax.lax.scan(step, tx.init(params), grads)[1]

    grads = jax.tree.map(lambda *leaves: np.stack(leaves), *map(params_of, range(4)))
    updates, expected, *states = jax.tree.map(np.asarray, run(grads))
    chex.assert_trees_all_close(updates, expected, rtol=1e-6, atol=1e-7)
    # The new state is near: it is what was encoded.
    for found, wanted in zip(*map(jax.tree.leaves, states), strict=True):
        found, wanted = found[-1], wanted[-1]  # noqa: PLW2901
        if np.issubdtype(found.dtype, np.floating):
            top, error = np.max(np.abs(wanted)), np.abs(found - wanted)
            # A root moves by at most 1 / 8, its square by 27 %, and an integer by 1 of at least 63.
            small = 1 / 63 if name == "muon" else 1e-5
            near = 0.51 * top if bits == 4 else 0.27 * np.abs(wanted) + small * top
            assert np.all(error <= near)


@pytest.mark.parametrize(
    ("name", "bits"),
    support.every_night(
        itertools.product(FORMS, (8, 4)),
        [("adamw", 8), ("amsgrad", 8), ("adamax", 8), ("ema", 4)],
    ),
)
def test_moments_of_a_constant_gradient_are_unbiased_after_1500_steps(name, bits):
    """The mean of 1,280 ratios to the moments in float32 is 1. Moments rounded to the nearest code would
    stand still. Maxima of noisy numbers are above their twins: those of AMSGrad climb, while those of
    Adamax decay, and so stay within one code: the root of their root has a code of width 1/16 to 1/8,
    and they have twice this width. Squares of centered RMSProp contain the variance of their means.
    Squares of Adadelta's updates are left out: each multiplies the last, so each rounding lasts."""
    g = {"w": np.exp(0.5 * support.normal((20, 64), 1))}

    def run(tx):
        return jax.lax.fori_loop(0, 1500, lambda _, s: tx.update(g, s, g)[1], tx.init(g))

    tx = optperm.quantize_state(INNERS[name], min_size=2, bits=bits)
    exact, found = jax.jit(lambda: (run(INNERS[name]), dequantize(run(tx))))()
    exact = jax.tree_util.tree_leaves_with_path(exact)
    noise = 0.0
    for (path, b), a in zip(exact, jax.tree.leaves(found), strict=True):
        field = jax.tree_util.keystr(path)
        if a.dtype != jnp.float32 or a.shape != (20, 64) or field.endswith(".e_x['w']"):
            continue
        if name == "adan" and field.endswith(".v['w']"):  # of differences of gradients
            assert not np.any((a, b))
        else:
            ratio = np.asarray(a) / np.asarray(b)
            error = 0.01 + 4 * ratio.std() / 36
            highest = 0.7 if "nu_max" in field else error
            if name in ("adamax", "rmsprop_centered") and ".nu" in field:
                highest = 0.12 if name == "adamax" else error + noise
            noise = ratio.var()
            assert -error < ratio.mean() - 1 < highest
            assert ratio.std() < (0.8 if bits == 4 else 0.4)


@pytest.mark.parametrize(
    ("places", "steps", "most"),
    [
        pytest.param(2048, 5000, 0.025, marks=pytest.mark.slow),
        pytest.param(65536, 10_000, 0.02, marks=pytest.mark.exhaustive),
    ],
)
def test_second_moments_of_noise_are_unbiased(places, steps, most):
    """v / s^2 of gradients N(0, s^2), s over a factor of 1,000 in each block, with b2 = 0.999; the mean
    of 2,048 ratios of sd 0.3 has an error of 0.7 %."""
    s = np.exp(np.random.default_rng(0).uniform(high=np.log(1000.0), size=(places // 64, 64)))
    tx = optperm.quantize_state(optax.scale_by_adam(b2=0.999), min_size=2)

    @jax.jit
    def run(s, keys):
        def step(state, key):
            return tx.update({"w": s * jax.random.normal(key, s.shape)}, state)[1], None

        return jax.lax.scan(step, tx.init({"w": s}), keys)[0]

    state = run(np.float32(s), jax.random.split(jax.random.key(1), steps))
    ratio = dequantize(state).nu["w"] / s**2 / (1 - 0.999**steps)
    assert abs(ratio.mean() - 1) < most
    assert 0.1 < ratio.std() < 0.45


@flax.struct.dataclass
class Holder:
    held: object
    count: int = 0


CONTAINERS = {
    "FrozenDict": (lambda s: flax.core.freeze({"s": s}), lambda s: s["s"]),
    "dataclass": (Holder, lambda s: s.held),
    "State": (lambda s: flax.nnx.State({"s": flax.nnx.Param(1.0), "t": s}), lambda s: s["t"]),
}


@pytest.mark.parametrize("kind", support.every_night(CONTAINERS, ["State"]))
def test_a_state_in_any_container_is_quantized(kind):
    """A FrozenDict, a dataclass and an `nnx.State` may contain a state of Optax."""
    adam, params = optax.scale_by_adam(), {"w": np.ones((64, 64), np.float32)}
    wrap, unwrap = CONTAINERS[kind]
    wrapped = optax.GradientTransformation(lambda p: wrap(adam.init(p)), optax.identity().update)
    tx = optperm.quantize_state(wrapped)

    @jax.jit
    def step(params):
        state = tx.init(params)
        expected = optperm.quantize_state(adam).init(params)
        return state, tx.update(params, state, params)[1], expected

    state, after, expected = step(params)
    support.assert_same_bits(unwrap(state.inner_state), expected.inner_state)
    support.assert_same_bits(after.inner_state, state.inner_state)


def test_leaves_and_steps_and_keys_have_other_random_numbers():
    """Equal leaves of equal moments are rounded apart, and so are two keys and two steps."""
    x = params_of(0, {"a": (64, 64)})["a"]
    grads, codes = {"a": x, "b": x}, []

    @jax.jit
    def round_zeros(key, count):
        inner = optax.contrib.scale_by_ademamix(b1=0.99, b3=0.99)  # two equal first moments
        tx = optperm.quantize_state(inner, key=key)
        state = dequantize(tx.update(grads, tx.init(grads)._replace(count=count))[1])
        return state.m1, state.m2

    for key, count in itertools.product(range(2), repeat=2):
        rounded = round_zeros(jax.random.key(key), np.int32(count))
        codes += map(np.asarray, jax.tree.leaves(rounded))
    apart = [np.mean(a != b) for i, a in enumerate(codes) for b in codes[:i]]
    assert 0.3 < min(apart) <= max(apart) < 0.6


def test_what_is_small_or_wide_or_left_out_stays():
    shapes = {"embed": (100, 64), "w": (64, 64), "b": (64,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def dtypes(params, include=None):
        tx = optperm.quantize_state(optax.adam(1e-2), include=include)
        nu = jax.eval_shape(tx.init, params).inner_state[0].nu
        return {name: leaf.dtype.name for name, leaf in nu.items()}

    narrow = {"embed": "float8_e4m3fn", "w": "float8_e4m3fn", "b": "float32"}
    assert dtypes(params) == narrow
    assert dtypes(params, lambda p: dict.fromkeys(p, True)) == narrow
    left_out = {"embed": False, "w": True, "b": True}
    assert dtypes(params, left_out) == narrow | {"embed": "float32"}
    with jax.enable_x64(True):
        wide = params | {"w": jax.ShapeDtypeStruct((64, 64), jnp.float64)}
        assert dtypes(wide) == narrow | {"w": "float64"}


@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 8)])
def test_a_state_of_other_bits_is_refused_with_the_way_to_convert_it(old, new):
    params = {"w": jnp.zeros((64, 64))}
    made, given = (optperm.quantize_state(optax.adam(0.1), bits=bits) for bits in (old, new))
    way = r"memory\.dequantize, then optperm\.memory\.quantize\.$"
    with pytest.raises(ValueError, match=rf"^bits must be {old}, as in the state, got .*{way}"):
        given.update(params, jax.jit(made.init)(params), params)


def test_moments_that_stay_in_float32_are_warned_of():
    both = optax.chain(optax.scale_by_sm3(), optax.trace(0.9))
    nothing = r"^quantize_state saves nothing: .* min_size=4096"
    for inner, shape, include, message in (
        (both, (64, 64), None, "does not know the moments of ScaleBySM3State: its 4"),
        (optax.adam(0.1), (8, 32), None, nothing),
        (optax.adam(0.1), (64, 64), False, nothing),
    ):
        with pytest.warns(UserWarning, match=message):
            optperm.quantize_state(inner, include=include).init({"w": np.zeros(shape, np.float32)})


def test_warnings_of_inner_come_once():
    """`init` calls the `init` of `inner` once, with its own params: nothing is said of traced params."""
    kernel, odd = (np.ones(shape, np.float32) for shape in ((64, 96), (64, 96, 2)))
    params = {"up": {"kernel": kernel}, "odd": odd}
    tx = optperm.quantize_state(optperm.apollo(rank=4))
    for init, number in ((tx.init, 1), (lambda p: jax.eval_shape(tx.init, p), 0)):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            init(params)
        assert len([each for each in seen if "apollo leaves" in str(each.message)]) == number


NEAR = ("rmsprop_corrected", "rmsprop_centered", "adan", "adadelta", "simplified_ademamix")


@pytest.mark.parametrize("name", support.every_night(NEAR, ("adan",)))
def test_a_run_in_8_bits_stays_near_the_run_in_float32(name):
    """Least squares with noise: 300 steps on the same rows have about the same losses.

    A decay rate of 0.99, as in simplified AdEMAMix, adds up the rounding errors of a hundred steps.
    """
    x, w = support.normal((256, 40), 1), support.normal((40, 32), 2)
    params = {"w": np.zeros((40, 32), np.float32)}
    rows = np.random.default_rng(0).integers(256, size=(300, 16), dtype=np.int32)

    def loss_fn(params, rows):
        return jnp.mean((x[rows] @ (params["w"] - w)) ** 2)

    def train(tx, rows):
        def step(carry, rows):
            params, state = carry
            grads = jax.grad(loss_fn)(params, rows)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state), loss_fn(params, slice(None))

        (trained, _), losses = jax.lax.scan(step, (params, tx.init(params)), rows)
        return trained["w"], losses

    inner = INNERS[name]
    methods = inner, optperm.quantize_state(inner, min_size=2)
    trained = jax.jit(lambda rows: [train(tx, rows) for tx in methods])(rows)
    (exact, losses), (found, others) = jax.tree.map(np.asarray, trained)
    assert np.linalg.norm(found - exact) < 0.2 * np.linalg.norm(exact)
    assert np.all(np.abs(np.log(others / losses)) < 0.25)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.filterwarnings("ignore:quantize_state does not know the moments of ScheduleFreeState")
def test_schedule_free_adamw_is_quantized():
    params = params_of()
    tx = optperm.quantize_state(optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2), min_size=2)
    state = jax.eval_shape(tx.init, params)
    assert state.exponents
    assert all(type(blocks).__name__ == "Root" for blocks in state.exponents)
    jax.eval_shape(tx.update, params, state, params)


def test_the_divisor_of_centered_squares_keeps_its_precision():
    """The variance is 1% of nu: an error of up to 27% of nu would be many times the variance."""
    inner = optax.scale_by_stddev(0.9)
    tx = optperm.quantize_state(inner, min_size=2)
    grads = [jax.tree.map(lambda w: 1 + np.float32(0.1) * w, params_of(i)) for i in range(60)]

    @jax.jit
    def run(grads):
        def step(states, g):
            return [
                each.update(g, state)[1] for each, state in zip((tx, inner), states, strict=True)
            ], None

        start = tx.init(params_of()), inner.init(params_of())
        state, exact = jax.lax.scan(step, [*start], grads)[0]
        return dequantize(state), exact

    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *grads)
    decoded, exact = jax.tree.map(np.asarray, run(stacked))
    variance = decoded.nu["w"] - decoded.mu["w"] ** 2
    ratio = variance / (exact.nu["w"] - exact.mu["w"] ** 2)
    assert ratio.min() > 0
    low, high = np.percentile(ratio, (2, 98))
    assert 0.25 < low < high < 4


class Momentum(NamedTuple):
    """The state of a user's optimizer."""

    count: jax.Array
    m: Any
    v: Any


def momentum():
    """Adam without a bias correction, with a state of its own."""

    def update(grads, state, params=None):
        m = optax.tree.update_moment(grads, state.m, 0.9, 1)
        v = optax.tree.update_moment(grads, state.v, 0.99, 2)
        steps = jax.tree.map(lambda m, v: -1e-2 * m / (jnp.sqrt(v) + 1e-8), m, v)
        return steps, Momentum(state.count + 1, m, v)

    def init(params):
        zeros = optax.tree.zeros_like(params)
        return Momentum(jnp.zeros([], jnp.int32), zeros, zeros)

    return optax.GradientTransformation(init, update)


def test_a_registered_state_is_quantized_as_a_known_one(monkeypatch):
    monkeypatch.setattr(_register_moments, "KNOWN", dict(_register_moments.KNOWN))
    params, tx = params_of(), optperm.quantize_state(momentum(), min_size=2)
    with pytest.raises(ValueError, match=r"Momentum.*memory\.register_moments"):
        tx.init(params)
    optperm.memory.register_moments(Momentum, m="mean", v="square")

    @jax.jit
    def step(grads):
        state = tx.init(grads)
        updates, after = tx.update(grads, state, grads)
        return state, updates, momentum().update(grads, dequantize(state))[0], dequantize(after).m

    state, updates, wanted, m = step(params)
    assert [type(blocks).__name__ for blocks in state.exponents] == ["Random"] * 2 + ["Root"] * 2
    chex.assert_trees_all_close(updates, wanted, rtol=1e-6)
    chex.assert_trees_all_close(m, jax.tree.map(lambda g: np.float32(0.1) * g, params), rtol=0.13)


def test_registrations_that_contradict_are_refused(monkeypatch):
    monkeypatch.setattr(_register_moments, "KNOWN", dict(_register_moments.KNOWN))
    register = optperm.memory.register_moments
    register(Momentum, m="mean")
    register(Momentum, m="mean")
    for state_type, roles, error, message in (
        (Momentum, {"m": "square"}, ValueError, "registered with other roles"),
        (Momentum, {"m": "mean", "v": "square"}, ValueError, "registered with other roles"),
        (optax.ScaleByAdamState, {"mu": "mean"}, ValueError, "registered with other roles"),
        (Momentum, {}, ValueError, "needs a role for a field of Momentum"),
        (Momentum, {"n": "mean"}, ValueError, "no field 'n': its fields are count, m, v"),
        (Momentum, {"m": "average"}, ValueError, "m must be"),
        (Momentum, {"m": "centered"}, ValueError, "the field of its mean before it"),
        (dict, {"m": "mean"}, TypeError, "must be a NamedTuple"),
        (Momentum(0, 0, 0), {"m": "mean"}, TypeError, "must be a NamedTuple"),
    ):
        with pytest.raises(error, match=message):
            register(state_type, **roles)


@pytest.mark.parametrize("bits", support.every_night((8, 4), [8]))
def test_a_checkpoint_is_quantized_and_back(bits):
    """The plain optimizer's state becomes the quantized optimizer's, and the other way round."""
    plain = optax.chain(optax.clip(1.0), optax.adam(1e-2))
    tx = optax.chain(optax.clip(1.0), optperm.quantize_state(optax.adam(1e-2), bits=bits))
    params, *grads = (params_of(seed, {"w": (64, 65)}) for seed in range(4))
    _, state = loops.train(plain, params, grads, apply=loops.by_addition)[-1]
    like = jax.eval_shape(tx.init, params)
    encode, decode = jax.jit(lambda state: quantize(state, like)), jax.jit(dequantize)
    found = encode(state)
    back = decode(found)
    assert jax.tree.structure((found, back)) == jax.tree.structure((like, state))
    # Numbers of the grid do not change.
    support.assert_same_bits(decode(encode(back)), back)
    chex.assert_trees_all_close(back[1][0].nu["w"], state[1][0].nu["w"], rtol=0.27, atol=1e-9)
    jax.eval_shape(tx.update, params, found, params)
    with pytest.raises(ValueError, match=r"opt_state.*like, decoded"):
        quantize(
            jax.eval_shape(plain.init, {"w": jax.ShapeDtypeStruct((3, 3), jnp.float32)}), found
        )
    with pytest.raises(ValueError, match="like has no QuantizedState"):
        quantize(state, state)


def test_quantize_takes_states_of_several_seeds():
    """All counts begin at 0, and the state trains on under vmap."""
    plain, params = optax.adamw(1e-2), {"w": np.ones((3, 64, 64), np.float32)}
    tx = optperm.quantize_state(plain)
    like = jax.eval_shape(jax.vmap(tx.init), params)
    state = jax.eval_shape(lambda p: quantize(jax.vmap(plain.init)(p), like), params)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, like)
    jax.eval_shape(jax.vmap(lambda p, s: tx.update(p, s, p)), params, state)


def test_map_params_maps_codes_and_leaves_exponents():
    tx, specs = optperm.quantize_state(optax.adam(1e-2)), {"w": P("x", None), "b": P()}
    params = {"w": np.ones((64, 64), np.float32), "b": np.ones(8, np.float32)}
    state = jax.jit(tx.init)(params)
    marked = optax.tree.map_params(
        tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: None
    )
    assert marked.inner_state[0].mu == marked.inner_state[0].nu == specs
    assert marked.exponents is None
    support.assert_same_bits(optax.tree.map_params(tx, lambda leaf: leaf, state), state)


MOVED = re.compile(
    r"= \(?\w+\[([\d,]*)\][^=]*? (?:all-gather|all-reduce|all-to-all|collective-permute)\("
)


@pytest.mark.parametrize(
    ("piece", "kind", "bits"),
    support.every_night(
        itertools.product((16, 32, 48), ("Auto", "Explicit"), (8, 4)),
        [(16, "Auto", 8), (32, "Explicit", 8)],
        slow=[(32, "Explicit", 4), (48, "Explicit", 8)],
    ),
)
def test_a_sharded_last_axis_has_the_codes_of_the_whole_one(piece, kind, bits):
    """Codes and exponents are those of one device; no codes move, and where a piece is a multiple of 32
    nothing does."""
    n = 8 * piece
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType[kind],))
    tx = optperm.quantize_state(optax.adam(1e-2), min_size=2, bits=bits)

    def run(place, init):
        params, *grads = (place(params_of(seed, {"w": (6, n)})) for seed in range(3))
        state = init(params)
        update = jax.jit(tx.update).lower(grads[0], state, params).compile()
        for g in grads:
            _, state = update(g, state, params)
        return state, update.as_text()

    whole, _ = run(jax.device_put, jax.jit(tx.init))
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(None, "x"))
        found, text = run(lambda tree: jax.device_put(tree, sharding), tx.init)
    support.assert_same_bits(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, whole))
    codes = found.inner_state[0].nu["w"]
    assert codes.sharding.is_equivalent_to(sharding, 2)
    moved = [math.prod(map(int, dims.split(","))) if dims else 1 for dims in MOVED.findall(text)]
    assert max(moved, default=0) <= (0 if piece == 32 else 6 * n // 8)


@pytest.mark.parametrize(
    ("axis", "kind"),
    support.every_night(itertools.product([0, 1], ["Auto", "Explicit"]), [(1, "Explicit")]),
)
def test_merged_axes_of_a_sharded_leaf_have_the_codes_of_the_whole_one(axis, kind):
    """The blocks of a kernel (out, in, 3, 3) run over (in, 3, 3); a device has 45 of these numbers."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType[kind],), devices=jax.devices()[:4])
    tx = optperm.quantize_state(optax.adam(1e-2), min_size=2)

    def run(place):
        params, *grads = (place(params_of(seed, {"w": (16, 20, 3, 3)})) for seed in range(3))
        state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
        for g in grads:
            updates, state = update(g, state, params)
        return updates, state

    whole = run(jax.device_put)
    assert [blocks.exponents.shape for blocks in whole[1].exponents] == [(16, 6)] * 2
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(*[None] * axis, "x"))
        found = run(lambda tree: jax.device_put(tree, sharding))
    support.assert_same_bits(*(jax.tree.map(np.asarray, each[1]) for each in (found, whole)))
    assert found[1].inner_state[0].nu["w"].sharding.is_equivalent_to(sharding, 4)
    assert found[0]["w"].sharding.is_equivalent_to(sharding, 4)


@pytest.mark.slow
def test_a_program_of_many_leaves_has_few_kernels():
    """The number of an array is an operand, so that leaves of one shape have equal kernels."""
    tx = optperm.quantize_state(optax.adam(1e-2), min_size=2)
    seen = []
    for leaves in (3, 6):
        params = [jax.ShapeDtypeStruct((16, 64), jnp.float32)] * leaves
        state = jax.eval_shape(tx.init, params)
        text = jax.jit(tx.update).lower(params, state, params).compile().as_text()
        # The opcodes, types and constants of each fused computation
        parts = re.split(r"\n(?=%)", text.split("\nENTRY")[0])
        bodies = [re.findall(r"= (\S+ [a-z-]+\((?:[^%,)]*\))?)", part) for part in parts]
        seen.append(len(set(map(tuple, bodies))))
    assert seen[1] <= seen[0] + 2
