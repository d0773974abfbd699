"""What `worker.py` does with `fit`, in each of two processes."""

import itertools
import signal

import fitting
import jax
import numpy as np
import support

from optperm import training


def part(epoch):
    """Of each batch what this process brings: as the arrays are dealt out."""
    for batch in fitting.batches(epoch):
        halves = {name: np.split(leaf, 2) for name, leaf in batch.items()}
        yield {name: parts[jax.process_index()] for name, parts in halves.items()}


def main(index, folder):
    svrg = fitting.fit("linen", "svrg", epochs=2, devices=2)
    where = {"checkpoints": folder / "agn", "checkpoint_every": 3}
    whole = fitting.fit("linen", "agn", epochs=2, devices=2)
    fitting.fit("linen", "agn", steps=4, devices=2, **where)
    resumed = fitting.fit("linen", "agn", epochs=2, devices=2, resume=3, **where)
    support.assert_same_bits(fitting.arrays(resumed), fitting.arrays(whole))
    for name, result in (("svrg", svrg), ("agn", whole)):
        np.savez(folder / f"fit-{name}-{index}", loss=result.history.steps["loss"])
    streamed = fitting.fit("linen", "agn", epochs=2, devices=2, train_data=part)
    np.testing.assert_allclose(
        streamed.history.steps["loss"], whole.history.steps["loss"], rtol=1e-5
    )
    # A callback in one of them stops all.
    stopped = fitting.fit(
        "linen",
        "agn",
        epochs=2,
        devices=2,
        every={1: lambda event: event.step == 2 and index == "1"},
    )
    assert (stopped.ended, stopped.step) == ("stopped", 2)
    mistakes(index, folder)


def mistakes(index, folder):
    """What differs between processes is named in all of them, before the first step."""
    moved = {name: np.roll(leaf, int(index), axis=0) for name, leaf in fitting.data().items()}
    state = fitting.linen_state(fitting.method("agn", "replica"))
    other = state.replace(params=jax.tree.map(lambda p: p + 1e-6 * int(index), state.params))
    cases = {
        "key": (state, fitting.data(), {"key": int(index)}),
        "the digest of params": (other, fitting.data(), {}),
        "the digest of train_data": (state, moved, {}),
        "batch_size": (state, fitting.data(), {"batch_size": 8 + 4 * int(index)}),
    }
    on = fitting.on(2, mapped=True)
    usual = {"epochs": 2, "batch_size": fitting.BATCH, **on}
    for name, (start, data, options) in cases.items():
        says = refusal(ValueError, start, data, **{**usual, **options})
        assert f"not the same in all processes: {name}" in says, says

    def unequal(epoch):
        for count, batch in enumerate(part(epoch)):
            few = 2 if count == 3 and index == "1" else 4
            yield {name: leaf[:few] for name, leaf in batch.items()}

    # A process without data, with data that it cannot read, or with parts that devices cannot share.
    few = [] if index == "1" else list(part(1))
    says = refusal(ValueError, state, few, epochs=1, **on)
    assert "the number of batches [5, 0]" in says, says
    none = (lambda _: []) if index == "1" else part
    says = refusal(ValueError, state, none, epochs=1, **on)
    assert "no further batch in the processes [1], but one in the others" in says, says
    fewer = (lambda epoch: itertools.islice(part(epoch), 2)) if index == "0" else part
    says = refusal(ValueError, state, fewer, epochs=1, **on)
    assert "no further batch in the processes [0], but one in the others" in says, says
    nothing = (
        jax.tree.map(lambda leaf: leaf[:0], fitting.data()) if index == "1" else fitting.data()
    )
    says = refusal((ValueError, TypeError, RuntimeError), state, nothing, **usual)
    assert ("examples" if index == "1" else "Another process has failed") in says, says
    odd = [jax.tree.map(lambda leaf: leaf[:3], batch) for batch in part(1)]
    plain = fitting.linen_state(fitting.method("adam"))
    says = refusal(ValueError, plain, odd, epochs=1)
    assert "3 examples in each of 2 processes, which 4 devices do not" in says, says
    # Without a mesh they train on all devices of all processes.
    by_default = training.fit(state, fitting.linen_loss, part, epochs=1, axis_name="replica")
    on_mesh = training.fit(state, fitting.linen_loss, part, epochs=1, **on)
    support.assert_same_bits(fitting.arrays(by_default), fitting.arrays(on_mesh))

    says = refusal(ValueError, state, unequal, epochs=1, **on)
    assert "[4, 2] examples in the processes" in says, says

    def failing(epoch):
        yield from itertools.islice(part(epoch), 2)
        if index == "1":
            raise OSError("no such file")
        yield from part(epoch)

    where = {"checkpoints": folder / "failed", "epochs": 1, **on}
    kind = OSError if index == "1" else RuntimeError
    says = refusal(kind, state, failing, **where)
    assert ("no such file" if index == "1" else "another process") in says, says
    # What they had trained by then is kept, and gone on with.
    gone_on = training.fit(state, fitting.linen_loss, part, resume=True, **where)
    whole = training.fit(state, fitting.linen_loss, part, epochs=1, **on)
    support.assert_same_bits(fitting.arrays(gone_on), fitting.arrays(whole))
    # A signal to one of them ends all.
    ended = training.fit(
        state,
        fitting.linen_loss,
        fitting.data(),
        epochs=2,
        batch_size=fitting.BATCH,
        **on,
        on_signal="return",
        every={4: lambda event: signal.raise_signal(signal.SIGTERM) if index == "1" else None},
    )
    assert (ended.ended, ended.step) == ("interrupted", 4)


def refusal(kind, state, data, **options):
    """What `fit` says when it refuses."""
    try:
        training.fit(state, fitting.linen_loss, data, **options)
    except kind as error:
        return str(error)
    return ""
