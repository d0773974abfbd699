"""The training methods that the command line offers: one table entry each.

The flags of a method are the parameters of the function that builds it, with their types and defaults,
and what their docstrings say. Parameters that such a function hands on as `**options` are those of the
public function that it calls.
"""

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.flatten_util import ravel_pytree

import optperm
from optperm.contract import checks
from optperm.contract.states import find_states

Hyperparameter = bool | int | float | str
_INFINITY = float("inf")
# What a run knows by itself, and hands to the functions that ask for it.
_FACTS = ("seed", "num_data", "batch_size", "axis_name")


class Flag(NamedTuple):
    """A hyperparameter on the command line: its type, its default and what it is."""

    kind: Any
    default: Hyperparameter
    help: str


class Posterior(NamedTuple):
    """Draws from a posterior.

    Attributes:
      draws: A tree like params whose leaves have two leading axes, a single chain and its draws.
      share_at_max_step: Of the params, those whose steps have the largest size allowed; None where a
        step mixes them.
    """

    draws: optax.Params
    share_at_max_step: float | None


@dataclasses.dataclass(frozen=True)
class Method:
    """A training method.

    Attributes:
      name: What follows `optperm train`.
      build: Makes the transformation.
      example: Flags of a sensible run.
      public: The function whose parameters it takes as `**options`, beside or instead of its own.
      permutes: Whether the trained weights are the initial ones in another order, and are saved
        as a permutation.
      epoch_start: From the number of an epoch (from 1) and the hyperparameters, how the optimizer state
        changes before it, if at all.
      gradients_a_step: From the hyperparameters, how many gradients of its batch a step takes; the
        trials of a line search are evaluations of the loss alone, and do not count.
      period: The flag that says after how many local steps the replicas commit to their center,
        which is then what is trained. None where all replicas take each step together.
      spreads: Whether several devices share its state, by a mapped axis.
      phase: From the steps done and the hyperparameters, what the method is doing, if it changes.
      posterior: From the optimizer state, the steps done and the hyperparameters, the draws from a
        posterior, if the method makes any.
    """

    name: str
    build: Callable[..., optax.GradientTransformation]
    example: str
    public: Callable[..., Any] | None = None
    permutes: bool = False
    epoch_start: Callable[..., Any] | None = None
    gradients_a_step: Callable[..., float] = lambda **_: 1
    period: str | None = None
    spreads: bool = False
    phase: Callable[..., str | None] = lambda step, **_: None
    posterior: Callable[..., Posterior | None] = lambda opt_state, step, **_: None

    @property
    def help(self) -> str:
        """What it does, in a line."""
        return (inspect.getdoc(self.build) or "").partition("\n")[0]

    @functools.cached_property
    def flags(self) -> dict[str, Flag]:
        """Its hyperparameters: those of `build`, then those that it hands on."""
        functions = [self.build, *([self.public] if self.public else [])]
        described: dict[str, str] = {}
        found: dict[str, Flag] = {}
        for function in reversed(functions):
            described |= _descriptions(function)
        for function in functions:
            for name, kind, default in _plain_parameters(function):
                found.setdefault(name, Flag(kind, default, described[name]))
        return found

    def defaults(self) -> dict[str, Hyperparameter]:
        """The default of each flag."""
        return {name: flag.default for name, flag in self.flags.items()}

    def transformation(
        self, hyperparameters: Mapping[str, Hyperparameter], run: Mapping[str, int | str | None]
    ) -> optax.GradientTransformationExtraArgs:
        """Builds the transformation from its flags and from `run`, what the run knows (`_FACTS`).

        Raises:
          TypeError: If a hyperparameter is of the wrong type.
          ValueError: If one is out of range.
        """
        wanted = inspect.signature(self.build).parameters
        known = {name: fact for name, fact in run.items() if name in wanted}
        return optax.with_extra_args_support(self.build(**hyperparameters, **known))


