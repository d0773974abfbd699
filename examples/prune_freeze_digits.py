"""How much of a network does training need? Pruning and freezing an MLP on scikit-learn's digits.

After 200 steps of constant SGD a fraction p of each array is pruned (set to zero and held there) or
frozen (held as it is), then 3000 more steps follow: for all fractions at once, by `jax.vmap` over masks.

    python examples/prune_freeze_digits.py [--fractions 51] [--repeats 5]
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import optperm

SETS, BATCH, HIDDEN, KERNEL = ("train", "test"), 32, 32, jax.nn.initializers.lecun_normal()
PRUNE, FREEZE = ("magnitude", "random"), ("preconditioned_gradient", "gradient", "random")
NAMES = [*(f"prune, {c}" for c in PRUNE), *(f"freeze, {c}" for c in FREEZE)]
AXES = 0, (None, 0)  # Each network has params and masks of its own; they share H.


def load() -> list[tuple[jax.Array, jax.Array]]:
    """1257 examples to train on and 540 to test on: standardized pixels, and labels."""
    digits = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(*digits, test_size=0.3, random_state=42)
    used = x.std(axis=0) > 0
    scaled = ((a - x.mean(axis=0))[:, used] / x.std(axis=0)[used] for a in (x, x_test))
    return [(jnp.float32(x), jnp.int32(y)) for x, y in zip(scaled, (y, y_test), strict=True)]


def predict(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Logits, of one network or of an array of them."""
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def sweep(sets: Any, fractions: jax.Array, steps: list[int]) -> Any:
    """A function from a seed to accuracies (curves, fractions, train or test)."""
    x, y = sets[0]

    def loss_fn(params: dict[str, jax.Array], batch: Any) -> jax.Array:
        logits = predict(params, batch[0])
        prior = optax.tree.norm(params, squared=True) / (2 * len(x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean() + prior

    sampler = optperm.constant_sgd(len(x), BATCH, burn_in=0, max_step=0.25, freeze_after=steps[0])
    tx = optax.chain(sampler, optperm.mask_elements())

    def step(params: Any, opt_state: Any, chosen: jax.Array) -> Any:
        e = optperm.evaluate(loss_fn, params, (x[chosen], y[chosen]))
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    @jax.jit
    def run(seed: jax.Array) -> jax.Array:
        draw, key, *keys = jax.random.split(jax.random.key(seed), 4)
        params = {"w1": KERNEL(keys[0], (x.shape[1], HIDDEN)), "b1": jnp.zeros((1, HIDDEN))}
        params |= {"w2": KERNEL(keys[1], (HIDDEN, 10)), "b2": jnp.zeros((1, 10))}
        first, then = jnp.split(jax.random.randint(draw, (sum(steps), BATCH), 0, len(x)), steps[:1])
        carry = params, tx.init(params)
        (params, opt_state), _ = jax.lax.scan(lambda c, i: (step(*c, i), None), carry, first)
        full_grad = optperm.full_gradient(loss_fn, params, sets[:1])

        def masked(p: jax.Array) -> Any:
            pruned = [optperm.prune(params, opt_state, p, criterion=c, key=key) for c in PRUNE]
            by = {"scores": full_grad, "key": key}
            frozen = [(params, optperm.freeze(opt_state, p, criterion=c, **by)) for c in FREEZE]
            networks = [(own, mask) for own, (_, mask) in pruned + frozen]
            all_params, masks = jax.tree.map(lambda *leaves: jnp.stack(leaves), *networks)
            return all_params, (opt_state[0], masks)

        params, opt_state = jax.vmap(masked, out_axes=(1, (None, 1)))(fractions)
        move = jax.vmap(jax.vmap(lambda p, s, i: step(p, s, i)[0], (*AXES, None)), (*AXES, None))

        # Masks and H stay: no new state is kept.
        params, _ = jax.lax.scan(lambda p, i: (move(p, opt_state, i), None), params, then)
        return jnp.stack([(predict(params, x).argmax(-1) == y).mean(-1) for x, y in sets], axis=-1)

    return run


def main(argv: list[str] | None = None) -> np.ndarray:
    """Draws; returns accuracies (repeats, curves, fractions, train or test)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fractions", type=int, default=51, help="evenly spaced from 0 to 1")
    parser.add_argument("--repeats", type=int, default=5, help="each with a seed of its own")
    parser.add_argument("--steps", type=int, nargs=2, default=(200, 3000), help="before and after")
    parser.add_argument("--out", default="prune-freeze-digits.png")
    options = parser.parse_args(argv)
    p = np.linspace(0, 1, options.fractions)
    run = sweep(load(), jnp.float32(p), options.steps)
    found = np.stack([run(seed) for seed in range(options.repeats)])
    figure = Figure(figsize=(11, 4), layout="constrained")
    for index, axes in enumerate(figure.subplots(1, 2, sharey=True)):
        for curve, name in enumerate(NAMES):
            y, d = found[:, curve, :, index].mean(0), found[:, curve, :, index].std(0)
            axes.plot(p, y, label=name)
            axes.fill_between(p, y - d, y + d, alpha=0.2)
            print(f"{SETS[index]:5} {name:31}", *(f"{value:.3f}" for value in y[::5]))
        axes.set(xlabel="fraction p", title=SETS[index])
    axes.legend(loc="lower left")
    figure.savefig(options.out)
    return found


if __name__ == "__main__":
    main()
