"""A trained network as its initial weights and a permutation, the exact weights in a state, and compiled
updates that are exported."""

import subprocess
import sys

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from flax import nnx
from optax.contrib import GaLoreDimensionNumbers

import optperm
from optperm import LeafAxes
from optperm.core.fingerprints import compare_fingerprints, list_fingerprints
from optperm.permutation import apply_permutation, export_permutation, permuted_params


def test_permutation_of_any_dtype_rebuilds_the_trained_weights():
    """Every bit, with ties and zeros of both signs."""
    ties = np.round(2 * np.random.default_rng(0).normal(size=(20, 3))) / 2
    ties[::2][ties[::2] == 0] = -0.0
    with jax.enable_x64(True):
        params = {name: ties.astype(dtype) for name, dtype in support.DTYPES.items()}
        params |= {"scale": np.float32(1), "none": np.zeros((0, 3)), "bias": support.bias(7)}
        params = jax.device_put(params)
        grads = [support.random_like(params, step) for step in range(3)]
        tx = optperm.sgperm(0.5, partition_ratio=0.7)
        _, opt_state = loops.train(tx, params, grads, how="scan", init="jit")[-1]
        trained = permuted_params(opt_state)
        support.assert_permutes(trained, params)
        assert not np.array_equal(trained["bfloat16"], params["bfloat16"])

        @jax.jit
        def rebuild(params, state):
            permutation = export_permutation(params, state)
            return permutation, apply_permutation(params, permutation)

        permutation, rebuilt = rebuild(params, opt_state)
        assert all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(permutation))
        assert jax.tree.map(jnp.shape, permutation) == jax.tree.map(jnp.shape, params)
        support.assert_same_bits(rebuilt, trained)


PERMUTING = {"sgperm": optperm.sgperm(0.5), "laperm": optperm.laperm(optax.adam(0.3), 2)}


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("name", support.every_night(PERMUTING, ["sgperm"]))
def test_masked_leaves_stay_with_their_optimizer(name):
    """Kernels are permuted, biases move by Adam, each as it would alone; those are MaskedNode in the
    export and in the exact weights, unless params are given, and kept as they are. Nothing of it has to
    be compiled, and the permutation may be in NumPy."""
    params, adam = support.random_params(), optax.adam(0.1)
    grads = support.random_like(params, 1)
    options = {"how": "scan", "init": "jit"}
    bias, _ = loops.train(adam, params["bias"], [grads["bias"]] * 3, **options)[-1]
    tx = optax.partition({0: PERMUTING[name], 1: adam}, {"kernel": 0, "bias": 1})
    after, opt_state = loops.train(tx, params, [grads] * 3, **options)[-1]
    chex.assert_trees_all_close(after["bias"], bias, rtol=1e-6)
    assert permuted_params(opt_state)["bias"] == optax.MaskedNode()
    full = permuted_params(opt_state, after)
    assert full["bias"] is after["bias"]
    support.assert_permutes(full["kernel"], params["kernel"])
    assert not np.array_equal(full["kernel"], params["kernel"])
    permutation = export_permutation(params, opt_state, after)
    assert permutation["bias"] == optax.MaskedNode()
    rebuilt = apply_permutation(params, jax.tree.map(np.asarray, permutation))
    assert rebuilt["bias"] is params["bias"]
    support.assert_same_bits(rebuilt["kernel"], full["kernel"])


# Of both processes. Optax leaves it to its users to register its states for serialization: the inner
# optimizer has none.
SETUP = """
import jax, numpy as np, optax, optperm
rng = np.random.default_rng(0)
params, grads = rng.normal(size=(2, 12, 5)).astype(np.float32)
identity = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, s))
methods = {"sgperm": optperm.sgperm(0.5), "laperm": optperm.laperm(identity, every=1)}
"""
RUN = """
import pathlib, sys
from optperm.permutation import _library as library
library.available_kernels()  # XLA learns of the compiled one
for method, tx in methods.items():
    update = jax.export.deserialize(pathlib.Path(sys.argv[1], method).read_bytes()).call
    _, opt_state = update(grads, jax.jit(tx.init)(params), params)
    print(np.asarray(optperm.permutation.permuted_params(opt_state)).tobytes().hex())
"""


