"""The training methods that the command line offers: one table entry each."""

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping

import optax

import optperm
from optperm import checks
from optperm.cli.training import EpochStart
from optperm.distributed.local_steps import Commit

Hyperparameter = bool | int | float | str


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
      gradients_a_step: From the hyperparameters, how many gradients of its batch a step takes.
      period: The flag that says after how many local steps the replicas commit to their center,
        which is then what is trained. None where all replicas take each step together.
    """

    name: str
    help: str
    build: Callable[..., optax.GradientTransformation]
    flags: Mapping[str, str]
    permutes: bool = False
    period: str | None = None
    epoch_start: Callable[..., EpochStart | None] = lambda epoch, **_: None
    gradients_a_step: Callable[..., int] = lambda **_: 1

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
)
METHODS = {method.name: method for method in _ENTRIES}
