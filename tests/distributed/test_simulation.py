"""Every step of AGN and DiLoCo, with all their options, against workers and centers in NumPy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
import valley

import optperm
from optperm.distributed import Compression, Every

pytestmark = pytest.mark.usefixtures("lenient")

SHAPES = {"a": (3, 5), "b": (4,), "c": (6, 2), "d": ()}
NUMBERS, SIZE, STEPS = 32, 4, 14
PLACES = dict(zip(SHAPES, np.split(np.arange(NUMBERS), [15, 19, 31]), strict=True))
WEIGHTS = np.array([0.1, 0.2, 0.7, 1.3])
ADAM = optax.adam(0.05), replicas.adam(0.05)
SGD = optax.sgd(0.1), replicas.sgd(0.1)
MOMENTUM = optax.sgd(0.05, 0.9), replicas.sgd(0.05, 0.9)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True), replicas.sgd(0.7, 0.9, nesterov=True)


def whole(*names):
    """Return the places of whole leaves."""
    return [PLACES[name] for name in names]


def layers(*chosen):
    """Return the places of some layers of the leaf that stacks six of them."""
    return [PLACES["c"].reshape(6, 2)[list(chosen)].reshape(-1)]


def largest(e):
    """Return the eight largest numbers of a leaf, not rounded."""
    kept = np.argsort(-np.abs(e), kind="stable")[:8]
    return np.where(np.isin(np.arange(e.size), kept), np.float32(e), 0.0)


def levels(e):
    """Return a leaf on 15 evenly spaced levels between minus and plus its largest magnitude."""
    scale = np.abs(np.float32(e)).max()
    return np.round(np.float32(e) / scale * 7) / 7 * scale


class Case(NamedTuple):
    """A method on some replicas, and what simulates it."""

    tx: Any
    simulate: Callable[..., Any]
    size: int = SIZE
    flags: Callable[[int], Any] = lambda step: None  # from the number of a step to `commit=`
    bad: int | None = None  # the step with a NaN in a gradient of the last replica
    atol: float = 1e-12


def agn(optimizer, combine, commits, parts=None, plan=None, compress=(None, None), **options):
    """Make a case of AGN."""
    plain = {"combine": combine, "axis_name": replicas.AXIS, "compress": compress[0]}
    if plan is not None:
        plain["every"] = plan
        plan = dataclasses.astuple(plan)
    tx = optperm.agn(optimizer[0], **plain, **options)
    simulated = {"commits": commits, "combine": combine, "plan": plan, "compress": compress[1]}
    simulated |= {"parts": parts or [whole(*SHAPES)]}
    return Case(tx, functools.partial(replicas.simulate_agn, [optimizer[1]] * 2, **simulated))


def diloco(inner, outer, plan, parts, compress=(None, None), fragment_of=None, **options):
    """Make a case of DiLoCo."""
    plain = {"every": plan, "axis_name": replicas.AXIS, "compress": compress[0]}
    tx = optperm.diloco(inner[0], outer[0], fragment_of=fragment_of, **plain, **options)
    options |= {"plan": dataclasses.astuple(plan), "parts": parts, "compress": compress[1]}
    return Case(tx, functools.partial(replicas.simulate_diloco, (inner[1], outer[1]), **options))


ALL = [whole(*SHAPES)]
TWO, THREE = [whole("a"), whole("b", "c", "d")], [whole("a"), whole("b"), whole("c", "d")]
SLICES = [whole("a", "b", "d"), layers(0, 2, 4), layers(1, 3, 5)]
OF_SLICES = {"a": 0, "b": 0, "c": [1, 2, 1, 2, 1, 2], "d": 0}
DEFAULT = None, replicas.sgd(1.0, 0.0)
NESTEROV = optax.sgd(0.8, momentum=0.5, nesterov=True), replicas.sgd(0.8, 0.5, nesterov=True)
LARGEST = Compression(0.25), (0.95, largest)
FOUR_BITS = Compression(bits=4), (1.0, levels)
PAIRS = {"combine": "pairs"}
FLAGGED, COMMITTED, DELAYED = {2, 3, 7, 14}, {5, 6, 13}, Every(4, 2, 1)
CASES = {
    "agn mean": agn(ADAM, "mean", {3, 6, 9, 12}, every=3)._replace(bad=4),
    "agn sum by a schedule": agn(MOMENTUM, "sum", {1, 3, 6, 10}, every=lambda commits: commits + 1),
    "agn sequential by flags": agn(MOMENTUM, "sequential", FLAGGED, every=99)._replace(
        flags=lambda step: step in FLAGGED, bad=5
    ),
    "agn of one replica": agn(MOMENTUM, "mean", {4, 8, 12}, every=4)._replace(size=1, bad=6),
    "agn in fragments": agn(MOMENTUM, "sequential", (), THREE, Every(5, 3))._replace(bad=4),
    "agn with a delay and commits of all": agn(MOMENTUM, "mean", COMMITTED, TWO, DELAYED)._replace(
        flags=lambda step: True if step in COMMITTED else None, bad=7
    ),
    "agn with a delay by flags": agn(MOMENTUM, "mean", COMMITTED, TWO, DELAYED)._replace(
        flags=lambda step: True if step in COMMITTED else DELAYED.at(step), bad=7
    ),
    "agn of layers with a delay": agn(
        ADAM, "sum", (), SLICES, Every(9, 3, 4), fragment_of=OF_SLICES
    )._replace(bad=3),
    "agn four bits": agn(ADAM, "mean", {3, 6, 9, 12}, None, None, FOUR_BITS, every=3)._replace(
        bad=4, atol=1e-6
    ),
    "agn largest": agn(MOMENTUM, "sum", (), TWO, Every(3, 2, 1), LARGEST)._replace(atol=1e-6),
    "agn largest in turn": agn(
        MOMENTUM, "sequential", {3, 6, 9, 12}, None, None, LARGEST, every=3
    )._replace(atol=1e-6),
    "diloco": diloco(ADAM, DEFAULT, Every(3), ALL)._replace(bad=4),
    "diloco with nesterov": diloco(ADAM, NESTEROV, Every(3), ALL)._replace(bad=4),
    "diloco by flags of the device": diloco(SGD, ADAM, Every(4), ALL)._replace(
        flags=lambda step: jnp.array(step % 4 == 0)
    ),
    "diloco sum": diloco(MOMENTUM, OUTER, Every(3), ALL, combine="sum"),
    "diloco sum with a delay": diloco(SGD, OUTER, Every(4, 2, 1), TWO, combine="sum", mixing=0.25),
    "diloco sequential": diloco(SGD, OUTER, Every(5, 3), THREE, combine="sequential"),
    "diloco sum of four bits": diloco(SGD, OUTER, Every(3), ALL, FOUR_BITS, combine="sum")._replace(
        atol=1e-6
    ),
    "diloco largest in turn": diloco(
        SGD, OUTER, Every(3, 2), TWO, LARGEST, combine="sequential"
    )._replace(atol=1e-6),
    "three fragments": diloco(SGD, OUTER, Every(5, 3), THREE),
    "a delay by flags": diloco(SGD, OUTER, DELAYED, TWO, mixing=0.25)._replace(flags=DELAYED.at),
    "layers with a delay beyond the next": diloco(
        SGD, OUTER, Every(9, 3, 4), SLICES, mixing=0.25, fragment_of=OF_SLICES
    ),
    "pairs": diloco(SGD, OUTER, Every(3), ALL, **PAIRS),
    "pairs of three": diloco(SGD, OUTER, Every(3, 2, 2), TWO, **PAIRS, mixing=0.5)._replace(size=3),
    "largest": diloco(SGD, OUTER, Every(3, 2, 1), TWO, LARGEST, mixing=0.25)._replace(atol=1e-6),
    "four bits": diloco(SGD, OUTER, Every(3), ALL, FOUR_BITS)._replace(atol=1e-6),
}


def unflat(rows):
    return {
        name: rows[:, PLACES[name]].reshape(len(rows), *shape) for name, shape in SHAPES.items()
    }


SLOW = ("diloco by flags of the device", "pairs of three")
# What these combine, other cases have: a center with Nesterov's momentum ("pairs"), sums, fragments with
# a delay, with flags and with layers, and the largest entries. test_messages.py has few bits, and
# test_center.py the known params of one replica.
FURTHER = (
    "agn of one replica",
    "agn in fragments",
    "agn with a delay by flags",
    "agn of layers with a delay",
    "agn four bits",
    "agn largest in turn",
    "diloco with nesterov",
    "diloco sum",
    "diloco sum with a delay",
    "diloco sum of four bits",
    "diloco largest in turn",
    "three fragments",
    "a delay by flags",
    "largest",
    "four bits",
)


@pytest.mark.parametrize(
    "name", support.every_night(CASES, [*{*CASES}.difference(FURTHER)], slow=SLOW)
)
@pytest.mark.usefixtures("x64")
def test_steps_of_any_method_are_those_of_a_simulation(name):
    """Train weighted replicas on a quadratic, whose gradient is the params less a target."""
    case, rng = CASES[name], np.random.default_rng(0)
    start, targets = rng.normal(size=NUMBERS), rng.normal(size=(STEPS, case.size, NUMBERS))
    if case.bad is not None:
        targets[case.bad - 1, -1, 7] = np.nan
    start, weights = np.stack([start] * case.size), WEIGHTS[: case.size]
    simulated = case.simulate(start, weights, lambda rows, step: rows - targets[step - 1], STEPS)

    def evaluate(flag, params, batch):
        given = {"commit": batch.get("flag", flag), "weight": batch["weight"]}
        return jax.tree.map(jnp.subtract, params, batch["target"]), given

    params, compiled = unflat(start), {}
    opt_state = replicas.stack([case.tx.init(replicas.take(params, 0))] * case.size)
    for step, (wanted, center, missed) in enumerate(simulated, start=1):
        batch = {"target": unflat(targets[step - 1]), "weight": weights}
        flag = case.flags(step)
        if isinstance(flag, jax.Array):
            batch["flag"], flag = np.stack([flag] * case.size), None
        if flag not in compiled:
            one = loops.make_step(case.tx, functools.partial(evaluate, flag))
            compiled[flag] = replicas.MAPPINGS["vmap"](one, case.size)
        params, opt_state = compiled[flag](params, opt_state, batch)
        np.testing.assert_allclose(valley.flat(params), wanted, rtol=0, atol=case.atol)
        found = valley.flat(optperm.distributed.center_params(opt_state))
        np.testing.assert_allclose(found, center, rtol=0, atol=case.atol)
        assert opt_state.skipped.tolist() == missed.tolist()
        if "pairs" not in name:
            assert (found == found[:1]).all()