def _plain_parameters(function: Callable[..., Any]) -> Iterator[tuple[str, Any, Hyperparameter]]:
    """The parameters that a flag can set, with types and defaults; a schedule cannot be."""
    types = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        default = parameter.default
        if name in _FACTS or not isinstance(default, bool | int | float | str):
            continue
        # A text has its choices for a type; of the types of a number that of the default serves.
        yield name, types[name] if isinstance(default, str) else type(default), default


def _descriptions(function: Callable[..., Any]) -> dict[str, str]:
    """What the docstring says of each parameter, its mathematics as plain text."""
    section = re.split(r"^\w+:\n", inspect.getdoc(function) or "", flags=re.MULTILINE)[1]
    entries = re.findall(r"^  (\w+): (.*?)(?=^  \w|\Z)", section, flags=re.MULTILINE | re.DOTALL)
    return {name: _plain(text) for name, text in entries}


def _plain(text: str) -> str:
    text = " ".join(text.split())
    # A flag is a number, where the function may take a schedule.
    for written, read in (
        (r",? a number or a schedule( of the step)?|( A|, or a) schedule [^.]*(?=\.|$)", ""),
        (r"\\ge\b", ">="),
        (r"\\in\b", "in"),
        (r":math:|[`\\{}]", ""),
    ):
        text = re.sub(written, read, text)
    return text.replace("..", ".")


