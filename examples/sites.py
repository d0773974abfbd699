"""Jobs over files: `python sites.py FOLDER center SECONDS`, and `python sites.py FOLDER NAME SLEEP`."""

import os
import pathlib
import sys
import time
import zipfile
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import optperm
from optperm.distributed import contribution, init_center, merge, pull

EVERY, BATCH, TRAIN, SEED = 20, 16, 1257, int(os.environ.get("SEED", "0"))
x, y = load_digits(return_X_y=True)
x, y = np.float32(x / 16), np.int32(y)
outer = optax.sgd(0.7)  # without momentum
tx = optperm.diloco(optax.adam(1e-3), outer, every=EVERY)
k1, k2 = jax.random.split(jax.random.key(SEED))
params = {
    "w0": jax.random.normal(k1, (64, 64)) / 8,
    "b0": jnp.zeros(64),
    "w1": jax.random.normal(k2, (64, 10)) / 8,
    "b1": jnp.zeros(10),
}
opt_state, center = tx.init(params), init_center(params, outer)
template, _ = contribution(params, opt_state)


def loss_fn(params, x, y):
    """Return the mean cross-entropy."""
    hidden = jax.nn.relu(x @ params["w0"] + params["b0"])
    logits = hidden @ params["w1"] + params["b1"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def train(params, opt_state, rows):
    """Take a local step for each row of examples."""

    def step(carry, row):
        params, opt_state = carry
        grads = jax.grad(loss_fn)(params, jnp.asarray(x)[row], jnp.asarray(y)[row])
        updates, opt_state = tx.update(grads, opt_state, params, commit=False)
        return (optperm.apply_updates(params, updates, opt_state), opt_state), None

    return jax.lax.scan(step, (params, opt_state), rows)[0]


def write(path, tree):
    """Write arrays to a new file and rename it, so that readers never see a part of a file."""
    new = path.with_suffix(f".{os.getpid()}")
    with new.open("wb") as file:
        np.savez(file, *jax.device_get(jax.tree.leaves(tree)))
    new.rename(path)


def read(path, like):
    """Read arrays into a tree; pickles are not allowed."""
    with np.load(path, allow_pickle=False) as file:
        leaves = list(file.values())
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def serve(folder, center, seconds):
    """Merge each message when it arrives, until some seconds after the first message."""
    if (folder / "center.npz").exists():
        center = read(folder / "center.npz", like=center)  # of a center that has died
    write(folder / "center.npz", center)
    steps, stale, end = Counter(), [], float("inf")
    while time.monotonic() < end:
        for path in sorted(folder.glob("message-*.npz")):
            try:
                message = read(path, like=template)
                age = max(0, int(center.version - message.version))
                message = message._replace(weight=message.weight / np.sqrt(1 + age))
                center = merge(center, [message], outer, combine="sum")
            except (EOFError, TypeError, ValueError, zipfile.BadZipFile) as error:
                print("left out", path.name, error, flush=True)
            else:
                write(folder / "center.npz", center)
                end = min(end, time.monotonic() + seconds)
                steps[path.stem.split("-")[1]] += int(message.steps)
                stale.append(age)
            path.unlink()
        time.sleep(0.005)
    (folder / "end").touch()
    loss = loss_fn(center.params, x[TRAIN:], y[TRAIN:])
    print(f"loss {loss:.3f} commits {len(stale)} staleness {np.mean(stale):.2f} steps", dict(steps))


def work(folder, name, sleep, params, opt_state):
    """Train, send a message, wait a second at most until it is merged, and pull."""
    rng = np.random.default_rng([SEED, *name.encode()])
    while not (folder / "end").exists():
        if (folder / "center.npz").exists():
            newest = read(folder / "center.npz", like=center)
            params, opt_state = pull(params, opt_state, newest)
            params, opt_state = train(params, opt_state, rng.integers(0, TRAIN, (EVERY, BATCH)))
            time.sleep(EVERY * sleep)  # a stand-in for a larger model
            message, opt_state = contribution(params, opt_state)
            path = folder / f"message-{name}-{time.time_ns()}.npz"
            write(path, message)
            for _ in range(100):
                if path.exists():
                    time.sleep(0.01)


if __name__ == "__main__":
    folder, name, number = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    if name == "center":
        serve(folder, center, number)
    else:
        work(folder, name, number, params, opt_state)
