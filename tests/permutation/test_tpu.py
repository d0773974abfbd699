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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm

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


def test_sgperm_on_a_tpu_is_an_error():
    """Lowered for a TPU, which takes no TPU, an update says where it can run instead."""
    tx, w = optperm.sgperm(), support.bias(12)
    update = jax.jit(tx.update).trace(w, jax.jit(tx.init)(w), w)
    update.lower(lowering_platforms=("cpu",))
    with pytest.raises(
        NotImplementedError, match=r"sgperm needs a CPU or a GPU, got tpu: run .* CPU"
    ):
        update.lower(lowering_platforms=("tpu",))


def test_laperm_sorts_without_the_host_in_little_memory():
    """A TPU pads the indices of a gather or a scatter; sorts take what they sort."""
    mesh = Mesh(np.array(tpus()[:1]), ("m",))
    program = compiled(optperm.laperm(optax.sgd(0.1), 10), [(N, ROWS)] * 2, mesh, P())
    assert not sizes_of(program, "send|recv|gather|scatter")
    assert program.memory_analysis().temp_size_in_bytes < 2 * (2 * 4 * N * ROWS)
