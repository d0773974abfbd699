"""Jobs in Ray that come and go: one is three times slower, one is killed, and one joins late.

`python elastic.py` needs `pip install 'optperm[elastic]'`, and ends by itself within two minutes. The
seed is an argument, and `python elastic.py 0 calm` runs four equal jobs without accidents.
"""

import os
import signal
import sys
import time

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import optperm
from optperm.distributed import contribution, init_center, merge, pull

try:
    import ray
except ImportError:
    sys.exit("elastic.py needs Ray: pip install 'optperm[elastic]'")

x, y = load_digits(return_X_y=True)
x, y, outer = np.float32(x / 16), np.int32(y), optax.sgd(0.7)
tx = optperm.diloco(optax.adam(1e-3), outer, every=20)
seed, seconds, is_calm = int((*sys.argv[1:], 0)[0]), 20, "calm" in sys.argv
draw = np.random.default_rng(seed).normal
params = {"w": np.float32(draw(size=(64, 64)) / 8), "v": np.float32(draw(size=(64, 10)) / 8)}


def loss_fn(params, x, y):
    """Return the mean cross-entropy."""
    logits = jax.nn.relu(x @ params["w"]) @ params["v"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


class Server:
    """The center, which merges each message when it arrives."""

    def __init__(self):
        """Begin with the params of all jobs, and compile a merge."""
        self.center, self.stale = init_center(params, outer), []
        message = contribution(params, tx.init(params))[0]
        merge(self.center, [message._replace(weight=np.float32(1))], outer, combine="sum")

    def start(self):
        """Start the clock."""
        self.end = time.time() + seconds

    def exchange(self, message=None):
        """Return the center after a message, or None at the end."""
        if message is not None:
            self.stale.append(int(self.center.version - message.version))
            message = message._replace(weight=message.weight / np.sqrt(1 + self.stale[-1]))
            self.center = merge(self.center, [message], outer, combine="sum")
        return jax.device_get(self.center) if time.time() < self.end else None

    def report(self):
        """Return the test loss, and the staleness of each commit."""
        return float(loss_fn(self.center.params, x[1257:], y[1257:])), self.stale


class Job:
    """A job, which trains until the end: local steps, a message, and a pull."""

    def __init__(self, server, name, sleep):
        """Compile the local steps."""
        self.server, self.sleep, self.opt_state = server, sleep, tx.init(params)
        self.rng = np.random.default_rng([seed, name])
        self.take_period(init_center(params, outer))

    def pid(self):
        """Return the process, when the job is ready."""
        return os.getpid()

    def run(self):
        """Train until the center has no more time; return the number of messages."""
        number, center = 0, ray.get(self.server.exchange.remote())
        while center is not None:
            message = self.take_period(center)
            center = ray.get(self.server.exchange.remote(message))
            number += 1
        return number

    def take_period(self, center):
        """Pull the center, and return the message of the local steps from there."""
        p, self.opt_state = pull(params, self.opt_state, center)
        rows = self.rng.integers(0, 1257, (20, 16))
        p, self.opt_state = train(p, self.opt_state, (x[rows], y[rows]))
        time.sleep(20 * self.sleep)  # a stand-in for a larger model
        message, self.opt_state = contribution(p, self.opt_state)
        return jax.device_get(message)


@jax.jit
def train(params, opt_state, batches):
    """Take a local step with each batch, without a commit."""

    def step(carry, batch):
        params, opt_state = carry
        grads = jax.grad(loss_fn)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params, commit=False)
        return (optperm.apply_updates(params, updates, opt_state), opt_state), None

    return jax.lax.scan(step, (params, opt_state), batches)[0]


if __name__ == "__main__":
    ray.init(num_cpus=6, include_dashboard=False, log_to_driver=False)
    server, sleeps = ray.remote(Server).remote(), [0.01] * 5
    if not is_calm:
        sleeps[3] = 0.03
    jobs = [ray.remote(Job).remote(server, i, sleep) for i, sleep in enumerate(sleeps)]
    pids = ray.get([job.pid.remote() for job in jobs])  # all are ready
    ray.get(server.start.remote())
    runs = [job.run.remote() for job in jobs[:4]]
    if not is_calm:
        time.sleep(seconds / 3)
        runs.append(jobs[4].run.remote())
        time.sleep(seconds / 6)
        os.kill(pids[0], signal.SIGKILL)
    ray.wait(runs, num_returns=len(runs))  # a job that was killed is ready, too
    sent = ray.get(runs if is_calm else runs[1:])
    loss, stale = ray.get(server.report.remote())
    ray.shutdown()
    print(f"loss {loss:.3f} commits {len(stale)} staleness {np.mean(stale):.2f} messages {sent}")
