"""The training methods of the command line, one table entry per method.

The flags of a method are the parameters of its public functions, with their types, defaults and
docstrings, and the hyperparameters that the entry adds or replaces.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import optax
import optax.contrib
from docstring_parser import DocstringStyle, parse

import optperm
from optperm.core import checks

Hyperparameter = bool | int | float | str | None
Transformation: TypeAlias = optax.GradientTransformation
# Facts that a run knows by itself, and passes to the functions that take them.
_FACTS = ("key", "num_data", "batch_size", "axis_name")
# Bounds that Optax itself does not check.
_FROM_ZERO = ("learning_rate", "weight_decay", "eps", "prior_precision", "aggressiveness")
_BOUNDS = dict.fromkeys((*_FROM_ZERO, "outer_learning_rate", "burn_in_learning_rate"), float("inf"))
_BOUNDS |= dict.fromkeys(("momentum", "outer_momentum", "b1", "b2", "aggressiveness_decay"), 1.0)


class Flag(NamedTuple):
    """A hyperparameter on the command line: its default, its help and its type."""

    default: Hyperparameter
    help: str
    kind: Any


@dataclasses.dataclass(frozen=True)
class Method:
    """A training method.

    Attributes:
      name: The name after `optperm train`.
      build: The function that makes the transformation of hyperparameters and of those `_FACTS` that it
        takes.
      example: The flags of a sensible run.
      of: The functions whose parameters are the flags, if not `build` itself.
      own: Replaced defaults of the functions, and added hyperparameters with their help.
      epoch_start: Returns the change of the optimizer state before an epoch, or None, from the number of
        the epoch (from 1) and the hyperparameters.
      gradients_a_step: Returns the number of gradients of its batch that a step takes, from the
        hyperparameters. Trials of a line search evaluate the loss alone, and do not count.
      phase: Returns the phase of the method, if it has phases, from the steps done and the
        hyperparameters.
    """

    name: str
    build: Callable[..., Transformation]
    example: str
    of: tuple[Callable[..., Any], ...] = ()
    own: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    epoch_start: Callable[..., Any] | None = None
    gradients_a_step: Callable[..., float] = lambda **_: 1
    phase: Callable[..., str | None] = lambda step, **_: None

    @property
    def help(self) -> str:
        """The first line of its docstring."""
        return (inspect.getdoc((*self.of, self.build)[0]) or "").partition("\n")[0]

    @functools.cached_property
    def flags(self) -> dict[str, Flag]:
        """Its hyperparameters by name."""
        found: dict[str, Flag] = {}
        for name, entry in self.own.items():
            default, about = entry if isinstance(entry, tuple) else (entry, "")
            found[name] = Flag(default, about, type(default))
        for function in self.of or (self.build,):
            docstring = parse(inspect.getdoc(function) or "", DocstringStyle.GOOGLE)
            described = {each.arg_name: each.description or "" for each in docstring.params}
            for name, parameter in inspect.signature(function).parameters.items():
                default, about, _ = found.get(name, (parameter.default, "", None))
                # A flag is a number, even if the function also takes a schedule.
                is_plain = isinstance(default, bool | int | float | str)
                if name in _FACTS or not (is_plain or name in self.own):
                    continue
                kind: Any = type(default)
                if kind is str or default is None:  # the annotation has the choices, or the type
                    kind = parameter.annotation
                    kind = typing.get_type_hints(function)[name] if isinstance(kind, str) else kind
                found[name] = Flag(default, about or _first_sentence(described.get(name, "")), kind)
        return found

    @property
    def takes_axis(self) -> bool:
        """True if the method is mapped over the axis of its replicas."""
        return "axis_name" in inspect.signature(self.build).parameters

    def defaults(self) -> dict[str, Hyperparameter]:
        """Return the default of each flag."""
        return {name: flag.default for name, flag in self.flags.items()}

    def transformation(
        self, hyperparameters: Mapping[str, Hyperparameter], run: Mapping[str, int | str | None]
    ) -> optax.GradientTransformationExtraArgs:
        """Make the transformation; raise a TypeError or ValueError for a wrong hyperparameter."""
        for name in _BOUNDS.keys() & hyperparameters.keys():
            checks.check_in_range(name, hyperparameters[name], 0.0, _BOUNDS[name])
        wanted = inspect.signature(self.build).parameters
        known = {name: fact for name, fact in run.items() if name in wanted}
        return optax.with_extra_args_support(self.build(**hyperparameters, **known))


def _first_sentence(text: str) -> str:
    """Return the first sentence of an argument's text, without a formula in front and without markup."""
    sentence = " ".join(text.split()).partition(". ")[0].removesuffix(".") + "."
    if sentence.startswith(":math:`"):
        sentence = sentence.split("`", 2)[2].lstrip(",: ")
        sentence = sentence[:1].upper() + sentence[1:]
    for mark in (":math:", ":func:", "`"):
        sentence = sentence.replace(mark, "")
    return sentence


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
        # The first step of the original already decays.
        first = aggressiveness * aggressiveness_decay
        schedule = optax.exponential_decay(first, 1, aggressiveness_decay)
    return optperm.sgperm(schedule, key=key, **options)


