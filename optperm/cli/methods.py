"""The training methods of the command line, with one table entry per method.

The flags of a method are the parameters of its public functions, with their types, defaults and
docstrings, and the hyperparameters that the table entry adds or replaces.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import jax
import optax
import optax.contrib
from cyclopts import Parameter, Token
from docstring_parser import DocstringStyle, parse

import optperm
from optperm.core import checks

Hyperparameter = bool | int | float | str | None
Transformation: TypeAlias = optax.GradientTransformation
# Values that a run determines itself, and passes to the functions that have these parameters.
_FACTS = ("key", "num_data", "batch_size", "axis_name")
# Bounds that Optax itself does not check.
_FROM_ZERO = ("learning_rate", "weight_decay", "eps", "prior_precision", "aggressiveness")
_BOUNDS = dict.fromkeys((*_FROM_ZERO, "outer_learning_rate", "burn_in_learning_rate"), float("inf"))
_BOUNDS |= dict.fromkeys(("momentum", "outer_momentum", "b1", "b2", "aggressiveness_decay"), 1.0)


class Flag(NamedTuple):
    """A hyperparameter on the command line: its default, its help, and its type if it differs."""

    default: Hyperparameter
    help: str
    kind: Any = None


@dataclasses.dataclass(frozen=True)
class Method:
    """A training method.

    Attributes:
      name: The name after `optperm train`.
      build: The function that makes the transformation from hyperparameters and the `_FACTS` among its
        parameters.
      of: The functions whose parameters are the flags, if not `build` itself.
      own: Flags that the functions do not have, and flags with a different default or help.
      epoch_start: A function from the number of an epoch (from 1) and the hyperparameters to the change
        of the optimizer state before this epoch, or None.
      gradients_a_step: A function from the hyperparameters to the number of batch gradients per step.
        Trials of a line search evaluate only the loss, and do not count.
      phase: A function from the number of steps and the hyperparameters to the name of the phase; None
        if the method has no phases.
    """

    name: str
    build: Callable[..., Transformation]
    of: tuple[Callable[..., Any], ...] = ()
    own: Mapping[str, Flag] = dataclasses.field(default_factory=dict)
    epoch_start: Callable[..., Any] | None = None
    gradients_a_step: Callable[..., float] = lambda **_: 1
    phase: Callable[..., str | None] = lambda step, **_: None

    @property
    def help(self) -> str:
        """The first line of the method's docstring."""
        return (inspect.getdoc((*self.of, self.build)[0]) or "").partition("\n")[0]

    @functools.cached_property
    def flags(self) -> dict[str, Flag]:
        """The hyperparameters of the method by name."""
        found = dict(self.own)
        for function in self.of or (self.build,):
            docstring = parse(inspect.getdoc(function) or "", DocstringStyle.GOOGLE)
            described = {each.arg_name: each.description or "" for each in docstring.params}
            for name, parameter in inspect.signature(function).parameters.items():
                sentence = " ".join(described.get(name, "").split()).partition(". ")[0]
                flag = found.get(name, Flag(parameter.default, sentence.removesuffix(".") + "."))
                if isinstance(flag.default, str) and flag.kind is None:
                    kind = parameter.annotation  # includes the choices
                    kind = typing.get_type_hints(function)[name] if isinstance(kind, str) else kind
                    flag = flag._replace(kind=kind)
                # A flag is a number or a text, even if the function also accepts a schedule.
                is_plain = isinstance(flag.default, bool | int | float | str)
                if name in found or (is_plain and name not in _FACTS):
                    found[name] = flag
        return found

    @property
    def takes_axis(self) -> bool:
        """True if the method is mapped over the axis of its replicas."""
        return "axis_name" in inspect.signature(self.build).parameters

    def defaults(self) -> dict[str, Hyperparameter]:
        """Return the default of each flag."""
        return {name: flag.default for name, flag in self.flags.items()}

    def transformation(
        self, hyperparameters: Mapping[str, Hyperparameter], **facts: int | str | None
    ) -> optax.GradientTransformationExtraArgs:
        """Make the transformation; raise a TypeError or ValueError for a wrong hyperparameter."""
        for name in _BOUNDS.keys() & hyperparameters.keys():
            checks.check_in_range(name, hyperparameters[name], 0.0, _BOUNDS[name])
        wanted = inspect.signature(self.build).parameters
        known = {name: fact for name, fact in facts.items() if name in wanted}
        return optax.with_extra_args_support(self.build(**hyperparameters, **known))


