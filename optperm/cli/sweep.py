"""How much of a network can be pruned or frozen: constant SGD, at every fraction at once.

A tanh network with one hidden layer takes some steps of constant SGD. Then a fraction p of each of its
arrays is pruned or frozen, for every p of a grid and by every criterion, and all these networks take
the same further steps side by side. Of one repeat they share the first steps, the batches and, but in
the legacy setting, the preconditioner H, which stays what the first steps have made it.
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optperm
from optperm.cli.datasets import Dataset
from optperm.cli.errors import UsageError
from optperm.contract.states import find_states, replace_state
from optperm.training.interrupt import Interrupt

_STEPS_A_CALL = 100
# What the seed of a repeat is for.
_INIT, _FIRST_BATCHES, _ORDER, _BATCHES, _NOISE = range(5)

Action = Literal["prune", "freeze"]
Params = dict[str, jax.Array]
_Examples = tuple[jax.Array, jax.Array]  # (examples, features), and labels (examples,)


class Curve(NamedTuple):
    """What is done to the networks of a curve.

    Attributes:
      action: `optperm.prune` or `optperm.freeze`.
      criterion: Its criterion.
    """

    action: Action
    criterion: str

    @property
    def name(self) -> str:
        """As it stands in the files."""
        return f"{self.action} {self.criterion}"


CURVES: dict[str, tuple[Curve, ...]] = {
    "prune": (Curve("prune", "magnitude"), Curve("prune", "random")),
    "freeze": (
        Curve("freeze", "preconditioned_gradient"),
        Curve("freeze", "gradient"),
        Curve("freeze", "random"),
    ),
}
CURVES["all"] = CURVES["prune"] + CURVES["freeze"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is sampled, and by what steps.

    Attributes:
      legacy: Whether the softmax is fed into a loss that takes a softmax itself, N is the number of
        params, and the noise is estimated to the end, by one example a step, for each network.
      learning_rate: Factor on all steps; 1 for sampling.
      max_step: The largest entry of H.
      prior_precision: Of the Gaussian prior of each parameter.
      noise_start: The estimate of the noise begins with random numbers from 0 to this; 0 for data.
    """

    legacy: bool
    learning_rate: float
    max_step: float
    prior_precision: float
    noise_start: float


