"""The training step of the tests, and the loop around it: plain, compiled, scanned or mapped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import replicas

import optperm


def linear_loss(params, batch):
    """Return a loss linear in the params, with another pull at each example and each entry."""
    total = jnp.mean(batch)
    rng = np.random.default_rng(17)
    pulls = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(p.dtype), params)
    parts = jax.tree.map(lambda p, g: jnp.sum(p * g).astype(jnp.float32), params, pulls)
    return sum(jax.tree.leaves(parts), start=jnp.float32(0.0)) * total


def full_gradient(params):
    """Return the gradient of that loss over all examples, which are five.

    It is one of the leaves that a wrapper shows, as this loss is a sum over leaves.
    """
    return jax.grad(linear_loss)(params, jnp.arange(5.0))


def linear(params, batch):
    """Return the gradient of that loss, with everything a method may ask for."""
    e = optperm.evaluate(linear_loss, params, batch)
    return e.grad, {"full_grad_fn": full_gradient, **e.extra_args}


def linear_batches(steps, first=0):
    """Return for each step two examples, other ones each time."""
    return [jnp.full((2,), 1.0 + index) for index in range(first, first + steps)]


def given(params, batch):
    """Evaluate for batches that are the gradients themselves."""
    del params
    return batch, {}


def gradient(loss_fn):
    """Evaluate the gradient of a loss, and nothing else that a method may ask for."""
    return lambda params, batch: (jax.grad(loss_fn)(params, batch), {})


def evaluation(loss_fn, **options):
    """Evaluate the gradient of a loss, and all that a method may ask for, with these options."""

    def evaluate(params, batch):
        e = optperm.evaluate(loss_fn, params, batch, **options)
        return e.grad, e.extra_args

    return evaluate


def by_addition(params, updates, opt_state):
    """Call `optax.apply_updates`, for a step that places and holds nothing."""
    del opt_state
    return optax.apply_updates(params, updates)


def make_step(tx, evaluate=given, apply=optperm.apply_updates):
    """Return a training step: from params, optimizer state and a batch to the next params and state.

    `evaluate` goes from params and a batch to a gradient and extra arguments, and `apply` from params,
    updates and the new state to the new params.
    """

    def step(params, opt_state, batch):
        grads, extra_args = evaluate(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params, **extra_args)
        return apply(params, updates, opt_state), opt_state

    return step


@functools.lru_cache(maxsize=64)  # each test that comes back to a step finds it here
def compiled(tx, evaluate=given, apply=optperm.apply_updates):
    """Return the same step under `jax.jit`; for the same arguments the same compiled function."""
    return jax.jit(make_step(tx, evaluate, apply))


def carry(step, params, opt_state, batches):
    """Return params and state after stacked batches, by one scan; for use in a compiled function."""
    start = params, opt_state
    return jax.lax.scan(lambda each, batch: (step(*each, batch), None), start, batches)[0]


def train(tx, params, batches, *, how="jit", size=None, opt_state=None, init="eager", **options):
    """Train, and return the params and the optimizer state after each step.

    Args:
      tx: The transformation.
      params: The initial params.
      batches: One for each step; under a mapping those of all replicas, stacked, as are the results.
      how: "eager", "jit", "scan" (one compiled scan, with results in NumPy), or of `replicas.MAPPINGS`.
      size: The number of replicas under a mapping, which all begin with these params.
      opt_state: A state to go on from, under a mapping stacked as the params are then.
      init: "eager", or "jit" where `init` computes: two dozen programs otherwise, for each shape. A
        scan has it in its own program then.
      options: The step's `evaluate` and `apply`, as in `make_step`.
    """
    is_scanned_whole = how == "scan" and opt_state is None and size is None and init == "jit"
    if opt_state is None and not is_scanned_whole:
        opt_state = jax.jit(tx.init)(params) if init == "jit" else tx.init(params)
        if size is not None:
            params, opt_state = (replicas.stack([tree] * size) for tree in (params, opt_state))
    step = compiled(tx, **options) if how == "jit" else make_step(tx, **options)
    if how == "scan":

        def body(carried, batch):
            carried = step(*carried, batch)
            return carried, carried

        @jax.jit
        def run(params, opt_state, batches):
            start = params, tx.init(params) if is_scanned_whole else opt_state
            return jax.lax.scan(body, start, batches)[1]

        # In NumPy, since each index of each leaf would be a program of JAX.
        trail = jax.device_get(run(params, opt_state, replicas.stack(batches)))
        return [replicas.take(trail, index) for index in range(len(batches))]
    if how not in ("eager", "jit"):
        step = replicas.MAPPINGS[how](step, size)
    trail = []
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
        trail.append((params, opt_state))
    return trail
