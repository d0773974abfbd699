"""Checks of what users pass: what is refused, what goes through, and what the messages say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.core import checks, schedules

INF = float("inf")
SCHEDULE = optax.constant_schedule(0.5)
KEY = jax.random.key(0)
FINE = {"a": np.ones(2), "b": jnp.bfloat16(1)}
# Each check, and values that it lets through: of Python, NumPy and JAX, and at the limits.
ALLOWED = [
    (
        lambda value: checks.check_in_range("it", value, 0.0, 1.0),
        [0, 1, 0.5, np.float32(0.5), np.int64(1), jnp.float32(0.5), optax.constant_schedule(7.0)],
    ),
    (lambda value: checks.check_in_range("it", value, 0.0, INF), [3e38]),
    (lambda value: checks.check_count("it", value), [1, 7, np.int32(3), jnp.int32(2), 2**31 - 1]),
    (lambda value: checks.check_flag("it", value), [True, np.False_]),
    (lambda value: checks.check_choice("it", value, ("a", "b")), ["b"]),
    (lambda value: checks.check_axis_name("it", value), [None, "data", ("host", "device")]),
    (lambda value: checks.check_transformation("it", value), [optax.sgd(0.1)]),
    (
        lambda value: checks.check_key("it", value),
        [KEY, jax.random.key_data(KEY), 0, 2**32 - 1, np.int64(3), jnp.int32(3)],
    ),
    (lambda value: checks.check_real_floating("it", value), [FINE]),
    (lambda value: checks.check_arrays("it", value), [{"x": [KEY, 1.0]}]),
]
# Each check, the error and the message, and values with which they come.
REFUSED = [
    (
        lambda value: checks.check_in_range("it", value, 0.0, 1.0, advice="Try less."),
        *(ValueError, r"^it must be in \[0, 1\], got .*\. Try less\.$"),
        [-0.1, 1.1, float("nan"), INF, np.float32(2), jnp.array(-1)],
    ),
    (
        lambda value: checks.check_in_range("it", value, 0.0, INF),
        *(ValueError, r"it must be at least 0, got -1\.0\.$"),
        [-1],
    ),
    (
        lambda value: checks.check_in_range("it", value, 0.0, 1.0),
        *(TypeError, "it must be a number or a schedule"),
        [True, np.True_, "1", None, 1j, [0.5, "x"], object()],
    ),
    (
        lambda value: checks.check_count("it", value),
        *(TypeError, "it must be an integer, got "),
        [1.0, True, np.True_, jnp.float32(1), jnp.ones(2, int), None],
    ),
    (
        lambda value: checks.check_in_range("it", value, -INF, INF),
        *(ValueError, "it must be finite in float32, got"),
        [INF, 1e39, -1e39, -INF],
    ),
    (
        lambda value: checks.check_in_range("it", value, 0.0, 1.0),
        *(ValueError, r"it must be a single number.*\(2,\)"),
        [[0.1, 0.2]],
    ),
    (
        lambda value: checks.check_in_range("it", value, 0.0, 1.0, may_be_schedule=False),
        *(TypeError, "it must be a number, got .*: call the schedule first"),
        [SCHEDULE],
    ),
    (lambda value: checks.check_positive("it", value), TypeError, "be a number,", [SCHEDULE]),
    (
        lambda value: checks.check_count("it", value),
        *(ValueError, "it must be at (least 1|most 2147483647), got "),
        [0, jnp.int32(-2), 2**31],
    ),
    (
        lambda value: checks.check_key("it", value),
        *(ValueError, "it must be at (least 0|most 4294967295)"),
        [-1, 2**32],
    ),
    (lambda value: checks.check_flag("it", value), TypeError, "True or False", [0, 1, None, "no"]),
    (
        lambda value: checks.check_choice("it", value, ("a", "b")),
        *(ValueError, r"it must be one of 'a', 'b', got 3\.$"),
        [3],
    ),
    (
        lambda value: checks.check_axis_name("it", value),
        *(TypeError, "it must be the name of a mapped axis"),
        [3, ["data"], ("data", None)],
    ),
    (
        lambda value: checks.check_transformation("it", value),
        *(TypeError, "it must be an optax.GradientTransformation"),
        [optax.sgd],
    ),
    (
        lambda value: checks.check_transformation("it", value),
        *(TypeError, r"which MultiSteps\(\.\.\.\)\.gradient_transformation\(\) returns"),
        [optax.MultiSteps(optax.sgd(0.1), 2)],
    ),
    (
        lambda value: checks.check_key("it", value),
        *(TypeError, "it must be an int or a random key, such as"),
        [jax.random.split(KEY), True, 1.0, jnp.ones(2)],
    ),
    (
        lambda value: checks.check_real_floating("it", value, advice="Mask it."),
        *(TypeError, r"it\['b'\]\[1\] has dtype int32; .* Mask it\."),
        [{"a": jnp.ones(2), "b": [jnp.ones(2, jnp.bfloat16), jnp.ones(2, int)], "c": 1j}],
    ),
]


def test_what_is_allowed_passes():
    """And is not changed, or looked at where it is not known yet."""
    for check, values in ALLOWED:
        assert [check(value) for value in values] == [None] * len(values)


def test_what_is_not_allowed_is_refused():
    """The message says the name, what is allowed, what came and what to do."""
    for check, error, message, values in REFUSED:
        for value in values:
            with pytest.raises(error, match=message):
                check(value)


def test_traced_numbers_pass_unseen():
    """Their values are not known yet."""
    jax.jit(lambda x: checks.check_in_range("share", x, 0.0, 1.0))(7.0)
    jax.jit(lambda x: checks.check_count("period", x))(-7)


def test_the_first_leaf_that_differs_is_named():
    """Structure first, then shape, then dtype if it matters."""
    params = support.random_params()
    checks.check_same_tree("grads", params, params, source="params")
    cast = params | {"bias": params["bias"].astype(jnp.bfloat16)}
    for wrong, message in (
        (list(params.values()), "grads has a different tree structure from the state"),
        (
            params | {"kernel": params["kernel"][:3]},
            r"grads\['kernel'\] is float32\[3, 5\], but the state has float32\[12, 5\] there",
        ),
        (cast, r"grads\['bias'\] is bfloat16\[5\]"),
    ):
        with pytest.raises(ValueError, match=message):
            checks.check_same_tree("grads", wrong, params, source="the state")
    checks.check_same_tree("grads", cast, params, source="the state", dtypes=False)


def test_axes_have_to_be_bound():
    """Within a mapped function its axis is, and no other."""
    checks.check_axis_is_bound(None)
    jax.vmap(lambda _: checks.check_axis_is_bound("data"), axis_name="data")(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"axis_name \('data', 'model'\) is not bound here"):
        checks.check_axis_is_bound(("data", "model"))
    with pytest.raises(ValueError, match="axis_name 'data' is not bound here"):
        jax.vmap(lambda _: checks.check_axis_is_bound("data"), axis_name="other")(jnp.zeros(2))


def test_what_is_no_array_is_named():
    """Alone or as a leaf, by its path; random keys and numbers are arrays."""
    leaves = ["x", b"x", object(), np.array(["a"]), np.datetime64("2020")]
    for value in [*leaves, None, [1.0]]:
        with pytest.raises(TypeError, match=r"mean must be an array of numbers, got"):
            checks.dtype_of("mean", value)
        with pytest.raises(TypeError, match="key must be an int or a random key"):
            checks.check_key("key", value)
        with pytest.raises(TypeError, match=r"step must be a function \(params\), got"):
            checks.check_function("step", value, "(params)")
    for value in leaves:
        with pytest.raises(TypeError, match=r"batch\['x'\]\[1\] must be an array of numbers"):
            checks.check_arrays("batch", {"x": [KEY, value], "y": 1.0})


def test_functions_among_params_are_told_how_to_leave_them_out():
    """As the activation of a model of Equinox is one."""
    tx = optperm.svrg()
    with pytest.raises(TypeError, match=r"activation.* eqx\.filter\(model, eqx\.is_inexact_array"):
        tx.init({"activation": jax.nn.relu, "weight": jnp.ones(2)})
    with pytest.raises(TypeError, match=r"got 'x'\.$"):
        tx.init({"activation": "x", "weight": jnp.ones(2)})


def test_traced_numbers_out_of_range_become_the_nearest_limit():
    limit = jax.jit(
        lambda x: schedules.resolve_schedule("ratio", x, jnp.int32(0), low=0.5, high=2.0)
    )
    assert [float(limit(jnp.float32(x))) for x in (0.25, 1.5, 3.0)] == [0.5, 1.5, 2.0]


def test_schedules_give_single_numbers():
    """What one returns is named by the argument that it was passed for."""
    for value in ("x", None, np.ones(2, np.float32), 1j, True):
        with pytest.raises(TypeError, match="the schedule alpha returns must be"):
            schedules.resolve_schedule("alpha", lambda _, value=value: value, jnp.int32(0))
