"""The training methods that the command line offers: one table entry each."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.flatten_util import ravel_pytree

import optperm
from optperm.bayes.noise_estimates import Preconditioner
from optperm.cli.training import EpochStart
from optperm.contract import checks
from optperm.contract.states import find_states
from optperm.distributed.commits import Commit
from optperm.subspace.dldr import SecondPhase

Hyperparameter = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class Posterior:
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
      help: What it does, in a line.
      build: Makes the transformation. Beside its hyperparameters it may have parameters named
        like what the run knows (`seed`, `num_data`, `batch_size`, `axis_name`), which are filled in.
      flags: The parameters of `build` that become flags, each with its help. Their types and
        defaults are those of the signature; a string has a `Literal` of its choices for a type.
      permutes: Whether the trained weights are the initial ones in another order, and are saved
        as a permutation.
      epoch_start: From the number of an epoch (from 1) and the hyperparameters, what the method does
        before it, if anything; also on resume, like without an interruption.
      gradients_a_step: From the hyperparameters, how many gradients of its batch a step takes; the
        trials of a line search are evaluations of the loss alone, and do not count.
      period: The flag that says after how many local steps the replicas commit to their center,
        which is then what is trained. None where all replicas take each step together.
      spreads: Whether each replica keeps a part of the state, so that the method averages the
        gradients of the replicas itself.
      phase: From the steps done and the hyperparameters, what the method is doing, if it changes.
      posterior: From the optimizer state, the steps done and the hyperparameters, the draws from a
        posterior, if the method makes any.
    """

    name: str
    help: str
    build: Callable[..., optax.GradientTransformation]
    flags: Mapping[str, str]
    permutes: bool = False
    period: str | None = None
    spreads: bool = False
    phase: Callable[..., str | None] = lambda step, **_: None
    epoch_start: Callable[..., EpochStart | None] = lambda epoch, **_: None
    posterior: Callable[..., Posterior | None] = lambda opt_state, step, **_: None
    gradients_a_step: Callable[..., float] = lambda **_: 1

    def defaults(self) -> dict[str, Hyperparameter]:
        """The default of each flag."""
        parameters = inspect.signature(self.build).parameters
        return {name: parameters[name].default for name in self.flags}

    def choices(self, name: str) -> tuple[str, ...]:
        """What a flag that is a string may be."""
        return typing.get_args(inspect.signature(self.build).parameters[name].annotation)

    def transformation(
        self, hyperparameters: Mapping[str, Hyperparameter], run: Mapping[str, int | str | None]
    ) -> optax.GradientTransformationExtraArgs:
        """Builds the transformation from its flags and what the run knows.

        Raises:
          TypeError: If a hyperparameter is of the wrong type.
          ValueError: If one is out of range.
        """
        wanted = inspect.signature(self.build).parameters
        known = {name: fact for name, fact in run.items() if name in wanted}
        return optax.with_extra_args_support(self.build(**hyperparameters, **known))


def _sgd(learning_rate: float = 0.1, momentum: float = 0.9) -> optax.GradientTransformation:
    checks.check_in_range("learning_rate", learning_rate, 0.0, float("inf"))
    checks.check_in_range("momentum", momentum, 0.0, 1.0)
    return optax.sgd(learning_rate, momentum)


def _adam(
    learning_rate: float = 1e-3, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8
) -> optax.GradientTransformation:
    checks.check_in_range("learning_rate", learning_rate, 0.0, float("inf"))
    checks.check_in_range("b1", b1, 0.0, 1.0)
    checks.check_in_range("b2", b2, 0.0, 1.0)
    checks.check_in_range("eps", eps, 0.0, float("inf"))
    return optax.adam(learning_rate, b1, b2, eps)


def _laperm(
    learning_rate: float = 1e-3, b1: float = 0.9, b2: float = 0.999, sync_every: int = 58
) -> optax.GradientTransformation:
    return optperm.laperm(_adam(learning_rate, b1, b2), sync_every)


def _muon(learning_rate: float = 0.02, weight_decay: float = 0.0) -> optax.GradientTransformation:
    checks.check_in_range("learning_rate", learning_rate, 0.0, float("inf"))
    checks.check_in_range("weight_decay", weight_decay, 0.0, float("inf"))
    return optax.contrib.muon(learning_rate, weight_decay=weight_decay)


def _svrg(
    update_freq: int = 2,
    coefficient: float = 1.0,
    learning_rate: float = 0.1,
    momentum: float = 0.0,
) -> optax.GradientTransformation:
    checks.check_count("update_freq", update_freq)
    return optax.chain(optperm.svrg(coefficient), _sgd(learning_rate, momentum))


