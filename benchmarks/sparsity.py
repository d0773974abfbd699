"""Accuracy, loss and use of sparse networks.

- images: accuracy by sparsity of gradual and one-shot pruning, RigL, SET, static masks and SNIP. An MLP
  of 300 and 100 hidden units on gray images, or a convolutional network on color images, with dense
  biases, trains for the same number of steps with Adam and a rate that falls to 0 by a cosine. One-shot
  pruning happens after half of the steps. The ramp of gradual pruning rises from 10 to 75 % of the
  steps, and RigL and SET end at 75 %. Masks change every 100 steps, or as `--every` says. With `--tune`
  each row takes the rate that is best on a validation split (5,000 training images), with one seed and
  a third of the steps;
- export: bytes, time and accuracy of gradually pruned networks after `to_sparse` and `remove_units`;
- transformer: nats per byte of a small decoder whose kernels have two zeros in each four inputs, or
  half of their entries zero. All methods train with clipping and Adam, 5 % of warm-up, and a rate that
  falls to 0 by a cosine, tuned for each method, with one seed and a third of the steps, on half of what
  is held out; the seeds are measured on the other half;
- sweep: an MLP on the digits, of which a fraction of each array is pruned (zero from then on) or frozen
  after 200 steps of constant SGD, and 3000 more steps follow, for all fractions at once, with
  `jax.vmap` over masks.

    python benchmarks/sparsity.py [--only PART ...] [--data FILE] [--json FILE]
"""

import argparse
import functools
import math
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import images
import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
import optax
import results
from results import picture
from timing import take_turns

import optperm
from optperm.sparsity import freeze, prune

RESULTS = results.Results()


# Images.
HIDDEN, BATCH = (300, 100), 100
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
SNIP_EXAMPLES = 2000
GROUPS = {
    "first": [("w0", -1), ("b0", -1), ("w1", -2)],
    "second": [("w1", -1), ("b1", -1), ("w2", -2)],
}


class Run(NamedTuple):
    """A training of a network of some layers; `every` is the number of steps between two masks."""

    steps: int
    rate: Any
    seed: Any
    every: int
    layers: int


# A row: from a sparsity and a run to an optimizer.
def adam(run: Run) -> optax.GradientTransformation:
    """The optimizer of all rows."""
    return optax.adam(optax.cosine_decay_schedule(run.rate, run.steps))


def gradual(sparsity: Any, run: Run, **options: Any) -> Any:
    """Zhu and Gupta's ramp from 10 to 75 % of the steps."""
    ramp = optax.polynomial_schedule(0.0, 1.0, 3, round(0.65 * run.steps), round(0.1 * run.steps))
    return optperm.prune_gradually(adam(run), sparsity, ramp, every=run.every, **options)


def moving(sparsity: Any, run: Run, **options: Any) -> Any:
    """RigL to 75 % of the steps; by options SET, or a static mask."""
    key, end = jax.random.key(1000 + run.seed), round(0.75 * run.steps)
    return optperm.rigl(adam(run), sparsity, end=end, key=key, every=run.every, **options)


def held(sparsity: float, run: Run) -> Any:
    """Masks that are set by hand."""
    return optax.chain(adam(run), optperm.mask_elements())


def same_sparsity(sparsity: float, run: Run) -> dict[str, float]:
    """The sparsity of each kernel, in the place of ERK's; biases have no zeros."""
    kernels = {f"w{index}": sparsity for index in range(run.layers)}
    return kernels | {f"b{index}": 0.0 for index in range(run.layers)}


ROWS: dict[str, Callable[..., Any]] = {
    "gradual magnitude, global": functools.partial(gradual, scope="global"),
    "gradual magnitude, ERK": gradual,
    "gradual magnitude, the same sparsity": functools.partial(gradual, scope="leaf"),
    "gradual movement, ERK": functools.partial(gradual, criterion="movement"),
    "one-shot magnitude, global": held,
    "RigL, ERK": moving,
    "SET, ERK": functools.partial(moving, grow="random"),
    "static random, ERK": functools.partial(moving, drop_fraction=0),
    "static random, the same sparsity": lambda sparsity, run: moving(
        same_sparsity(sparsity, run), run, drop_fraction=0
    ),
    "SNIP, global": held,
    "dense": held,
}
# Whole units of the hidden layers, for `--export`.
UNITS = {
    "units": lambda sparsity, run: gradual(
        same_sparsity(sparsity, run) | {"w2": 0.0}, run, structure=optperm.sparsity.Units()
    )
}