def _laperm(every: int, **adam: Any) -> Transformation:
    return optperm.laperm(optax.adam(**adam), every)


def _svrg(every: int, coefficient: float, **sgd: Any) -> Transformation:
    checks.check_count("every", every)
    return optax.chain(optperm.svrg(coefficient), optax.sgd(**sgd))


def _snapshot(epoch: int, *, every: int, **_: Hyperparameter) -> Any:
    """Take a snapshot before the epochs 1, 1 + every, ..."""
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
    rank: float,
    learning_rate: float,
    weight_decay: float,
    **options: Any,
) -> Transformation:
    direction = make(rank=int(rank) if rank >= 1 else rank, **options)
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
    checks.check_choice("second", second, ("dim_reduce", "project", "twa"))
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
    """Return the phase: snapshots until the last of them, then the subspace."""
    # A snapshot is taken before its step, so the step after the last snapshot is in the subspace.
    taken = max(0, -(-(step - start) // every))
    return "subspace" if taken >= num_snapshots else f"snapshots {taken}/{num_snapshots}"


def _constant_sgd(
    *,
    burn_in_learning_rate: float,
    prior_precision: float,
    num_data: int,
    batch_size: int,
    **options: Any,
) -> Transformation:
    if options["estimator"] == "single_example":  # the command passes no extra example
        raise ValueError("estimator must be per_example or two_batches.")
    del prior_precision  # it is in the loss
    options["burn_in_optimizer"] = optax.sgd(burn_in_learning_rate, 0.9)
    return optperm.mandt_sgd(num_data, batch_size, **options)


_RATE = "The step size."
_IN_SUBSPACES = {
    "learning_rate": (3e-3, _RATE),
    "weight_decay": (0.0, "The decay of all weights, times the step size."),
    "rank": (0.25, "The rank, or from 0 to 1 its ratio to each matrix's smaller side."),
}
_ENTRIES = (
    Method(
        "sgperm",
        _sgperm,
        "--aggressiveness 0.2 --epochs 20",
        (optperm.sgperm,),
        {
            "aggressiveness": (
                0.1,
                "At the start, a weight moves by at most about this fraction of its weight vector's "
                "range; it falls to a hundredth over the run.",
            ),
            "aggressiveness_decay": (
                0.0,
                "The factor on the aggressiveness in each step; 0 to let it fall over the run.",
            ),
            "num_steps": (
                None,
                "The number of steps over which the aggressiveness falls; by default the whole run.",
            ),
            "centralize": True,
        },
    ),
    Method(
        "laperm",
        _laperm,
        "--every 25 --epochs 20",
        (optperm.laperm, optax.adam),
        {"learning_rate": (1e-3, _RATE), "every": 58},
    ),
    Method(
        "sgd",
        optax.sgd,
        "--learning-rate 0.05 --momentum 0.5",
        own={"learning_rate": (0.1, _RATE), "momentum": 0.9},
    ),
    Method("adam", optax.adam, "--model cnn --b1 0.8", own={"learning_rate": (1e-3, _RATE)}),
    Method(
        "muon",
        optax.contrib.muon,
        "--learning-rate 0.01 --hidden 512",
        own={"learning_rate": (0.02, _RATE)},
    ),
    Method(
        "svrg",
        _svrg,
        "--coefficient 0.5 --every 1",
        (optperm.svrg, optax.sgd),
        {
            "every": (2, "The number of epochs between snapshots."),
            "coefficient": (1.0, "1 is plain SVRG, which mostly hurts deep networks; 0 is SGD."),
            "learning_rate": (0.1, _RATE),
            "momentum": 0.0,
        },
        epoch_start=_snapshot,
        gradients_a_step=lambda coefficient, **_: 2 if coefficient else 1,
    ),
    Method(
        "agn",
        _agn,
        "--every 20 --devices 4",
        (optperm.agn, optax.sgd),
        {"learning_rate": (0.5, _RATE), "momentum": 0.5},
    ),
    Method(
        "diloco",
        _diloco,
        "--every 50 --devices 4",
        (optperm.diloco, optax.adamw),
        {
            "every": 20,
            "learning_rate": (3e-3, _RATE),
            "outer_learning_rate": (0.8, "The step size of the outer steps."),
            "outer_momentum": (0.5, "The decay of the Nesterov momentum of the outer steps."),
        },
    ),
    Method(
        "dldr",
        _dldr,
        "--num-snapshots 31 --n-components 20",
        (optperm.dldr, optperm.dim_reduce, optax.sgd),
        {
            "second": ("dim_reduce", "The method in the subspace: dim_reduce, project or twa."),
            "every": 5,
            "num_snapshots": 16,
            "n_components": 10,
            "alpha": 0.01,
            "max_search_steps": (10, "The maximum number of trials of a line search."),
            "learning_rate": (0.1, _RATE),
            "momentum": 0.0,
        },
        phase=_dldr_phase,
    ),
    Method(
        "low-rank",
        _low_rank,
        "--rank 0.125 --hidden 512",
        (optperm.low_rank,),
        {
            **_IN_SUBSPACES,
            "residual": (True, "Add the scaled part of the gradient outside of the subspace."),
            "b1": (0.9, "The decay rate of Adam's mean of gradients."),
            "b2": (0.999, "The decay rate of Adam's mean of squared gradients."),
        },
    ),
    Method(
        "apollo",
        _apollo,
        "--rank 1 --by tensor --scale 11.3",
        (optperm.apollo,),
        {
            **_IN_SUBSPACES,
            "scale": (0.0, "A factor on the steps of matrices; 0 for the root of d / r."),
        },
    ),
    Method(
        "constant-sgd",
        _constant_sgd,
        "--burn-in 300 --max-step 0.1 --epochs 30",
        (optperm.mandt_sgd,),
        {
            "burn_in": 150,
            "burn_in_learning_rate": (
                0.1,
                "The step size of the burn-in, by SGD with momentum .9.",
            ),
            "learning_rate": (1.0, "A factor on the steps; 1 for sampling."),
            "max_step": 0.5,
            "momentum": (0.0, "The decay rate of the momentum, in [0, 1)."),
            "prior_precision": (
                1.0,
                "The precision of the normal prior of each parameter; 0 for none.",
            ),
        },
        gradients_a_step=lambda estimator, **_: 2.0 if estimator == "per_example" else 1.5,
        phase=lambda step, burn_in, **_: "sampling" if step >= burn_in else "burn-in",
    ),
)
METHODS = {method.name: method for method in _ENTRIES}