def _snapshot(epoch: int, *, update_freq: int, **_: Hyperparameter) -> EpochStart | None:
    """The snapshot of epochs 1, 1 + update_freq, ...

    The one that is in force is part of the optimizer state, and so of a checkpoint. A run that is
    resumed before an epoch of the schedule takes a new one, at the params of the checkpoint, as the run
    that went on did; before any other epoch it has that of the checkpoint, and a new one would part it
    from the run that went on. It never goes without: the schedule begins with the first epoch.
    """
    is_due = (epoch - 1) % update_freq == 0
    return EpochStart("full gradient", optperm.take_snapshot) if is_due else None


def _agn(
    learning_rate: float = 0.5,
    momentum: float = 0.5,
    communication_period: int = 10,
    commit: Commit = "mean",
    *,
    axis_name: str | None = None,
) -> optax.GradientTransformation:
    return optperm.agn(
        _sgd(learning_rate, momentum), communication_period, axis_name=axis_name, commit=commit
    )


def _diloco(
    learning_rate: float = 3e-3,
    weight_decay: float = 1e-4,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    sync_every: int = 20,
    *,
    axis_name: str | None = None,
) -> optax.GradientTransformation:
    infinity = float("inf")
    checks.check_in_range("learning_rate", learning_rate, 0.0, infinity)
    checks.check_in_range("weight_decay", weight_decay, 0.0, infinity)
    checks.check_in_range("outer_learning_rate", outer_learning_rate, 0.0, infinity)
    checks.check_in_range("outer_momentum", outer_momentum, 0.0, 1.0)
    return optperm.diloco(
        optax.adamw(learning_rate, weight_decay=weight_decay),
        optax.sgd(outer_learning_rate, outer_momentum, nesterov=True),
        sync_every,
        axis_name=axis_name,
    )


def _dldr(
    learning_rate: float = 0.1,
    momentum: float = 0.0,
    sample_every: int = 5,
    num_samples: int = 16,
    n_components: int = 10,
    start: int = 0,
    second_phase: SecondPhase = "bfgs",
    rho: float = 0.55,
    gamma: float = 0.9,
    alpha: float = 0.01,
    sigma: float = 0.4,
    max_search_steps: int = 2,
    *,
    axis_name: str | None = None,
) -> optax.GradientTransformation:
    return optperm.dldr(
        _sgd(learning_rate, momentum),
        sample_every=sample_every,
        num_samples=num_samples,
        n_components=n_components,
        start=start,
        second_phase=second_phase,
        rho=rho,
        gamma=gamma,
        alpha=alpha,
        sigma=sigma,
        max_search_steps=max_search_steps,
        axis_name=axis_name,
    )