@functools.partial(jax.jit, static_argnames=("name", "sparsity", "steps", "every"))
def trained(
    name: str,
    sparsity: float,
    steps: int,
    every: int,
    rate: Any,
    seed: Any,
    batches: Any,
    data: Any,
) -> Any:
    """The params of a row after batches of indices (steps, BATCH): one program for all rates."""
    params = images.initial(seed, data[0].shape[1:], hidden=HIDDEN)
    tx = (ROWS | UNITS)[name](sparsity, Run(steps, rate, seed, every, len(params) // 2))
    state = tx.init(params)
    if name == "SNIP, global":
        grads = jax.grad(images.loss_fn)(params, (data[0][:SNIP_EXAMPLES], data[1][:SNIP_EXAMPLES]))
        scores = jax.tree.map(lambda w, g: jnp.abs(w * g), params, grads)
        params, state = prune(params, state, sparsity, scope="global", scores=scores)
    elif isinstance(state, optperm.sparsity.SparseState):
        params, state = prune(params, state, 0.0)
    if name == "one-shot magnitude, global":
        first, batches = batches[: steps // 2], batches[steps // 2 :]
        params, state = images.train(tx, params, state, first, data)
        params, state = prune(params, state, sparsity, scope="global")
    return images.train(tx, params, state, batches, data)[0]


def fit(every: int, name: str, sparsity: Any, rate: float, seed: int, steps: int, data: Any) -> Any:
    """The trained params of a row."""
    batches = images.batches(len(data[0]), BATCH, steps, seed)
    return trained(name, sparsity, steps, every, rate, seed, batches, data)


def compare_images(options: argparse.Namespace, data: str, train: Any, test: Any) -> None:
    """Show the accuracy by row and sparsity, each at its rate."""
    title = f"{data}, test accuracy by sparsity" + (", tuned rates" * options.tune)
    steps = round(options.epochs * len(train[0]) / BATCH)
    for name in options.rows or ROWS:
        cells = {}
        for sparsity in (0.0,) if name == "dense" else options.sparsity:
            of_row, rate = functools.partial(fit, options.every, name, sparsity), options.rate
            if options.tune:
                rate, _ = images.tune(RATES, of_row, steps, train)
            nets = [of_row(rate, seed, steps, train) for seed in range(options.seeds)]
            scores = images.spread([images.accuracy(params, test) for params in nets])
            cells[f"{sparsity:.0%}"] = scores + (f" ({rate:g})" if options.tune else "")
        RESULTS.show(title, method=name, **cells)
        RESULTS.write(options.json)


def bytes_of(tree: Any) -> int:
    """What the arrays of params take, sparse ones included."""
    total = 0
    for leaf in jax.tree.leaves(tree, is_leaf=lambda node: hasattr(node, "indptr")):
        parts = (leaf.data, leaf.indices, leaf.indptr) if hasattr(leaf, "indptr") else (leaf,)
        total += sum(np.asarray(part).nbytes for part in parts)
    return total


def apply_sparse(params: Any, x: Any, xp: Any) -> Any:
    """Logits by matrices that are transposed."""
    for index in range(len(params) // 2):
        x = xp.maximum(x, 0) if index else x
        x = (params[f"w{index}"] @ x.T).T + params[f"b{index}"]
    return x


def least_milliseconds(function: Callable[..., Any], *arguments: Any, repetitions: int) -> float:
    """Processor time of a call, the least of many."""
    calls = {"": lambda: function(*arguments)}
    return 1e3 * min(take_turns(calls, repetitions, time.process_time, warm_up=1)[""])


def compare_export(options: argparse.Namespace, data: Any, test: Any) -> None:
    """Bytes, time and accuracy of what was trained sparse, as it is used."""
    x, y = test[0].reshape(len(test[0]), -1), np.asarray(test[1])
    steps = round(options.epochs * len(data[0]) / BATCH)
    title = "Used after training: bytes, processor milliseconds a batch of 1, 32 and 256, accuracy"

    def show(name: str, function: Callable[..., Any], params: Any, xp: Any) -> None:
        least = functools.partial(least_milliseconds, function, params)
        parts = [xp.asarray(x[:n]) for n in (1, 32, 256)]
        times = [f"{least(part, repetitions=options.repetitions):.3f}" for part in parts]
        right = np.mean(np.asarray(function(params, xp.asarray(x))).argmax(axis=-1) == y)
        cells = dict(zip(("ms_of_1", "ms_of_32", "ms_of_256"), times, strict=True))
        RESULTS.show(title, network=name, bytes=bytes_of(params), **cells, accuracy=f"{right:.4f}")

    jitted, sparse = jax.jit(images.logits), jax.jit(lambda p, x: apply_sparse(p, x, jnp))

    def train(name: str, sparsity: float) -> Any:
        return fit(options.every, name, sparsity, options.rate, 0, steps, data)

    show("dense", jitted, train("dense", 0.0), jnp)
    for sparsity in options.sparsity:
        params = train("gradual magnitude, ERK", sparsity)
        show(f"{sparsity:.0%} zeros, dense product", jitted, params, jnp)
        for kind in ("bcsr", "bcoo"):
            show(
                f"{sparsity:.0%} zeros, {kind}",
                sparse,
                optperm.sparsity.to_sparse(params, kind),
                jnp,
            )
        by_scipy = optperm.sparsity.to_sparse(params, "scipy")
        by_scipy = {k: np.asarray(v) if k.startswith("b") else v for k, v in by_scipy.items()}
        show(f"{sparsity:.0%} zeros, scipy", lambda p, x: apply_sparse(p, x, np), by_scipy, np)
        small = optperm.sparsity.remove_units(params, GROUPS, zero_at_zero=True)
        shapes = [small[f"w{i}"].shape for i in range(3)]
        show(
            f"{sparsity:.0%} zeros, unused units removed {shapes[0][1]}-{shapes[1][1]}",
            jitted,
            small,
            jnp,
        )
    for units in options.units:
        params = train("units", units)
        # A unit that nothing enters is a constant: it goes into the bias of what follows.
        for index in (0, 1):
            is_dead = (params[f"w{index}"] == 0).all(axis=0)
            constant = jnp.where(is_dead, jax.nn.relu(params[f"b{index}"]), 0.0)
            params[f"b{index + 1}"] += constant @ params[f"w{index + 1}"]
            params[f"b{index}"] = jnp.where(is_dead, 0.0, params[f"b{index}"])
        small = optperm.sparsity.remove_units(params, GROUPS, zero_at_zero=True)
        shapes = [small[f"w{i}"].shape for i in range(3)]
        show(f"{units:.0%} of units pruned {shapes[0][1]}-{shapes[1][1]}", jitted, small, jnp)


# A transformer.
WINDOWS, TWELFTHS = 8, 12
DECODER_RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)


def are_kernels(params: Any) -> Any:
    """Return whether each leaf is a kernel."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "kernel" in jax.tree_util.keystr(path), params
    )


TWO_OF_FOUR: dict[str, Any] = {"include": are_kernels, "structure": optperm.sparsity.NOfM(2, 4)}
THREE_OF_FOUR = TWO_OF_FOUR | {"structure": optperm.sparsity.NOfM(3, 4)}
Tx = optax.GradientTransformation


def with_masks(optimizer: Tx, steps: Any) -> Tx:
    """Return an optimizer whose masks are set by hand."""
    return optax.chain(optimizer, optperm.mask_elements())


def halved(optimizer: Tx, steps: Any) -> Tx:
    """Return an optimizer with Zhu and Gupta's ramp from 10 to 75 % of the steps."""

    def ramp(t: jax.Array) -> jax.Array:
        return 1 - (1 - jnp.clip((t / steps - 0.1) / 0.65, 0.0, 1.0)) ** 3

    return optperm.prune_gradually(optimizer, 0.5, ramp, every=10, include=are_kernels)


def straight_through(params: Any) -> Any:
    """Return params in 2:4, with gradients for all entries."""
    return optperm.sparsity.keep_top(params, None, **TWO_OF_FOUR)


class Method(NamedTuple):
    """A row.

    Attributes:
      prunings: After how many twelfths of the steps `prune` is called, with its fraction and options.
      wrap: What makes an optimizer and a number of steps a sparse optimizer.
      forward: What the decoder uses in place of the params.
    """

    prunings: Mapping[int, tuple[float | None, dict[str, Any]]]
    wrap: Callable[[Tx, Any], Tx] = with_masks
    forward: Callable[[Any], Any] = lambda params: params


METHODS = {
    "dense": Method({}),
    "2:4 from the start": Method({0: (None, TWO_OF_FOUR)}),
    "2:4 after half of the steps": Method({6: (None, TWO_OF_FOUR)}),
    "3:4 after a quarter, 2:4 after half": Method(
        {3: (None, THREE_OF_FOUR), 6: (None, TWO_OF_FOUR)}
    ),
    "2:4 straight-through": Method({TWELFTHS: (None, TWO_OF_FOUR)}, forward=straight_through),
    "50 % after half of the steps, ERK": Method({6: (0.5, {"include": are_kernels})}),
    "50 % gradually, ERK": Method({}, wrap=halved),
}


def warmed_adam(rate: Any, steps: Any) -> Tx:
    """Return the optimizer of all rows."""

    def schedule(t: jax.Array) -> jax.Array:
        done = t / steps
        return rate * jnp.minimum(done / 0.05, 1.0) * (1 + jnp.cos(jnp.pi * done)) / 2

    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


@functools.partial(jax.jit, static_argnames=("wrap", "forward"))
def go_on(carry: Any, batches: Any, rate: Any, steps: Any, *, wrap: Any, forward: Any) -> Any:
    """Return params and state after batches (steps, batch, time): one program for all rates."""
    tx = wrap(warmed_adam(rate, steps), steps)

    def step(carry: Any, ids: jax.Array) -> Any:
        params, opt_state = carry
        grads = jax.grad(lambda params: library_bytes.loss_fn(forward(params), ids))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optperm.apply_updates(params, updates, opt_state), opt_state), None

    return jax.lax.scan(step, carry, batches)[0]


def train_decoder(method: Method, rate: float, seed: int, steps: int, data: np.ndarray) -> Any:
    """Return the params after training in twelve parts, between which `prune` is called."""
    params = library_bytes.initial(seed)
    opt_state = method.wrap(warmed_adam(rate, steps), steps).init(params)
    batches = library_bytes.windows(data, np.random.default_rng((seed, 7)), steps, WINDOWS)
    for part in range(TWELFTHS + 1):
        if part in method.prunings:
            fraction, options = method.prunings[part]
            params, opt_state = prune(params, opt_state, fraction, **options)
        if part < TWELFTHS:
            chosen = batches[part * steps // TWELFTHS : (part + 1) * steps // TWELFTHS]
            numbers = jnp.float32(rate), jnp.float32(steps)
            params, opt_state = go_on(
                (params, opt_state), chosen, *numbers, wrap=method.wrap, forward=method.forward
            )
    return params


def zeros_of(params: Any) -> tuple[float, int]:
    """Return the sparsity of the kernels, and the most nonzeros in four inputs of an output."""
    flags = jax.tree.leaves(are_kernels(params))
    kernels = [
        np.asarray(w) for w, flag in zip(jax.tree.leaves(params), flags, strict=True) if flag
    ]
    most = max((w != 0).reshape(-1, 4, w.shape[-1]).sum(axis=1).max() for w in kernels)
    return sum((w == 0).sum() for w in kernels) / sum(w.size for w in kernels), int(most)


def compare_decoders(options: argparse.Namespace) -> None:
    """Tune each method, train it from each seed, and show its rows."""
    data, held = library_bytes.load(options.data)
    name = options.data.stem if options.data else "Python's library"
    evaluate, steps = jax.jit(library_bytes.loss_fn), options.steps
    parts = held[: len(held) // 2], held[len(held) // 2 :]
    validation, test = (
        library_bytes.windows(part, np.random.default_rng(index), 256)
        for index, part in enumerate(parts)
    )
    for title, method in METHODS.items():
        tried = {}
        for rate in DECODER_RATES:
            params = train_decoder(method, rate, 0, steps // 3, data)
            tried[rate] = float(evaluate(params, validation))
        best = min(tried, key=lambda rate: np.nan_to_num(tried[rate], nan=math.inf))
        nets = [train_decoder(method, best, seed, steps, data) for seed in range(options.seeds)]
        losses = [float(evaluate(params, test)) for params in nets]
        sparsities, most = zip(*map(zeros_of, nets), strict=True)
        RESULTS.show(
            f"Nats a byte on the validation part by the rate: {steps // 3} steps, one seed",
            method=title,
            **{f"{rate:g}": f"{loss:.3f}" for rate, loss in tried.items()},
        )
        RESULTS.show(
            f"Bytes of {name}: {steps} steps, {options.seeds} seeds",
            method=title,
            nats_per_byte=f"{np.mean(losses):.3f} ± {np.std(losses, ddof=min(len(losses) - 1, 1)):.3f}",
            rate=f"{best:g}",
            zeros_of_the_kernels=f"{np.mean(sparsities):.2%}",
            most_nonzeros_in_four_inputs=max(most),
        )
        RESULTS.write(options.json)


# Pruning and freezing between steps.
SETS, SMALL, KERNEL = ("train", "test"), 32, jax.nn.initializers.lecun_normal()
PRUNE, FREEZE = ("magnitude", "random"), ("preconditioned_gradient", "gradient", "random")
CRITERIA = [*(f"prune {c}" for c in PRUNE), *(f"freeze {c}" for c in FREEZE)]


def predict(params: dict, x: jax.Array) -> jax.Array:
    """Logits, of one network or of an array of them."""
    w1, b1, w2, b2 = (params[name] for name in ("w1", "b1", "w2", "b2"))
    return jnp.tanh(x @ w1 + b1[..., None, :]) @ w2 + b2[..., None, :]


def make_sweep(sets: list, p: np.ndarray, steps: list, hidden: int) -> Callable[[int], jax.Array]:
    """Return a function from a seed to accuracies (criteria, fractions, sets)."""
    (x, y), fractions = sets[0], jnp.asarray(p, jnp.float32)
    sampler = optperm.mandt_sgd(len(x), SMALL, max_step=0.25, freeze_after=steps[0])
    tx = optax.chain(sampler, optperm.mask_elements())

    def loss_fn(params: dict, batch: tuple) -> jax.Array:
        logits = predict(params, batch[0])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()
        return loss + optax.tree.norm(params, squared=True) / (2 * len(x))

    def step(params: dict, state: tuple, chosen: jax.Array) -> tuple:
        (batch, rows), (apart, row) = ((x[i], y[i]) for i in (chosen[:-1], chosen[-1:]))
        e = optperm.evaluate(loss_fn, params, (batch, rows), example=(apart, row))
        updates, state = tx.update(e.grad, state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, state), state

    def run(seed: jax.Array) -> jax.Array:
        init, first, order, then, _ = jax.random.split(jax.random.key(seed), 5)
        w1, _, w2, _ = jax.random.split(init, 4)
        params = {"w1": KERNEL(w1, (x.shape[1], hidden)), "b1": jnp.zeros(hidden)}
        params |= {"w2": KERNEL(w2, (hidden, 10)), "b2": jnp.zeros(10)}
        state = tx.init(params)
        keys = zip((first, then), steps, strict=True)
        first, then = (jax.random.randint(k, (n, SMALL + 1), 0, len(x)) for k, n in keys)
        (params, state), _ = jax.lax.scan(lambda c, i: (step(*c, i), None), (params, state), first)
        of_each = {"scope": "leaf", "include": True, "key": order}
        by = {"scores": optperm.variance.full_gradient(loss_fn, params, sets[:1]), **of_each}

        def masked(p: jax.Array) -> tuple:
            found = [prune(params, state, p, criterion=c, **of_each) for c in PRUNE]
            found += [(params, freeze(state, p, criterion=c, **by)) for c in FREEZE]
            return jax.tree.map(lambda *x: jnp.stack(x), *((own, mask) for own, (_, mask) in found))

        nets, masks = jax.vmap(masked, out_axes=1)(fractions)
        axes = 0, (None, 0), None
        move = jax.vmap(jax.vmap(step, axes), axes)

        def all_move(nets: Any, chosen: jax.Array) -> tuple:  # with one estimate of the noise
            return move(nets, (state[0], masks), chosen)[0], None

        nets, _ = jax.lax.scan(all_move, nets, then)
        return jnp.stack([(predict(nets, x).argmax(-1) == y).mean(-1) for x, y in sets], axis=-1)

    return jax.jit(run)


def compare_fractions(options: argparse.Namespace) -> np.ndarray:
    """Show and draw; return accuracies (seeds, criteria, fractions, train or test)."""
    p, data = np.linspace(0, 1, options.fractions), images.standardized_digits()
    used = np.ptp(data[0][0], axis=0) > 0
    sets = [(jnp.asarray(x[:, used]), jnp.asarray(y)) for x, y in data]
    run = make_sweep(sets, p, options.sweep_steps, options.hidden)
    found = np.stack([run(seed) for seed in range(options.seeds)])
    shown = sorted({int(np.abs(p - q).argmin()) for q in (0, 0.4, 0.6, 0.8, 0.9, 0.96, 1)})
    for name, row in zip(CRITERIA, found[..., 1].mean(0), strict=True):
        cells = {f"{p[index]:.2g}": f"{row[index]:.3f}" for index in shown}
        RESULTS.show("Test accuracy over the share pruned or frozen", **{"share p": name}, **cells)
    if options.picture is None:
        return found
    with picture(options.picture, figsize=(6, 4)) as figure:
        figure.suptitle(f"mean of {options.seeds} networks; bands: one standard deviation")
        for index, axes in enumerate(figure.subplots(1, 2, sharey=True)):
            curves = zip(found[..., index].mean(0), found[..., index].std(0), strict=True)
            for number, (y, d) in enumerate(curves):
                axes.plot(p, y, "--" if number < len(PRUNE) else "-")
                axes.fill_between(p, y - d, y + d, alpha=0.2)
            axes.set(xlabel="fraction pruned, frozen", xlim=(0.4, 1))
            axes.set(ylabel=f"{SETS[index]} accuracy")
        figure.legend(axes.lines, CRITERIA, loc="outside lower center", ncols=2)
    return found


PARTS = ("images", "export", "transformer", "sweep")


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images.add_arguments(parser)
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS)
    add("--seeds", type=int, default=3)
    add("--epochs", type=float, default=3.0, help="for images and export")
    add("--rate", type=float, default=2e-3)
    add("--sparsity", type=float, nargs="+", default=[0.9, 0.95, 0.98])
    add("--units", type=float, nargs="*", default=[0.5, 0.75], help="for export")
    add("--every", type=int, default=100, help="steps between two masks")
    add("--rows", nargs="*", choices=list(ROWS), help="of images")
    add("--tune", action="store_true", help="the rate of each row of images")
    add("--repetitions", type=int, default=50, help="for export")
    add("--steps", type=int, default=612, help="of the transformer, a multiple of 36")
    add("--fractions", type=int, default=51, help="how many from 0 to 1, for sweep")
    add("--hidden", type=int, default=32, help="hidden units of sweep")
    add("--sweep-steps", type=int, default=(200, 3000), help="before and after", nargs=2)
    add("--picture", type=pathlib.Path, help="a file for the picture of sweep")
    results.add_argument(parser)
    options = parser.parse_args()
    if {"images", "export"} & {*options.only}:
        name, train, test = images.load(options.data, options.examples)
        if "images" in options.only:
            compare_images(options, name, train, test)
        if "export" in options.only:
            compare_export(options, train, test)
    if "transformer" in options.only:
        compare_decoders(options)
    if "sweep" in options.only:
        compare_fractions(options)
    RESULTS.write(options.json)


if __name__ == "__main__":
    main()
