"""What every transformation of this library promises, beside what Optax's own cases ask."""

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
from transformations import TRANSFORMATIONS, VARIANTS_AT_NIGHT

import optperm

every = pytest.mark.parametrize("ours", TRANSFORMATIONS, ids=str)
# Of what takes most to compile.
one_of_each = pytest.mark.parametrize("ours", VARIANTS_AT_NIGHT, ids=str)


@flax.struct.dataclass
class Layer:
    kernel: Any
    bias: Any


EVERY_TIME = {
    "one array": lambda p: p["kernel"],
    "nested": lambda p: Layer({"layer": (p["kernel"], [p["bias"]])}, {"absent": None}),
    "nnx.State": lambda p: nnx.State({k: nnx.Param(x) for k, x in p.items()}),
    "no leaves": lambda p: {},
}
CONTAINERS = EVERY_TIME | {
    "dict": dict,
    "tuple": lambda p: tuple(p.values()),
    "list": lambda p: list(p.values()),
    "FrozenDict": flax.core.freeze,
    "dataclass": lambda p: Layer(**p),
    "None leaves": lambda p: {**p, "absent": None},
}


# What the modules of the methods import for type checkers alone.
NAMES = {
    name: getattr(jaxtyping, name)
    for name in ("Array", "Bool", "Float", "Float32", "Int32", "PyTree", "Shaped", "UInt32")
}


def states_in(node):
    """The states of this library's own types anywhere in an optimizer state."""
    if isinstance(node, dict):
        node = tuple(node.values())
    if not isinstance(node, tuple | list):
        return
    if type(node).__module__.startswith("optperm."):
        yield node
    for child in node:
        yield from states_in(child)


def assert_typed(opt_state, params):
    """Asserts that each field of each state has the shape and dtype of its annotation."""
    of_params = NAMES["PyTree"][NAMES["Shaped"][jax.Array, "?*shape"], "Params"]
    for state in states_in(opt_state):
        hints = typing.get_type_hints(type(state), localns=NAMES)
        with jaxtyping.jaxtyped("context"):
            assert isinstance(params, of_params)
            for name, hint in hints.items():
                assert hint is not jax.Array, f"{type(state).__name__}.{name} says no shape"
                if hint is not typing.Any:
                    assert isinstance(getattr(state, name), hint), f"{name} is not {hint}"


def train(ours, params, steps=3, **options):
    """Params and state after each step."""
    return loops.train(
        ours.make(), params, loops.linear_batches(steps), evaluate=loops.linear, **options
    )


@every
@pytest.mark.parametrize("container", support.every_night(CONTAINERS, EVERY_TIME))
def test_params_in_any_container(ours, container):
    """Every pytree of arrays can be trained, and keeps its form."""
    params = CONTAINERS[container](support.random_params())
    start = params, jax.eval_shape(ours.make().init, params)
    after = jax.eval_shape(
        loops.make_step(ours.make(), loops.linear), *start, loops.linear_batches(1)[0]
    )
    assert support.signature(after) == support.signature(start)


@every
def test_state_never_changes_its_form(ours):
    """Structure, shapes, dtypes and weak types stay those of init, planned or made, and are what the
    states' types say; none is weak."""
    params = support.random_params()
    tx = ours.make()
    start, after = tx.init(params), train(ours, params, 1)[0][1]
    expected = support.signature(start)
    assert not any(weak for _, _, weak in expected[1])
    assert support.signature(after) == expected
    for opt_state in (start, after):
        assert_typed(opt_state, params)
    for given in (params, jax.eval_shape(support.random_params)):
        assert support.signature(jax.eval_shape(tx.init, given)) == expected


@every
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


@every
def test_training_goes_on_from_a_checkpoint(ours, tmp_path):
    """Params and state that went through Orbax after any of the first steps, alone or stacked, go on as
    they were bit for bit."""
    trail = train(ours, support.random_params(), 6)
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
        resumed = loops.train(ours.make(), params, rest, evaluate=loops.linear, opt_state=opt_state)
        support.assert_same_bits(resumed, trail[taken:])


