"""Optimizers with moments in 8 and 4 bits, against the same optimizers in float32."""

import pickle
import re

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.memory import dequantize, quantize

pytestmark = pytest.mark.usefixtures("lenient")

INNERS = {
    "adamw": optax.adamw(1e-2),
    "nadam": optax.nadam(1e-2),
    "slow adam": optax.adam(1e-2, b1=0.99),
    "adamax": optax.adamax(1e-2),
    "amsgrad": optax.amsgrad(1e-2),
    "adabelief": optax.adabelief(1e-2),
    "yogi": optax.yogi(1e-2),
    "lion": optax.lion(1e-2),
    "sgd": optax.sgd(1e-2, 0.9),
    "ema": optax.ema(0.99),
    "rmsprop": optax.rmsprop(1e-2, decay=0.99),
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
}
# The form of each array in 8 bits
FORMS = {
    "adamw": {"random", "root"},
    "slow adam": {"random", "root"},
    "adamax": {"random", "size"},
    "amsgrad": {"random", "root", "largest"},
    "lion": {"random"},
    "ema": {"random"},
    "rmsprop": {"root"},
    "adagrad": {"root"},
    "ademamix": {"random", "root"},
    "adafactor": {"root"},
    "low_rank": {"random", "root"},
    "apollo": {"random", "root"},
}


def params_of(seed=0, shapes=None):
    shapes = shapes or {"w": (16, 70), "b": (40,)}
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def forms_of(opt_state):
    paths = jax.tree_util.tree_leaves_with_path(opt_state.exponents)
    return {re.search(r"'([a-z]+)_float32'", jax.tree_util.keystr(path))[1] for path, _ in paths}


@pytest.mark.filterwarnings("ignore:quantize_state does not know the moments")
@pytest.mark.filterwarnings("ignore:(low_rank|apollo) leaves .* at full rank")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", INNERS)
def test_an_update_is_that_of_the_decoded_state(name, bits):
    inner = INNERS[name]
    tx = optperm.quantize_state(inner, min_size=2, bits=bits)
    params = params_of()
    state = tx.init(params)
    if bits == 8 and name in FORMS:
        assert forms_of(state) == FORMS[name]
    update, plain = jax.jit(tx.update), jax.jit(inner.update)
    for step in range(4):
        decoded = jax.tree.map(jnp.asarray, dequantize(state))
        updates, state = update(params_of(step), state, params)
        expected, after = plain(params_of(step), decoded, params)
        support.assert_close(updates, expected, rtol=1e-6, atol=1e-7)
    # The new state is near: it is what was encoded.
    pairs = zip(jax.tree.leaves(dequantize(state)), jax.tree.leaves(after), strict=True)
    for found, wanted in pairs:
        if jnp.issubdtype(found.dtype, jnp.floating):
            top, error = jnp.max(jnp.abs(wanted)), jnp.abs(found - wanted)
            # A root moves by at most 1 / 8, and its square by 27 %.
            near = 0.51 * top if bits == 4 else 0.27 * jnp.abs(wanted) + 1e-5 * top
            assert jnp.all(error <= near)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", [name for name in FORMS if name not in ("low_rank", "apollo")])
def test_moments_of_a_constant_gradient_are_unbiased_after_1500_steps(name, bits):
    """The mean of 1,280 ratios to the moments in float32 is 1. Moments rounded to the nearest code would
    stand still. Only maxima of noisy numbers, as of AMSGrad and Adamax, are above their twins."""
    inner, steps = INNERS[name], 1500
    g = {"w": jnp.exp(0.5 * jax.random.normal(jax.random.key(1), (20, 64)))}

    def run(tx):
        def step(state, _):
            return tx.update(g, state, g)[1], None

        return jax.jit(lambda state: jax.lax.scan(step, state, length=steps)[0])(tx.init(g))

    exact = jax.tree_util.tree_leaves_with_path(run(inner))
    found = dequantize(run(optperm.quantize_state(inner, min_size=2, bits=bits)))
    for (path, b), a in zip(exact, jax.tree.leaves(found), strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating) and a.shape == (20, 64):
            ratio = np.asarray(a / b)
            error = 0.01 + 4 * ratio.std() / 36
            climbs = "nu_max" in jax.tree_util.keystr(path) or (
                name == "adamax" and "nu" in str(path)
            )
            assert -error < ratio.mean() - 1 < (0.7 if climbs else error)
            assert ratio.std() < (0.8 if bits == 4 else 0.4)


