"""What `worker.py` does with `fit`, in each of two processes."""

import itertools
import re
import signal
import unittest.mock

import fitting
import jax
import numpy as np
import optax
import pytest
import support

import optperm
from optperm import training
from optperm.training import _checkpoints as checkpoints
from optperm.training import _processes as processes


def part(epoch):
    """Of each batch what this process brings: as the arrays are dealt out."""
    for batch in fitting.batches(epoch):
        halves = {name: np.split(leaf, 2) for name, leaf in batch.items()}
        yield {name: parts[jax.process_index()] for name, parts in halves.items()}


def fit(name, **options):
    return fitting.fit("linen", name, epochs=2, devices=2, **options)


def main(index, folder):
    svrg, agn = fit("svrg"), fit("agn")
    for name, result in (("svrg", svrg), ("agn", agn)):
        np.savez(folder / f"fit-{name}-{index}", loss=result.history.steps["loss"])
    where = {"checkpoints": folder / "agn", "checkpoint_every": 3}
    fit("agn", steps=4, **where)
    resumed = fit("agn", resume=3, **where)
    support.assert_same_bits(fitting.arrays(resumed), fitting.arrays(agn))
    streamed = fit("agn", train_data=part).history.steps["loss"]
    np.testing.assert_allclose(streamed, agn.history.steps["loss"], rtol=1e-5)
    # A callback or a signal in one of them stops all.
    stop = {2: lambda event: index == "1"}
    stopped = fit("agn", every=stop)
    assert (stopped.ended, stopped.step) == ("stopped", 2)
    end = {4: lambda event: signal.raise_signal(signal.SIGTERM) if index == "1" else None}
    where = {"checkpoints": folder / "ended", "on_signal": "return"}
    ended = fit("agn", every=end, **where)
    assert (ended.ended, ended.step) == ("interrupted", 4)
    refuse_what_differs(index)
    refuse_folders_that_are_not_shared(index, folder)
    meet_rarely()
    resume_after_an_error_in_one_of_them(index, folder)


def refuses(error, says, state, data, **options):
    """Assert that `fit` refuses something, and what it says."""
    with pytest.raises(error, match=re.escape(says)):
        training.fit(state, fitting.linen_loss, data, **fitting.arguments(options))


def refuse_what_differs(index):
    """In all processes, before the first step if it can be known then."""
    state, shift = fitting.linen_state(fitting.method("agn", "replica")), int(index)
    params = jax.tree.map(lambda p: p + 1e-6 * shift, state.params)
    moved = {name: np.roll(leaf, shift, axis=0) for name, leaf in fitting.DATA.items()}
    on = fitting.on(2, mapped=True)
    usual = {"epochs": 2, "batch_size": fitting.BATCH, **on}
    for name, start, data, options in [
        ("key", state, fitting.DATA, {"key": shift}),
        ("the digest of params", state.replace(params=params), fitting.DATA, {}),
        ("the digest of data", state, moved, {}),
        ("batch_size", state, fitting.DATA, {"batch_size": 8 + 4 * shift}),
    ]:
        says = f"not the same in all processes: {name}"
        refuses(ValueError, says, start, data, **{**usual, **options})

    def smaller(epoch):
        for count, batch in enumerate(part(epoch)):
            few = 2 if count == 3 and index == "1" else 4
            yield {name: leaf[:few] for name, leaf in batch.items()}

    for data, says in [
        ([] if index == "1" else list(part(1)), "the number of batches [5, 0]"),
        (
            lambda epoch: itertools.islice(part(epoch), 2 + 3 * shift),
            "no more batches in the processes [0], but one in the others",
        ),
        (smaller, "[4, 2] examples in the processes"),
    ]:
        refuses(ValueError, says, state, data, epochs=1, **on)
    if index == "1":
        empty = jax.tree.map(lambda leaf: leaf[:0], fitting.DATA)
        refuses(ValueError, "examples", state, empty, **usual)
    else:
        says = "Another process has failed"
        refuses((ValueError, RuntimeError), says, state, fitting.DATA, **usual)
    says = "3 examples in each of 2 processes, which 4 devices cannot"
    odd = [jax.tree.map(lambda leaf: leaf[:3], batch) for batch in part(1)]
    refuses(ValueError, says, fitting.linen_state(fitting.method("adam")), odd, epochs=1)
    # The exchanges of two methods would wait for each other.
    local = optperm.diloco(optax.sgd(0.1), every=2 + shift, axis_name="replica")
    for tx, options in ((local, on), (optax.sgd(0.1 + shift), {})):
        says, start = "compiled different programs", fitting.linen_state(tx)
        refuses(ValueError, says, start, part, epochs=1, **options)


def refuse_folders_that_are_not_shared(index, folder):
    """Before the first step, in all processes, where one would else wait for the other for minutes."""
    state, options = (
        fitting.linen_state(fitting.method("agn", "replica")),
        fitting.on(2, mapped=True),
    )
    options |= {"epochs": 1}
    own, says = folder / f"own-{index}", "Process 0 does not see what process 1 writes to"
    with unittest.mock.patch.object(checkpoints, "_PATIENCE", 0.5):
        refuses(training.CheckpointError, says, state, part, checkpoints=own, **options)
    assert not list(own.iterdir())
    is_one = index == "1"
    for given in (
        {"checkpoints": folder / "shared", "resume": is_one},
        {"checkpoints": folder / "shared" if is_one else None},
        {"every": {2 + is_one: print}},
    ):
        name = "callbacks" if "every" in given else "checkpoints"
        refuses(ValueError, f"in all processes: {name}", state, part, **given, **options)


def meet_rarely():
    """The number of exchanges follows from the number of calls of compiled steps, not of steps."""
    state, options = (
        fitting.linen_state(fitting.method("agn", "replica")),
        fitting.on(2, mapped=True),
    )

    def count(num_batches):
        data = [
            batch for batch, _ in zip(itertools.cycle(part(1)), range(num_batches), strict=False)
        ]
        with unittest.mock.patch.object(processes, "gather", wraps=processes.gather) as gather:
            training.fit(state, fitting.linen_loss, lambda _: iter(data), epochs=1, **options)
        return gather.call_count

    assert count(60) == count(20) <= count(5) + 1


def resume_after_an_error_in_one_of_them(index, folder):
    """What they had trained by then is kept. Without a mesh they train on all devices."""

    def failing(epoch):
        yield from itertools.islice(part(epoch), 2)
        if index == "1":
            raise OSError("no such file")
        yield from part(epoch)

    state = fitting.linen_state(fitting.method("agn", "replica"))
    options = {"checkpoints": folder / "failed", "epochs": 1, "axis_name": "replica"}
    own, other = (OSError, "no such file"), (RuntimeError, "Another process could not load")
    refuses(*(own if index == "1" else other), state, failing, **options)
    given = fitting.arguments(options | {"resume": True})
    gone_on = training.fit(state, fitting.linen_loss, part, **given)
    on_mesh = fitting.on(2, mapped=True)
    whole = training.fit(state, fitting.linen_loss, part, epochs=1, **on_mesh)
    support.assert_same_bits(fitting.arrays(gone_on), fitting.arrays(whole))
