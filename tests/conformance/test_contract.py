"""The promises of every transformation of this library that Optax's own cases do not test."""

import contextlib
import functools
import typing
from typing import Any

import chex
import flax.core
import flax.struct
import jax
import jax.numpy as jnp
import jaxtyping
import loops
import numpy as np
import optax
import orbax.checkpoint
import pytest
import replicas
import support
from flax import nnx
from jax.tree_util import DictKey

import optperm


@flax.struct.dataclass
class Layer:
    kernel: Any
    bias: Any


CONTAINERS = {
    "one array": lambda p: p["kernel"],
    "nested": lambda p: Layer(
        {"layer": (p["kernel"], [p["bias"]])}, flax.core.freeze({"no": None})
    ),
    "nnx.State": lambda p: nnx.State({k: nnx.Param(x) for k, x in p.items()}),
    "no leaves": lambda p: {},
    "any rank": lambda p: {
        "empty": jnp.zeros((0, 3)),
        "scalars": [jnp.float16(1.0), (jnp.bfloat16(1.0),)],
        "four": jnp.ones((2, 1, 3, 2)),
    },
    "empty alone": lambda p: (jnp.zeros((0, 3)),),
    "scalar alone": lambda p: [jnp.bfloat16(1.0)],
}
WRAPPERS = {
    "masked": lambda tx: optax.masked(tx, {"kernel": True, "bias": False}),
    "partition": lambda tx: optax.partition(
        {"ours": tx, "other": optax.sgd(0.1)}, {"kernel": "other", "bias": "ours"}
    ),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
}
# What `optperm.core.shapes` shows to type checkers alone.
NAMES = {
    name: getattr(jaxtyping, name)
    for name in ("Array", "Bool", "Float", "Float32", "Int8", "Int32", "PyTree", "Shaped", "UInt32")
}


def states_in(opt_state):
    """Return the states of this library's own types anywhere in an optimizer state."""
    found = []

    def visit(node):
        if isinstance(node, tuple) and type(node).__module__.startswith("optperm."):
            found.append(node)

    jax.tree.leaves(opt_state, is_leaf=visit)
    return found


def assert_typed(opt_state, params):
    """Assert that each field of each state has the shape and dtype of its annotation."""
    of_params = NAMES["PyTree"][NAMES["Shaped"][jax.Array, "?*shape"], "Params"]
    for state in states_in(opt_state):
        hints = typing.get_type_hints(type(state), localns=NAMES)
        with jaxtyping.jaxtyped("context"):
            assert isinstance(params, of_params)
            for name, hint in hints.items():
                assert hint is not jax.Array, f"{type(state).__name__}.{name} says no shape"
                if hint is not typing.Any:
                    assert isinstance(getattr(state, name), hint), f"{name} is not {hint}"


