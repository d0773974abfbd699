"""SGPerm on many devices and inside what Optax and Flax wrap around it: always the same bits."""

import functools
import itertools
import os
import pathlib
import re
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
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm import LeafAxes
from optperm.permutation import _library as library
from optperm.permutation import apply_permutation, export_permutation, permuted_params

# Its recommendations are exact sums, so that no program rounds them otherwise.
make = functools.partial(optperm.sgperm, 0.4, 0.7, learning_rate=1.0, momentum=0.5)


def test_program_for_gpus_calls_python():
    """Lowered for CUDA, which takes no GPU, an update calls Python as `jax.pure_callback` does there."""
    tx, w = make(), support.bias(12)
    arguments = w, jax.jit(tx.init)(w), w
    lowered = jax.jit(tx.update).trace(*arguments).lower(lowering_platforms=("cuda",))
    (call,) = (line for line in lowered.as_text().splitlines() if "python" in line)
    assert "@xla_ffi_python_gpu_callback" in call
    assert "index = 0 : ui64" in call
    assert "tensor<1x12x1xf32>" in call


STACK, HEADS = LeafAxes("kernel", 1, 2, 0), LeafAxes("kernel", 0, (1, 2))
WINDOW = LeafAxes("kernel", (0, 1, 2), 3)
# Shape, axes, how it is cut, and what a device has: a batch of n entries in each of some rows.
OUTPUTS_CUT = {
    "columns": ((30, 16), None, P(None, ("x", "y")), (1, 30, 2)),
    "convolution": ((3, 3, 4, 8), WINDOW, P(None, None, None, ("x", "y")), (1, 36, 1)),
    "first of two outputs": ((6, 4, 8), HEADS, P(None, "x"), (1, 6, 16)),
    "both outputs": ((6, 4, 8), HEADS, P(None, "x", "y"), (1, 6, 4)),
    "layers": ((4, 6, 8), STACK, P("x"), (2, 6, 8)),
    "columns of layers": ((4, 6, 8), STACK, P("x", None, "y"), (2, 6, 2)),
    "biases of layers": ((4, 9), LeafAxes("bias", (), 1, 0), P("y"), (1, 9, 1)),
}
METHODS = {
    "sgperm": lambda axes: make(axes=axes),
    "laperm": lambda axes: optperm.laperm(optax.sgd(1.0), 1, axes=axes),
}
TARGETS = {
    ("sgperm", "ffi"): "optperm_permute_rows_float32",
    ("sgperm", "callback"): "xla_buffer_python_cpu_callback",
    ("laperm", "ffi"): "optperm_reorder_rows_int32",
}