def test_adamax_halves_its_sizes_in_693_steps_without_a_gradient():
    tx = optperm.quantize_state(optax.scale_by_adamax(b2=0.999), min_size=2)
    g = {"w": jnp.ones((64, 64)) * jnp.exp(jax.random.normal(jax.random.key(0), (64, 64)))}
    state = tx.update(g, tx.init(g))[1]
    before = dequantize(state).nu["w"]

    def step(state, _):
        return tx.update(jax.tree.map(jnp.zeros_like, g), state)[1], None

    state = jax.jit(lambda state: jax.lax.scan(step, state, length=693)[0])(state)
    after = dequantize(state).nu["w"]
    assert abs(float(jnp.sum(after) / jnp.sum(before)) - 0.5) < 0.01


def second_moments(places, steps):
    """v / s^2 of gradients N(0, s^2), s over a factor of 1,000 in each block."""
    s = jnp.exp(jax.random.uniform(jax.random.key(0), (places // 64, 64)) * np.log(1000.0))
    tx = optperm.quantize_state(optax.scale_by_adam(b2=0.999), min_size=2)

    def step(state, key):
        return tx.update({"w": s * jax.random.normal(key, s.shape)}, state)[1], None

    keys = jax.random.split(jax.random.key(1), steps)
    run = jax.jit(lambda state: jax.lax.scan(step, state, keys)[0])
    return np.asarray(dequantize(run(tx.init({"w": s}))).nu["w"] / s**2)


def test_second_moments_are_unbiased_over_5000_steps():
    """With b2 = 0.999; the mean of 2,048 ratios of sd 0.3 has an error of 0.7 %."""
    ratio = second_moments(2048, 5000) / (1 - 0.999**5000)
    assert abs(ratio.mean() - 1) < 0.025
    assert 0.1 < ratio.std() < 0.45


@pytest.mark.exhaustive
def test_second_moments_of_many_places_are_unbiased_over_10000_steps(capsys):
    ratio = second_moments(65536, 10_000)
    with capsys.disabled():
        print(f"\nmean of v / s^2: {ratio.mean():.4f}, sd {ratio.std():.3f}")
    assert abs(ratio.mean() - 1) < 0.02


def test_the_state_of_one_step_on_resumes_bit_for_bit():
    tx, params = optperm.quantize_state(optax.adamw(1e-2), min_size=2, key=3), params_of()
    update, state = jax.jit(tx.update), tx.init(params)
    trail = []
    for step in range(5):
        _, state = update(params_of(step), state, params)
        trail.append(state)
    again = pickle.loads(pickle.dumps(trail[1]))
    for step in range(2, 5):
        _, again = update(params_of(step), again, params)
    support.assert_same_bits(again, trail[-1])
    _, other = update(params_of(9), trail[0], params)
    assert jax.tree.structure(other) == jax.tree.structure(again)


def test_leaves_and_steps_and_keys_have_other_random_numbers():
    """Equal leaves of equal moments are rounded apart, and so are two keys and two steps."""
    x = jax.random.normal(jax.random.key(0), (64, 64))
    codes = []
    for key in (0, 1):
        tx = optperm.quantize_state(optax.ema(0.99, debias=False), key=key)
        state = tx.init({"a": x, "b": x})
        for _ in range(2):
            # From a state of zeros the same number is rounded.
            zeros = tx.init({"a": x, "b": x})._replace(count=state.count)
            _, state = tx.update({"a": x, "b": x}, zeros)
            found = dequantize(state).ema
            codes += [np.asarray(found["a"]), np.asarray(found["b"])]
    apart = [np.mean(a != b) for i, a in enumerate(codes) for b in codes[:i]]
    assert 0.3 < min(apart) <= max(apart) < 0.6


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_block(bits, bad):
    tx = optperm.quantize_state(optax.adam(1e-2), min_size=2, bits=bits)
    params = params_of()
    _, state = tx.update(params_of(1), tx.init(params), params)
    g = params_of(2)
    spoiled = g | {"w": g["w"].at[3, 40].set(bad)}
    (_, found), (_, clean) = tx.update(spoiled, state, params), tx.update(g, state, params)
    for a, b in zip(
        jax.tree.leaves(dequantize(found)), jax.tree.leaves(dequantize(clean)), strict=True
    ):
        if a.shape != (16, 70):
            np.testing.assert_array_equal(a, b)
            continue
        others = np.ones((16, 70), bool)
        others[3, 32:64] = False
        assert np.isnan(a[3, 40])
        np.testing.assert_array_equal(a[others], b[others])


def test_what_is_small_or_left_out_stays():
    params = params_of(shapes={"embed": (100, 64), "w": (64, 64), "b": (64,)})
    tx = optperm.quantize_state(optax.adam(1e-2), include={"embed": False, "w": True, "b": True})
    nu = tx.init(params).inner_state[0].nu
    assert [nu[name].dtype.name for name in params] == ["float32", "float8_e4m3fn", "float32"]
    whole = optperm.quantize_state(optax.adam(1e-2), include=lambda p: {k: True for k in p})
    nu = whole.init(params).inner_state[0].nu
    assert nu["embed"].dtype == jnp.float8_e4m3fn
    with jax.enable_x64(True):
        wide = {**params, "w": params["w"].astype(jnp.float64)}
        assert whole.init(wide).inner_state[0].nu["w"].dtype == jnp.float64
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    state = tx.update(half, tx.init(half), half)[1]
    assert dequantize(state)[0].mu["w"].dtype == jnp.bfloat16


def test_wrong_arguments_are_refused():
    params = {"w": jnp.zeros((64, 64))}
    for inner, names in ((optax.sgd(0.1), "EmptyState"), (optax.scale_by_sm3(), "ScaleBySM3State")):
        with pytest.raises(ValueError, match=rf"no state with known moments: it has .*{names}"):
            optperm.quantize_state(inner).init(params)
    for bits in (16, 2, True, "8"):
        with pytest.raises(ValueError, match="bits must be 8 or 4, got"):
            optperm.quantize_state(optax.adam(0.1), bits=bits)
    with pytest.raises(TypeError, match=r"inner must be an optax\.GradientTransformation"):
        optperm.quantize_state(0.1)
    with pytest.raises(ValueError, match=r"include\['v'\]|include does not fit"):
        optperm.quantize_state(optax.adam(0.1), include={"v": True}).init(params)
    both = optax.chain(optax.scale_by_sm3(), optax.trace(0.9))
    with pytest.warns(UserWarning, match="does not know the moments of ScaleBySM3State: its 4"):
        optperm.quantize_state(both).init(params)


def test_a_state_in_any_container_is_quantized():
    """In a FrozenDict, a dataclass and an `nnx.State`, where a state of Optax may stand."""

    @flax.struct.dataclass
    class Holder:
        held: object
        count: int = 0

    def contained(wrap, unwrap):
        inner = optax.scale_by_adam()

        def update(updates, state, params=None):
            updates, state = inner.update(updates, unwrap(state), params)
            return updates, wrap(state)

        return optax.GradientTransformation(lambda params: wrap(inner.init(params)), update)

    params = {"w": jnp.ones((64, 64))}
    expected = optperm.quantize_state(optax.scale_by_adam()).init(params)
    for wrap, unwrap in (
        (lambda s: flax.core.freeze({"s": s}), lambda s: s["s"]),
        (Holder, lambda s: s.held),
        (lambda s: flax.nnx.State({"s": flax.nnx.Param(1.0), "t": s}), lambda s: s["t"]),
    ):
        tx = optperm.quantize_state(contained(wrap, unwrap))
        state = tx.init(params)
        support.assert_same_bits(unwrap(state.inner_state), expected.inner_state)
        tx.update(params, state, params)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_checkpoint_is_quantized_and_back(bits):
    """The plain optimizer's state becomes the quantized optimizer's, and the other way round."""
    plain = optax.chain(optax.clip(1.0), optax.adam(1e-2))
    tx = optax.chain(optax.clip(1.0), optperm.quantize_state(optax.adam(1e-2), bits=bits))
    params = params_of(shapes={"w": (64, 65)})
    state = plain.init(params)
    for step in range(3):
        _, state = plain.update(params_of(step, {"w": (64, 65)}), state, params)
    found = quantize(state, jax.eval_shape(tx.init, params))
    assert jax.tree.structure(found) == jax.tree.structure(tx.init(params))
    back = dequantize(found)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    # Numbers of the grid do not change.
    support.assert_same_bits(dequantize(quantize(back, found)), back)
    support.assert_close(back[1][0].nu["w"], state[1][0].nu["w"], rtol=0.27, atol=1e-9)
    tx.update(params, found, params)
    with pytest.raises(ValueError, match=r"opt_state.*like, decoded"):
        quantize(plain.init({"w": jnp.zeros((3, 3))}), found)


def test_map_params_maps_codes_and_leaves_exponents():
    params = {"w": jnp.ones((64, 64)), "b": jnp.ones(8)}
    tx = optperm.quantize_state(optax.adam(1e-2))
    state = tx.init(params)
    specs = {"w": P("x", None), "b": P()}
    marked = optax.tree.map_params(
        tx, lambda leaf, spec: spec, state, specs, transform_non_params=lambda _: None
    )
    assert marked.inner_state[0].mu == specs
    assert marked.inner_state[0].nu == specs
    assert marked.exponents is None
    support.assert_same_bits(optax.tree.map_params(tx, lambda leaf: leaf, state), state)


MOVED = re.compile(
    r"= \(?(\w+)\[([\d,]*)\][^=]*? (all-gather|all-reduce|all-to-all|collective-permute)\("
)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("piece", [16, 32, 48])
def test_a_sharded_last_axis_has_the_codes_of_the_whole_one(piece, kind, bits):
    """Codes and exponents are those of one device; no codes move, and where a piece is a multiple of 32
    nothing does."""
    n = 8 * piece
    mesh = jax.make_mesh((8,), ("x",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    tx = optperm.quantize_state(optax.adam(1e-2), min_size=2, bits=bits)

    def run(place):
        params = place(params_of(shapes={"w": (6, n)}))
        state, text = tx.init(params), ""
        for step in range(3):
            g = place(params_of(step, {"w": (6, n)}))
            update = jax.jit(tx.update).lower(g, state, params).compile()
            text, (_, state) = update.as_text(), update(g, state, params)
        return state, text

    whole, _ = run(lambda tree: tree)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(None, "x"))
        found, text = run(lambda tree: jax.device_put(tree, sharding))
    support.assert_same_bits(jax.tree.map(np.asarray, found), jax.tree.map(np.asarray, whole))
    codes = found.inner_state[0].nu["w"]
    assert codes.sharding.is_equivalent_to(sharding, 2)
    moved = [
        (kind, int(np.prod([int(d) for d in dims.split(",") if d])))
        for kind, dims, _ in MOVED.findall(text)
    ]
    if piece == 32:
        assert not moved
    assert all(count <= 6 * n // 8 for _, count in moved), moved


# Wrappers of Optax and of this library around and inside of `quantize_state`, and what they need
AROUND = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "multi_transform": lambda tx: optax.multi_transform(
        {"a": tx, "b": optax.sgd(0.1)}, {"w": "a", "b": "b"}
    ),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 2),
    "schedule_free": lambda tx: optax.contrib.schedule_free(tx, 1e-2),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_wrapper_around_gives_what_it_gives_around_float32(name):
    """Its first step, from exact zeros, is that of float32; in later ones codes change each step."""
    inner = optax.adam(1e-2)
    params = params_of()
    tx, plain = (AROUND[name](each) for each in (optperm.quantize_state(inner, min_size=2), inner))
    update, exact = jax.jit(tx.update), jax.jit(plain.update)
    state, expected = tx.init(params), plain.init(params)
    is_float8 = lambda leaf: leaf.dtype == jnp.float8_e4m3fn  # noqa: E731
    assert any(map(is_float8, jax.tree.leaves(state)))
    for step in range(4):
        out, state = update(params_of(step), state, params)
        wanted, expected = exact(params_of(step), expected, params)
        # A second moment moves by at most 27 %, and a first one by an eighth
        support.assert_close(
            out, wanted, rtol=1e-5 if step < 1 else 0.5, atol=1e-7 if step < 1 else 3e-3
        )


@pytest.mark.filterwarnings("ignore:quantize_state does not know the moments of ScheduleFreeState")
def test_an_update_of_schedule_free_inside_is_that_of_the_decoded_state():
    """Its base has the moments, and its own iterates stay as they are."""
    inner = optax.contrib.schedule_free(optax.adam(1e-2), 1e-2)
    tx, params = optperm.quantize_state(inner, min_size=2), params_of()
    state = tx.init(params)
    for step in range(3):
        decoded = jax.tree.map(jnp.asarray, dequantize(state))
        out, state = tx.update(params_of(step), state, params)
        support.assert_close(out, inner.update(params_of(step), decoded, params)[0], rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:quantize_state does not know the moments of DilocoState")
def test_replicas_of_pmap_and_diloco_have_the_codes_of_one_device():
    """With equal gradients on two replicas, inside and around `diloco`, whose commits change nothing."""
    params, quantized = params_of(), optperm.quantize_state(optax.adam(1e-2), min_size=2)
    options = {"every": 2, "axis_name": "i"}
    inside = optperm.diloco(quantized, optax.sgd(1.0), **options)
    outside = optperm.quantize_state(
        optperm.diloco(optax.adam(1e-2), optax.sgd(1.0, 0.9), **options), min_size=2
    )

    def run(tx, mapped):
        def train(params):
            state = tx.init(params)
            for step in range(3):
                updates, state = tx.update(params_of(step), state, params)
                params = optax.apply_updates(params, updates)
            return params, state

        two = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
        return mapped(train)(two)

    def pmap(train):
        return jax.pmap(train, axis_name="i")

    alone = run(quantized, lambda train: jax.jit(jax.vmap(train)))
    found = run(inside, pmap)
    support.assert_close(found[0], alone[0], rtol=1e-5, atol=1e-6)
    # Outside are the moments of the inner Adam, and the momentum of the center.
    for state, number in ((found[1], 4), (run(outside, pmap)[1], 6)):
        codes = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype == jnp.float8_e4m3fn]
        assert len(codes) == number
        for leaf in codes:
            support.assert_same_bits(leaf[0], leaf[1])


def test_a_program_of_many_leaves_has_few_kernels():
    """The number of an array is an operand, so that leaves of one shape have equal kernels."""
    tx = optperm.quantize_state(optax.adam(1e-2), min_size=2)
    seen = []
    for leaves in (4, 12):
        params = {f"w{i:02}": jax.ShapeDtypeStruct((16, 64), jnp.float32) for i in range(leaves)}
        state = jax.eval_shape(tx.init, params)
        text = jax.jit(tx.update).lower(params, state, params).compile().as_text()
        # The opcodes, types and constants of each fused computation
        parts = re.split(r"\n(?=%)", text.split("\nENTRY")[0])
        bodies = [re.findall(r"= (\S+ [a-z-]+\((?:[^%,)]*\))?)", part) for part in parts]
        seen.append(len(set(map(tuple, bodies))))
    assert seen[1] <= seen[0] + 2


def test_a_state_of_the_plain_optimizer_is_refused_with_the_way_to_convert_it():
    plain, params = optax.adamw(1e-3), {"w": jnp.ones((64, 64))}
    with pytest.raises(ValueError, match=r"needs a QuantizedState.*optperm\.memory\.quantize"):
        optperm.quantize_state(plain).update(params, plain.init(params), params)


def test_quantize_refuses_a_state_like_that_is_not_quantized():
    state = optax.adamw(1e-3).init({"w": jnp.ones((64, 64))})
    with pytest.raises(ValueError, match="like has no QuantizedState"):
        optperm.memory.quantize(state, state)


def test_quantize_takes_states_of_several_seeds():
    """All counts begin at 0, and the state trains on under vmap."""
    plain = optax.adamw(1e-2)
    tx = optperm.quantize_state(plain)
    params = {"w": jnp.ones((3, 64, 128))}
    like = jax.eval_shape(jax.vmap(tx.init), params)
    state = optperm.memory.quantize(jax.vmap(plain.init)(params), like)
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, like)
    jax.vmap(lambda p, s: tx.update(p, s, p))(params, state)


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({"w": jnp.ones((8, 32))}, {}),
        ({"w": jnp.ones((64, 128))}, {"include": {"w": False}}),
        ({"w": np.ones((64, 128))}, {}),
    ],
)
def test_a_state_in_which_nothing_is_quantized_is_warned_of(params, options, x64):
    with pytest.warns(UserWarning, match=r"^quantize_state saves nothing: .* min_size=4096"):
        state = optperm.quantize_state(optax.adam(0.1), **options).init(params)
    assert state.inner_state[0].mu["w"].dtype == params["w"].dtype


@pytest.mark.parametrize(("old", "new"), [(8, 4), (4, 8)])
def test_a_state_of_other_bits_is_refused(old, new):
    params = {"w": jnp.ones((64, 128))}
    state = optperm.quantize_state(optax.adam(0.1), bits=old).init(params)
    tx = optperm.quantize_state(optax.adam(0.1), bits=new)
    with pytest.raises(ValueError, match=rf"^bits must be {old}, as in the state, got {new}\. "):
        tx.update(params, state, params)
