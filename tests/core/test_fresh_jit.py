"""Functions of users are compiled with the present values of all that they read."""

import dataclasses
import gc
import weakref

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.core import fresh_jit as compiling
from optperm.core.fresh_jit import fresh_jit, fresh_jit_once


@dataclasses.dataclass
class Ridge:
    """A loss that cannot be hashed, and whose attribute changes."""

    scale: float = 1.0

    def __call__(self, w, batch):
        return self.scale * 0.5 * jnp.mean((batch[0] @ w - batch[1]) ** 2)


@pytest.fixture
def programs(monkeypatch):
    """The store of compiled programs, empty."""
    programs = {}
    monkeypatch.setattr(compiling, "_PROGRAMS", programs)
    return programs


both = pytest.mark.parametrize("compile_function", [fresh_jit, fresh_jit_once])


X = support.normal((32, 2))
DATA = X, X[:, 0]
ENSEMBLE = optperm.bayes.Ensemble(jnp.ones((3, 2)))


def draw_scales(loss):
    """Return two draws of one chain, whose step adds the scale of the loss."""
    step = lambda w, s, _: (w + loss.scale, s)  # noqa: E731
    samples = optperm.bayes.draw_samples(step, jnp.zeros(()), (), 0, num_chains=1, num_draws=2)
    return samples.params


@pytest.mark.parametrize(
    "call",
    [
        lambda loss: optperm.variance.full_gradient(loss, jnp.ones(2), [DATA]),
        pytest.param(
            lambda loss: (
                1 / optperm.variance.svrg_learning_rate(loss, jnp.zeros(2), DATA, 4, num_passes=2)
            ),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda loss: optperm.variance.minimize(loss, DATA, jnp.zeros(2)).history[0].gap,
            marks=pytest.mark.slow,
        ),
        lambda loss: optperm.bayes.posterior_predictive(loss, ENSEMBLE, DATA).mean,
        draw_scales,
    ],
    ids=["full_gradient", "svrg_learning_rate", "minimize", "posterior_predictive", "draw_samples"],
)
def test_public_function_sees_what_the_loss_reads_now(call):
    """Change the scale of the loss in an attribute, and change it back."""
    loss = Ridge()
    at_one = call(loss)
    assert np.all(at_one)  # zeros would be right at any scale
    loss.scale = 64.0
    chex.assert_trees_all_close(call(loss), 64.0 * np.asarray(at_one), rtol=1e-5)
    loss.scale = 1.0
    chex.assert_trees_all_close(call(loss), at_one, rtol=0)


def test_second_call_with_equal_values_compiles_nothing(programs):
    """A changed attribute compiles another program, and an old value finds the old program."""
    loss, sizes = Ridge(), []
    for scale in (1.0, 2.0, 1.0, 2.0):
        loss.scale = scale
        np.testing.assert_array_equal(draw_scales(loss), [[scale, 2 * scale]])
        sizes.append(len(programs))
    assert sizes == [1, 2, 2, 2]


def test_gradient_over_all_examples_is_compiled_once_for_equal_values(programs):
    """A snapshot in each epoch compiles as many programs as one snapshot."""
    loss, sizes = Ridge(), []
    for _ in range(3):
        optperm.variance.full_gradient(loss, jnp.ones(2), [DATA, DATA])
        sizes.append(len(programs))
    assert sizes[0] > 0
    assert sizes == sizes[:1] * 3


@both
def test_same_function_is_traced_again(compile_function):
    """Also by JAX's own cache, which knows the function and the types of its arguments."""
    values = {"scale": 2.0}

    def scale(x):
        return values["scale"] * x

    assert compile_function(scale)(jnp.ones(())) == 2.0
    values["scale"] = 3.0
    assert compile_function(scale)(jnp.ones(())) == 3.0
    assert compile_function(Ridge(4.0))(jnp.zeros(2), (jnp.ones((1, 2)), jnp.ones(1))) == 2.0


