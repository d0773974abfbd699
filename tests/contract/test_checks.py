"""Checks of what users pass: what is refused, what goes through, and what the messages say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

from optperm.contract import checks, schedules
from optperm.contract.transformation import transformation


@pytest.mark.parametrize("value", [0, 1, 0.5, np.float32(0.5), np.int64(1), jnp.float32(0.5)])
def test_numbers_in_range_pass(value):
    """Python, NumPy and JAX numbers, the limits included."""
    checks.check_in_range("share", value, 0.0, 1.0)


@pytest.mark.parametrize(
    "value", [-0.1, 1.1, float("nan"), float("inf"), np.float32(2), jnp.array(-1)]
)
def test_numbers_out_of_range_are_refused(value):
    """The message says the name, the range, what came and what to do."""
    with pytest.raises(ValueError, match=r"share must be in \[0, 1\], got .*\. Try less\.$"):
        checks.check_in_range("share", value, 0.0, 1.0, advice="Try less.")


def test_a_range_without_a_limit_ends_where_float32_does():
    """What float32 holds as a finite number is in it, infinity is not."""
    checks.check_in_range("rate", 3e38, 0.0, float("inf"))
    with pytest.raises(ValueError, match=r"rate must be at least 0, got -1\.0\.$"):
        checks.check_in_range("rate", -1, 0.0, float("inf"))
    for value in (float("inf"), 1e39, -1e39, -float("inf")):
        with pytest.raises(ValueError, match=r"rate must be finite in float32, got"):
            checks.check_in_range("rate", value, -float("inf"), float("inf"))


@pytest.mark.parametrize("value", [True, np.True_, "1", None, 1j, [0.5, "x"], object()])
def test_what_is_no_number_is_refused(value):
    """Booleans are no numbers here."""
    with pytest.raises(TypeError, match="share must be a number or a schedule"):
        checks.check_in_range("share", value, 0.0, 1.0)


def test_arrays_are_no_single_numbers():
    """A vector of fine numbers is still refused."""
    with pytest.raises(ValueError, match=r"share must be a single number.*\(2,\)"):
        checks.check_in_range("share", [0.1, 0.2], 0.0, 1.0)


def test_schedules_and_traced_numbers_pass_unseen():
    """Their values are not known yet."""
    checks.check_in_range("share", optax.constant_schedule(7.0), 0.0, 1.0)
    jax.jit(lambda x: checks.check_in_range("share", x, 0.0, 1.0))(7.0)
    jax.jit(lambda x: checks.check_count("period", x))(-7)


@pytest.mark.parametrize("value", [1, 7, np.int32(3), jnp.int32(2)])
def test_counts_pass(value):
    """Integers of Python, NumPy and JAX."""
    checks.check_count("period", value)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, "period must be at least 1, got 0"),
        (jnp.int32(-2), ValueError, "period must be at least 1, got -2"),
        (1.0, TypeError, "period must be an integer, got 1.0"),
        (True, TypeError, "period must be an integer, got True"),
        (np.True_, TypeError, "period must be an integer"),
        (jnp.float32(1), TypeError, "period must be an integer"),
        (jnp.ones(2, int), TypeError, "period must be an integer"),
        (None, TypeError, "period must be an integer, got None"),
    ],
)
def test_what_is_no_count_is_refused(value, error, message):
    """Below the minimum, a float, a bool, an array or nothing."""
    with pytest.raises(error, match=message):
        checks.check_count("period", value)


def test_a_count_may_have_another_minimum():
    """Seeds may be zero."""
    checks.check_count("seed", 0, minimum=0)
    checks.check_seed("seed", 0)
    with pytest.raises(ValueError, match="seed must be at least 0"):
        checks.check_seed("seed", -1)


def test_flags_are_booleans():
    """0 and 1 are not."""
    checks.check_flag("nested", True)
    checks.check_flag("nested", np.False_)
    for value in (0, 1, None, "no"):
        with pytest.raises(TypeError, match="nested must be True or False"):
            checks.check_flag("nested", value)


def test_the_first_leaf_that_is_not_real_is_named():
    """With its dtype and the advice."""
    tree = {"a": jnp.ones(2), "b": [jnp.ones(2, jnp.bfloat16), jnp.ones(2, int)], "c": 1j}
    with pytest.raises(TypeError, match=r"params\['b'\]\[1\] has dtype int32; .* Mask it\."):
        checks.check_real_floating("params", tree, advice="Mask it.")
    checks.check_real_floating("params", {"a": np.ones(2), "b": jnp.bfloat16(1)}, advice="")


def test_the_first_leaf_that_differs_is_named():
    """Structure first, then shape, then dtype if it matters."""
    params = support.random_params()
    checks.check_same_tree("grads", params, params, source="params")
    with pytest.raises(ValueError, match="grads has another tree structure than the state"):
        checks.check_same_tree("grads", list(params.values()), params, source="the state")
    wrong = params | {"kernel": params["kernel"][:3]}
    message = r"grads\['kernel'\] is float32\[3, 5\], but the state has float32\[12, 5\] there"
    with pytest.raises(ValueError, match=message):
        checks.check_same_tree("grads", wrong, params, source="the state")
    cast = params | {"bias": params["bias"].astype(jnp.float16)}
    with pytest.raises(ValueError, match=r"grads\['bias'\] is float16\[5\]"):
        checks.check_same_tree("grads", cast, params, source="the state")
    checks.check_same_tree("grads", cast, params, source="the state", dtypes=False)


def test_params_are_required_by_name_of_the_method():
    """And handed on, as they are, where they are there."""
    params = {"w": jnp.ones(2)}
    seen = []

    def update(updates, state, params):
        seen.append(params)
        return updates, state

    tx = transformation(lambda params: (), update, method="svrg")
    tx.update(params, (), params)
    assert seen[0] is params
    with pytest.raises(ValueError, match=r"svrg needs the current params"):
        tx.update(params, (), None)


def test_choices_are_listed():
    """What is none of them is refused with all that are."""
    checks.check_choice("mode", "b", ("a", "b"))
    with pytest.raises(ValueError, match=r"mode must be one of 'a', 'b', got 3\.$"):
        checks.check_choice("mode", 3, ("a", "b"))


def test_transformations_are_told_from_their_factories():
    """An optimizer passes; the function that builds one does not."""
    checks.check_transformation("inner", optax.sgd(0.1))
    with pytest.raises(TypeError, match=r"inner must be an optax.GradientTransformation"):
        checks.check_transformation("inner", optax.sgd)


def test_axis_names_are_strings():
    """One, several or none; nothing else."""
    for name in (None, "data", ("host", "device")):
        checks.check_axis_name("axis_name", name)
    for name in (3, ["data"], ("data", None)):
        with pytest.raises(TypeError, match="axis_name must be the name of a mapped axis"):
            checks.check_axis_name("axis_name", name)


def test_axes_have_to_be_bound():
    """Within a mapped function its axis is, and no other."""
    checks.check_axis_is_bound(None)
    jax.vmap(lambda _: checks.check_axis_is_bound("data"), axis_name="data")(jnp.zeros(2))
    with pytest.raises(ValueError, match=r"axis_name \('data', 'model'\) is not bound here"):
        checks.check_axis_is_bound(("data", "model"))
    with pytest.raises(ValueError, match="axis_name 'data' is not bound here"):
        jax.vmap(lambda _: checks.check_axis_is_bound("data"), axis_name="other")(jnp.zeros(2))


@pytest.mark.parametrize(
    "value", ["x", b"x", None, [1.0], object(), np.array(["a"]), np.datetime64("2020"), 10**30]
)
def test_what_is_no_array_is_named(value):
    """Alone or as a leaf, by its path; random keys and numbers are arrays."""
    with pytest.raises(TypeError, match=r"mean must be an array of numbers, got"):
        checks.dtype_of("mean", value)
    if not isinstance(value, list) and value is not None:
        with pytest.raises(TypeError, match=r"batch\['x'\]\[1\] must be an array of numbers"):
            checks.check_arrays("batch", {"x": [jax.random.key(0), value], "y": 1.0})
    with pytest.raises(TypeError, match="key must be a random key"):
        checks.check_key("key", value)
    with pytest.raises(TypeError, match=r"step must be a function \(params\), got"):
        checks.check_function("step", value, "(params)")


def test_random_keys_are_typed_or_raw():
    """One, not several."""
    checks.check_key("key", jax.random.key(0))
    checks.check_key("key", jax.random.key_data(jax.random.key(0)))
    with pytest.raises(TypeError, match="key must be a random key"):
        checks.check_key("key", jax.random.split(jax.random.key(0)))


def test_counts_fit_what_states_count_in_and_seeds_what_keys_hold():
    """JAX would raise an OverflowError that names nothing, or drop the upper bits of a seed."""
    checks.check_count("every", 2**31 - 1)
    checks.check_seed("seed", 2**32 - 1)
    with pytest.raises(ValueError, match="every must be at most 2147483647, got 2147483648"):
        checks.check_count("every", 2**31)
    with pytest.raises(ValueError, match="seed must be at most 4294967295"):
        checks.check_seed("seed", 2**32)


def test_what_is_no_schedule_is_refused_where_only_numbers_go():
    """It would fail somewhere inside the first step."""
    schedule = optax.constant_schedule(0.5)
    with pytest.raises(TypeError, match=r"t0 must be a number, got .*: call the schedule first"):
        checks.check_in_range("t0", schedule, 0.0, 1.0, may_be_schedule=False)
    with pytest.raises(TypeError, match="max_step must be a number"):
        checks.check_positive("max_step", schedule)


@pytest.mark.parametrize("value", ["x", None, np.ones(2, np.float32), 1j, True])
def test_schedules_give_single_numbers(value):
    """What one returns is named by the argument that it was passed for."""
    with pytest.raises(TypeError, match="the schedule alpha returns must be"):
        schedules.resolve_schedule("alpha", lambda count: value, jnp.int32(0))
