"""traffic_report against closed forms, and against the collectives of compiled programs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replicas
import support
from collectives import traffic

import optperm
from optperm.distributed._traffic_report import _sum_operands

Compression, Every = optperm.distributed.Compression, optperm.distributed.Every
traffic_report = optperm.distributed.traffic_report
AXIS, PERIOD, REPLICAS = "replica", 10, 4
SGD = optax.sgd(0.1)
PARAMS = {
    "hidden": {"kernel": np.zeros((784, 128), "f"), "bias": np.zeros(128, "f")},
    "output": {"kernel": np.zeros((128, 10), "f"), "bias": np.zeros(10, "f")},
}
NUMBERS = 101_770
DILOCO = functools.partial(optperm.diloco, SGD, every=PERIOD, axis_name=AXIS)
AGN = functools.partial(optperm.agn, SGD, every=PERIOD, axis_name=AXIS)
PLAIN = DILOCO()
report = functools.partial(traffic_report, axis_name=AXIS, every=PERIOD)
FOUR, LATE = Every(PERIOD, 4), Every(PERIOD, 2, 3)
METHODS = {
    "diloco": PLAIN,
    "agn": AGN(),
    "sequential": AGN(combine="sequential"),
    "fragments of agn": AGN(every=FOUR),
    "4 bits of agn in turn": AGN(combine="sequential", compress=Compression(bits=4)),
    "fragments": DILOCO(every=FOUR),
    "delay": DILOCO(every=LATE),
    "4 bits": DILOCO(compress=Compression(bits=4)),
    "top k": DILOCO(compress=Compression(1 / 32, bits=2)),
    "pairs": DILOCO(combine="pairs"),
    "sum": DILOCO(combine="sum"),
    "dtype of the center": DILOCO(center_dtype=jnp.float32),
}
PLANS = {"fragments": FOUR, "fragments of agn": FOUR, "delay": LATE}


@pytest.mark.parametrize(
    "name", support.every_night(METHODS, ["sequential"], slow=["fragments", "top k", "pairs"])
)
def test_traffic_of_each_option_is_what_the_compiled_program_sends(name):
    """The operands in the HLO of a step whose conditionals are entered once a period."""
    tx = METHODS[name]

    def step(params, state):
        updates, state = tx.update(params, state, params)
        return optperm.apply_updates(params, updates, state), state

    step = jax.pmap(step, axis_name=AXIS, devices=jax.devices()[:REPLICAS])
    stacked = [replicas.stack([tree] * REPLICAS) for tree in (PARAMS, tx.init(PARAMS))]
    hlo = step.lower(*stacked).compile().as_text()
    # A program of pairs has a branch for each way to pair four replicas, and takes one of the two.
    ways = 2 if name == "pairs" else 1
    expected = traffic(hlo, PERIOD * ways).bytes_per_step
    found = report(tx, PARAMS, every=PLANS.get(name, PERIOD), replicas=REPLICAS)
    assert found.all.bytes_per_step == pytest.approx(expected)


@pytest.mark.parametrize(("dtype", "size"), [(jnp.float32, 4), (jnp.bfloat16, 2)])
def test_traffic_of_all_params_is_four_bytes_each_and_a_weight(dtype, size):
    """32 bits of each number, also of bfloat16, and of the weight of each fragment."""
    found = report(PLAIN, jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), PARAMS))
    assert found.synchronous.bytes_per_step == size * NUMBERS
    assert found.all.bytes_per_commit == 4 * NUMBERS + 4
    assert found.all.bytes_per_step == (4 * NUMBERS + 4) / PERIOD


def test_operands_of_a_collective_count_by_their_dtypes():
    """Three integers of 8 bits, five numbers of 16 and seven of 32 are 41 bytes."""
    leaves = jnp.zeros(3, jnp.int8), jnp.zeros(5, jnp.bfloat16), jnp.zeros(7)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2,), (AXIS,))):
        specs = {"in_specs": jax.P(), "out_specs": jax.P(), "check_vma": False}
        mapped = jax.shard_map(lambda *sent: jax.lax.psum(sent, AXIS), **specs)
        jaxpr = jax.make_jaxpr(mapped)(*leaves).jaxpr
    assert _sum_operands(jaxpr, {AXIS}).total() == 3 + 2 * 5 + 4 * 7


def test_traffic_of_a_plan_is_a_line_for_each_fragment():
    found = report(METHODS["fragments"], PARAMS, every=FOUR)
    # The middles of the leaves in the sizes of all: biases first, by the order of the tree
    sizes = [128, 784 * 128, 0, 10 + 1280]
    assert [each.bytes_per_commit for each in found.fragments] == [4 * n + 4 for n in sizes]
    assert found.all.bytes_per_commit == 4 * NUMBERS + 16
    lines = str(found).splitlines()
    assert len(lines) == 7
    assert lines[2].split()[:3] == ["fragment", "1", "401,412"]
    assert "s/commit" not in lines[0].split()


def test_seconds_are_the_bits_of_a_ring_over_the_bandwidth():
    """2 (k - 1) / k of an all-reduce, k - 1 of an all-gather, and 1 of a pair."""
    size = 3
    multiples = {"diloco": 2 * (size - 1) / size, "4 bits": size - 1, "pairs": 1}
    for name, multiple in multiples.items():
        found = report(METHODS[name], PARAMS, bandwidth=1e6, replicas=size)
        seconds = 8 * found.all.bytes_per_commit * multiple / 1e6
        assert found.all.seconds_per_commit == pytest.approx(seconds)
        assert found.all.seconds_per_step == pytest.approx(seconds / PERIOD)
        ring = 8 * 4 * NUMBERS * multiples["diloco"] / 1e6
        assert found.synchronous.seconds_per_step == pytest.approx(ring)


NAMES = {"hidden": {"kernel": "rest", "bias": "own"}, "output": "rest"}
INJECTED = optax.inject_hyperparams(optperm.diloco)(SGD, every=PERIOD, axis_name=AXIS)


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    ("tx", "numbers", "every"),
    [
        (optax.chain(optax.clip(1.0), PLAIN), NUMBERS, PERIOD),
        (optax.MultiSteps(PLAIN, 3).gradient_transformation(), NUMBERS, PERIOD),
        (optperm.switch_after(5, SGD, PLAIN), NUMBERS, PERIOD),
        (optax.partition({"own": PLAIN, "rest": SGD}, NAMES), 128, PERIOD),
        (INJECTED, NUMBERS, PERIOD),  # which is a number of the state
        (AGN(every=lambda commits: 5 + commits), NUMBERS, 7.5),
    ],
)
def test_traffic_in_any_nesting_is_of_the_params_that_the_method_trains(tx, numbers, every):
    """By the mean period, where a program or a schedule chooses the period."""
    found = report(tx, PARAMS, every=every)
    assert found.all.bytes_per_step == (4 * numbers + 4) / every
    assert found.synchronous.bytes_per_step == 4 * NUMBERS


def test_traffic_over_two_axes_and_sharded_replicas_is_that_of_one_axis():
    how = {"bandwidth": 1e6, "replicas": 4}
    for options in ({"axis_name": ("slice", "host")}, {"shard_axes": "model"}):
        found = report(DILOCO(**options), PARAMS, **options, **how)
        assert found == report(PLAIN, PARAMS, **how)