@pytest.mark.parametrize(
    ("axis_type", "cut", "by"),
    support.every_night(
        itertools.product(["Explicit", "Auto"], OUTPUTS_CUT, TARGETS),
        [
            ("Explicit", "both outputs", ("sgperm", "ffi")),
            ("Explicit", "columns of layers", ("laperm", "ffi")),
            ("Auto", "columns", ("sgperm", "callback")),
        ],
    ),
    ids=str,
)
def test_whole_weight_vectors_of_sharded_params_stay_on_their_devices(
    axis_type, cut, by, monkeypatch
):
    """By whichever kernel each permutes its own, with the bits of one device, and gathers nothing."""
    method, kernel = by
    support.require_kernel(kernel)
    monkeypatch.setenv("OPTPERM_KERNEL", kernel)
    shape, axes, spec, (batch, n, rows) = OUTPUTS_CUT[cut]
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType[axis_type],) * 2)
    w, g = (support.normal(shape, seed) for seed in range(2))
    tx = METHODS[method](axes)
    export, rebuild = functools.partial(export_permutation, axes=axes), apply_permutation
    if (
        axis_type == "Explicit"
    ):  # XLA shards the results of a compiled call as it likes on the other
        export, rebuild = jax.jit(export), jax.jit(rebuild)
    _, expected = jax.jit(tx.update)(g, jax.jit(tx.init)(w), w)
    with jax.set_mesh(mesh):
        w, g = jax.device_put((w, g), NamedSharding(mesh, spec))
        initial, constant = jax.jit(tx.init)(w), jax.jit(lambda: tx.init(w))()
        update = jax.jit(tx.update).lower(g, initial, w).compile()
        _, opt_state = update(g, initial, w)
        exported = export(w, opt_state)
        rebuilt = rebuild(w, exported)
    support.assert_same_bits(permuted_params(constant), w)
    program = update.as_text()
    assert not re.search("all-gather|all-to-all|collective-permute", program)
    (call,) = (line for line in program.splitlines() if f'="{TARGETS[by]}"' in line)
    assert re.search(rf"\[({batch},{n},{rows}|{batch * rows},{n})\]", call)
    for weights in (permuted_params(opt_state), rebuilt):
        support.assert_same_bits(weights, permuted_params(expected))
    for array in (permuted_params(opt_state), exported, rebuilt):
        assert array.sharding.is_equivalent_to(w.sharding, w.ndim)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "spec"), support.in_turns(METHODS, [P("x", None), P("x", "y")]), ids=str
)
def test_zeros_and_subnormal_weights_of_an_automatic_mesh_keep_their_bits(method, spec):
    """Where weights cross devices XLA may add them to zeros, which makes 0.0 of -0.0 or subnormals."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    alone, g = (support.normal((16, 8), seed) for seed in range(2))
    alone = alone.at[::3].multiply(0.0).at[1::3].set(1e-42 * np.arange(-3, 5, dtype=np.float32))
    assert np.signbit(alone[::3]).any()
    w = jax.device_put(alone, NamedSharding(mesh, spec))
    tx = METHODS[method](None)
    step = jax.jit(loops.make_step(tx))
    init = jax.jit(tx.init)
    (expected, state_alone), (trained, opt_state) = (step(p, init(p), g) for p in (alone, w))
    assert not np.array_equal(expected, alone)
    support.assert_same_bits(trained, expected)
    at_start = permuted_params(state_alone, alone)  # which LaPerm synchronizes first
    support.assert_same_bits(permuted_params(opt_state, w), at_start)
    exported = export_permutation(w, opt_state)
    for initial in (alone, w):
        support.assert_same_bits(apply_permutation(initial, exported), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "spec", "axis_type"),
    support.every_night(
        itertools.product(library.KERNELS, [P(), P("x"), P(None, "x")], ["Explicit", "Auto"]),
        [("ffi", P("x"), "Explicit"), ("callback", P(None, "x"), "Auto")],
    ),
    indirect=["kernel"],
    ids=str,
)
@pytest.mark.usefixtures("kernel")
def test_replicas_whose_params_are_sharded_train_as_alone(spec, axis_type):
    """Under `jax.vmap` and `jax.shard_map` over one axis of a mesh, params may be cut over another."""
    mesh = jax.make_mesh((2, 2), ("replica", "x"), axis_types=(AxisType[axis_type],) * 2)
    starts, pulls = (support.normal((2, 12, 8), seed) for seed in range(2))
    tx = make()

    def step(w, g):
        _, opt_state = tx.update(g, tx.init(w), w)
        return permuted_params(opt_state)

    alone = jax.jit(step)
    expected = jnp.stack([alone(w, g) for w, g in zip(starts, pulls, strict=True)])
    with jax.set_mesh(mesh):
        starts, pulls = jax.device_put((starts, pulls), NamedSharding(mesh, P("replica", *spec)))
        replicas = jax.shard_map(
            lambda w, g: step(w[0], g[0])[None],
            in_specs=P("replica"),
            out_specs=P("replica"),
            axis_names={"replica"},
        )
        for run in (jax.vmap(step), replicas):
            support.assert_same_bits(jax.jit(run)(starts, pulls), expected)


@pytest.mark.parametrize(
    ("method", "spec"),
    support.every_night(
        itertools.product(METHODS, [P(None, "x"), P("replica", "x")]), [("sgperm", P(None, "x"))]
    ),
    ids=str,
)
def test_replicas_of_stacks_whose_layers_are_sharded_train_as_alone(method, spec):
    """On a mesh with explicit axes `jax.vmap` merges replicas and layers, either of them sharded."""
    mesh = jax.make_mesh((2, 2), ("replica", "x"), axis_types=(AxisType.Explicit,) * 2)
    starts, pulls = (support.normal((2, 4, 6, 8), seed) for seed in range(2))
    tx = METHODS[method](STACK)

    def step(w, g):
        return permuted_params(tx.update(g, tx.init(w), w)[1])

    alone, (starts, pulls) = jax.jit(step), map(np.asarray, (starts, pulls))
    expected = np.stack([alone(w, g) for w, g in zip(starts, pulls, strict=True)])
    with jax.set_mesh(mesh):
        starts, pulls = jax.device_put((starts, pulls), NamedSharding(mesh, spec))
        got = jax.jit(jax.vmap(step))(starts, pulls)
    support.assert_same_bits(got, expected)
    assert got.sharding.is_equivalent_to(starts.sharding, 4)


# Each with its kernel, in one process.
HANGS = [
    {"pmap": "ffi", "rows": "callback"},
    {"pmap": "callback", "shard_map unchecked": "ffi", "rows": "ffi"},
    {"shard_map unchecked": "callback"},
]


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="processes cannot be tied to cores"
)
@pytest.mark.programs
@pytest.mark.parametrize("cells", support.every_night(HANGS, HANGS[:1]), ids=str)
def test_large_leaves_on_eight_devices_end_their_training(cells):
    """Train 200 steps on eight devices of two cores, in replicas and with rows sharded: the kernel's
    call cannot deadlock.

    Whether it could depends on who waits for whose threads, not on how long the search for cycles takes:
    a twentieth of the entries has a gradient.
    """
    for kernel in cells.values():
        support.require_kernel(kernel)
    program = """
        import os, sys
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
        import jax, jax.numpy as jnp, loops, numpy as np, optperm, replicas
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        n = 504
        params = jax.random.normal(jax.random.key(0), (n, n))
        pulls = jnp.where(jnp.arange(n)[:, None] % 100 < 5, params[::-1], 0.0)
        tx = optperm.sgperm(partition_ratio=1.0)

        def train(params, seed, mean=lambda grads: grads):
            def evaluate(params, key):
                return mean(pulls * jax.random.normal(key, (n, 1))), {}

            keys = jax.random.split(jax.random.key(seed), 200)
            return loops.carry(loops.make_step(tx, evaluate), params, tx.init(params), keys)[0]

        def replica(params, seed):
            return train(params, seed, lambda grads: jax.lax.pmean(grads, replicas.AXIS))

        for where, kernel in eval(sys.argv[1]).items():
            os.environ["OPTPERM_KERNEL"] = kernel
            if where == "rows":
                mesh = Mesh(np.array(jax.devices()), ("x",))
                cut = jax.device_put(params, NamedSharding(mesh, P(None, "x")))
                out = jax.jit(train)(cut, 0)[None]
            else:
                run = replicas.MAPPINGS[where](replica, 8)
                out = run(jnp.stack([params] * 8), jnp.arange(8))
            out, start = np.asarray(out), np.asarray(params)
            assert (out == out[0]).all()
            assert (out[0] != start).any()
            assert (np.sort(out[0], axis=0) == np.sort(start, axis=0)).all()
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), repr(cells)],
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr[-2000:]