SETTINGS = {
    # The noise of a network that fits its data all but vanishes, and max_step is the size of most
    # steps. .1 to 1 end at .977 to .980 with p = 0; the more it is, the less is left to learn after the
    # first steps, and the less it costs to freeze. The prior is worth .004 in test accuracy.
    False: Setting(
        legacy=False, learning_rate=1.0, max_step=0.25, prior_precision=1.0, noise_start=0.0
    ),
    # The original's estimate of the noise began with random numbers, whose share in it falls as
    # 10 / (10 + t), and had no limit: its steps grew to the end. How large they were is not published;
    # up to .05 gives the published test accuracy after 200 steps, .86 (.1: .78, .03: .90).
    True: Setting(
        legacy=True,
        learning_rate=0.01,
        max_step=math.inf,
        prior_precision=0.0,
        noise_start=0.05,
    ),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to compute.

    Attributes:
      curves: One or several of `CURVES`.
      setting: What is sampled.
      grid: How many fractions, evenly spaced from 0 to 1.
      repeats: How many networks are trained at first, each from a seed of its own.
      first_steps: Steps before the networks are pruned or frozen.
      steps: Steps after that.
      batch_size: Examples a step, drawn with replacement.
      hidden: Units of the hidden layer.
      seed: Of the first repeat; the next one has the next.
    """

    curves: tuple[Curve, ...]
    setting: Setting = SETTINGS[False]
    grid: int = 51
    repeats: int = 5
    first_steps: int = 200
    steps: int = 3000
    batch_size: int = 32
    hidden: int = 32
    seed: int = 0

    @property
    def fractions(self) -> np.ndarray:
        """p, (grid,)."""
        return np.arange(self.grid) / (self.grid - 1)

    @property
    def calls(self) -> int:
        """How often `run` calls on_call."""
        return self.repeats * math.ceil(self.steps / _STEPS_A_CALL)


class Repeat(NamedTuple):
    """The accuracies of one repeat.

    Attributes:
      start: Before anything is pruned or frozen: on the training and on the test examples.
      train: (curves, grid), on the training examples.
      test: (curves, grid), on the test examples.
      masked: (curves, grid), how many params are masked.
    """

    start: tuple[float, float]
    train: np.ndarray
    test: np.ndarray
    masked: np.ndarray


def plan(arguments: argparse.Namespace) -> Plan:
    """The plan that the parsed flags of `sweep` describe."""
    own = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(Setting)
        if field.name in arguments
    }
    fields = {field.name for field in dataclasses.fields(Plan)} - {"curves", "setting"}
    return Plan(
        curves=CURVES[arguments.action],
        setting=dataclasses.replace(SETTINGS[arguments.legacy], **own),
        **{name: getattr(arguments, name) for name in fields},
    )


def records(plan: Plan, number: int, repeat: Repeat) -> Iterator[dict[str, Any]]:
    """A line for metrics.jsonl for each curve of a repeat, the `number`-th."""
    for curve, train, test in zip(plan.curves, repeat.train, repeat.test, strict=True):
        yield {
            "seed": plan.seed + number,
            **curve._asdict(),
            "start_train_accuracy": repeat.start[0],
            "start_test_accuracy": repeat.start[1],
            "train_accuracy": train.tolist(),
            "test_accuracy": test.tolist(),
        }


class Networks:
    """The networks of a plan.

    Args:
      plan: What to compute.
      data: What to train and test on; features that are constant in training are left out.

    Raises:
      UsageError: If the plan does not fit the data, or a hyperparameter is out of range.
    """

    def __init__(self, plan: Plan, data: Dataset) -> None:
        self._plan, setting = plan, plan.setting
        self._train, self._test = _flat(data)
        num_data, features = self._train[0].shape
        if plan.batch_size > num_data:
            raise UsageError(
                f"--batch-size {plan.batch_size} is more than the {num_data} training examples. "
                "Choose a smaller one."
            )
        for field in ("learning_rate", "prior_precision", "noise_start"):
            if (value := getattr(setting, field)) < 0:
                raise UsageError(f"--{field.replace('_', '-')} must be at least 0, got {value}.")
        self._shapes = {
            "w1": (features, plan.hidden),
            "b1": (plan.hidden,),
            "w2": (plan.hidden, data.num_classes),
            "b2": (data.num_classes,),
        }
        self.num_params = sum(map(math.prod, self._shapes.values()))
        self._loss_fn = _loss_function(setting, num_data)
        try:
            sampler = optperm.constant_sgd(
                self.num_params if setting.legacy else num_data,
                plan.batch_size,
                learning_rate=setting.learning_rate,
                estimator="single_example" if setting.legacy else "per_example",
                max_step=setting.max_step,
                burn_in=0,
                freeze_after=None if setting.legacy else plan.first_steps,
            )
        except (ValueError, TypeError) as error:
            raise UsageError(f"sweep: {error}") from error
        self._tx = optax.chain(sampler, optperm.mask_elements())

    def run(self, *, interrupt: Interrupt, on_call: Callable[[int], None]) -> Iterator[Repeat]:
        """Computes the plan, repeat by repeat.

        Args:
          interrupt: Ends it after some steps once it is requested; the repeat is lost.
          on_call: Called with the number of the repeat after every few steps of all its networks.

        Yields:
          A `Repeat` each.
        """
        plan, sets = self._plan, (self._train, self._test)
        start, branch = jax.jit(self._start), jax.jit(self._branch)
        advance = jax.jit(self._advance, donate_argnums=0)
        shape = (len(plan.curves), plan.grid)
        for repeat in range(plan.repeats):
            keys = jax.random.split(jax.random.key(plan.seed + repeat, impl="threefry2x32"), 5)
            params, opt_state, grad = start(keys, self._train)
            before = [float(_accuracy(params, examples)) for examples in sets]
            carry, fixed = branch(params, opt_state, grad, keys[_ORDER])
            batches = self._batches(keys[_BATCHES], plan.steps)
            for first in range(0, plan.steps, _STEPS_A_CALL):
                if interrupt.requested:
                    return
                chosen = batches[first : first + _STEPS_A_CALL]
                carry = jax.block_until_ready(advance(carry, fixed, self._train, chosen))
                on_call(repeat)
            train, test = (
                np.asarray(_accuracies(carry[0], examples)).reshape(shape) for examples in sets
            )
            masked = sum(
                np.sum(~np.asarray(leaf).reshape(*shape, -1), axis=-1)
                for leaf in jax.tree.leaves(fixed[1])
            )
            yield Repeat((before[0], before[1]), train, test, np.asarray(masked))

    def _batches(self, key: jax.Array, steps: int) -> jax.Array:
        """Which examples, (steps, batch_size + 1), drawn with replacement; the last is apart."""
        return jax.random.randint(key, (steps, self._plan.batch_size + 1), 0, len(self._train[0]))

    def _step(self, params: Params, opt_state: Any, examples: Any) -> tuple[Params, Any]:
        batch, apart = (
            jax.tree.map(lambda leaf, rows=rows: leaf[rows], examples)
            for rows in (slice(None, -1), slice(-1, None))
        )
        e = optperm.evaluate(self._loss_fn, params, batch, example=apart)
        updates, opt_state = self._tx.update(e.grad, opt_state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    def _start(self, purposes: jax.Array, data: Any) -> tuple[Params, Any, Params]:
        """Params and state after the first steps, and the gradient over all examples there."""
        keys = jax.random.split(purposes[_INIT], len(self._shapes))
        kernel = jax.nn.initializers.lecun_normal()
        params = {
            name: kernel(key, shape) if len(shape) == 2 else jnp.zeros(shape)
            for key, (name, shape) in zip(keys, self._shapes.items(), strict=True)
        }

        def step(carry: Any, chosen: jax.Array) -> tuple[Any, None]:
            params, opt_state = carry
            return self._step(params, opt_state, _examples(data, chosen)), None

        batches = self._batches(purposes[_FIRST_BATCHES], self._plan.first_steps)
        opt_state = self._with_random_noise(self._tx.init(params), purposes[_NOISE])
        (params, opt_state), _ = jax.lax.scan(step, (params, opt_state), batches)
        return params, opt_state, optperm.full_gradient(self._loss_fn, params, [data])

    def _with_random_noise(self, opt_state: Any, key: jax.Array) -> Any:
        """The state as if random numbers had been estimated already, with all the weight there is."""
        if not self._plan.setting.noise_start:
            return opt_state
        (noise,) = find_states(opt_state, optperm.GradientNoiseState)
        random = optax.tree.random_like(
            key,
            noise.covariance,
            functools.partial(jax.random.uniform, maxval=self._plan.setting.noise_start),
        )
        started = noise._replace(weight=jnp.ones_like(noise.weight), covariance=random)
        return replace_state(opt_state, optperm.GradientNoiseState, started, method="constant_sgd")

    def _branch(self, params: Params, opt_state: Any, grad: Params, key: jax.Array) -> Any:
        """Prunes or freezes every fraction by every criterion.

        Returns:
          The carry and what is fixed, for `_advance`.
        """
        # The next number up: p n rounds to no less than an integer that it should be.
        above = np.nextafter(self._plan.fractions.astype(np.float32), np.float32(2))
        fractions = jnp.asarray(np.minimum(above, 1))

        def choose(curve: Curve, fraction: jax.Array) -> tuple[Params, Any]:
            criterion: Any = curve.criterion
            if curve.action == "prune":
                return optperm.prune(params, opt_state, fraction, criterion=criterion, key=key)
            return params, optperm.freeze(
                opt_state, fraction, scores=grad, criterion=criterion, key=key
            )

        chosen = [
            jax.vmap(functools.partial(choose, curve), out_axes=(0, (None, 0)))(fractions)
            for curve in self._plan.curves
        ]
        all_params, masks = (
            jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
            for parts in zip(*((p, mask) for p, (_, mask) in chosen), strict=True)
        )
        sampler = opt_state[0]
        if not self._plan.setting.legacy:
            return (all_params, ()), (sampler, masks)
        count = len(fractions) * len(self._plan.curves)
        own = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (count, *leaf.shape)), sampler)
        return (all_params, own), ((), masks)

    def _advance(self, carry: Any, fixed: Any, data: Any, batches: jax.Array) -> Any:
        """All networks after a step on each batch, which all of them share.

        Args:
          carry: Params, and what else each network has for itself and a step changes.
          fixed: The sampler's state, where that is frozen and all share it, and the masks.
          data: The training examples.
          batches: Which of them.
        """
        shared, masks = fixed
        is_own = self._plan.setting.legacy

        def step(carry: Any, chosen: jax.Array) -> tuple[Any, None]:
            examples = _examples(data, chosen)

            def move(params: Params, own: Any, mask: Any) -> tuple[Params, Any]:
                state = (own if is_own else shared, mask)
                params, (sampler, _) = self._step(params, state, examples)
                # Where it is frozen it is not kept, and XLA leaves out the gradients of single examples.
                return params, sampler if is_own else ()

            params, own = carry
            return jax.vmap(move)(params, own, masks), None

        return jax.lax.scan(step, carry, batches)[0]


def _flat(data: Dataset) -> tuple[_Examples, _Examples]:
    """Training and test examples as vectors, without the features that are constant in training."""
    x_train, x_test = (x.reshape(len(x), -1) for x in (data.x_train, data.x_test))
    varies = np.ptp(x_train, axis=0) > 0
    return (
        (jnp.asarray(x_train[:, varies]), jnp.asarray(data.y_train)),
        (jnp.asarray(x_test[:, varies]), jnp.asarray(data.y_test)),
    )


def _examples(data: _Examples, chosen: jax.Array) -> _Examples:
    x, y = data
    return x[chosen], y[chosen]


def _logits(params: Params, x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["w1"] + params["b1"][None])
    return hidden @ params["w2"] + params["b2"][None]


def _loss_function(setting: Setting, num_data: int) -> Callable[[Params, _Examples], jax.Array]:
    """The mean over a batch of l_n, which has its share of the prior."""

    def loss_fn(params: Params, batch: _Examples) -> jax.Array:
        x, y = batch
        outputs = _logits(params, x)
        if setting.legacy:
            outputs = jax.nn.softmax(outputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, y)
        prior = setting.prior_precision / (2 * num_data) * optax.tree.norm(params, squared=True)
        return jnp.mean(losses) + prior

    return loss_fn


@jax.jit
def _accuracy(params: Params, examples: _Examples) -> jax.Array:
    x, y = examples
    return jnp.mean(jnp.argmax(_logits(params, x), axis=-1) == y)


@jax.jit
def _accuracies(params: Params, examples: _Examples) -> jax.Array:
    """The accuracy of each network, one after the other: all at once might not fit."""
    return jax.lax.map(lambda one: _accuracy(one, examples), params)
