"""Every transformation of this library, one entry each.

An entry puts a method into all suites that methods share: the contract, the states' types, `flax.nnx`,
checkpoints, meshes, Optax's own cases, bad and hostile arguments, and gradients that are not finite.
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import kernels
import numpy as np
import optax

import optperm
from optperm.core.checks import name_states

PLACING = (optperm.permutation.PermuteByCyclesState, optperm.permutation.LapermState)


def options_of(parameter):
    """Return the alternatives in an argument's annotation."""
    return typing.get_args(parameter.annotation) or (parameter.annotation,)


def bowl(params):
    """Return the gradient of half the squared norm."""
    return params


def two_examples(params, **part):
    """Return the gradients of two examples of a bowl with noise."""
    del part
    return jax.tree.map(lambda p: jnp.stack([p + jnp.ones_like(p), p - jnp.ones_like(p)]), params)


def half(p):
    """Return half of an array in 32 bits at least: a draw at an exact distance, as rounding of a small
    one would leave few digits."""
    return 0.5 * (p if p.dtype.itemsize > 2 else p.astype(jnp.float32))


# What a case does not pass; of the loss a line search learns nothing.
EXTRA_ARGS = {
    "value": jnp.zeros([]),
    "value_fn": lambda params: jnp.zeros([]),
    **dict.fromkeys(("grad_fn", "full_grad_fn"), bowl),
    "per_example_grad_fn": two_examples,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Transformation:
    """One transformation and how to build it.

    Attributes:
      factory: What builds it, by its public name.
      arguments: The numbers to build it with.
      sums_over_params: Whether an update sums over params, so that their shardings change its rounding.
      prepared: From a fresh state and params, the state with what training would put into it.
      other_name: The name, if the same factory has several entries.
    """

    factory: Callable[..., optax.GradientTransformationExtraArgs]
    arguments: Mapping[str, Any]
    sums_over_params: bool = False
    prepared: Callable[[Any, Any], Any] = lambda opt_state, params: opt_state
    other_name: str = ""

    @property
    def name(self):
        """The public name of its factory, or its own."""
        return self.other_name or self.factory.__name__

    def __str__(self):
        return self.name

    def make(self):
        """Return the same object each time, so that what it was compiled into is found."""
        return self._made

    @functools.cached_property
    def _made(self):
        return self.build(**self.arguments)

    @functools.cached_property
    def build(self):
        """The factory, with its signature, of what takes the extra arguments from here."""

        @functools.wraps(self.factory)
        def build(*args, **kwargs):
            tx = self.factory(*args, **kwargs)

            def update(updates, state, params=None, **extra_args):
                given = EXTRA_ARGS | extra_args
                if self.factory is optperm.ivon and "draw" not in given:
                    given["draw"] = jax.tree.map(half, params)
                return tx.update(updates, state, params, **given)

            return optax.GradientTransformationExtraArgs(tx.init, update)

        return build

    @functools.cached_property
    def _shapes(self):
        # Updates of gradients in bfloat16 and the new state, for params in float32.
        params = {"w": jax.ShapeDtypeStruct((6, 4), jnp.float32)}
        grads = {"w": jax.ShapeDtypeStruct((6, 4), jnp.bfloat16)}
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            state = jax.eval_shape(self.make().init, params)
            return jax.eval_shape(self.make().update, grads, state, params)

    @property
    def is_identity(self):
        """Return whether it passes the updates unchanged, in their dtype."""
        return self._shapes[0]["w"].dtype == jnp.bfloat16

    @property
    def permutes(self):
        """Return whether it only reorders the values of the params."""
        state = self._shapes[1]
        # That of a chain is a plain tuple.
        parts = state if type(state) is tuple else (state,)
        return any(isinstance(part, PLACING) for part in parts)

    @property
    def lenient(self):
        """Return whether it contains optimizers of Optax, which promote dtypes."""
        return any(hasattr(optax, name) for name in name_states(self._shapes[1]).split(", "))

    @property
    def required(self):
        """The arguments without which it cannot be built."""
        parameters = inspect.signature(self.factory).parameters.values()
        return {p.name: self.arguments[p.name] for p in parameters if p.default is p.empty}

    @property
    def static(self):
        """The arguments that decide shapes, which no program can change: integers, but no arrays."""
        parameters = inspect.signature(self.factory, eval_str=True).parameters
        allowed = {name: options_of(parameters[name]) for name in self.arguments}
        return [name for name, each in allowed.items() if int in each and jax.Array not in each]


def svrg_and_sgd(learning_rate: optax.ScalarOrSchedule, probability: float):
    """Loopless SVRG with something after it."""
    return optax.chain(optperm.svrg(probability=probability), optax.sgd(learning_rate, 0.5))


def mars_adamw(learning_rate: optax.ScalarOrSchedule, gamma: optax.ScalarOrSchedule):
    """The paper's optimizer."""
    return optax.chain(optperm.mars(gamma), optax.adamw(learning_rate, b1=0.95, weight_decay=0.0))


def with_basis(opt_state, params):
    """Return the state with a basis of two orthonormal rows."""
    shapes = jax.tree.map(lambda p: np.zeros(p.shape, p.dtype), params)
    flat, unravel = jax.flatten_util.ravel_pytree(shapes)
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(flat.size, 2)))[0].T
    basis = jax.vmap(unravel)(jnp.asarray(rows, flat.dtype))
    return optperm.subspace.set_basis(opt_state, basis)


