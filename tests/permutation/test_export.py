"""A trained network as its initial weights and a permutation, the exact weights in a state, and compiled
updates that are exported."""

import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support

import optperm


def test_permutation_of_any_dtype_rebuilds_the_trained_weights():
    """Every bit, with ties and zeros of both signs, from arrays of JAX or of NumPy."""
    ties = np.round(2 * np.random.default_rng(0).normal(size=(20, 3))) / 2
    ties[::2][ties[::2] == 0] = -0.0
    with jax.enable_x64(True):
        params = {name: jnp.asarray(ties, name) for name in support.DTYPES}
        params |= {"scale": jnp.float32(1), "none": jnp.zeros((0, 3)), "bias": support.bias(7)}
        grads = [support.random_like(params, step) for step in range(3)]
        tx = optperm.sgperm(0.5, partition_ratio=0.7)
        _, opt_state = loops.train(tx, params, grads, init="jit")[-1]
        trained = optperm.permutation.permuted_params(opt_state)
        support.assert_permutes(trained, params)
        assert not np.array_equal(trained["bfloat16"], params["bfloat16"])
        export, apply = (
            optperm.permutation.export_permutation,
            optperm.permutation.apply_permutation,
        )
        permutation = jax.jit(export)(params, opt_state)
        support.assert_same_bits(export(params, opt_state), permutation)
        assert all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(permutation))
        assert jax.tree.map(jnp.shape, permutation) == jax.tree.map(jnp.shape, params)
        support.assert_same_bits(jax.jit(apply)(params, permutation), trained)
        support.assert_same_bits(apply(params, jax.tree.map(np.asarray, permutation)), trained)


@pytest.mark.usefixtures("lenient")
def test_masked_leaves_stay_with_their_optimizer():
    """Kernels are permuted, biases move by Adam, each as it would alone; those are MaskedNode in the
    export and in the exact weights, unless params are given, and kept as they are."""
    params, adam = support.random_params(), optax.adam(0.1)
    grads = support.random_like(params, 1)
    for method in (optperm.sgperm(0.5), optperm.laperm(optax.adam(0.3), 2)):
        tx = optax.partition(
            {"permute": method, "adam": adam}, {"kernel": "permute", "bias": "adam"}
        )
        after, opt_state = loops.train(tx, params, [grads] * 3)[-1]
        bias, _ = loops.train(adam, params["bias"], [grads["bias"]] * 3)[-1]
        support.assert_close(after["bias"], bias, rtol=1e-6)
        assert optperm.permutation.permuted_params(opt_state)["bias"] == optax.MaskedNode()
        full = optperm.permutation.permuted_params(opt_state, after)
        assert full["bias"] is after["bias"]
        support.assert_permutes(full["kernel"], params["kernel"])
        assert not np.array_equal(full["kernel"], params["kernel"])
        permutation = optperm.permutation.export_permutation(params, opt_state, after)
        assert permutation["bias"] == optax.MaskedNode()
        rebuilt = optperm.permutation.apply_permutation(params, permutation)
        assert rebuilt["bias"] is params["bias"]
        support.assert_same_bits(rebuilt["kernel"], full["kernel"])


# Optax leaves it to its users to register its states for serialization: the inner optimizer has none.
METHODS = {
    "sgperm": "optperm.sgperm(0.5, partition_ratio=0.7)",
    "laperm": """optperm.laperm(
        optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, s)), every=1
    )""",
}


@pytest.mark.programs
def test_exported_updates_in_another_process_give_the_same_bits(tmp_path):
    """Follow the recipe of docs/design/index.md: serialize here, run there."""
    pytest.importorskip("flatbuffers", reason="jax.export serializes by flatbuffers")
    support.require_kernel("ffi")
    params = support.random_params()
    grads = support.random_like(params, 1)
    checks = [
        jax.export.DisabledSafetyCheck.custom_call(f"optperm_{call}")
        for call in ("permute_rows_float32", "reorder_rows_int32")
    ]
    np.savez(tmp_path / "grads.npz", **grads)
    np.savez(tmp_path / "params.npz", **params)
    expected = {}
    for method, code in METHODS.items():
        tx = eval(code)
        arguments = grads, jax.jit(tx.init)(params), params
        exported = jax.export.export(jax.jit(tx.update), disabled_checks=checks)(*arguments)
        (tmp_path / method).write_bytes(exported.serialize())
        _, opt_state = jax.jit(tx.update)(*arguments)
        expected[method] = optperm.permutation.permuted_params(opt_state)
    program = """
        import pathlib, sys
        import jax, numpy as np, optax, optperm
        from optperm.permutation import _library as library

        folder = pathlib.Path(sys.argv[1])
        library.available_kernels()  # XLA learns of the compiled one
        grads, params = (dict(np.load(folder / name)) for name in ("grads.npz", "params.npz"))
        for method, code in eval(sys.argv[2]).items():
            update = jax.export.deserialize((folder / method).read_bytes()).call
            _, opt_state = update(grads, jax.jit(eval(code).init)(params), params)
            np.savez(folder / f"{method}.npz", **optperm.permutation.permuted_params(opt_state))
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), repr(METHODS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for method, wanted in expected.items():
        with np.load(tmp_path / f"{method}.npz") as after:
            support.assert_same_bits(dict(after), wanted)
        assert not np.array_equal(wanted["kernel"], params["kernel"])


def test_update_that_calls_python_is_not_exported(monkeypatch):
    """For several platforms, of which one needs it, the error says what can be done."""
    support.require_kernel("ffi")
    monkeypatch.setenv("OPTPERM_KERNEL", "ffi")
    tx, w = optperm.sgperm(), support.bias(5)
    export = jax.export.export(jax.jit(tx.update), platforms=["cpu", "cuda"])
    with pytest.raises(NotImplementedError, match="single platform: export the update for the CPU"):
        export(w, tx.init(w), w)
