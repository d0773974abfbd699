"""How much of a network needs training? Pruning and freezing an MLP on scikit-learn's digits.

After 200 steps of constant SGD a fraction p of each array is pruned (zero from then on) or frozen, and
3000 more steps follow, for all fractions at once, with `jax.vmap` over masks. With `--legacy` the loss
applies a second softmax, and N is the number of params, as in the first version of the experiment.

    python benchmarks/prune_freeze_sweep.py [--fractions 51] [--repeats 5] [--legacy]
"""

import argparse

import digits
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib import figure, style

import optperm
from optperm.sparsity import freeze, prune

SETS, BATCH, KERNEL = ("train", "test"), 32, jax.nn.initializers.lecun_normal()
PRUNE, FREEZE = ("magnitude", "random"), ("preconditioned_gradient", "gradient", "random")
NAMES = [*(f"prune {c}" for c in PRUNE), *(f"freeze {c}" for c in FREEZE)]


def predict(params: dict, x: jax.Array) -> jax.Array:
    """Logits, of one network or of an array of them."""
    w1, b1, w2, b2 = (params[name] for name in ("w1", "b1", "w2", "b2"))
    return jnp.tanh(x @ w1 + b1[..., None, :]) @ w2 + b2[..., None, :]


def sweep(sets: list, p: np.ndarray, steps: list, hidden: int, *, legacy: bool) -> object:
    """From a seed to accuracies (curves, fractions, sets). But for `legacy` all networks share H."""
    (x, y), fractions = sets[0], jnp.asarray(p, jnp.float32)
    size, chosen = len(x), {"max_step": 0.25, "freeze_after": steps[0]}
    if legacy:  # Its estimate of the noise began with random numbers, and its steps had no limit.
        chosen = {"learning_rate": 0.01, "estimator": "single_example", "max_step": jnp.inf}
        size = (x.shape[1] + 1) * hidden + (hidden + 1) * 10
    sampler = optperm.mandt_sgd(size, BATCH, burn_in=0, **chosen)
    tx = optax.chain(sampler, optperm.mask_elements())

    def loss_fn(params: dict, batch: tuple) -> jax.Array:
        logits = predict(params, batch[0])
        loss = digits.cross_entropy(jax.nn.softmax(logits) if legacy else logits, batch[1])
        return loss if legacy else loss + optax.tree.norm(params, squared=True) / (2 * len(x))

    def step(params: dict, state: tuple, chosen: jax.Array) -> tuple:
        (batch, rows), (apart, row) = ((x[i], y[i]) for i in (chosen[:-1], chosen[-1:]))
        e = optperm.evaluate(loss_fn, params, (batch, rows), example=(apart, row))
        updates, state = tx.update(e.grad, state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, state), state

    def run(seed: jax.Array) -> jax.Array:
        init, first, order, then, noise = jax.random.split(jax.random.key(seed), 5)
        w1, _, w2, _ = jax.random.split(init, 4)
        params = {"w1": KERNEL(w1, (x.shape[1], hidden)), "b1": jnp.zeros(hidden)}
        params |= {"w2": KERNEL(w2, (hidden, 10)), "b2": jnp.zeros(10)}
        state = tx.init(params)
        if legacy:
            random = optax.tree.random_like(noise, params, lambda *a: 0.05 * jax.random.uniform(*a))
            state = optax.tree.set(state, estimates=jnp.int32(1), covariance=random)
        keys = zip((first, then), steps, strict=True)
        first, then = (jax.random.randint(k, (n, BATCH + 1), 0, len(x)) for k, n in keys)
        (params, state), _ = jax.lax.scan(lambda c, i: (step(*c, i), None), (params, state), first)
        of_each = {"scope": "leaf", "include": True, "key": order}
        by = {"scores": optperm.variance.full_gradient(loss_fn, params, sets[:1]), **of_each}

        def masked(p: jax.Array) -> tuple:
            found = [prune(params, state, p, criterion=c, **of_each) for c in PRUNE]
            found += [(params, freeze(state, p, criterion=c, **by)) for c in FREEZE]
            return jax.tree.map(lambda *x: jnp.stack(x), *((own, mask) for own, (_, mask) in found))

        nets, masks = jax.vmap(masked, out_axes=1)(fractions)
        many, axes = ((5, len(p)), (0, 0, None)) if legacy else ((), (0, (None, 0), None))
        own = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (*many, *leaf.shape)), state[0])

        def all_move(carry: tuple, chosen: jax.Array) -> tuple:
            move = jax.vmap(jax.vmap(step, axes), axes)
            nets, (new, _) = move(carry[0], (carry[1], masks), chosen)
            return (nets, new if legacy else own), None

        (nets, _), _ = jax.lax.scan(all_move, (nets, own), then)
        return jnp.stack([(predict(nets, x).argmax(-1) == y).mean(-1) for x, y in sets], axis=-1)

    return jax.jit(run)


@style.context("optperm.pictures")
def main(argv: list[str] | None = None) -> np.ndarray:
    """Draws; returns accuracies (repeats, curves, fractions, train or test)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="prune-freeze-sweep.png", help="the file for the picture")
    parser.add_argument("--fractions", type=int, default=51, help="how many fractions from 0 to 1")
    parser.add_argument("--repeats", type=int, default=5, help="networks to average")
    parser.add_argument("--hidden", type=int, default=32, help="hidden units")
    parser.add_argument("--steps", type=int, default=(200, 3000), help="before and after", nargs=2)
    parser.add_argument("--legacy", action="store_true", help="as it was first made")
    options, (train, test) = parser.parse_args(argv), digits.load()
    p, used = np.linspace(0, 1, options.fractions), np.ptp(train[0], axis=0) > 0
    sets = [(jnp.asarray(x[:, used]), jnp.asarray(y)) for x, y in (train, test)]
    run = sweep(sets, p, options.steps, options.hidden, legacy=options.legacy)
    found = np.stack([run(seed) for seed in range(options.repeats)])
    shown = sorted({int(np.abs(p - q).argmin()) for q in (0, 0.4, 0.6, 0.8, 0.9, 0.96, 1)})
    for name, row in zip(["test accuracy, p =", *NAMES], [p, *found[..., 1].mean(0)], strict=True):
        print(f"{name:31}", *(f"{row[index]:.3f}" for index in shown))
    picture = figure.Figure(figsize=(6, 4))
    picture.suptitle(f"mean of {options.repeats} networks; bands: one standard deviation")
    for index, axes in enumerate(picture.subplots(1, 2, sharey=True)):
        curves = zip(found[..., index].mean(0), found[..., index].std(0), strict=True)
        for number, (y, d) in enumerate(curves):
            axes.plot(p, y, "--" if number < len(PRUNE) else "-")
            axes.fill_between(p, y - d, y + d, alpha=0.2)
        axes.set(xlabel="fraction pruned, frozen", xlim=(0.4, 1), ylabel=f"{SETS[index]} accuracy")
    picture.legend(axes.lines, NAMES, loc="outside lower center", ncols=2)
    picture.savefig(options.out)
    return found


if __name__ == "__main__":
    main()