def _sgd(learning_rate: float = 0.1, momentum: float = 0.9) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum.

    Args:
      learning_rate: The step size.
      momentum: The decay of the momentum.
    """
    checks.check_in_range("learning_rate", learning_rate, 0.0, _INFINITY)
    checks.check_in_range("momentum", momentum, 0.0, 1.0)
    return optax.sgd(learning_rate, momentum)


def _adam(
    learning_rate: float = 1e-3, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    """Adam.

    Args:
      learning_rate: The step size.
      b1: The decay of the first moment.
      b2: The decay of the second moment.
      eps: What is added to the root of the second moment.
    """
    checks.check_in_range("learning_rate", learning_rate, 0.0, _INFINITY)
    checks.check_in_range("b1", b1, 0.0, 1.0)
    checks.check_in_range("b2", b2, 0.0, 1.0)
    checks.check_in_range("eps", eps, 0.0, _INFINITY)
    return optax.adam(learning_rate, b1, b2, eps)


def _laperm(
    learning_rate: float = 1e-3, b1: float = 0.9, b2: float = 0.999, sync_every: int = 58
) -> optax.GradientTransformation:
    """LaPerm: Adam, with the initial weights put in the order of the trained ones now and then.

    Args:
      learning_rate: The step size of Adam.
      b1: The decay of the first moment.
      b2: The decay of the second moment.
      sync_every: Steps from one synchronization to the next; what is tested and kept is always
        synchronized.
    """
    return optperm.laperm(_adam(learning_rate, b1, b2), sync_every)


def _muon(learning_rate: float = 0.02, weight_decay: float = 0.0) -> optax.GradientTransformation:
    """Muon for matrices, Adam for the rest.

    Args:
      learning_rate: The step size.
      weight_decay: That of the matrices.
    """
    checks.check_in_range("learning_rate", learning_rate, 0.0, _INFINITY)
    checks.check_in_range("weight_decay", weight_decay, 0.0, _INFINITY)
    return optax.contrib.muon(learning_rate, weight_decay=weight_decay)


def _svrg(
    update_freq: int = 2, learning_rate: float = 0.1, momentum: float = 0.0, **options: Any
) -> optax.GradientTransformation:
    """SVRG: SGD whose gradients are corrected by a snapshot, taken every few epochs.

    Args:
      update_freq: Epochs from one snapshot to the next.
      learning_rate: The step size.
      momentum: The decay of the momentum.
      coefficient: The weight of the correction: 1 is plain SVRG, which mostly hurts deep networks, less
        is milder, 0 is SGD.
    """
    checks.check_count("update_freq", update_freq)
    return optax.chain(optperm.svrg(**options), _sgd(learning_rate, momentum))


def _snapshot(epoch: int, *, update_freq: int, **_: Hyperparameter) -> Any:
    """Takes the snapshot of epochs 1, 1 + update_freq, ..."""
    return optperm.take_snapshot if (epoch - 1) % update_freq == 0 else None


def _agn(
    learning_rate: float = 0.5,
    momentum: float = 0.5,
    *,
    axis_name: str | None = None,
    **options: Any,
) -> optax.GradientTransformation:
    """AGN: local steps of SGD, rare commits of the normalized sum of their gradients.

    Args:
      learning_rate: The step size, of the local steps and the center's.
      momentum: The decay of the momentum, likewise.
      commit: How the replicas' contributions to a commit are combined.
    """
    return optperm.agn(_sgd(learning_rate, momentum), axis_name=axis_name, **options)


def _diloco(
    learning_rate: float = 3e-3,
    weight_decay: float = 1e-4,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    sync_every: int = 20,
    *,
    axis_name: str | None = None,
) -> optax.GradientTransformation:
    """DiLoCo: local steps of AdamW, rare outer steps of SGD on how far they went.

    Args:
      learning_rate: The step size of the local steps.
      weight_decay: That of the local steps.
      outer_learning_rate: The step size of the outer steps.
      outer_momentum: The decay of the Nesterov momentum of the outer steps.
      sync_every: Local steps from one outer step to the next.
    """
    checks.check_in_range("learning_rate", learning_rate, 0.0, _INFINITY)
    checks.check_in_range("weight_decay", weight_decay, 0.0, _INFINITY)
    checks.check_in_range("outer_learning_rate", outer_learning_rate, 0.0, _INFINITY)
    checks.check_in_range("outer_momentum", outer_momentum, 0.0, 1.0)
    inner = optax.adamw(learning_rate, weight_decay=weight_decay)
    outer = optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
    return optperm.diloco(inner, outer, sync_every, axis_name=axis_name)


def _dldr(
    learning_rate: float = 0.1,
    momentum: float = 0.0,
    sample_every: int = 5,
    num_samples: int = 16,
    n_components: int = 10,
    alpha: float = 0.01,
    *,
    axis_name: str | None = None,
    **options: Any,
) -> optax.GradientTransformation:
    """DLDR: SGD, then quasi-Newton or SGD steps in the subspace that its trajectory spans.

    Args:
      learning_rate: The step size of SGD.
      momentum: The decay of the momentum of SGD.
      sample_every: Steps from one snapshot of the trajectory to the next.
      num_samples: Snapshots; with the last one the second phase begins.
      n_components: Dimensions of the subspace, fewer than there are snapshots.
      alpha: The learning rate of the residual, the gradient outside of the subspace; 0 is P-BFGS,
        which stays in it.
      rho: The factor on a step that the line search rejected (this and what follows: bfgs).
    """
    return optperm.dldr(
        _sgd(learning_rate, momentum),
        sample_every=sample_every,
        num_samples=num_samples,
        n_components=n_components,
        alpha=alpha,
        axis_name=axis_name,
        **options,
    )


def _dldr_phase(
    step: int, *, sample_every: int, num_samples: int, start: int, **_: Hyperparameter
) -> str:
    """Snapshots are taken before steps; the step after the last one is in the subspace already."""
    taken = max(0, -(-(step - start) // sample_every))
    return "subspace" if taken >= num_samples else f"sampling {taken}/{num_samples}"


def _constant_sgd(
    burn_in: int = 150,
    burn_in_learning_rate: float = 0.1,
    max_step: float = 0.5,
    prior_precision: float = 1.0,
    momentum: float = 0.0,
    estimator: Literal["per_example", "two_batches"] = "per_example",
    draw_every: int = 5,
    max_draws: int = 50,
    *,
    num_data: int,
    batch_size: int,
    **options: Any,
) -> optax.GradientTransformation:
    """SGD to an optimum, then steps of a constant size whose iterates sample the posterior.

    Args:
      burn_in: Steps of SGD with momentum .9 before the first one that samples.
      burn_in_learning_rate: The step size of these.
      max_step: The largest step size: where a network fits its data there is too little noise to sample
        by, and all steps are of this size.
      prior_precision: That of the normal prior of each parameter; 0 for none.
      momentum: The decay of the momentum of the steps that sample.
      estimator: What the noise is estimated from: gradients of single examples, or halves of the batch.
      draw_every: Steps from one draw to the next.
      max_draws: Draws to keep, the last ones.
    """
    checks.check_in_range("prior_precision", prior_precision, 0.0, _INFINITY)
    return optax.chain(
        optperm.record_trajectory(draw_every, max_draws),
        optax.add_decayed_weights(prior_precision / num_data),
        optperm.constant_sgd(
            num_data,
            batch_size,
            estimator=estimator,
            momentum=momentum or None,
            burn_in=burn_in,
            burn_in_optimizer=_sgd(burn_in_learning_rate),
            max_step=max_step,
            **options,
        ),
    )


def _constant_sgd_phase(step: int, *, burn_in: int, **_: Hyperparameter) -> str:
    return "sampling" if step >= burn_in else "burn-in"


def _constant_sgd_posterior(
    opt_state: Any,
    step: int,
    *,
    preconditioner: str,
    max_step: float,
    burn_in: int,
    draw_every: int,
    **_: Hyperparameter,
) -> Posterior | None:
    """The snapshots that were taken after a step that sampled."""
    snapshots, count = optperm.trajectory(opt_state)
    taken = -(-step // draw_every) - (burn_in // draw_every + 1)
    valid = min(int(count), taken)
    if valid < 1:
        return None
    draws = jax.tree.map(lambda rows: rows[int(count) - valid : int(count)][None], snapshots)
    (noise,) = find_states(opt_state, optperm.GradientNoiseState)
    if preconditioner == "full":
        return Posterior(draws, None)
    sizes = ravel_pytree(
        noise.preconditioned(jax.tree.map(lambda row: jnp.ones_like(row[0, 0]), draws))
    )[0]
    return Posterior(draws, float(jnp.mean(sizes >= jnp.float32(max_step))))


_ENTRIES = (
    Method("sgperm", optperm.sgperm, "--aggressiveness 0.2 --epochs 20", permutes=True),
    Method("laperm", _laperm, "--sync-every 25 --epochs 20", permutes=True),
    Method("sgd", _sgd, "--learning-rate 0.05 --momentum 0.5"),
    Method("adam", _adam, "--learning-rate 0.003 --model cnn"),
    Method("muon", _muon, "--learning-rate 0.01 --hidden 512"),
    Method(
        "svrg",
        _svrg,
        "--coefficient 0.5 --update-freq 1",
        optperm.svrg,
        epoch_start=_snapshot,
        gradients_a_step=lambda coefficient, **_: 2 if coefficient else 1,
    ),
    Method(
        "agn",
        _agn,
        "--communication-period 20 --devices 4",
        optperm.agn,
        period="communication_period",
    ),
    Method("diloco", _diloco, "--sync-every 50 --devices 4", period="sync_every"),
    Method(
        "dldr",
        _dldr,
        "--num-samples 31 --n-components 20",
        optperm.dldr,
        spreads=True,
        phase=_dldr_phase,
    ),
    Method(
        "constant-sgd",
        _constant_sgd,
        "--burn-in 300 --max-step 0.1 --epochs 30",
        optperm.constant_sgd,
        phase=_constant_sgd_phase,
        gradients_a_step=lambda estimator, **_: 2.0 if estimator == "per_example" else 1.5,
        posterior=_constant_sgd_posterior,
    ),
)
METHODS = {method.name: method for method in _ENTRIES}
