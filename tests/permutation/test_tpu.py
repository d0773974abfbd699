"""What updates compile to for TPUs, read without one: libtpu compiles for a topology by its name."""

import functools
import math
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.permutation import _cycles as cycles
from optperm.permutation import _host_calls as host_calls
from optperm.permutation._weight_vectors import sort_ranks

N, ROWS = 256, 512


@functools.cache
def tpus():
    """Devices that are not there."""
    pytest.importorskip("libtpu")
    # Else libtpu asks a server for metadata, for minutes, and only one process may load it.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices


def compiled(tx, shapes, mesh, spec):
    """A step with donated state, for params of these shapes that all lie by the same spec."""

    def place(leaf):
        of_leaf = P(*[None] * (leaf.ndim - len(spec)), *spec) if leaf.ndim > 1 else P()
        sharding = NamedSharding(mesh, of_leaf if leaf.shape in shapes else P())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    params, state = jax.tree.map(place, (params, jax.eval_shape(tx.init, params)))
    with jax.set_mesh(mesh):
        return jax.jit(tx.update, donate_argnums=(0, 1)).lower(params, state, params).compile()


def sizes_of(program, operations):
    """The numbers of entries of what some operations give, on one device."""
    lines = re.findall(rf"= (.*?) (?:{operations})(?:-start)?\(", program.as_text())
    shapes = [re.findall(r"\w\[([\d,]*)\]", types) for types in lines]
    return [
        sum(math.prod(int(n) for n in shape.split(",") if n) for shape in each) for each in shapes
    ]


@pytest.mark.parametrize(
    ("axis_type", "names", "spec"),
    support.every_night(
        [("Auto", "m", P("m")), ("Explicit", "m", P("m")), ("Auto", "xy", P(("x", "y")))],
        [("Auto", "m", P("m")), ("Explicit", "m", P("m"))],
    ),
    ids=str,
)
def test_each_device_sends_the_weight_vectors_that_it_holds(axis_type, names, spec):
    """Where outputs are cut an update exchanges a device's own rows with the host, in four arrays out
    and two back, and nothing but sums of a number with other devices."""
    shape = {1: (4,), 2: (2, 2)}[len(names)]
    mesh = Mesh(
        np.reshape(tpus(), shape), tuple(names), axis_types=(AxisType[axis_type],) * len(names)
    )
    program = compiled(optperm.sgperm(), [(N, ROWS)], mesh, spec)
    share = N * ROWS // 4
    sent, received = (sizes_of(program, operation) for operation in ("send", "recv"))
    # Beside each array there are a number and a token.
    assert sorted(size - 2 for size in sent) == [ROWS, share, share, share]
    assert [size - 2 for size in received] == [share, share]
    moved = (
        "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    )
    assert max(sizes_of(program, moved)) <= 2
    assert "maximal" not in program.as_text()


def test_laperm_sorts_without_the_host_in_little_memory():
    """A TPU pads the indices of a gather or a scatter; sorts take what they sort."""
    mesh = Mesh(np.array(tpus()[:1]), ("m",))
    program = compiled(optperm.laperm(optax.sgd(0.1), 10), [(N, ROWS)] * 2, mesh, P())
    assert not sizes_of(program, "send|recv|gather|scatter")
    assert program.memory_analysis().temp_size_in_bytes < 2 * (2 * 4 * N * ROWS)


def test_exchange_with_the_host_gives_the_bits_of_the_direct_call():
    """On one device and on four, whatever axes of rows there are, odd ones included."""
    support.require_kernel("ffi")
    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    on_host = functools.partial(cycles.permute_on_host, "ffi", False)
    exchange = functools.partial(host_calls.exchange, cycles.PERMUTE, on_host)
    for rows in ((3, 4), (5,), ()):
        w, m = (jnp.asarray(x, jnp.float32) for x in rng.normal(size=(2, 2, 30, *rows)))
        seeds = jnp.asarray(rng.integers(0, 2**32, (2, *rows, 2), np.uint32))
        numbers = jnp.float32(0.2), jnp.int32(11)
        expected = jax.jit(functools.partial(cycles.permute_rows, drop_remainder=False))(
            m, w, sort_ranks(w), seeds, *numbers
        )
        of_rows = (jnp.broadcast_to(number, (2, *rows)) for number in numbers)
        operands = m, w, sort_ranks(w), seeds, *of_rows
        for call in (exchange, host_calls.on_all_devices(cycles.PERMUTE, exchange, mesh)):
            got = jax.jit(call)(*operands)
            support.assert_same_bits(list(got), list(expected))
