"""Uncertainty of a network: averages, draws and ensembles compared with Adam.

The network is an MLP on gray images, or a convolutional network on color images. All methods take the
same number of gradients (the ensemble five times as many). The script prints the accuracy, negative
log-likelihood (NLL), calibration error and Brier score on test images, the NLL and ECE on the same
images rotated by 30 degrees, and how well the entropy of the prediction separates test images from noise
and from other data (AUROC). Each method takes the hyperparameters of its printed grid that have the
lowest NLL on a validation split, with one seed and a third of the steps.

    python benchmarks/uncertainty.py --data mnist.npz --other cifar10.npz [--seeds 3] [--epochs 10]
    python benchmarks/uncertainty.py --only steps [--repetitions 101]

`--only defaults` trains the four networks of `small_tasks.py` with Adam and with IVON. Only the rate is
tuned: it is the best of a printed grid on validation examples, over all seeds.

    python benchmarks/uncertainty.py --only defaults --data mnist.npz --text text.txt [--steps 800]
"""

import argparse
import functools
import itertools
import pathlib
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import images
import jax
import jax.numpy as jnp
import numpy as np
import optax
import results
import scoring
import small_tasks
from scipy import ndimage
from timing import take_turns

import optperm

BATCH, HIDDEN, DRAWS, MODELS, COLLECTED = 128, (256, 256), 8, 5, 20
RESULTS = results.Results()

# How each method is made, of its hyperparameters and of how many steps and images there are.


def make_adam(number: Any, steps: int, size: int) -> Any:
    """Return Adam at a rate that falls by a cosine."""
    del size
    return optax.adam(optax.cosine_decay_schedule(number, steps))


def make_sgd(number: Any, steps: int, size: int) -> Any:
    """Return SGD with momentum at a rate that falls by a cosine."""
    del size
    return optax.sgd(optax.cosine_decay_schedule(number, steps), momentum=0.9)