def _dldr_phase(
    step: int, *, sample_every: int, num_samples: int, start: int, **_: Hyperparameter
) -> str:
    """Snapshots are taken before steps; the step after the last one is in the subspace already."""
    taken = max(0, -(-(step - start) // sample_every))
    return "subspace" if taken >= num_samples else f"sampling {taken}/{num_samples}"


def _constant_sgd(
    learning_rate: float = 1.0,
    preconditioner: Preconditioner = "diagonal",
    estimator: Literal["per_example", "two_batches"] = "per_example",
    momentum: float = 0.0,
    temperature: float = 1.0,
    prior_precision: float = 1.0,
    max_step: float = 0.5,
    burn_in: int = 150,
    burn_in_learning_rate: float = 0.1,
    draw_every: int = 5,
    max_draws: int = 50,
    *,
    num_data: int,
    batch_size: int,
    axis_name: str | None = None,
) -> optax.GradientTransformation:
    checks.check_in_range("prior_precision", prior_precision, 0.0, float("inf"))
    return optax.chain(
        optperm.record_trajectory(draw_every, max_draws),
        optax.add_decayed_weights(prior_precision / num_data),
        optperm.constant_sgd(
            num_data,
            batch_size,
            learning_rate=learning_rate,
            preconditioner=preconditioner,
            estimator=estimator,
            momentum=momentum or None,
            temperature=temperature,
            burn_in=burn_in,
            burn_in_optimizer=_sgd(burn_in_learning_rate),
            max_step=max_step,
            axis_name=axis_name,
        ),
    )


def _constant_sgd_phase(step: int, *, burn_in: int, **_: Hyperparameter) -> str:
    return "sampling" if step >= burn_in else "burn-in"


def _constant_sgd_posterior(
    opt_state: Any,
    step: int,
    *,
    preconditioner: Preconditioner,
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
    Method(
        "sgperm",
        "train only by permuting the initial weights",
        optperm.sgperm,
        {
            "aggressiveness": "how far a weight moves at first, as a share of its vector's range",
            "aggressiveness_decay": "factor on the aggressiveness, each step",
            "min_aggressiveness": "the least aggressiveness",
            "partition_ratio": "share of a weight vector permuted within itself at first",
            "partition_growth": "factor on the partition ratio, each step",
            "max_partition_ratio": "the greatest partition ratio",
            "learning_rate": "weight of the newest gradient in the recommendation",
            "momentum": "weight of the last recommendation in the next",
            "min_partition_size": "least weights permuted within themselves",
            "include_remainder": "permute a smaller last part of a weight vector as well",
        },
        permutes=True,
    ),
    Method(
        "laperm",
        "Adam, with the initial weights put in the order of the trained ones now and then",
        _laperm,
        {
            "learning_rate": "step size of Adam",
            "b1": "decay of the first moment",
            "b2": "decay of the second moment",
            "sync_every": "steps from one synchronization to the next; what is tested and kept is "
            "always synchronized",
        },
        permutes=True,
    ),
    Method(
        "sgd",
        "stochastic gradient descent with momentum",
        _sgd,
        {"learning_rate": "step size", "momentum": "decay of the momentum"},
    ),
    Method(
        "adam",
        "Adam",
        _adam,
        {
            "learning_rate": "step size",
            "b1": "decay of the first moment",
            "b2": "decay of the second moment",
            "eps": "added to the root of the second moment",
        },
    ),
    Method(
        "muon",
        "Muon for matrices, Adam for the rest",
        _muon,
        {"learning_rate": "step size", "weight_decay": "of the matrices"},
    ),
    Method(
        "svrg",
        "SGD whose gradients are corrected by a snapshot, taken every few epochs",
        _svrg,
        {
            "update_freq": "epochs from one snapshot to the next",
            "coefficient": "weight of the correction: 1 is plain SVRG, which mostly hurts deep "
            "networks, less is milder, 0 is SGD",
            "learning_rate": "step size",
            "momentum": "decay of the momentum",
        },
        epoch_start=_snapshot,
        gradients_a_step=lambda coefficient, **_: 2 if coefficient else 1,
    ),
    Method(
        "agn",
        "local steps of SGD, rare commits of the normalized sum of their gradients",
        _agn,
        {
            "learning_rate": "step size, of the local steps and the center's",
            "momentum": "decay of the momentum, likewise",
            "communication_period": "local steps from one commit to the next",
            "commit": "how the replicas' contributions to a commit are combined",
        },
        period="communication_period",
    ),
    Method(
        "diloco",
        "local steps of AdamW, rare outer steps of SGD on how far they went",
        _diloco,
        {
            "learning_rate": "step size of the local steps",
            "weight_decay": "of the local steps",
            "outer_learning_rate": "step size of the outer steps",
            "outer_momentum": "decay of the Nesterov momentum of the outer steps",
            "sync_every": "local steps from one outer step to the next",
        },
        period="sync_every",
    ),
    Method(
        "dldr",
        "SGD, then quasi-Newton or SGD steps in the subspace that its trajectory spans",
        _dldr,
        {
            "learning_rate": "step size of SGD",
            "momentum": "decay of the momentum of SGD",
            "sample_every": "steps from one snapshot of the trajectory to the next",
            "num_samples": "snapshots; with the last one the second phase begins",
            "n_components": "dimensions of the subspace, fewer than there are snapshots",
            "start": "steps before the first snapshot",
            "second_phase": "how to train in the subspace: quasi-Newton steps with a line search, or "
            "SGD that sees the projected gradient",
            "rho": "factor on a step that the line search rejected (this and what follows: bfgs)",
            "gamma": "decay of the momentum of the residual, the gradient outside of the subspace",
            "alpha": "step size of the residual; 0 is P-BFGS, which stays in the subspace",
            "sigma": "share of the predicted decrease that the line search asks for",
            "max_search_steps": "step lengths that the line search tries, at a loss evaluation each",
        },
        spreads=True,
        phase=_dldr_phase,
    ),
    Method(
        "constant-sgd",
        "SGD to an optimum, then steps of a constant size whose iterates sample the posterior",
        _constant_sgd,
        {
            "learning_rate": "factor on the steps that sample; 1 for the posterior",
            "preconditioner": "what the steps are divided by: the mean noise of the gradients, that of "
            "each parameter, or their whole covariance",
            "estimator": "of the noise: gradients of single examples, or of halves of the batch",
            "momentum": "decay of the momentum of the steps that sample",
            "temperature": "factor on the covariance of the posterior",
            "prior_precision": "of the normal prior of each parameter; 0 for none",
            "max_step": "the largest step size: where a network fits its data there is too little noise "
            "to sample by, and all steps are of this size",
            "burn_in": "steps of SGD with momentum .9 before the first one that samples",
            "burn_in_learning_rate": "step size of these",
            "draw_every": "steps from one draw to the next",
            "max_draws": "draws to keep, the last ones",
        },
        phase=_constant_sgd_phase,
        gradients_a_step=lambda estimator, **_: 2.0 if estimator == "per_example" else 1.5,
        posterior=_constant_sgd_posterior,
    ),
)
METHODS = {method.name: method for method in _ENTRIES}
