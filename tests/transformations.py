"""Every transformation of this library, one entry each.

An entry puts a method into all suites that methods share: the contract, the states' types, `flax.nnx`,
checkpoints, meshes, Optax's own cases, bad and hostile arguments, and gradients that are not finite.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

import optperm


@dataclasses.dataclass(frozen=True, eq=False)
class Transformation:
    """One transformation and how to build it.

    Attributes:
      factory: What builds it, by its public name.
      arguments: The numbers to build it with.
      limits: What the annotations and defaults of its arguments do not tell: their limits, as
        `calls.number` and `calls.count` take them.
      static: The arguments that decide shapes, which no program can change.
      permutes: Whether it keeps the values of the params, in another order.
      has_optax: Whether it has optimizers of Optax in it that are not among its arguments.
      is_identity: Whether it hands on the updates as they came.
      knows: What of the params that it was made for its state tells: their "dtypes", which are compared
        with those that come, their "shapes" alone, or "nothing".
      rows: For params of state entries with a leading axis, the lengths that occur.
      has_own_shapes: Whether its state holds entries for params in other shapes than theirs.
      needs_params: Whether its `update` needs the params.
      extra_args: The extra arguments that it needs, for a case that does not pass them.
      no_minimum: Why it does not minimize the losses of Optax's cases, if it does not.
      hands_on: Whether it hands on what is not finite, to what follows or to the optimizer in it.
      sums_over_params: Whether an update sums over params, so that it rounds by where they lie.
      may_gather: For how a kernel is cut, the largest parameter that the update has to gather then.
      prepared: From a fresh state and params, the state with what training would put into it.
      other_name: What tells it from another one that the same factory builds.
    """

    factory: Callable[..., optax.GradientTransformationExtraArgs]
    arguments: Mapping[str, Any]
    limits: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    static: tuple[str, ...] = ()
    permutes: bool = False
    has_optax: bool = False
    is_identity: bool = False
    knows: Literal["dtypes", "shapes", "nothing"] = "dtypes"
    rows: tuple[int, ...] = ()
    has_own_shapes: bool = False
    needs_params: bool = True
    extra_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    no_minimum: str = ""
    hands_on: bool = False
    sums_over_params: bool = False
    may_gather: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prepared: Callable[[Any, Any], Any] = lambda opt_state, params: opt_state
    other_name: str = ""

    @property
    def name(self) -> str:
        """The public name of its factory, or its own."""
        return self.other_name or self.factory.__name__

    @property
    def lenient(self) -> bool:
        """Whether optimizers of Optax are in it, which promote dtypes freely."""
        given = self.arguments.values()
        return self.has_optax or any(isinstance(g, optax.GradientTransformation) for g in given)

    def make(self) -> optax.GradientTransformationExtraArgs:
        """The transformation, the same object each time, so that what it was compiled into is found."""
        return self._made

    @functools.cached_property
    def _made(self) -> optax.GradientTransformationExtraArgs:
        return self.build(**self.arguments)

    @functools.cached_property
    def build(self) -> Callable[..., optax.GradientTransformationExtraArgs]:
        """The factory, with its signature, of what takes the extra arguments from here."""

        @functools.wraps(self.factory)
        def build(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
            tx = self.factory(*args, **kwargs)

            def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
                return tx.update(updates, state, params, **{**self.extra_args, **extra_args})

            return optax.GradientTransformationExtraArgs(tx.init, update)

        return build

    @property
    def required(self) -> dict[str, Any]:
        """The arguments without which it cannot be built."""
        parameters = inspect.signature(self.factory).parameters.values()
        wanted = [each.name for each in parameters if each.default is each.empty]
        return {name: self.arguments[name] for name in wanted}

    def __str__(self) -> str:
        return self.name


def svrg_and_sgd(
    learning_rate: optax.ScalarOrSchedule, probability: float
) -> optax.GradientTransformationExtraArgs:
    """Loopless SVRG with something after it."""
    return optax.chain(
        optperm.svrg(probability=probability), optax.sgd(learning_rate, momentum=0.5)
    )


def mars_adamw(
    learning_rate: optax.ScalarOrSchedule, gamma: optax.ScalarOrSchedule
) -> optax.GradientTransformationExtraArgs:
    """The paper's optimizer."""
    return optax.chain(optperm.mars(gamma), optax.adamw(learning_rate, b1=0.95, weight_decay=0.0))