def _sgperm(
    aggressiveness: float,
    aggressiveness_decay: float,
    num_steps: int | None,
    *,
    key: int,
    **options: Any,
) -> Transformation:
    schedule = optperm.permutation.falling(aggressiveness, num_steps)
    if aggressiveness_decay:
        if num_steps is not None:
            raise ValueError("pass aggressiveness_decay or num_steps, not both.")
        # In the original, the first step already decays.
        first = aggressiveness * aggressiveness_decay
        schedule = optax.exponential_decay(first, 1, aggressiveness_decay)
    return optperm.sgperm(schedule, key=key, **options)


def _laperm(every: int, **adam: Any) -> Transformation:
    return optperm.laperm(optax.adam(**adam), every)


def _svrg(every: int, coefficient: float, **sgd: Any) -> Transformation:
    checks.check_count("every", every)
    return optax.chain(optperm.svrg(coefficient), optax.sgd(**sgd))


def _snapshot(epoch: int, *, every: int, **_: Hyperparameter) -> Any:
    """Return `take_snapshot` before the epochs 1, 1 + every, ..., otherwise None."""
    return optperm.variance.take_snapshot if (epoch - 1) % every == 0 else None


def _agn(every: int, *, combine: Any, axis_name: str | None = None, **sgd: Any) -> Transformation:
    return optperm.agn(optax.sgd(**sgd), every=every, combine=combine, axis_name=axis_name)


def _diloco(
    every: int,
    *,
    outer_learning_rate: float,
    outer_momentum: float,
    mixing: float,
    combine: Any,
    axis_name: str | None = None,
    **adamw: Any,
) -> Transformation:
    outer = optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
    inner = optax.adamw(**adamw)
    how: dict[str, Any] = {"mixing": mixing, "combine": combine, "axis_name": axis_name}
    return optperm.diloco(inner, outer, every=every, **how)


def _low_rank(*, residual: bool, b1: float, b2: float, key: int, **options: Any) -> Transformation:
    how: dict[str, Any] = {"residual": "scaled" if residual else None, "key": key}
    low_rank = functools.partial(optperm.low_rank, optax.scale_by_adam(b1, b2), b1=b1, b2=b2)
    return _with_decay(low_rank, **how, **options)


def _apollo(*, scale: float, key: int, **options: Any) -> Transformation:
    return _with_decay(optperm.apollo, scale=scale or "auto", key=key, **options)


def _with_decay(
    make: Callable[..., Transformation],
    *,
    learning_rate: float,
    weight_decay: float,
    **options: Any,
) -> Transformation:
    direction = make(**options)
    decay = optax.add_decayed_weights(weight_decay)
    return optax.chain(direction, decay, optax.scale_by_learning_rate(learning_rate))


def _dldr(
    *,
    learning_rate: float,
    momentum: float,
    nesterov: bool,
    second: str,
    n_components: int,
    axis_name: str | None = None,
    **options: Any,
) -> Transformation:
    sgd = optax.sgd(learning_rate, momentum, nesterov)
    names = ("every", "num_snapshots", "start", "restart")
    recording = {name: options.pop(name) for name in names}
    more = options if second == "dim_reduce" else {"inner": sgd}
    make = getattr(optperm, second)
    tx = optperm.dldr(
        sgd, make(n_components=n_components, axis_name=axis_name, **more), **recording
    )
    jax.eval_shape(tx.init, {})  # `init` compares the numbers of snapshots and components
    return tx