@pytest.mark.programs
def test_exported_updates_in_another_process_give_the_same_bits(tmp_path):
    """Follow the recipe of docs/design/index.md: serialize here, run there."""
    pytest.importorskip("flatbuffers", reason="jax.export serializes by flatbuffers")
    support.require_kernel("ffi")
    calls = "permute_rows_float32", "reorder_rows_int32"
    checks = [jax.export.DisabledSafetyCheck.custom_call(f"optperm_{call}") for call in calls]
    here, expected = {}, []
    exec(SETUP, here)
    for method, tx in here["methods"].items():
        update = jax.jit(tx.update)
        arguments = here["grads"], jax.jit(tx.init)(here["params"]), here["params"]
        exported = jax.export.export(update, disabled_checks=checks)(*arguments)
        (tmp_path / method).write_bytes(exported.serialize())
        weights = np.asarray(permuted_params(update(*arguments)[1]))
        assert not np.array_equal(weights, here["params"])
        expected.append(weights.tobytes().hex())
    command = [sys.executable, "-c", SETUP + RUN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == expected, done.stderr[-2000:]


def test_update_that_calls_python_is_not_exported(monkeypatch):
    """If one of several platforms needs a call to Python, the error says what to do."""
    support.require_kernel("ffi")
    monkeypatch.setenv("OPTPERM_KERNEL", "ffi")
    tx, w = optperm.sgperm(), support.bias(5)
    export = jax.export.export(jax.jit(tx.update), platforms=["cpu", "cuda"])
    with pytest.raises(NotImplementedError, match="single platform: export the update for the CPU"):
        export(w, tx.init(w), w)


MAKERS = {
    "sgperm": lambda axes: optperm.sgperm(1.0, axes=axes),
    "laperm": lambda axes: optperm.laperm(optax.sgd(1.0), every=2, axes=axes),
}


@pytest.mark.parametrize("method", support.every_night(MAKERS, ["laperm"]))
def test_a_state_with_other_axes_is_refused_by_name(method):
    """In an update, in an export and in a checkpoint; the same axes may be written in another way."""
    initial = {"kernel": support.normal((4, 3, 5)), "bias": support.bias(5)}
    of_kernel = lambda *axes: {"kernel": LeafAxes("kernel", *axes), "bias": None}  # noqa: E731
    stack = of_kernel(1, 2, 0) | {"bias": LeafAxes("bias", (), 0)}
    state = jax.jit(MAKERS[method](of_kernel(0, (1, 2))).init)(initial)
    says = "made with another axes=. Pass the value with which init made the state"
    for axes in (of_kernel((0, 1), 2), of_kernel((1, 2), 0), stack, lambda params: stack):
        with pytest.raises(ValueError, match=says):
            MAKERS[method](axes).update(initial, state, initial)
        with pytest.raises(ValueError, match=says):
            export_permutation(initial, state, axes=axes)
    other = jax.jit(MAKERS[method](stack).init)(initial)
    assert compare_fingerprints(*map(list_fingerprints, (state, other))) == ["axes"]
    if method == "laperm":
        with pytest.raises(ValueError, match=says):
            permuted_params(state, initial)
    as_numbers = {"kernel": GaLoreDimensionNumbers(0, (-1, 1)), "bias": None}
    # An update of a traced state compares no axes, so this state is read.
    _, state = jax.jit(lambda: MAKERS[method](as_numbers).update(initial, state, initial))()

    @jax.jit
    def read(initial, state):
        trained = permuted_params(state, initial, axes=lambda params: of_kernel(0, (2, 1)))
        permutation = export_permutation(initial, state, initial, axes=of_kernel(0, 1, 2))
        return trained, permutation, apply_permutation(initial, permutation)

    trained, permutation, rebuilt = read(initial, state)
    support.assert_same_bits(rebuilt, trained)
    np.testing.assert_array_equal(permutation["bias"], np.arange(5))


def test_the_state_of_an_nnx_model_is_exported_and_rebuilt():
    """Take variables as plain arrays, which functions of params see, and give variables back."""
    plain = {"dense": {"bias": support.bias(5, 1), "kernel": support.normal((12, 5))}}
    model = nnx.State({"dense": nnx.State(jax.tree.map(nnx.Param, plain["dense"]))})
    own = {"kernel": LeafAxes("kernel", 1, 0)}
    axes = lambda params: optperm.leaf_axes(params, **own)  # noqa: E731
    tx = optperm.sgperm(1.0, axes=axes)
    with pytest.warns(UserWarning, match="In dense/bias, dense/kernel, all weights"):
        tx.init(jax.tree.map(jnp.ones_like, model))
    step = jax.jit(lambda initial: tx.update(initial, tx.init(initial), initial)[1])
    state = step(plain)

    @jax.jit
    def rebuild(initial, state):
        permutation = export_permutation(initial, state, axes=optperm.leaf_axes(initial, **own))
        return apply_permutation(initial, permutation)

    rebuilt = rebuild(model, step(model))
    assert jax.tree.structure(rebuilt) == jax.tree.structure(model)
    for got, wanted in zip(
        jax.tree.leaves(rebuilt), jax.tree.leaves(permuted_params(state)), strict=True
    ):
        support.assert_same_bits(got, wanted)


def test_a_stack_of_states_is_exported_within_vmap():
    stack = {"w": support.normal((2, 4, 3))}
    state = jax.jit(jax.vmap(optperm.laperm(optax.sgd(0.1), 2).init))(stack)
    for call in (export_permutation, lambda p, s: permuted_params(s, p)):
        with pytest.raises(ValueError, match=r"a stack of states: call it within jax.vmap"):
            call(stack, state)
        assert jax.eval_shape(jax.vmap(call), stack, state)["w"].shape == (2, 4, 3)


def test_functions_of_params_see_boxes_of_flax_as_arrays():
    params = {"dense": {"kernel": nn.Partitioned(support.normal((4, 3)), (None, "m"))}}
    seen = []
    axes = lambda params: seen.append(params["dense"]["kernel"]) or optperm.leaf_axes(params)  # noqa: E731
    optperm.sgperm(axes=axes).init(params)
    assert seen
    assert all(isinstance(leaf, jax.Array) for leaf in seen)