def bowl(params: optax.Params) -> optax.Updates:
    """The gradient of half the squared norm."""
    return params


# A loss that tells a line search nothing; before a basis is set none is made.
LOSS = {"value": jnp.zeros([]), "value_fn": lambda params: jnp.zeros([])}


def two_examples(params: optax.Params, **part: int) -> optax.Updates:
    """The gradients of two examples of a bowl with noise."""
    del part
    return jax.tree.map(lambda p: jnp.stack([p + jnp.ones_like(p), p - jnp.ones_like(p)]), params)


@functools.wraps(optperm.ivon)
def ivon(*args: Any, **kwargs: Any) -> optax.GradientTransformationExtraArgs:
    """IVON, with a draw at a known distance from the params where none is passed."""
    tx = optperm.ivon(*args, **kwargs)

    def half(p: Any) -> Any:
        # As `optperm.bayes.sample_params`, in 32 bits at least
        return p * 0.5 if jnp.result_type(p).itemsize > 2 else p.astype(jnp.float32) * 0.5

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        # A distance that is exact: of a small one rounding would leave few digits
        draw = None if params is None else jax.tree.map(half, params)
        return tx.update(updates, state, params, **{"draw": draw, **extra_args})

    return optax.GradientTransformationExtraArgs(tx.init, update)


INF = float("inf")
# What numbers may be, where it is not anything from 0, and integers, where it is not anything from 1.
SHARE = {"high": 1.0}
ABOVE_ZERO = {"is_open": True}
FROM_ZERO = {"minimum": 0}
SEARCH_LIMITS = {"rho": SHARE, "gamma": SHARE, "sigma": SHARE}
NOISE_LIMITS = {
    **dict.fromkeys(("max_step", "stability", "noise_ratio"), ABOVE_ZERO),
    "burn_in": FROM_ZERO,
}
# What entries of `low_rank` and `apollo` have in common; a rank is an integer, or a ratio.
LOW_RANK: dict[str, Any] = {
    "limits": {
        "rank": None,
        "limit": {"low": 1.0},
        "scale": ABOVE_ZERO,
        **dict.fromkeys(("b1", "b2"), SHARE | {"is_below": True}),
    },
    "static": ("rank",),
    "knows": "nothing",
    "has_own_shapes": True,
    "needs_params": False,
    "hands_on": True,
    "sums_over_params": True,
}
QUANTIZED: dict[str, Any] = {
    "limits": {"bits": None},
    "static": ("min_size", "bits"),
    "knows": "nothing",
    "needs_params": False,
    "hands_on": True,
    "has_own_shapes": True,
    # Of pieces that are no blocks, the exponents of groups are moved.
    "may_gather": {"both": "kernel"},
}
REACHES_NO_OTHER_VALUES = "reaches only the values that the params start with"
# A weight vector that lies on several devices has to be gathered to be permuted.
CUT_VECTORS = {"input": "kernel", "both": "kernel", "output": "bias"}


def with_basis(opt_state: Any, params: Any) -> Any:
    """The state with a basis of two orthonormal rows."""
    shapes = jax.tree.map(lambda p: np.zeros(p.shape, p.dtype), params)
    flat, unravel = jax.flatten_util.ravel_pytree(shapes)
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(flat.size, 2)))[0].T
    basis = jax.vmap(unravel)(jnp.asarray(rows, flat.dtype))
    return optperm.subspace.set_basis(opt_state, basis)