def assert_form_stays(tx, params, evaluate=loops.linear):
    """Assert that updates are of the form of params, and params and state of theirs after a step."""

    def step(params, opt_state, batch):
        grads, extra_args = evaluate(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
        return updates, optperm.apply_updates(params, updates, opt_state), opt_state

    start = params, jax.eval_shape(tx.init, params)
    after = jax.eval_shape(step, *start, loops.linear_batches(1)[0])
    assert support.signature(after) == support.signature((params, *start))


@pytest.mark.spans("constant_sgd", "switch_after")
@pytest.mark.filterwarnings("ignore:The updates are not the gradient in the extra arguments")
@pytest.mark.filterwarnings("ignore:(low_rank|apollo) leaves .* alone")
def test_booleans_that_a_wrapper_turned_into_integers_act_as_booleans(ours, lenient):
    """As optax.contrib.sam does with a state, whose types then stay: take the same steps."""
    tx, params = ours.make(), support.random_params()
    start = ours.prepared(tx.init(params), params)

    def as_integers(state):
        return jax.tree.map(lambda leaf: leaf * 1 if leaf.dtype == bool else leaf, state)

    step = loops.make_step(tx, loops.linear, loops.by_addition)
    run = jax.jit(functools.partial(loops.carry, step))
    batches = np.stack(loops.linear_batches(3))
    wanted, after = run(params, start, batches)
    got, integers = run(params, as_integers(start), batches)
    support.assert_same_bits(got, wanted)
    support.assert_same_bits(integers, as_integers(after))


@pytest.mark.spans("diloco-streaming", "mask_elements")
@pytest.mark.filterwarnings("ignore:The updates are not the gradient in the extra arguments")
@pytest.mark.filterwarnings("ignore:(low_rank|apollo) leaves .* alone")
def test_form_stays_in_any_container_dtype_and_wrapper(ours, lenient):
    """No container, dtype or wrapper changes the type of a leaf of params or state."""
    params, tx = support.random_params(), ours.make()
    for make in CONTAINERS.values():
        assert_form_stays(tx, make(params))
    for wrap in WRAPPERS.values():
        assert_form_stays(wrap(tx), params)
    fixed = [k for k, v in ours.arguments.items() if isinstance(v, optax.GradientTransformation)]
    traced = optax.inject_hyperparams(ours.build, static_args=(*ours.static, *fixed))
    assert_form_stays(traced(**ours.arguments), params)
    with jax.enable_x64(True):
        assert_form_stays(tx, {name: jnp.ones((9, 2), name) for name in support.DTYPES})
    # Gradients of another dtype than the params, or made of Python's numbers, and an unknown argument.
    for of_params, of_grads in (
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float32", None),
    ):

        def evaluate(params, batch, dtype=of_grads):
            extra_args = loops.linear(params, batch)[1] | {"no_such_argument": object()}
            return jax.tree.map(lambda p: jnp.full(p.shape, 1.0, dtype), params), extra_args

        if not ours.is_identity:
            assert_form_stays(tx, support.random_params(dtype=of_params), evaluate)


@pytest.mark.spans("sgperm", "agn", "svrg")
def test_update_is_pure_and_keeps_the_form_of_the_state(ours):
    """The same step twice gives the same bits and leaves what it was given alone; structure, shapes,
    dtypes and strong types are those of init, planned or made, and of the states' types."""
    params, tx = support.random_params(), ours.make()
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    given = params, tx.init(params), loops.linear_batches(1)[0]
    before = jax.tree.map(np.array, given)
    # Elsewhere a compiled step has to do: outside of jax.jit every operation is compiled by itself.
    step = loops.make_step if ours.name in ("svrg", "mask_elements") else loops.compiled
    first, second = (step(tx, loops.linear)(*given) for _ in range(2))
    support.assert_same_bits(second, first)
    support.assert_same_bits(given, before)
    expected = support.signature(given[1])
    assert not any(weak for _, _, weak in expected[1])
    assert support.signature(first[1]) == expected
    for opt_state in (given[1], first[1]):
        assert_typed(opt_state, params)
    for shapes in (params, jax.eval_shape(support.random_params)):
        assert support.signature(jax.eval_shape(tx.init, shapes)) == expected


@pytest.mark.spans("sgperm", "agn", "svrg", "mandt_sgd")
def test_init_keeps_no_alias_of_the_params(ours):
    """Params may be donated while the state lives: it holds copies."""
    params = support.random_params()
    opt_state = ours.make().init(params)
    held = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    assert held.isdisjoint(leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(opt_state))
    arrays = {name: np.array(leaf) for name, leaf in params.items()}
    opt_state = ours.make().init(arrays)
    before = jax.tree.map(np.array, opt_state)
    for array in arrays.values():
        array[...] = 0.0
    support.assert_same_bits(opt_state, before)


@pytest.mark.spans("sgperm", "diloco-streaming")
def test_training_goes_on_from_a_checkpoint(ours, tmp_path):
    """Params and state that went through Orbax after any of the first steps, alone or stacked, go on as
    they were bit for bit."""
    train = functools.partial(loops.train, ours.make(), evaluate=loops.linear)
    trail = train(support.random_params(), loops.linear_batches(6))
    saved = {"alone": trail[0], "stacked": jax.device_put(replicas.stack(trail[:4]))}
    blank = jax.tree.map(lambda leaf: jax.device_put(np.zeros_like(leaf)), saved)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", saved)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", blank)
    support.assert_same_bits(restored, saved)
    stacked = jax.device_get(restored["stacked"])
    for taken in range(1, 5):
        params, opt_state = replicas.take(stacked, taken - 1)
        rest = loops.linear_batches(6 - taken, first=taken)
        support.assert_same_bits(train(params, rest, opt_state=opt_state), trail[taken:])


def test_tree_map_params_sees_the_params_of_the_state(ours):
    """`optax.tree.map_params` maps the entries that mirror params, and gives each its spec."""
    params, tx = support.random_params(), ours.make()
    opt_state = tx.init(params)
    names, other = {name: name for name in params}, {"transform_non_params": lambda _: ""}
    marked = optax.tree.map_params(tx, lambda _, name: name, opt_state, names, **other)
    shapes = {path: leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state)}
    for path, spec in jax.tree_util.tree_leaves_with_path(marked):
        name = next((name for name in params if path[-1:] == (DictKey(name),)), "")
        # An entry may have a row for each of several, or be of a shape of its own, or several arrays.
        mirrors = name and shapes.get(path, ())[-params[name].ndim :] == params[name].shape
        assert spec == name or not (spec or mirrors), jax.tree_util.keystr(path)
    support.assert_same_bits(optax.tree.map_params(tx, lambda leaf: leaf, opt_state), opt_state)


