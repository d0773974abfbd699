"""Kill training at random moments, resume it from checkpoints, and compare with an uninterrupted run.

SIGKILL ends a program that trains with `optperm.training.fit`, within a step, during a checkpoint or
while it starts. The program starts again with `resume=True`, until the given number of kills. At the end
its params, optimizer state and losses must equal the results of an uninterrupted run, bit for bit, and
its checkpoints must be whole.

    python benchmarks/kills.py --kills 40 --devices 4
"""

import argparse
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

STEPS_PER_EPOCH, PAUSE = 50, 0.2


def train(folder: pathlib.Path, devices: int, epochs: int, pause: float) -> None:
    """Trains, or goes on, until the end, and writes what came of it."""
    import jax  # noqa: PLC0415

    jax.config.update("jax_num_cpu_devices", devices)
    import numpy as np  # noqa: PLC0415
    import optax  # noqa: PLC0415

    import optperm  # noqa: PLC0415
    from optperm.training import TrainState, fit  # noqa: PLC0415

    rng = np.random.default_rng(0)
    x = rng.normal(size=(8 * STEPS_PER_EPOCH, 32)).astype(np.float32)
    data = {"x": x, "y": x @ rng.normal(size=(32, 4)).astype(np.float32)}
    shapes = {"hidden": (32, 64), "out": (64, 4)}
    params = {k: 0.1 * rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}

    def loss_fn(params: Any, batch: Any, *, rng: Any) -> Any:
        hidden = jax.nn.relu(batch["x"] @ params["hidden"])
        kept = jax.random.bernoulli(rng, 0.9, hidden.shape)
        return ((jax.numpy.where(kept, hidden, 0.0) @ params["out"] - batch["y"]) ** 2).mean()

    state = TrainState.create(
        apply_fn=None,  # type: ignore[arg-type]
        params=jax.tree.map(jax.numpy.asarray, params),
        tx=optax.chain(optperm.svrg(0.5), optax.adam(1e-3)),
        rng=jax.random.key(0),
    )
    print("begun", flush=True)
    result = fit(
        state,
        loss_fn,
        data,
        epochs=epochs,
        batch_size=8,
        mesh=jax.make_mesh((devices,), ("replica",)) if devices > 1 else None,
        epoch_start=optperm.variance.take_snapshot,
        every={5: lambda event: time.sleep(pause) if pause else None},
        checkpoints=folder / "kept",
        checkpoint_every=7,
        checkpoint_keep=3,
        resume=True,
    )
    assert result.state is not None
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result.state.replace(rng=None))]
    np.savez(folder / "result.npz", *leaves, loss=result.history.steps["loss"])


def run(folder: pathlib.Path, devices: int, epochs: int, *, kill_after: float | None) -> bool:
    """Starts the program; whether it came to its end before it was killed."""
    pause = 0.0 if kill_after is None else PAUSE
    command = [sys.executable, __file__, "--train", str(folder), "--devices", str(devices)]
    command += ["--epochs", str(epochs), "--pause", str(pause)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        program.stdout.readline()  # it has begun
        try:
            code = program.wait(kill_after)
        except subprocess.TimeoutExpired:
            program.kill()
            return False
    if code:
        raise SystemExit(f"the program ended with {code}")
    return True


def main() -> None:
    """Kills, goes on, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=40, help="of 50 steps")
    parser.add_argument("--seconds", type=float, default=6.0, help="that each life lasts at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--pause", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=pathlib.Path, help="a file for the figures, for the site")
    chosen = parser.parse_args()
    if chosen.train is not None:
        train(chosen.train, chosen.devices, chosen.epochs, chosen.pause)
        return
    import jax  # noqa: PLC0415
    import numpy as np  # noqa: PLC0415
    import orbax.checkpoint as ocp  # noqa: PLC0415
    import results  # noqa: PLC0415

    jax.config.update("jax_num_cpu_devices", chosen.devices)
    draw, came, kills = random.Random(chosen.seed), [], 0
    with tempfile.TemporaryDirectory() as name:
        killed, alone = pathlib.Path(name, "killed"), pathlib.Path(name, "alone")
        for folder in (killed, alone):
            folder.mkdir()
        run(alone, chosen.devices, chosen.epochs, kill_after=None)
        while kills < chosen.kills:
            after = draw.uniform(0.0, chosen.seconds)
            if run(killed, chosen.devices, chosen.epochs, kill_after=after):
                raise SystemExit("it came to its end: ask for more epochs")
            kills += 1
            kept = [int(p.name) for p in (killed / "kept").glob("*") if p.name.isdecimal()]
            came.append(max(kept, default=0))
        run(killed, chosen.devices, chosen.epochs, kill_after=None)
        with np.load(killed / "result.npz") as one, np.load(alone / "result.npz") as other:
            same = all(one[key].tobytes() == other[key].tobytes() for key in other.files)
            num_steps = other["loss"].size
        manager = ocp.CheckpointManager(killed / "kept")
        for step in manager.all_steps():  # each is whole
            items = {"state": ocp.args.StandardRestore(), "history": ocp.args.StandardRestore()}
            manager.restore(step, args=ocp.args.Composite(**items, run=ocp.args.JsonRestore()))
    print(f"{chosen.devices} devices: {kills} kills, after steps {came}")
    print(f"{num_steps} steps, the last checkpoints whole, the same bits: {same}")
    found = results.Results()
    cells = {"devices": chosen.devices, "kills": kills, "steps": num_steps, "same_bits": same}
    found.row("Training that was killed, beside one that was not", **cells)
    found.write(chosen.json)
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