_IN_SUBSPACE = {"sums_over_params": True, "prepared": with_basis}
_TWO_SNAPSHOTS = {"inner": optax.sgd(1e-3, 0.9), "every": 1, "num_snapshots": 2}
_HALF_SPARSE = {"sparsity": 0.5, "every": 2, "include": True}
TRANSFORMATIONS = (
    Transformation(optperm.sgperm, {"aggressiveness": 0.3}),
    Transformation(optperm.permute_by_cycles, {"aggressiveness": 0.3, "partition_ratio": 0.5}),
    Transformation(optperm.laperm, {"inner": optax.sgd(1e-2, 0.9), "every": 3}),
    Transformation(optperm.agn, {"inner": optax.sgd(2e-3, 0.9), "every": 2}),
    Transformation(optperm.diloco, {"inner": optax.sgd(1e-3), "every": 2}),
    Transformation(
        optperm.diloco,
        {"inner": optax.sgd(1e-3), "every": optperm.distributed.Every(2, delay=1), "mixing": 0.5},
        other_name="diloco-streaming",
    ),
    Transformation(optperm.record_trajectory, {"every": 2, "num_snapshots": 3}),
    Transformation(
        optperm.dim_reduce,
        {"n_components": 2, "inner": optax.sgd(0.01), "alpha": 0.2},
        **_IN_SUBSPACE,
    ),
    Transformation(
        optperm.dim_reduce,
        {"n_components": 2, "alpha": 2e-3, "line_search": "mindspore"},
        other_name="dim_reduce-mindspore",
        **_IN_SUBSPACE,
    ),
    Transformation(
        optperm.project, {"inner": optax.sgd(2e-3, 0.9), "n_components": 2}, **_IN_SUBSPACE
    ),
    Transformation(optperm.twa, {"inner": optax.adam(2e-3), "n_components": 2}, **_IN_SUBSPACE),
    Transformation(
        optperm.dldr,
        _TWO_SNAPSHOTS | {"subspace_optimizer": optperm.dim_reduce(n_components=1)},
        sums_over_params=True,
    ),
    Transformation(
        optperm.dldr,
        _TWO_SNAPSHOTS
        | {"subspace_optimizer": optperm.twa(optax.adam(1e-3), n_components=2), "restart": "mean"},
        sums_over_params=True,
        other_name="dldr-twa",
    ),
    Transformation(
        optperm.low_rank,
        {"inner": optax.chain(optax.scale_by_adam(), optax.scale(-1e-2)), "rank": 1, "every": 2},
        sums_over_params=True,
    ),
    Transformation(
        optperm.low_rank,
        {"inner": optax.sgd(1e-3, 0.5), "rank": 2, "every": 2}
        | {"projection": "svd", "residual": None},
        sums_over_params=True,
        other_name="low_rank-svd",
    ),
    # With rank 1, some column norms |R_j| are near zero for most keys. Dividing by them amplifies the
    # rounding differences of sharded programs to 1e-4 (5e-14 in float64).
    Transformation(
        optperm.apollo, {"inner": optax.adam(1e-2), "rank": 2, "every": 2}, sums_over_params=True
    ),
    Transformation(optperm.quantize_state, {"inner": optax.adam(2e-3), "min_size": 1, "bits": 8}),
    Transformation(
        optperm.quantize_state,
        {"inner": optax.sgd(1e-3, 0.5), "min_size": 1, "bits": 4},
        other_name="quantize_state-4",
    ),
    Transformation(optperm.widen_params, {"inner": optax.adam(2e-3), "bits": 8}),
    Transformation(optperm.mask_elements, {}),
    Transformation(
        optperm.proximal,
        {"learning_rate": 1e-3, **dict.fromkeys(("l1", "l2", "group"), 0.1)},
        sums_over_params=True,
    ),
    Transformation(
        optperm.prune_gradually,
        _HALF_SPARSE | {"inner": optax.sgd(2e-3, 0.9), "ramp": optax.linear_schedule(0.0, 1.0, 4)},
    ),
    Transformation(optperm.rigl, _HALF_SPARSE | {"inner": optax.sgd(2e-3, 0.9), "end": 200}),
    Transformation(
        optperm.rigl,
        _HALF_SPARSE | {"inner": optax.adam(2e-3), "end": 200, "grow": "random", "skip_step": True},
        other_name="set",
    ),
    Transformation(optperm.svrg, {"coefficient": 0.5, "every": 2}),
    Transformation(svrg_and_sgd, {"learning_rate": 2e-3, "probability": 0.3}),
    Transformation(
        optperm.katyusha, {"learning_rate": 1e-3, "strong_convexity": 0.5, "probability": 0.3}
    ),
    Transformation(optperm.mars, {}, sums_over_params=True),
    Transformation(
        optperm.mars,
        {"gamma": 0.5, "b1": 0.5, "exact": True},
        sums_over_params=True,
        other_name="mars-exact",
    ),
    Transformation(mars_adamw, {"learning_rate": 1e-2, "gamma": 0.025}, sums_over_params=True),
    Transformation(optperm.recursive_gradient, {"a": 0.5, "every": 2}),
    Transformation(
        optperm.recursive_gradient, {"a": 0.1, "probability": 0.3}, other_name="recursive-page"
    ),
    Transformation(
        optperm.switch_after,
        {"num_steps": 2, "first": optperm.agn(optax.sgd(2e-3, 0.9), every=2)}
        | {"then": optax.sgd(2e-3, 0.9)},
    ),
    Transformation(kernels.constant_sgd, {}),
    Transformation(optperm.mandt_sgd, {"num_data": 1000, "batch_size": 2, "max_step": 2e-3}),
    Transformation(
        optperm.ivon, {"learning_rate": 1e-3, "num_data": 1.0, "b2": 0.9, "mc_samples": 1}
    ),
    Transformation(optperm.swag, {"every": 2, "rank": 2}),
    Transformation(optperm.sgld, {"step_size": 4e-6, "num_data": 1000}),
    Transformation(optperm.sghmc, {"step_size": 1e-6, "num_data": 1000, "friction": 0.5}),
)
# Eight entries of different kinds: by default, the contract tests run for these.
SPANNING = (
    *("sgperm", "laperm", "agn", "diloco-streaming"),
    *("dim_reduce", "svrg", "mandt_sgd", "mask_elements"),
)
# For how a kernel is cut, the largest parameter that the update has to gather then: to permute a weight
# vector, to factorize a matrix, or to move the exponents of groups of entries.
_OF_VECTORS = {"input": "kernel", "both": "kernel", "output": "bias"}
GATHERED = {
    **dict.fromkeys(("sgperm", "permute_by_cycles", "laperm"), _OF_VECTORS),
    "low_rank-svd": {"input": "kernel", "both": "kernel"},
    "quantize_state": dict.fromkeys(("output", "both"), "kernel"),
    "quantize_state-4": dict.fromkeys(("output", "both"), "kernel"),
}


def ordinal(ours):
    """Return the place among all entries; the entries of the default tier come first."""
    order = sorted(TRANSFORMATIONS, key=lambda each: each.name not in SPANNING)
    return order.index(ours)