@pytest.mark.spans("agn", "svrg")
@pytest.mark.filterwarnings("ignore:(low_rank|apollo) leaves .* alone")
def test_narrow_and_wide_leaves_of_one_tree_move(ours):
    """Beside float64 a leaf of bfloat16 is trained too, and each keeps its dtype."""
    tx = ours.make()
    with jax.enable_x64(True):
        narrow, wide = (support.normal((9, 2), 0, d) for d in ("bfloat16", "float64"))
        params = {"layer": (narrow, [wide])}
        step = loops.make_step(tx, loops.evaluation(loops.linear_loss))
        # The first step of some methods only looks.
        run = jax.jit(functools.partial(loops.carry, step))
        opt_state = ours.prepared(jax.jit(tx.init)(params), params)
        after, _ = run(params, opt_state, np.ones((2, 2), np.float32))
        chex.assert_trees_all_equal_shapes_and_dtypes(params, after)
        pairs = zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True)
        assert all(not np.array_equal(new, old) for new, old in pairs)


SPOILED = [
    (lambda p: {"kernel": p["kernel"]}, "tree structure"),
    (lambda p: (p["kernel"], p["bias"]), "tree structure"),
    (lambda p: p | {"bias": p["bias"][:3]}, r"\['bias'\] is float32\[3\]"),
    (lambda p: p | {"kernel": p["kernel"].T}, r"\['kernel'\] is float32\[5, 12\]"),
]
# Methods whose states do not tell the dtypes of the params, and those that tell nothing of them.
TELL_NO_DTYPES = {
    *("record_trajectory", "mask_elements", "swag", "project", "twa", "dldr-twa", "ivon", "sghmc"),
    *("prune_gradually", "rigl", "set", "mars", "mars_adamw", "constant_sgd", "mandt_sgd"),
}
TELL_NOTHING = {
    *("low_rank", "low_rank-svd", "apollo", "quantize_state", "quantize_state-4"),
    *("proximal", "sgld", "widen_params"),
}


@pytest.mark.spans("sgperm", "diloco-streaming", "dim_reduce", "svrg", "mask_elements", "sgld")
def test_what_does_not_fit_is_refused_by_name(ours):
    """Missing or untrainable params, params of another state and other updates are refused."""
    params, tx = support.random_params(), ours.make()
    opt_state = tx.init(params)
    for bad in ({"a": jnp.ones(2, int)}, [jnp.ones(2, complex)]):
        with pytest.raises(TypeError, match=r"params.* has dtype .*optax\.partition"):
            tx.init(bad)
    try:
        jax.eval_shape(tx.update, params, opt_state)
    except ValueError as error:  # of those that need params
        assert "update(updates, state, params)" in str(error)  # noqa: PT017
    if ours.name not in TELL_NO_DTYPES | TELL_NOTHING:
        cast = params | {"bias": params["bias"].astype("bfloat16")}
        with pytest.raises(ValueError, match=r"params\['bias'\] is bfloat16\[5\].*float32\[5\]"):
            tx.update(params, opt_state, cast)
    for spoil, message in SPOILED:
        with pytest.raises(ValueError, match=f"updates.*{message}"):
            tx.update(spoil(params), opt_state, params)
        of_params = f"^params.*{message}"
        # Where the state cannot tell which of the two is wrong, it is that they do not match each other.
        if ours.name in TELL_NOTHING:
            of_params = (
                r"^updates(\['\w+'\] is float32.*| has a different tree structure) .*\bparams\b"
            )
        with pytest.raises(ValueError, match=of_params):
            tx.update(params, opt_state, spoil(params))


@pytest.mark.spans("agn", "mask_elements")
@pytest.mark.usefixtures("lenient")
def test_steps_hold_under_the_checks_of_jax(ours):
    """As a scan's carry, in donated buffers, training is what the loop gives without them, to the last
    digit: XLA may round a product and a sum at once."""
    tx, params = ours.make(), support.random_params()
    state = ours.prepared(tx.init(params), params)
    batches = loops.linear_batches(3)
    expected = loops.train(tx, params, batches, evaluate=loops.linear, opt_state=state)[-1]
    given = jax.block_until_ready((params, state, jax.device_put(np.stack(batches))))
    checks = [jax.debug_nans(True), jax.debug_infs(True), jax.debug_key_reuse(True)]
    checks.append(jax.transfer_guard("disallow"))
    # jax.custom_partitioning, which calls the kernel, keeps tracers of its own.
    if not ours.permutes:
        checks.append(jax.checking_leaks())
    with contextlib.ExitStack() as stack:
        for each in checks:
            stack.enter_context(each)
        # A new function, so that it is traced here.
        run = functools.partial(loops.carry, loops.make_step(tx, loops.linear))
        found = jax.block_until_ready(jax.jit(run, donate_argnums=(0, 1))(*given))
    chex.assert_trees_all_close(found, expected, rtol=1e-5 if ours.sums_over_params else 1e-6)
