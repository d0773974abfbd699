"""Functions of users are compiled with the present values of all that they read."""

import dataclasses
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.core import current
from optperm.core.current import jit_current


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
    monkeypatch.setattr(current, "_PROGRAMS", programs)
    return programs


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
        lambda loss: (
            1 / optperm.variance.svrg_learning_rate(loss, jnp.zeros(2), DATA, 4, num_passes=2)
        ),
        lambda loss: optperm.variance.minimize(loss, DATA, jnp.zeros(2)).history[0].gap,
        lambda loss: optperm.bayes.posterior_predictive(loss, ENSEMBLE, DATA).mean,
        draw_scales,
    ],
    ids=["full_gradient", "svrg_learning_rate", "minimize", "posterior_predictive", "draw_samples"],
)
def test_public_function_sees_what_the_loss_reads_now(call, programs):
    """Change the scale of the loss in an attribute; an equal scale compiles nothing."""
    loss = Ridge()
    at_one = call(loss)
    assert np.all(at_one)  # zeros would be right at any scale
    loss.scale = 64.0
    support.assert_close(call(loss), 64.0 * np.asarray(at_one), rtol=1e-5)
    compiled = len(programs)
    loss.scale = 1.0
    support.assert_close(call(loss), at_one, rtol=0)
    assert len(programs) == compiled


def test_host_callback_of_this_call_is_called():
    """Compile anew, since a text holds the index of a callback, and not its function."""
    for value in (1.0, 2.0, 3.0):

        def loss(w, batch, value=value):
            out = jax.ShapeDtypeStruct((), jnp.float32)
            return w * jnp.mean(batch) * jax.pure_callback(lambda: np.float32(value), out)

        assert optperm.variance.full_gradient(loss, jnp.float32(1.0), [jnp.ones(2)]) == value


@pytest.mark.parametrize("size", [2, 1000, 2**18 + 1])
def test_captured_array_of_any_size_is_the_current_one(size, programs):
    for seed in (0, 1, 0):
        array = support.normal((size,), seed=seed)
        got = jit_current(lambda x, array=array: array + x)(jnp.ones(()).reshape(1))
        np.testing.assert_array_equal(got, array + 1)
    assert len(programs) == (2 if size <= 2**18 else 0)


def test_results_and_arguments_of_other_types_have_their_own_programs():
    for name in ("accuracy", "loss"):
        assert [*jit_current(lambda x, name=name: {name: x})(jnp.ones(1))] == [name]
    for number, is_weak in ((2.0, True), (jnp.float32(2.0), False)):
        got = jit_current(lambda _, number=number: jnp.asarray(number))(jnp.ones(1))
        assert got.weak_type == is_weak
    call, x = jit_current(lambda x, y: x * y), jnp.ones(3, jnp.bfloat16)
    assert call(x, 2.0).dtype == jnp.bfloat16
    with jax.numpy_dtype_promotion("standard"):
        assert call(x, jnp.float32(2.0)).dtype == jnp.float32
    assert call(np.ones(2, np.float32), 2.0).shape == (2,)


def test_mesh_that_only_the_function_knows_is_the_current_one():
    for devices in (jax.devices()[:4], jax.devices()[4:]):
        sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
        call = jit_current(lambda x, s=sharding: jax.lax.with_sharding_constraint(x, s))
        assert call(np.ones(8, np.float32)).devices() == {*devices}


def test_donated_argument_and_placement_of_results_are_those_of_jit():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("x"))
    x, y = jax.device_put((jnp.ones(8), jnp.ones(8)), whole)
    call = jit_current(lambda x, y: (x + y, y), donate_argnums=(0,), out_shardings=(whole, rows))
    first, second = call(x, y)
    assert x.is_deleted()
    assert not y.is_deleted()
    assert (first.sharding, second.sharding) == (whole, rows)


def test_traced_arguments_and_captured_traced_values_belong_to_their_trace():
    def product(z):
        return jit_current(lambda x: x * z)(jnp.ones(())) + jit_current(lambda x: 2 * x)(z)

    assert jax.jit(product)(3.0) == 9.0
    np.testing.assert_array_equal(jax.vmap(product)(jnp.arange(2.0)), [0.0, 3.0])
    assert jax.grad(product)(2.0) == 3.0
    with jax.disable_jit():
        assert jit_current(lambda x: float(x) + 1)(jnp.ones(())) == 2.0


def test_programs_are_bounded_and_release_the_function(programs, monkeypatch):
    monkeypatch.setattr(current, "_MOST_PROGRAMS", 2)

    def multiply_by(factor):
        def multiply(x):
            return x * factor

        jit_current(multiply)(jnp.ones(()))
        return weakref.ref(multiply)

    functions = [multiply_by(factor) for factor in (1.5, 2.5, 1.5, 3.5)]
    gc.collect()
    assert [function() for function in functions] == [None] * 4
    kept = [*programs]
    assert len(kept) == 2
    multiply_by(1.5)  # the most recently used of the first two
    assert {*programs} == {*kept}