@both
def test_host_callback_of_this_call_is_called(compile_function, programs):
    """A program contains the index of a callback, and not its function."""
    out = jax.ShapeDtypeStruct((), jnp.float32)
    for value in (1.0, 2.0, 3.0):
        call = compile_function(
            lambda x, value=value: x * jax.pure_callback(lambda: np.float32(value), out)
        )
        assert call(jnp.ones(())) == value
    assert not programs


@pytest.mark.parametrize("size", [2, 2**18 + 1])
def test_captured_array_of_any_size_is_the_current_one(size, programs):
    """The last entry differs, which no excerpt of a long constant would show."""
    for last in (0.0, 1.0, 0.0):
        array = support.normal((size,)).at[-1].set(last)
        got = fresh_jit_once(lambda x, array=array: array + x)(jnp.ones(1))
        np.testing.assert_array_equal(got, array + 1)
    assert len(programs) == 2


@both
def test_results_and_arguments_of_other_types_have_their_own_programs(compile_function):
    for name in ("accuracy", "loss"):
        assert [*compile_function(lambda x, name=name: {name: x})(jnp.ones(1))] == [name]
    for number, is_weak in ((2.0, True), (jnp.float32(2.0), False)):
        got = compile_function(lambda _, number=number: jnp.asarray(number))(jnp.ones(1))
        assert got.weak_type == is_weak
    call, x = compile_function(lambda x, y: x * y), jnp.ones(3, jnp.bfloat16)
    assert call(x, 2.0).dtype == jnp.bfloat16
    with jax.numpy_dtype_promotion("standard"):
        assert call(x, jnp.float32(2.0)).dtype == jnp.float32
    assert call(np.ones(2, np.float32), 2.0).shape == (2,)


@both
def test_device_of_an_argument_and_mesh_of_the_function_are_the_current_ones(compile_function):
    for device in jax.devices()[:2]:
        x = jax.device_put(jnp.ones(8), device)
        assert compile_function(lambda x: x + 1)(x).devices() == {device}
    for devices in (jax.devices()[:4], jax.devices()[4:]):
        sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
        call = compile_function(lambda x, s=sharding: jax.lax.with_sharding_constraint(x, s))
        assert call(np.ones(8, np.float32)).devices() == {*devices}


def test_donated_argument_and_placement_of_results_are_those_of_jit():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    x, y = jax.device_put((jnp.ones(8), jnp.ones(8)), whole)
    call = fresh_jit(lambda x, y: (x + y, y), donate_argnums=(0,), out_shardings=(whole, rows))
    first, second = call(x, y)
    assert x.is_deleted()
    assert not y.is_deleted()
    assert (first.sharding, second.sharding) == (whole, rows)


@both
def test_traced_arguments_and_captured_traced_values_belong_to_their_trace(compile_function):
    def product(z):
        return compile_function(lambda x: x * z)(jnp.ones(())) + compile_function(lambda x: 2 * x)(
            z
        )

    assert jax.jit(product)(3.0) == 9.0
    np.testing.assert_array_equal(jax.vmap(product)(jnp.arange(2.0)), [0.0, 3.0])
    assert jax.grad(product)(2.0) == 3.0
    with jax.disable_jit():
        assert compile_function(lambda x: float(x) + 1)(jnp.ones(())) == 2.0


@both
def test_error_of_a_function_is_its_own(compile_function):
    def fail(x):
        raise ValueError(f"no loss for {x.shape}")

    with pytest.raises(ValueError, match=r"no loss for \(2,\)"):
        compile_function(fail)(jnp.ones(2))


def test_programs_are_bounded_and_release_the_function(programs, monkeypatch):
    monkeypatch.setattr(compiling, "_MOST_PROGRAMS", 2)

    def multiply_by(factor):
        def multiply(x):
            return x * factor

        fresh_jit_once(multiply)(jnp.ones(()))
        return weakref.ref(multiply)

    functions = [multiply_by(factor) for factor in (1.5, 2.5, 1.5, 3.5)]
    gc.collect()
    assert [function() for function in functions] == [None] * 4
    kept = [*programs]
    assert len(kept) == 2
    multiply_by(1.5)  # the most recently used of the first two
    assert {*programs} == {*kept}