@every
def test_tree_map_params_sees_the_params_of_the_state(ours):
    """`optax.tree.map_params` maps the entries that mirror params, with a spec beside each."""
    params = support.random_params()
    tx = ours.make()
    opt_state = tx.init(params)
    specs = {"kernel": "k", "bias": "b"}
    marked = optax.tree.map_params(
        tx,
        lambda leaf, spec: (spec, leaf.shape),
        opt_state,
        specs,
        transform_non_params=lambda _: None,
    )
    found = jax.tree.leaves(
        marked, is_leaf=lambda x: isinstance(x, tuple) and x[:1] in (("k",), ("b",))
    )
    plain = set() if ours.knows == "nothing" else {("k", (12, 5)), ("b", (5,))}
    with_rows = {(spec, (rows, *shape)) for spec, shape in plain for rows in ours.rows}
    assert with_rows <= set(found) <= plain | with_rows
    assert ours.rows or set(found) == plain
    unchanged = optax.tree.map_params(tx, lambda leaf: leaf, opt_state)
    support.assert_same_bits(unchanged, opt_state)


@one_of_each
def test_mixed_dtypes_keep_theirs(ours):
    """In one tree of several containers each leaf's updates, and the params after them, have its
    dtype; narrow ones and wide ones move."""

    def step(params, opt_state):
        e = optperm.evaluate(loops.linear_loss, params, jnp.ones((2,), jnp.float32))
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return updates, optperm.apply_updates(params, updates, opt_state), opt_state

    tx = ours.make()
    with jax.enable_x64(True):
        every = {name: jnp.ones((9, 2), name) for name in support.DTYPES}
        opt_state = jax.eval_shape(tx.init, every)
        updates, after, new_state = jax.eval_shape(step, every, opt_state)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, every, after)
        assert support.signature(new_state) == support.signature(opt_state)
        narrow, wide = (support.normal((9, 2), 0, d) for d in ("bfloat16", "float64"))
        params = {"layer": (narrow, [wide])}

        def body(carried, _):
            updates, *carried = step(*carried)
            return tuple(carried), updates

        # The first step of some methods only looks.
        run = jax.jit(lambda p: jax.lax.scan(body, (p, ours.prepared(tx.init(p), p)), length=2))
        (after, _), _ = run(params)
        chex.assert_trees_all_equal_shapes_and_dtypes(params, after)
        pairs = zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True)
        assert all(not np.array_equal(new, old) for new, old in pairs)


@every
def test_gradients_in_another_precision(ours):
    """Float32 gradients train bfloat16 params, and the other way round; the params' dtype stays."""
    if ours.is_identity:
        pytest.skip("hands on the updates as they came")
    for param_dtype, grad_dtype in [("bfloat16", "float32"), ("float32", "bfloat16")]:
        params, grads = (support.random_params(dtype=dtype) for dtype in (param_dtype, grad_dtype))
        before = jax.eval_shape(ours.make().init, params)
        updates, opt_state = jax.eval_shape(ours.make().update, grads, before, params)
        chex.assert_trees_all_equal_dtypes(updates, params)
        assert support.signature(opt_state) == support.signature(before)


@every
def test_weak_types_go_no_further(ours):
    """Gradients made of Python's numbers give updates and states that are strongly typed."""
    if ours.is_identity:
        pytest.skip("hands on the updates as they came")
    params = support.random_params()
    grads = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1.0), params)
    assert all(leaf.weak_type for leaf in jax.tree.leaves(grads))
    tx = ours.make()
    after = jax.eval_shape(tx.update, grads, jax.eval_shape(tx.init, params), params)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(after))


@one_of_each
def test_update_is_pure(ours):
    """The same call twice, outside of jit, gives the same bits and leaves what it was given alone, also
    with what other methods of a chain need; the state keeps its form."""
    params, tx = support.random_params(), ours.make()
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    given = params, tx.init(params), *loops.linear(params, jnp.ones((2,)))
    before = jax.tree.map(np.array, given[:3])

    def update(**more):
        params, opt_state, grads, extra_args = given
        return tx.update(grads, opt_state, params, **extra_args, **more)

    first, second = update(), update(no_such_argument=object())
    assert support.signature(first[1]) == support.signature(given[1])
    support.assert_same_bits(second, first)
    support.assert_same_bits(given[:3], before)


