"""What `worker.py` does with `fit`, in each of two processes."""

import itertools
import signal

import fitting
import jax
import numpy as np
import optax
import support

import optperm
from optperm import training


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
    ended = fit("agn", on_signal="return", every=end)
    assert (ended.ended, ended.step) == ("interrupted", 4)
    refuse_what_differs(index)
    resume_after_an_error_in_one_of_them(index, folder)


def refuse_what_differs(index):
    """In all processes, before the first step if it can be known then."""
    state = fitting.linen_state(fitting.method("agn", "replica"))
    params = jax.tree.map(lambda p: p + 1e-6 * int(index), state.params)
    moved = {name: np.roll(leaf, int(index), axis=0) for name, leaf in fitting.data().items()}
    on = fitting.on(2, mapped=True)
    usual = {"epochs": 2, "batch_size": fitting.BATCH, **on}
    for name, start, data, options in [
        ("key", state, fitting.data(), {"key": int(index)}),
        ("the digest of params", state.replace(params=params), fitting.data(), {}),
        ("the digest of train_data", state, moved, {}),
        ("batch_size", state, fitting.data(), {"batch_size": 8 + 4 * int(index)}),
    ]:
        says = refusal(ValueError, start, data, **{**usual, **options})
        assert f"not the same in all processes: {name}" in says, says

    def smaller(epoch):
        for count, batch in enumerate(part(epoch)):
            few = 2 if count == 3 and index == "1" else 4
            yield {name: leaf[:few] for name, leaf in batch.items()}

    for data, why in [
        ([] if index == "1" else list(part(1)), "the number of batches [5, 0]"),
        (
            lambda epoch: itertools.islice(part(epoch), 2 + 3 * int(index)),
            "no more batches in the processes [0], but one in the others",
        ),
        (smaller, "[4, 2] examples in the processes"),
    ]:
        says = refusal(ValueError, state, data, epochs=1, **on)
        assert why in says, says
    empty = jax.tree.map(lambda leaf: leaf[:0], fitting.data())
    data = empty if index == "1" else fitting.data()
    says = refusal((ValueError, RuntimeError), state, data, **usual)
    assert ("examples" if index == "1" else "Another process has failed") in says, says
    odd = [jax.tree.map(lambda leaf: leaf[:3], batch) for batch in part(1)]
    says = refusal(ValueError, fitting.linen_state(fitting.method("adam")), odd, epochs=1)
    assert "3 examples in each of 2 processes, which 4 devices cannot" in says, says
    # The exchanges of one method would wait for those of another.
    local = optperm.diloco(optax.sgd(0.1), every=2 + int(index), axis_name="replica")
    for tx, options in ((local, on), (optax.sgd(0.1 + int(index)), {})):
        says = refusal(ValueError, fitting.linen_state(tx), part, epochs=1, **options)
        assert "compiled different programs" in says, says


def resume_after_an_error_in_one_of_them(index, folder):
    """What they had trained by then is kept. Without a mesh they train on all devices."""

    def failing(epoch):
        yield from itertools.islice(part(epoch), 2)
        if index == "1":
            raise OSError("no such file")
        yield from part(epoch)

    state = fitting.linen_state(fitting.method("agn", "replica"))
    options = {"checkpoints": folder / "failed", "epochs": 1, "axis_name": "replica"}
    says = refusal(OSError if index == "1" else RuntimeError, state, failing, **options)
    assert ("no such file" if index == "1" else "Another process could not load") in says, says
    gone_on = training.fit(state, fitting.linen_loss, part, resume=True, **options)
    on_mesh = fitting.on(2, mapped=True)
    whole = training.fit(state, fitting.linen_loss, part, epochs=1, **on_mesh)
    support.assert_same_bits(fitting.arrays(gone_on), fitting.arrays(whole))


def refusal(kind, state, data, **options):
    """What `fit` says when it refuses."""
    try:
        training.fit(state, fitting.linen_loss, data, **options)
    except kind as error:
        return str(error)
    return ""
