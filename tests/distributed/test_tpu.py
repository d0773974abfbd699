"""What AGN and DiLoCo compile to on TPUs; skipped where `libtpu` is not installed."""

import accelerator_programs
import accelerators
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import optperm

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("lenient")]
pytest.importorskip("libtpu")

PARAMS, BYTES = accelerators.square_leaves(4), 4 * 4 * accelerators.SIDE**2
AGN = optperm.agn(accelerators.ADAMW, every=10)
DILOCO = optperm.diloco(accelerators.ADAMW, every=10)


@pytest.mark.parametrize(
    ("tx", "commit"), [(AGN, None), (AGN, True), (DILOCO, None), (DILOCO, True)]
)
def test_a_step_needs_less_than_half_the_params_beside_them(tx, commit):
    """As AdamW it writes all that is donated in place; a commit needs a part of one more copy."""
    mesh = accelerator_programs.tpu_mesh({"replica": 1}, "v5e:1x1")
    given = accelerator_programs.shapes((PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS), mesh)
    program = accelerator_programs.Program(accelerators.make_step(tx, commit), *given)
    assert program.temp_bytes < 0.5 * BYTES
    assert program.not_donated < 1e-3 * BYTES


def test_counted_steps_sum_all_leaves_at_once_in_a_conditional():
    program = accelerators.compiled(accelerators.Case(accelerators.DILOCO()))
    assert program.temp_bytes < 0.5 * BYTES
    (found,) = program.collectives()
    assert (found.operation, found.is_conditional) == ("all-reduce", True)
    assert BYTES <= found.bytes <= BYTES + 1024


def compressed(*options, **more):
    return accelerators.DILOCO(compress=optperm.distributed.Compression(*options, **more))


@pytest.mark.parametrize(
    ("tx", "bytes_per_param"),
    [
        (compressed(bits=4), 4 / 8 + 1 / 64),
        (compressed(bits=1), 1 / 8 + 1 / 64),
        (compressed(1 / 32, bits=2), (2 / 8 + 2) / 32 + 1 / 1024),
        (accelerators.AGN(combine="sequential"), 4),
    ],
)
def test_what_replicas_contribute_one_by_one_is_gathered_as_bytes(tx, bytes_per_param):
    """Neither padded to lanes while it is packed, nor summed as everybody's rows."""
    program = accelerators.compiled(accelerators.Case(tx, True, leaves=1))
    if bytes_per_param < 4:
        assert program.temp_bytes < 2 * 4 * 1024**2
    (found,) = program.collectives()
    assert found.operation == "all-gather"
    assert found.bytes <= bytes_per_param * 1024**2 + 1024


def test_pairs_permute_in_a_conditional():
    """A device sends its params, one leaf after another."""
    program = accelerators.compiled(accelerators.Case(accelerators.DILOCO(combine="pairs")))
    assert program.temp_bytes < 0.5 * BYTES
    found = program.collectives()
    kinds = {(each.operation.removesuffix("-start"), each.is_conditional) for each in found}
    assert kinds == {("collective-permute", True)}
    # In a branch for each of the two ways to pair four replicas.
    assert sum(each.bytes for each in found) <= 2 * (BYTES + 1024)


def on_two_slices(step, tx, **options):
    """A step of two replicas, each sharded over the four devices of a slice."""
    mesh = accelerator_programs.tpu_mesh({"replica": 2, "model": 4}, slices=2)
    trees = PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), trees)
    replica, sharded = P("replica"), P("replica", "model")
    given = accelerator_programs.shapes(
        wide, mesh, lambda leaf: sharded if leaf.ndim == 3 else replica
    )
    mapped = jax.shard_map(
        jax.vmap(step), mesh=mesh, in_specs=replica, out_specs=replica, axis_names={"replica"}
    )
    return accelerator_programs.Program(mapped, *given, **options)


def is_large(found):
    return found.bytes > 1024


def test_shards_cross_slices_within_a_conditional():
    """Each device sends its own shard, and nothing is gathered; a local step sends nothing."""
    tx = accelerators.DILOCO()
    program = on_two_slices(accelerators.make_step(tx), tx)
    assert all(each.is_conditional for each in program.transfers())
    assert sum(each.bytes for each in program.transfers()) == pytest.approx(BYTES / 4, rel=1e-3)
    assert not list(filter(is_large, program.collectives()))
    assert not on_two_slices(accelerators.make_step(tx, False), tx).transfers()


def loss_fn(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def test_a_delay_overlaps_steps_of_one_program():
    """Of three steps in one program two lie between sending and arrival."""
    plan = optperm.distributed.Every(10, fragments=2, delay=2)
    tx = accelerators.DILOCO(every=plan)

    def three(params, opt_state, _):
        for number in (10, 11, 12):
            grads = jax.grad(loss_fn)(params, jnp.ones((8, 1024)))
            step = accelerators.make_step(tx, plan.at(number))
            params, opt_state = step(params, opt_state, grads)
        return params, opt_state

    program = on_two_slices(three, tx, keep_unused=True)
    sent = [each for each in program.transfers() if each.kind == "ALL_REDUCE" and is_large(each)]
    assert sent
    assert all(each.meanwhile > program.fusions() / 2 for each in sent)
    assert program.not_donated < 1e-3 * BYTES