@every
def test_update_without_params_says_so(ours):
    """Forgetting the params raises a ValueError that shows the right call."""
    if not ours.needs_params:
        pytest.skip("does without them")
    params = support.random_params()
    tx = ours.make()
    with pytest.raises(ValueError, match=r"update\(updates, state, params\)"):
        tx.update(params, tx.init(params))


@every
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: {"kernel": p["kernel"]}, "tree structure"),
        (lambda p: (p["kernel"], p["bias"]), "tree structure"),
        (lambda p: p | {"bias": p["bias"][:3]}, r"\['bias'\] is float32\[3\]"),
        (lambda p: p | {"kernel": p["kernel"].T}, r"\['kernel'\] is float32\[5, 12\]"),
    ],
)
def test_trees_that_do_not_match_are_named(ours, spoil, message):
    """Other params or updates than the state was made for raise, saying which leaf and how."""
    params = support.random_params()
    tx = ours.make()
    opt_state = tx.init(params)
    with pytest.raises(ValueError, match=f"updates.*{message}"):
        tx.update(spoil(params), opt_state, params)
    # Where the state cannot tell which of the two is wrong, it is that they do not match each other.
    if ours.knows == "nothing":
        message = r"^updates(\['\w+'\] is float32.*| has another tree structure) .*\bparams\b"
    else:
        message = f"^params.*{message}"
    with pytest.raises(ValueError, match=message):
        tx.update(params, opt_state, spoil(params))


@every
def test_params_of_another_dtype_are_named(ours):
    """Params cast behind the optimizer's back raise."""
    if ours.is_identity or ours.knows != "dtypes":
        pytest.skip("keeps nothing in the dtypes of the params")
    params = support.random_params()
    tx = ours.make()
    cast = params | {"bias": params["bias"].astype("bfloat16")}
    with pytest.raises(ValueError, match=r"params\['bias'\] is bfloat16\[5\].*float32\[5\]"):
        tx.update(params, tx.init(params), cast)


WRAPPERS = {
    "masked": lambda tx: optax.masked(tx, {"kernel": True, "bias": False}),
    "partition": lambda tx: optax.partition(
        {"ours": tx, "other": optax.sgd(0.1)}, {"kernel": "other", "bias": "ours"}
    ),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
}


@every
@pytest.mark.filterwarnings("ignore:The gradient is not the one of the extra arguments")
@pytest.mark.parametrize("wrapper", [*WRAPPERS, "inject_hyperparams"])
def test_wrapped_by_optax_the_state_keeps_its_form(ours, wrapper, lenient):
    """Masked, partitioned, skipped, accumulated or with traced numbers: no leaf changes its type."""
    if wrapper == "inject_hyperparams":
        static = [
            k for k, v in ours.arguments.items() if isinstance(v, optax.GradientTransformation)
        ]
        make = optax.inject_hyperparams(ours.build, static_args=(*ours.static, *static))
        tx = make(**ours.arguments)
    else:
        tx = WRAPPERS[wrapper](ours.make())
    params = support.random_params()
    opt_state = jax.eval_shape(tx.init, params)
    step = loops.make_step(tx, loops.linear)
    after = jax.eval_shape(step, params, opt_state, jnp.ones((2,)))
    assert support.signature(after) == support.signature((params, opt_state))


@one_of_each
def test_vmap_trains_each_as_by_itself(ours):
    """Three networks at once, each with a state of its own, end where they end one by one."""
    each = [support.random_params(seed) for seed in range(3)]
    tx = ours.make()

    @jax.jit
    @jax.vmap
    def run(params):
        step = loops.make_step(tx, loops.linear)
        return loops.carry(step, params, tx.init(params), jnp.stack(loops.linear_batches(2)))

    together = jax.device_get(run(replicas.stack(each)))
    for index, params in enumerate(each):
        chex.assert_trees_all_close(
            replicas.take(together, index), train(ours, params, 2)[-1], rtol=1e-5, atol=1e-6
        )
