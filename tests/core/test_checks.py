"""Checks of what users pass: what passes, what is refused, and what the messages say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import optperm
from optperm.core import checks, schedules

INF, KEY = float("inf"), jax.random.key(0)
share = functools.partial(checks.check_in_range, "it", low=0.0, high=1.0)
finite = functools.partial(checks.check_in_range, "it", low=-INF, high=INF)
count, key, flag, axis_name, arrays, transformation = (
    functools.partial(getattr(checks, f"check_{name}"), "it")
    for name in ("count", "key", "flag", "axis_name", "arrays", "transformation")
)


def axis_is_bound(axis_name):
    jax.vmap(lambda _: checks.check_axis_is_bound(axis_name), axis_name="data")(np.zeros(2))


ALLOWED = [
    (share, [0, np.float32(0.5), np.int64(1), jnp.float32(0.5), optax.constant_schedule(7.0)]),
    (finite, [-3e38, 3e38]),
    (count, [1, np.int32(3), jnp.int32(2), 2**31 - 1]),
    (key, [KEY, jax.random.key_data(KEY), 0, 2**32 - 1, np.int64(3), jnp.int32(3)]),
    (flag, [True, np.False_]),
    (axis_name, [None, "data", ("host", "device")]),
    (axis_is_bound, [None, "data"]),
    (arrays, [{"x": [KEY, 1.0]}]),
    # What is traced passes unseen.
    (jax.jit(share), [7.0]),
    (jax.jit(count), [-7]),
]
OUT_OF_RANGE, NO_NUMBERS = [-0.1, 1.1, float("nan"), np.float32(2), jnp.array(-1)], [True, "1", 1j]
NO_KEYS = [jax.random.split(KEY), True, 1.0, jnp.ones(2)]
# With the words between "it must be" and ", got".
REFUSED = [
    (share, ValueError, r"in \[0, 1\]", OUT_OF_RANGE),
    (share, TypeError, "a real number or a schedule", [*NO_NUMBERS, np.True_, None, object()]),
    (finite, ValueError, "finite in float32", [INF, 1e39, -1e39]),
    (count, TypeError, "an integer", [1.0, True, jnp.float32(1), jnp.ones(2, int)]),
    (count, ValueError, "at (least 1|most 2147483647)", [0, jnp.int32(-2), 2**31]),
    (key, ValueError, "at (least 0|most 4294967295)", [-1, 2**32]),
    (key, TypeError, "an int or a single random key", NO_KEYS),
    (flag, TypeError, "True or False", [0, 1, None, "no"]),
    (axis_name, TypeError, "the name of a mapped axis", [3, ["data"], ("data", None)]),
]


def test_what_is_allowed_passes_and_the_rest_is_refused():
    for check, values in ALLOWED:
        for value in values:
            check(value)
    for check, error, message, values in REFUSED:
        for value in values:
            with pytest.raises(error, match=f"^it must be {message}.*, got "):
                check(value)


def test_what_is_wrong_is_named_with_advice():
    real = functools.partial(checks.check_real_floating, "it", advice="Mask it.")
    static_count = functools.partial(checks.check_static_count, "it")
    mixed = {"a": jnp.ones(2), "b": [jnp.ones(2, jnp.bfloat16), jnp.ones(2, int)]}
    several = optax.MultiSteps(optax.sgd(0.1), 2)
    init, model = optperm.svrg().init, {"act": jax.nn.relu, "w": jnp.ones(2)}
    for check, value, error, message in (
        (axis_is_bound, "other", ValueError, "axis_name 'other' is not bound here"),
        (static_count, jnp.int32(3), TypeError, "it sets the shapes of arrays.* name it in static"),
        (
            transformation,
            several,
            TypeError,
            r"which MultiSteps\(\.\.\.\)\.gradient_transformation",
        ),
        (
            real,
            mixed,
            TypeError,
            r"it\['b'\]\[1\] has dtype int32, but must be real floating\. Mask it\.",
        ),
        (init, model, TypeError, r"act.* eqx\.filter\(model, eqx\.is_inexact_array"),
        (init, model | {"act": "x"}, TypeError, r"act.* got 'x'\.$"),
    ):
        with pytest.raises(error, match=message):
            check(value)


@pytest.mark.parametrize("value", ["x", b"x", object(), np.array(["a"]), np.datetime64("2020")])
def test_what_is_no_array_is_named_by_its_path(value):
    with pytest.raises(TypeError, match=r"it\['x'\]\[1\] must be an array of numbers"):
        arrays({"x": [KEY, value], "y": 1.0})
    with pytest.raises(TypeError, match=r"step must be a function \(params\), got"):
        checks.check_function("step", value, "(params)")


def test_traced_numbers_out_of_range_become_the_nearest_limit():
    limit = jax.jit(
        lambda x: schedules.resolve_schedule("ratio", x, jnp.int32(0), low=0.5, high=2.0)
    )
    assert [float(limit(jnp.float32(x))) for x in (0.25, 1.5, 3.0)] == [0.5, 1.5, 2.0]


@pytest.mark.parametrize("value", ["x", None, np.ones(2, np.float32), 1j, True])
def test_schedule_that_gives_no_single_number_is_named(value):
    with pytest.raises(TypeError, match="value of the schedule alpha must be"):
        schedules.resolve_schedule("alpha", lambda _: value, jnp.int32(0))


X = jnp.ones(2)


@pytest.mark.parametrize(
    ("tree", "expected", "says"),
    [
        ({"a": X}, {"b": X}, r"params\['b'\] is missing"),
        ({"a": {"c": X, "d": X}}, {"a": {"c": X}}, r"params\['a'\]\['d'\] is not expected"),
        ([X], (X,), "params is a list, not a tuple"),
        ((X,), (X, X), r"params\[1\] is missing"),
        ({"a": None}, {"a": X}, r"params\['a'\] is None, not an array"),
        (X, {"a": X}, "params is an array, not a dict"),
        ({"a": optax.MaskedNode()}, {"a": X}, r"params\['a'\] is a MaskedNode, not an array"),
        ({"a": X}, {"a": nnx.Param(X)}, r"params\['a'\] is an array, not a Param"),
    ],
)
def test_the_first_node_that_differs_is_named_without_the_trees(tree, expected, says):
    with pytest.raises(ValueError, match=f"^params has a different .* the state: {says}.$"):
        checks.check_same_tree("params", tree, expected, source="the state")


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda tree: optperm.low_rank(tree, 4), r"\{'w': float32\[64, 256\]\}"),
        (lambda tree: key([tree["w"], np.zeros(3)]), r"\[float32\[64, 256\], float64\[3\]\]"),
        (lambda tree: flag(tree["w"]), r"float32\[64, 256\]"),
        (lambda tree: key("x" * 9999), "'x+[.]{3}x+'"),
        (lambda tree: optperm.leaf_axes(tree, w=tree), r"\{'w': float32\[64, 256\]\}"),
    ],
)
def test_message_shows_an_array_by_dtype_and_shape(call, says):
    with pytest.raises(TypeError, match=rf", got {says}\.$") as raised:
        call({"w": jnp.zeros((64, 256))})
    assert len(str(raised.value)) < 400