TRANSFORMATIONS = (
    Transformation(
        optperm.sgperm,
        {"aggressiveness": 0.3},
        limits={"partition_ratio": SHARE, "momentum": SHARE},
        permutes=True,
        no_minimum=REACHES_NO_OTHER_VALUES,
        may_gather=CUT_VECTORS,
    ),
    Transformation(
        optperm.permute_by_cycles,
        {"aggressiveness": 0.3, "partition_ratio": 0.5},
        limits={"partition_ratio": SHARE},
        permutes=True,
        no_minimum=REACHES_NO_OTHER_VALUES,
        may_gather=CUT_VECTORS,
    ),
    Transformation(
        optperm.laperm,
        {"inner": optax.sgd(1e-2, 0.9), "every": 3},
        permutes=True,
        no_minimum=REACHES_NO_OTHER_VALUES,
        may_gather=CUT_VECTORS,
    ),
    Transformation(optperm.agn, {"inner": optax.sgd(2e-3, 0.9), "every": 2}),
    Transformation(
        optperm.diloco, {"inner": optax.sgd(1e-3), "every": 2}, limits={"mixing": SHARE}
    ),
    Transformation(
        optperm.diloco,
        {"inner": optax.sgd(1e-3), "every": optperm.distributed.Every(2, delay=1), "mixing": 0.5},
        other_name="diloco-streaming",
    ),
    Transformation(
        optperm.record_trajectory,
        {"every": 2, "num_snapshots": 3},
        static=("num_snapshots",),
        is_identity=True,
        rows=(3,),
        no_minimum="hands on the updates as they came",
        hands_on=True,
    ),
    Transformation(
        optperm.dim_reduce,
        {"n_components": 2, "inner": optax.sgd(0.01), "alpha": 0.2},
        limits=SEARCH_LIMITS,
        static=("n_components",),
        rows=(2,),
        extra_args=LOSS,
        sums_over_params=True,
        prepared=with_basis,
    ),
    Transformation(
        optperm.dim_reduce,
        {"n_components": 2, "alpha": 2e-3, "line_search": "mindspore"},
        other_name="dim_reduce-mindspore",
        limits=SEARCH_LIMITS,
        static=("n_components",),
        has_optax=True,
        rows=(2,),
        extra_args=LOSS,
        sums_over_params=True,
        prepared=with_basis,
    ),
    Transformation(
        optperm.project,
        {"inner": optax.sgd(2e-3, 0.9), "n_components": 2},
        static=("n_components",),
        knows="shapes",
        rows=(2,),
        no_minimum="stays in a plane",
        sums_over_params=True,
        prepared=with_basis,
    ),
    Transformation(
        optperm.twa,
        {"inner": optax.adam(2e-3), "n_components": 2},
        static=("n_components",),
        knows="shapes",
        rows=(2,),
        no_minimum="stays in a plane",
        sums_over_params=True,
        prepared=with_basis,
    ),
    Transformation(
        optperm.dldr,
        {
            "inner": optax.sgd(1e-3, 0.9),
            "subspace_optimizer": optperm.dim_reduce(n_components=1),
            "every": 1,
            "num_snapshots": 2,
        },
        limits={"start": FROM_ZERO},
        static=("num_snapshots",),
        rows=(1,),
        extra_args=LOSS,
        no_minimum="goes on in a line with a loss that the case does not pass",
        sums_over_params=True,
    ),
    Transformation(
        optperm.dldr,
        {
            "inner": optax.sgd(1e-3, 0.9),
            "subspace_optimizer": optperm.twa(optax.adam(1e-3), n_components=2),
            "every": 1,
            "num_snapshots": 2,
            "restart": "mean",
        },
        other_name="dldr-twa",
        static=("num_snapshots",),
        knows="shapes",
        rows=(1, 2),
        no_minimum="goes on in a plane",
        sums_over_params=True,
    ),
    Transformation(
        optperm.low_rank,
        {"inner": optax.chain(optax.scale_by_adam(), optax.scale(-1e-2)), "rank": 1, "every": 2},
        **LOW_RANK,
    ),
    Transformation(
        optperm.low_rank,
        {
            "inner": optax.sgd(1e-3, 0.5),
            "rank": 2,
            "projection": "svd",
            "every": 2,
            "residual": None,
        },
        other_name="low_rank-svd",
        **LOW_RANK,
        may_gather={"input": "kernel", "both": "kernel"},
    ),
    Transformation(
        optperm.apollo,
        # With one vector |R_j| = |b' G_j|, by which a step is divided, is near 0 for some column at most
        # keys, and magnifies the rounding by which sharded programs differ: 1e-4, but 5e-14 in float64.
        {"inner": optax.adam(1e-2), "rank": 2, "every": 2},
        **LOW_RANK,
    ),
    Transformation(optperm.quantize_state, {"inner": optax.adam(2e-3), "min_size": 1}, **QUANTIZED),
    Transformation(
        optperm.quantize_state,
        {"inner": optax.sgd(1e-3, 0.5), "min_size": 1, "bits": 4},
        other_name="quantize_state-4",
        **QUANTIZED,
    ),
    Transformation(
        optperm.mask_elements,
        {},
        is_identity=True,
        needs_params=False,
        no_minimum="hands on the updates as they came",
        hands_on=True,
    ),
    Transformation(
        optperm.proximal,
        {"learning_rate": 1e-3, "l1": 0.1, "l2": 0.1, "group": 0.1},
        limits={"lower": None, "upper": None, "group_axes": None},
        knows="nothing",
        no_minimum="hands on the updates, less a penalty",
        hands_on=True,
        sums_over_params=True,
    ),
    Transformation(
        optperm.prune_gradually,
        {
            "inner": optax.sgd(2e-3, 0.9),
            "sparsity": 0.5,
            "ramp": optax.linear_schedule(0.0, 1.0, 4),
            "every": 2,
            "include": True,
        },
        limits={"ramp": SHARE},
        knows="shapes",
        no_minimum="half of the params are zero",
        hands_on=True,
    ),
    Transformation(
        optperm.rigl,
        {
            "inner": optax.sgd(2e-3, 0.9),
            "sparsity": 0.5,
            "end": 200,
            "key": jax.random.key(0),
            "every": 2,
            "include": True,
        },
        limits={"drop_fraction": SHARE},
        static=("key",),
        knows="shapes",
        no_minimum="half of the params are zero",
        hands_on=True,
    ),
    Transformation(
        optperm.rigl,
        {
            "inner": optax.adam(2e-3),
            "sparsity": 0.5,
            "end": 200,
            "every": 2,
            "grow": "random",
            "skip_step": True,
            "include": True,
        },
        static=("key",),
        knows="shapes",
        no_minimum="half of the params are zero",
        hands_on=True,
        other_name="set",
    ),
    Transformation(
        optperm.svrg,
        {"coefficient": 0.5, "every": 2},
        limits={"probability": SHARE},
        extra_args={"grad_fn": bowl, "full_grad_fn": bowl},
        no_minimum="corrects gradients for an optimizer after it; svrg_and_sgd has one",
        hands_on=True,
    ),
    Transformation(
        svrg_and_sgd,
        {"learning_rate": 2e-3, "probability": 0.3},
        extra_args={"grad_fn": bowl, "full_grad_fn": bowl},
        hands_on=True,
    ),
    Transformation(
        optperm.katyusha,
        {"learning_rate": 1e-3, "strong_convexity": 0.5, "probability": 0.3},
        limits={
            **dict.fromkeys(("learning_rate", "strong_convexity"), ABOVE_ZERO),
            "probability": SHARE | ABOVE_ZERO,
        },
        extra_args={"grad_fn": bowl, "full_grad_fn": bowl},
    ),
    Transformation(
        optperm.mars,
        {},
        limits={"b1": None, "max_norm": ABOVE_ZERO},
        knows="shapes",
        no_minimum="corrects gradients for an optimizer after it; mars_adamw has one",
        hands_on=True,
        sums_over_params=True,
    ),
    Transformation(
        optperm.mars,
        {"gamma": 0.5, "b1": 0.5, "exact": True},
        extra_args={"grad_fn": bowl},
        no_minimum="corrects gradients by those of a loss that the case does not pass",
        hands_on=True,
        sums_over_params=True,
        other_name="mars-exact",
    ),
    Transformation(
        mars_adamw,
        {"learning_rate": 1e-2, "gamma": 0.025},
        has_optax=True,
        knows="shapes",
        hands_on=True,
        sums_over_params=True,
    ),
    Transformation(
        optperm.recursive_gradient,
        {"a": 0.5, "every": 2},
        limits={"a": SHARE, "probability": SHARE},
        extra_args={"grad_fn": bowl, "full_grad_fn": bowl},
        no_minimum="estimates gradients of a loss that the case does not pass",
        hands_on=True,
    ),
    Transformation(
        optperm.recursive_gradient,
        {"a": 0.1, "probability": 0.3},
        extra_args={"grad_fn": bowl, "full_grad_fn": bowl},
        no_minimum="estimates gradients of a loss that the case does not pass",
        hands_on=True,
        other_name="recursive-page",
    ),
    Transformation(
        optperm.switch_after,
        {
            "num_steps": 2,
            "first": optperm.agn(optax.sgd(2e-3, 0.9), every=2),
            "then": optax.sgd(2e-3, 0.9),
        },
        limits={"num_steps": FROM_ZERO},
    ),
    Transformation(
        optperm.constant_sgd,
        {
            "num_data": 1000,
            "batch_size": 2,
            "preconditioner": "diagonal",
            "momentum": 0.5,
            "burn_in": 2,
            "freeze_after": 6,
            "burn_in_optimizer": optax.sgd(2e-3),
        },
        limits={**NOISE_LIMITS, "momentum": SHARE | {"is_below": True}},
        knows="shapes",
        extra_args={"per_example_grad_fn": two_examples, "grad_fn": bowl},
        no_minimum="samples",
        hands_on=True,
        sums_over_params=True,
    ),
    Transformation(
        optperm.mandt_sgd,
        {"num_data": 1000, "batch_size": 2, "burn_in": 1, "max_step": 2e-3},
        limits={**NOISE_LIMITS, "momentum": SHARE | {"is_below": True}},
        has_optax=True,
        knows="shapes",
        extra_args={"per_example_grad_fn": two_examples},
        hands_on=True,
    ),
    Transformation(
        ivon,
        {"learning_rate": 1e-3, "num_data": 1.0, "b2": 0.9},
        limits={
            **dict.fromkeys(("num_data", "hess_init", "weight_decay", "clip_radius"), ABOVE_ZERO),
            **dict.fromkeys(("b1", "b2"), SHARE | {"is_below": True}),
        },
        static=("mc_samples",),
        knows="shapes",
        no_minimum="its gradients have to be those at draws",
    ),
    Transformation(
        optperm.swag,
        {"every": 2, "rank": 2},
        limits={"start": FROM_ZERO, "rank": None},
        static=("rank",),
        is_identity=True,
        knows="shapes",
        rows=(2,),
        no_minimum="hands on the updates as they came",
        hands_on=True,
    ),
    Transformation(
        optperm.sgld, {"step_size": 4e-6, "num_data": 1000}, knows="nothing", no_minimum="samples"
    ),
    Transformation(
        optperm.sghmc,
        {"step_size": 1e-6, "num_data": 1000, "friction": 0.5},
        limits={"friction": SHARE | ABOVE_ZERO, "noise_estimate": {"high": 0.5}},
        knows="shapes",
        no_minimum="samples",
    ),
)
# Eight that span the kinds: what is promised of every method is tested of these by default.
SPANNING = (
    "sgperm",
    "laperm",
    "agn",
    "diloco-streaming",
    "dim_reduce",
    "svrg",
    "mandt_sgd",
    "mask_elements",
)


def ordinal(ours: Transformation) -> int:
    """The place of an entry among all, for what takes turns; those of the default tier come first."""
    order = sorted(TRANSFORMATIONS, key=lambda each: each.name not in SPANNING)
    return order.index(ours)
