"""Checks of what users pass: what passes, what is refused, and what the messages say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.core import checks, schedules

INF = float("inf")
KEY = jax.random.key(0)


def check_share(value):
    checks.check_in_range("it", value, 0.0, 1.0)


def check_finite(value):
    checks.check_in_range("it", value, -INF, INF)


def check_count(value):
    checks.check_count("it", value)


def check_key(value):
    checks.check_key("it", value)


def check_flag(value):
    checks.check_flag("it", value)


def check_axis_name(value):
    checks.check_axis_name("it", value)


ALLOWED = [
    (
        check_share,
        [0, np.float32(0.5), np.int64(1), jnp.float32(0.5), optax.constant_schedule(7.0)],
    ),
    (check_finite, [-3e38, 3e38]),
    (check_count, [1, np.int32(3), jnp.int32(2), 2**31 - 1]),
    (check_key, [KEY, jax.random.key_data(KEY), 0, 2**32 - 1, np.int64(3), jnp.int32(3)]),
    (check_flag, [True, np.False_]),
    (check_axis_name, [None, "data", ("host", "device")]),
]
REFUSED = [
    (
        check_share,
        ValueError,
        r"in \[0, 1\]",
        [-0.1, 1.1, float("nan"), np.float32(2), jnp.array(-1)],
    ),
    (
        check_share,
        TypeError,
        "a real number or a schedule",
        [True, np.True_, "1", None, 1j, object()],
    ),
    (check_finite, ValueError, "finite in float32", [INF, 1e39, -1e39]),
    (check_count, TypeError, "an integer", [1.0, True, jnp.float32(1), jnp.ones(2, int)]),
    (check_count, ValueError, "at (least 1|most 2147483647)", [0, jnp.int32(-2), 2**31]),
    (check_key, ValueError, "at (least 0|most 4294967295)", [-1, 2**32]),
    (
        check_key,
        TypeError,
        "an int or a single random key",
        [jax.random.split(KEY), True, 1.0, jnp.ones(2)],
    ),
    (check_flag, TypeError, "True or False", [0, 1, None, "no"]),
    (check_axis_name, TypeError, "the name of a mapped axis", [3, ["data"], ("data", None)]),
]


def test_what_is_allowed_passes_and_the_rest_is_refused():
    for check, values in ALLOWED:
        for value in values:
            check(value)
    for check, error, message, values in REFUSED:
        for value in values:
            with pytest.raises(error, match=f"^it must be {message}.*, got "):
                check(value)


def test_traced_numbers_pass_unseen():
    jax.jit(check_share)(7.0)
    jax.jit(check_count)(-7)


def test_multi_steps_is_refused_with_its_transformation():
    with pytest.raises(
        TypeError, match=r"MultiSteps\(\.\.\.\)\.gradient_transformation\(\) returns"
    ):
        checks.check_transformation("it", optax.MultiSteps(optax.sgd(0.1), 2))


def test_leaf_of_another_dtype_is_named_where_dtypes_count():
    params = support.random_params()
    cast = params | {"bias": params["bias"].astype(jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"grads\['bias'\] is bfloat16\[5\]"):
        checks.check_same_tree("grads", cast, params, source="the state")
    checks.check_same_tree("grads", cast, params, source="the state", dtypes=False)
    tree = {"a": jnp.ones(2), "b": [jnp.ones(2, jnp.bfloat16), jnp.ones(2, int)]}
    with pytest.raises(
        TypeError, match=r"it\['b'\]\[1\] has dtype int32, but must be real floating\. Mask it\."
    ):
        checks.check_real_floating("it", tree, advice="Mask it.")


def test_axes_have_to_be_bound():
    checks.check_axis_is_bound(None)
    jax.vmap(lambda _: checks.check_axis_is_bound("data"), axis_name="data")(jnp.zeros(2))
    with pytest.raises(ValueError, match="axis_name 'data' is not bound here"):
        jax.vmap(lambda _: checks.check_axis_is_bound("data"), axis_name="other")(jnp.zeros(2))


def test_what_is_no_array_is_named_by_its_path():
    checks.check_arrays("batch", {"x": [KEY, 1.0]})
    for value in ["x", b"x", object(), np.array(["a"]), np.datetime64("2020")]:
        with pytest.raises(TypeError, match=r"batch\['x'\]\[1\] must be an array of numbers"):
            checks.check_arrays("batch", {"x": [KEY, value], "y": 1.0})
        with pytest.raises(TypeError, match=r"step must be a function \(params\), got"):
            checks.check_function("step", value, "(params)")


def test_functions_among_params_are_refused_with_the_filter_of_equinox():
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


def test_schedule_that_gives_no_single_number_is_named():
    for value in ("x", None, np.ones(2, np.float32), 1j, True):
        with pytest.raises(TypeError, match="value of the schedule alpha must be"):
            schedules.resolve_schedule("alpha", lambda _, value=value: value, jnp.int32(0))