def make_swag(number: Any, steps: int, size: int) -> Any:
    """Return SGD at a constant rate, and SWAG in the last quarter."""
    del size
    start = 3 * steps // 4
    every = max((steps - start) // COLLECTED, 1)
    collect = optperm.swag(every, rank=COLLECTED, start=start)
    return optax.chain(optax.sgd(number, momentum=0.9), collect)


def make_constant_sgd(number: Any, steps: int, size: int) -> Any:
    """Return constant SGD with a kernel, at a temperature, and a record of the draws."""
    del size
    kernel, temperature, factor = number
    sampler = optperm.constant_sgd(kernel, temperature=temperature, learning_rate=factor)
    return optax.chain(sampler, optperm.record_trajectory(max(steps // DRAWS, 1), DRAWS))


def make_ivon(number: Any, steps: int, size: int) -> Any:
    """Return IVON at a rate that falls by a cosine.

    Its first draws deviate by 1 / sqrt(num_data * hess_init), which has to be less than the initial
    weights.
    """
    rate, precision, clip_radius = number
    schedule = optax.cosine_decay_schedule(rate, steps)
    return optperm.ivon(
        schedule,
        num_data=size,
        hess_init=precision / size,
        b2=1 - 1 / steps,
        clip_radius=clip_radius,
    )


@functools.partial(jax.jit, static_argnames=("make", "precision"))
def train(
    make: Any, number: Any, params: Any, indices: jax.Array, data: Any, precision: float = 0.0
) -> tuple[Any, Any]:
    """Return params and state after a step for each row of indices, with a normal prior or none."""
    tx = make(number, len(indices), len(data[0]))
    loss_fn = functools.partial(loss_with_prior, precision=precision, size=len(data[0]))
    return images.train(tx, params, tx.init(params), indices, data, loss_fn)


def loss_with_prior(params: Any, batch: Any, precision: float, size: int) -> jax.Array:
    """Return the mean loss of a batch with the prior."""
    return images.loss_fn(params, batch) + optperm.bayes.normal_prior(params, precision, size)


@functools.partial(jax.jit, static_argnames="make")
def train_at_draws(
    make: Any, number: Any, params: Any, indices: jax.Array, data: Any, key: jax.Array
) -> tuple[Any, Any]:
    """Return params and state after a step by the gradient at a draw for each row of indices."""
    tx = make(number, len(indices), len(data[0]))

    def step(carry: Any, at: Any) -> Any:
        (params, state), (chosen, key) = carry, at
        draw = optperm.bayes.sample_params(state, params, key)
        grads = jax.grad(images.loss_fn)(draw, (data[0][chosen], data[1][chosen]))
        updates, state = tx.update(grads, state, params, draw=draw)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(key, len(indices))
    return jax.lax.scan(step, (params, tx.init(params)), (indices, keys))[0]


# What each method returns: by the way of predicting, params of models along a leading axis.


class Setting(NamedTuple):
    """The training of a method, apart from its hyperparameters.

    Attributes:
      seed: The seed of the initial params, the batches and the draws.
      steps: Gradients of batches.
      data: The training images.
      rate: The rate that was best for Adam.
    """

    seed: int
    steps: int
    data: images.Data
    rate: float

    def start(self) -> tuple[images.Params, jax.Array, images.Data]:
        """Return initial params, the indices of batches and the data."""
        size, shape = len(self.data[0]), self.data[0].shape[1:]
        indices = images.batches(size, BATCH, self.steps, self.seed)
        return images.initial(self.seed, shape, hidden=HIDDEN), indices, self.data


Ways = dict[str, Any]
TRAINED: dict[tuple[float, int, int, int], images.Params] = {}


def stack(*models: Any) -> Any:
    """Return the params of models along a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)


def model_of_adam(rate: float, setting: Setting) -> images.Params:
    """Return params trained by Adam: once for all methods that begin with them."""
    key = rate, setting.seed, setting.steps, len(setting.data[0])
    if key not in TRAINED:
        TRAINED[key], _ = train(make_adam, rate, *setting.start())
    return TRAINED[key]


def adam(number: float, setting: Setting) -> Ways:
    """Train one model, the first of the ensemble's."""
    return {"Adam": stack(model_of_adam(number, setting._replace(seed=MODELS * setting.seed)))}


def temperature(number: float, setting: Setting) -> Ways:
    """Train one model without the validation split, and scale its logits by what fits the split."""
    fitted, (x, y) = images.split(setting.data)
    params = model_of_adam(number, setting._replace(seed=MODELS * setting.seed, data=fitted))
    by = optperm.bayes.fit_temperature(images.predict(params, x), y)
    # The last layer's params make the logits.
    last = len(params) // 2 - 1
    scaled = {name: params[name] / by for name in (f"w{last}", f"b{last}")}
    return {"Adam, temperature": stack(params | scaled)}


def ensemble(number: float, setting: Setting) -> Ways:
    """Train five models with Adam, from initial params and batches of their own."""
    seeds = range(MODELS * setting.seed, MODELS * (setting.seed + 1))
    models = [model_of_adam(number, setting._replace(seed=seed)) for seed in seeds]
    return {f"Ensemble of {MODELS}": stack(*models)}


def sgd(number: float, setting: Setting) -> Ways:
    """Train one model."""
    return {"SGD, momentum": stack(train(make_sgd, number, *setting.start())[0])}


def swag(number: float, setting: Setting) -> Ways:
    """Train with SGD, and collect."""
    params, state = train(make_swag, number, *setting.start())
    draws = optperm.bayes.sample_params(state, params, jax.random.key(setting.seed), DRAWS)
    return {"SWA": stack(optperm.bayes.posterior_mean(state)), f"SWAG, {DRAWS} draws": draws}


def ivon(number: tuple[float, ...], setting: Setting) -> Ways:
    """Train with IVON, and predict at the mean and by draws."""
    keys = jax.random.split(jax.random.key(setting.seed))
    params, state = train_at_draws(make_ivon, number, *setting.start(), keys[0])
    draws = optperm.bayes.sample_params(state, params, keys[1], DRAWS)
    one = jax.tree.map(lambda leaf: leaf[:1], draws)
    return {"IVON, at the mean": stack(params), "IVON, 1 draw": one, f"IVON, {DRAWS} draws": draws}


def constant_sgd(number: tuple[float, float], setting: Setting) -> Ways:
    """Draw all params by constant SGD at a temperature, with batches drawn with replacement.

    Adam takes half of the steps, a quarter learns the kernel, and a quarter samples.
    """
    (temperature, factor), size = number, len(setting.data[0])
    params, indices, data = setting.start()
    indices = jax.random.randint(jax.random.key(setting.seed), indices.shape, 0, size)
    half = max(len(indices) // 2, 1)
    params, _ = train(make_adam, setting.rate, params, indices[:half], data, 1.0)
    kernel, params = optperm.bayes.learn_kernel(
        functools.partial(loss_with_prior, precision=1.0, size=size),
        data,
        params,
        jax.random.key(setting.seed),
        batch_size=BATCH,
        preconditioner="diagonal",
        estimator="two_batches",
        steps=max(len(indices) // 4, 16),
    )
    given = kernel, temperature, factor
    rest = indices[half + len(indices) // 4 :]
    _, state = train(make_constant_sgd, given, params, rest, data, 1.0)
    return {f"Constant SGD, {DRAWS} draws": optperm.subspace.trajectory(state)[0]}


def last_layer(number: float, setting: Setting) -> Ways:
    """Draw the last layer of Adam's model by SGLD with a step size, its inputs computed once."""
    params = model_of_adam(setting.rate, setting._replace(seed=MODELS * setting.seed))
    x, y = setting.data
    names = [f"{kind}{len(params) // 2 - 1}" for kind in "wb"]
    rest = {name: leaf for name, leaf in params.items() if name not in names}
    inputs = jax.nn.relu(images.predict(rest, x)).reshape(len(x), -1)
    last = {"w0": params[names[0]], "b0": params[names[1]]}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # eight draws are too few for figures, not for a mean
        samples = optperm.bayes.sample(
            functools.partial(loss_with_prior, precision=1.0, size=len(x)),
            (inputs, y),
            last,
            jax.random.key(setting.seed),
            sampler=lambda size, batch: optperm.sgld(number, size),
            batch_size=BATCH,
            num_chains=2,
            num_draws=DRAWS // 2,
            thinning=250,
            burn_in=1000,
            starts=stack(last, last),
        )
    draws = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), samples.params)
    models = {name: jnp.broadcast_to(leaf, (DRAWS, *leaf.shape)) for name, leaf in rest.items()}
    models |= {names[0]: draws["w0"], names[1]: draws["b0"]}
    return {f"Last layer, {DRAWS} draws": models}


# By name: what trains, how many trainings it costs, and the grid of its hyperparameters: a rate, a step
# size, IVON's rate, the precision of its first draws and the maximum entry of its direction, or a
# temperature and a factor on step sizes. None takes Adam's best rate; Adam comes first.
METHODS: dict[str, tuple[Callable[[Any, Setting], Ways], int, tuple[Any, ...] | None]] = {
    "Adam": (adam, 1, (1e-3, 3e-3, 1e-2)),
    "ensemble": (ensemble, MODELS, None),
    "SGD": (sgd, 1, (0.015, 0.05, 0.15)),
    "SWAG": (swag, 1, (0.01, 0.03, 0.1, 0.3)),
    "IVON": (ivon, 1, tuple(itertools.product((0.1, 0.3, 1.0), (2e3, 2e4), (1e-3, 1e9)))),
    "last layer": (last_layer, 1, (1e-7, 1e-6)),
    "constant SGD": (constant_sgd, 1, tuple(itertools.product((1e-4, 1e-2), (1e-3, 1e-2)))),
    "temperature": (temperature, 1, None),
}


def predict_probabilities(params: Any, x: jax.Array) -> jax.Array:
    """Return the class probabilities of one model."""
    return jax.nn.softmax(images.predict(params, x))


def predict(models: Any, x: jax.Array) -> optperm.bayes.Predictions:
    """Return the class probabilities of all models, and their mean."""
    return optperm.bayes.posterior_predictive(
        predict_probabilities, optperm.bayes.Ensemble(models), x
    )


def negative_nll(ways: Ways, held: images.Data) -> float:
    """Return the score of the last way to predict; NaN where the training diverged."""
    found = predict([*ways.values()][-1], held[0]).mean
    if not jnp.isfinite(found).all():
        return float("nan")
    return -scoring.classification(found, held[1]).nll


def judge(models: Any, test: images.Data, rotated: Any, others: Any) -> dict[str, float]:
    """Return all figures of a row."""
    inside = predict(models, test[0])
    scores = scoring.classification(inside.mean, test[1])
    far = scoring.classification(predict(models, rotated).mean, test[1])
    row = {"accuracy": scores.accuracy, "NLL": scores.nll, "ECE": scores.calibration_error}
    row |= {"Brier": scores.brier, "NLL, rotated": far.nll, "ECE, rotated": far.calibration_error}
    for name, other in others.items():
        row[f"AUROC, {name}"] = scoring.auroc(inside.entropy(), predict(models, other).entropy())
    return row


def compare(arguments: argparse.Namespace) -> None:
    """Print a row for each way of predicting."""
    name, data, test = images.load(arguments.data, arguments.examples)
    test = test[0][: arguments.test], test[1][: arguments.test]
    rotate = functools.partial(ndimage.rotate, axes=(1, 2), reshape=False, order=1)
    rotated = jnp.asarray(rotate(np.asarray(test[0]), 30))
    others = {"noise": jax.random.uniform(jax.random.key(0), test[0][:2000].shape)}
    if arguments.other is not None:
        other, _, (x, _) = images.load(arguments.other, 1)
        # In gray, and as large as MNIST's
        others[other] = x[:2000].mean(axis=-1, keepdims=True)[:, 2:-2, 2:-2]
    steps, rate = round(arguments.epochs * len(data[0]) / BATCH), arguments.adam_rate
    title = f"{name}, {len(data[0])} images, {steps} steps of {BATCH}, {arguments.seeds} seeds"
    for method in arguments.methods:
        fit, cost, grid = METHODS[method]
        start, best, shown = time.process_time(), rate, "as Adam"
        if grid is not None:
            best, tried = images.tune(
                grid,
                lambda number, *setting, fit=fit, rate=rate: fit(number, Setting(*setting, rate)),
                steps,
                data,
                negative_nll,
            )
            shown = images.shown({number: -score for number, score in tried.items()})
            if np.isnan(tried[best]):
                RESULTS.row(title, method=method, trainings=cost, accuracy="diverges", grid=shown)
                RESULTS.write(arguments.json)
                print(f"{method:24} diverges: {shown}", flush=True)
                continue
        rate = best if method == "Adam" else rate
        rows: dict[str, list[dict[str, float]]] = {}
        for seed in range(arguments.seeds):
            for way, models in fit(best, Setting(seed, steps, data, rate)).items():
                rows.setdefault(way, []).append(judge(models, test, rotated, others))
        for way, found in rows.items():
            cells = {key: images.spread([row[key] for row in found]) for key in found[0]}
            RESULTS.row(
                title,
                method=way,
                trainings=cost,
                **cells,
                hyperparameters=images.text(best),
                grid=shown,
            )
            print(f"{way:24} {images.text(best)}:", ", ".join(f"{k} {v}" for k, v in cells.items()))
        print(f"  grid {shown}; {time.process_time() - start:.0f} s", flush=True)
        RESULTS.write(arguments.json)
    if arguments.into is not None:
        RESULTS.merge(arguments.into)


# IVON by its defaults, against Adam.

RATES = {"Adam": (1e-3, 3e-3, 1e-2), "IVON": (0.1, 0.3, 1.0)}
TASKS = ("MLP", "CNN", "CNN, BatchNorm", "transformer")


@functools.partial(jax.jit, static_argnames=("method", "loss_fn", "num_data"))
def train_by_defaults(
    method: str, loss_fn: Any, num_data: int, rate: Any, params: Any, batches: Any, key: jax.Array
) -> tuple[Any, Any]:
    """Return params and state after a step for each batch, at a rate that falls by a cosine."""
    steps = len(jax.tree.leaves(batches)[0])
    schedule = optax.cosine_decay_schedule(rate, steps)
    tx = optax.adam(schedule) if method == "Adam" else optperm.ivon(schedule, num_data)
    tx = optax.with_extra_args_support(tx)

    def step(carry: Any, at: Any) -> Any:
        (params, state), (batch, key) = carry, at
        is_drawn = method == "IVON"
        draw = optperm.bayes.sample_params(state, params, key) if is_drawn else params
        updates, state = tx.update(jax.grad(loss_fn)(draw, batch), state, params, draw=draw)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(key, steps)
    return jax.lax.scan(step, (params, tx.init(params)), (batches, keys))[0]


@functools.partial(jax.jit, static_argnames="logits")
def logits_of(logits: Any, models: Any, inputs: jax.Array) -> jax.Array:
    """Return the logits (models, labels, classes) of models along a leading axis."""

    def of_one(params: Any) -> jax.Array:
        found = logits(params, inputs)
        return found.reshape(-1, found.shape[-1])

    return jax.lax.map(of_one, models)


def nll(logits: jax.Array, labels: jax.Array) -> float:
    """Return the negative log-likelihood of the mean prediction of logits (models, n, classes)."""
    return scoring.classification(jax.nn.softmax(logits).mean(axis=0), labels.ravel()).nll


def ways_of(method: str, task: small_tasks.Task, rate: float, seed: int, steps: int) -> Ways:
    """Train, and return the models of each way to predict."""
    keys = jax.random.split(jax.random.key(seed))
    given = rate, task.initial(seed), task.batches(seed, steps), keys[0]
    params, state = train_by_defaults(method, task.loss_fn, task.num_data, *given)
    if method == "Adam":
        return {"Adam": stack(params)}
    draws = optperm.bayes.sample_params(state, params, keys[1], DRAWS)
    return {"IVON, at the mean": stack(params), f"IVON, {DRAWS} draws": draws}


def judge_method(
    method: str, task: small_tasks.Task, arguments: argparse.Namespace, has_temperature: bool
) -> dict[str, str]:
    """Return the NLL of each way to predict, at the best rate, and the grid."""
    trained: dict[float, list[Ways]] = {}
    scores: dict[float, float] = {}

    def score(rate: float) -> None:
        seeds = range(arguments.seeds)
        trained[rate] = [ways_of(method, task, rate, seed, arguments.steps) for seed in seeds]
        (x, y), last = task.validation, [[*ways.values()][-1] for ways in trained[rate]]
        found = float(np.mean([nll(logits_of(task.logits, models, x), y) for models in last]))
        scores[rate] = found if np.isfinite(found) else float("inf")

    for rate in RATES[method]:
        score(rate)
    best = min(scores, key=scores.__getitem__)
    # A best rate at the end of the grid: one more.
    if best in (min(scores), max(scores)):
        score(best * 3 if best == max(scores) else best / 3)
        best = min(scores, key=scores.__getitem__)
    found: dict[str, list[float]] = {}
    for ways in trained[best]:
        for way, models in ways.items():
            logits = logits_of(task.logits, models, task.test[0])
            found.setdefault(way, []).append(nll(logits, task.test[1]))
            if way == "Adam" and has_temperature:
                x, y = task.validation
                temperature = optperm.bayes.fit_temperature(logits_of(task.logits, models, x)[0], y)
                of_temperature = nll(logits / temperature, task.test[1])
                found.setdefault("Adam, temperature", []).append(of_temperature)
    cells = {way: images.spread(values) for way, values in found.items()}
    return cells | {f"{method}'s rates": images.shown(dict(sorted(scores.items())))}


def compare_defaults(arguments: argparse.Namespace) -> None:
    """Print the NLL of Adam and of IVON on test examples; only the rates are tuned."""
    title = f"IVON by default against Adam: NLL, {arguments.steps} steps, {arguments.seeds} seeds"
    for name, task in small_tasks.load(arguments.data, arguments.text).items():
        if name not in TASKS:
            continue
        start, cells = time.process_time(), {}
        for method in RATES:
            cells |= judge_method(method, task, arguments, name != "transformer")
        RESULTS.row(title, network=name, **cells)
        print(f"{name}:", "; ".join(f"{key} {cell}" for key, cell in cells.items()))
        print(f"  {time.process_time() - start:.0f} s", flush=True)
        RESULTS.write(arguments.json)


# What a step costs.


def compare_steps(arguments: argparse.Namespace) -> None:
    """Print what a step of IVON takes over one of Adam, measured in turns."""
    for name, shape in {"CNN": (32, 32, 3), "MLP": (28, 28, 1)}.items():
        title = f"One step of the {name}, batches of {BATCH}, IVON over Adam"
        for part in ("the update alone", "without the draw", "the whole step"):
            steps = {method: _stepper(method, part, shape) for method in ("Adam", "IVON")}
            times = take_turns(steps, arguments.repetitions).values()
            one, other = map(statistics.median, times)
            # Where other programs run, the fastest tenth was disturbed least.
            least = [sorted(taken)[len(taken) // 10] for taken in times]
            RESULTS.row(
                title,
                part=part,
                ratio_of_medians=f"{other / one:.2f}",
                of_the_fastest_tenth=f"{least[1] / least[0]:.2f}",
                Adam_in_ms=f"{1e3 * one:.2f}",
                IVON_in_ms=f"{1e3 * other:.2f}",
            )
            print(f"{name} {part:17} {1e3 * one:8.2f} ms, IVON {1e3 * other:8.2f}", end="")
            print(f", ratio {other / one:.2f}, of the fastest tenth {least[1] / least[0]:.2f}")
            RESULTS.write(arguments.json)
    compare_draws(arguments)


def compare_draws(arguments: argparse.Namespace) -> None:
    """Print the time of a draw of the MLP's params, and of `jax.random.normal` for each leaf."""
    params = images.initial(0, (28, 28, 1), hidden=HIDDEN)
    state = optperm.ivon(0.1, num_data=50_000.0).init(params)

    @jax.jit
    def normal(key: jax.Array) -> Any:
        return optax.tree.random_like(key, params)

    @jax.jit
    def sample(key: jax.Array) -> Any:
        return optperm.bayes.sample_params(state, params, key)

    threefry, rbg = jax.random.key(0), jax.random.key(0, impl="rbg")
    for name, draw, key in (
        ("sample_params", sample, threefry),
        ("jax.random.normal", normal, threefry),
        ('jax.random.normal, impl="rbg"', normal, rbg),
    ):
        jax.block_until_ready(draw(key))
        start = time.process_time()
        for _ in range(arguments.repetitions):
            jax.block_until_ready(draw(key))
        taken = 1e3 * (time.process_time() - start) / arguments.repetitions
        title = f"A draw of {optax.tree.size(params)} params, ms of processor"
        RESULTS.row(title, by=name, ms=f"{taken:.2f}")
        print(f"{name:32} {taken:8.2f} ms")
    RESULTS.write(arguments.json)


def _stepper(method: str, part: str, shape: tuple[int, ...]) -> Callable[[], Any]:
    """Return a function that takes one more step, compiled, with params and state donated."""
    params = images.initial(0, shape, hidden=HIDDEN)
    batch = jax.random.uniform(jax.random.key(0), (BATCH, *shape)), jnp.arange(BATCH) % 10
    tx = optax.adam(1e-3) if method == "Adam" else optperm.ivon(0.1, num_data=50_000.0)
    given = jax.tree.map(lambda leaf: leaf + 1e-3, params)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(carry: Any, given: Any) -> Any:
        params, state, key = carry
        draw, extra = params, {}
        if method == "IVON":
            key, of_draw = jax.random.split(key)
            is_given = part != "the whole step"
            draw = given if is_given else optperm.bayes.sample_params(state, params, of_draw)
            extra = {"draw": draw}
        grads = given if part == "the update alone" else jax.grad(images.loss_fn)(draw, batch)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, key

    carry = params, tx.init(params), jax.random.key(1)

    def run() -> Any:
        nonlocal carry
        carry = step(carry, given)
        return carry

    for _ in range(3):
        jax.block_until_ready(run())
    return run


PARTS = {"predictions": compare, "steps": compare_steps, "defaults": compare_defaults}


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images.add_arguments(parser)
    parser.add_argument("--only", choices=[*PARTS], default="predictions")
    parser.add_argument(
        "--text", type=pathlib.Path, help="of the transformer; without, Python's modules"
    )
    parser.add_argument("--steps", type=int, default=800, help="of each network of --only defaults")
    parser.add_argument("--other", type=pathlib.Path, help="color images from elsewhere, for gray")
    parser.add_argument("--test", type=int, help="as many of the test images")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--adam-rate", type=float, default=1e-3, help="where Adam is not a method")
    parser.add_argument("--into", type=pathlib.Path, help="results in whose table to put the rows")
    parser.add_argument("--repetitions", type=int, default=101)
    results.add_argument(parser)
    arguments = parser.parse_args()
    PARTS[arguments.only](arguments)


if __name__ == "__main__":
    main()