def _dldr_phase(
    step: int, *, every: int, num_snapshots: int, start: int, **_: Hyperparameter
) -> str:
    """Return the phase: snapshots until the last snapshot, then the subspace."""
    # A snapshot is taken before its step, so the step after the last snapshot is in the subspace.
    taken = max(0, -(-(step - start) // every))
    return "subspace" if taken >= num_snapshots else f"snapshots {taken}/{num_snapshots}"


def _constant_sgd(
    *,
    burn_in: int,
    burn_in_learning_rate: float,
    prior_precision: float,
    num_data: int,
    batch_size: int,
    **options: Any,
) -> Transformation:
    del prior_precision  # the loss contains the prior
    first = optax.sgd(burn_in_learning_rate, 0.9)
    sampler = optperm.mandt_sgd(num_data, batch_size, **options)
    return optperm.switch_after(burn_in, first, sampler, track=True)


def _read_rank(kind: Any, tokens: Sequence[Token]) -> float:
    """Read integers as ranks and other numbers as fractions, for which 1.0 is too large."""
    text = tokens[0].value
    return int(text) if text.isdecimal() else float(text)


_RANK = Flag(
    0.25,
    "The rank; below 1, a fraction of each matrix's smaller side.",
    Annotated[float, Parameter(converter=_read_rank)],
)
_STEP_SIZE, _DECAY = "The step size.", "The decay rate of the momentum; 0 for none."
_WEIGHT_DECAY = "The weight decay, which is multiplied by the step size."
_ENTRIES = (
    Method(
        "sgperm",
        _sgperm,
        (optperm.sgperm,),
        {
            "aggressiveness": Flag(
                0.1,
                "At the start, a weight moves by at most this fraction of its weight vector's range, "
                "plus the mean distance of neighboring values; it falls to a hundredth over the run.",
            ),
            "aggressiveness_decay": Flag(
                0.0, "The decay of the aggressiveness per step; 0 to decay it over the run."
            ),
            "num_steps": Flag(
                None, "The steps over which the aggressiveness falls; by default all.", int | None
            ),
            "centralize": Flag(
                True, "Whether to subtract a random pivot near their mean from the recommendations."
            ),
            "partition_ratio": Flag(1.0, "The fraction of a weight vector in one subset."),
            "learning_rate": Flag(0.01, "The factor that multiplies the current gradient."),
            "momentum": Flag(0.9, "The factor that multiplies the last recommendation."),
        },
    ),
    Method(
        "laperm",
        _laperm,
        (optperm.laperm, optax.adam),
        {
            "learning_rate": Flag(1e-3, _STEP_SIZE),
            "every": Flag(58, "The number of steps from one synchronization to the next."),
        },
    ),
    Method(
        "sgd",
        optax.sgd,
        own={"learning_rate": Flag(0.1, _STEP_SIZE), "momentum": Flag(0.9, _DECAY)},
    ),
    Method("adam", optax.adam, own={"learning_rate": Flag(1e-3, _STEP_SIZE)}),
    Method("muon", optax.contrib.muon, own={"learning_rate": Flag(0.02, _STEP_SIZE)}),
    Method(
        "svrg",
        _svrg,
        (optperm.svrg, optax.sgd),
        {
            "every": Flag(2, "The number of epochs between snapshots."),
            "coefficient": Flag(
                1.0, "1 is plain SVRG, which mostly hurts deep networks; 0 is SGD."
            ),
            "learning_rate": Flag(0.1, _STEP_SIZE),
            "momentum": Flag(0.0, _DECAY),
        },
        epoch_start=_snapshot,
        gradients_a_step=lambda coefficient, **_: 2 if coefficient else 1,
    ),
    Method(
        "agn",
        _agn,
        (optperm.agn, optax.sgd),
        {
            "learning_rate": Flag(0.5, _STEP_SIZE),
            "momentum": Flag(0.5, _DECAY),
            "every": Flag(10, "The number of local steps from one commit to the next."),
            "combine": Flag("mean", "The rule by which replicas' contributions are combined."),
        },
    ),
    Method(
        "diloco",
        _diloco,
        (optperm.diloco, optax.adamw),
        {
            "every": Flag(20, "The number of local steps from one outer step to the next."),
            "combine": Flag(
                "mean", "An outer step takes the mean or the sum of all replicas, or pairs meet."
            ),
            "mixing": Flag(0.0, "The weight of a replica's own params in a pull."),
            "learning_rate": Flag(3e-3, _STEP_SIZE),
            "outer_learning_rate": Flag(0.8, "The step size of the outer steps."),
            "outer_momentum": Flag(0.5, "The decay of the Nesterov momentum of the outer steps."),
        },
    ),
    Method(
        "dldr",
        _dldr,
        (optperm.dldr, optperm.dim_reduce, optax.sgd),
        {
            "second": Flag(
                "dim_reduce",
                "The method in the subspace.",
                Literal["dim_reduce", "project", "twa"],
            ),
            "every": Flag(5, "The number of steps from one snapshot to the next."),
            "num_snapshots": Flag(16, "The number of snapshots before the second phase."),
            "n_components": Flag(10, "The dimensions of the subspace, fewer than the snapshots."),
            "alpha": Flag(0.01, "The step size outside of the subspace; 0 for no steps there."),
            "start": Flag(0, "The step of the first snapshot."),
            "restart": Flag("last", "The snapshot at which the second phase starts."),
            "rho": Flag(0.55, "The maximum ratio of a trial length to the previous length."),
            "sigma": Flag(0.4, "The fraction of the predicted decrease that a trial has to reach."),
            "gamma": Flag(0.9, "The decay rate of the momentum outside of the subspace."),
            "line_search": Flag("safeguarded", "The line search along quasi-Newton steps."),
            "max_search_steps": Flag(10, "The maximum number of trials of a line search."),
            "learning_rate": Flag(0.1, _STEP_SIZE),
            "momentum": Flag(0.0, _DECAY),
        },
        phase=_dldr_phase,
    ),
    Method(
        "low-rank",
        _low_rank,
        (optperm.low_rank,),
        {
            "learning_rate": Flag(3e-3, _STEP_SIZE),
            "weight_decay": Flag(0.0, _WEIGHT_DECAY),
            "rank": _RANK,
            "residual": Flag(True, "Whether to add the scaled gradient outside of the subspace."),
            "b1": Flag(0.9, "The decay rate of Adam's mean of gradients."),
            "b2": Flag(0.999, "The decay rate of Adam's mean of squared gradients."),
            "every": Flag(200, "The number of steps from one basis to the next."),
            "projection": Flag("random", "The basis, random or near the first singular vectors."),
            "carry": Flag(True, "Whether to carry over Adam's means to the next basis."),
            "side": Flag("smaller", "The side of each matrix to project."),
            "limit": Flag(
                1.01, "The maximum factor by which the norm of the scaled gradient grows."
            ),
        },
    ),
    Method(
        "apollo",
        _apollo,
        (optperm.apollo,),
        {
            "learning_rate": Flag(3e-3, _STEP_SIZE),
            "weight_decay": Flag(0.0, _WEIGHT_DECAY),
            "rank": _RANK,
            "scale": Flag(0.0, "The factor of the steps of matrices; 0 to choose it by the rank."),
            "by": Flag("channel", "The part of a gradient that shares one factor."),
            "limit": Flag(1.01, "The maximum factor by which the norm of a step grows."),
        },
    ),
    Method(
        "constant-sgd",
        _constant_sgd,
        (optperm.mandt_sgd,),
        {
            "burn_in": Flag(
                150, "The number of steps of SGD, which estimate the gradients' noise."
            ),
            "burn_in_learning_rate": Flag(0.1, "The step size of the burn-in, with momentum 0.9."),
            "learning_rate": Flag(1.0, "A factor that multiplies the steps; 1 for sampling."),
            "max_step": Flag(0.5, "The maximum eigenvalue of the matrix that scales a gradient."),
            "momentum": Flag(0.0, _DECAY),
            "preconditioner": Flag("diagonal", "The form of the matrix that scales a gradient."),
            "estimator": Flag(
                "per_example",
                "The estimator of the gradients' noise.",
                Literal["per_example", "two_batches"],
            ),
            "temperature": Flag(1.0, "A factor that multiplies the posterior's covariance."),
            "damping": Flag(0.0, "The minimum eigenvalue of the gradients' covariance."),
            "prior_precision": Flag(1.0, "The precision of each parameter's prior; 0 for none."),
        },
        gradients_a_step=lambda estimator, **_: 2.0 if estimator == "per_example" else 1.5,
        phase=lambda step, burn_in, **_: "sampling" if step >= burn_in else "burn-in",
    ),
)
METHODS = {method.name: method for method in _ENTRIES}
