"""Every transformation of this library, one entry each; the contract and Optax's cases run on all.

A new one joins with one line here, and with what it must leave out of Optax's cases in
`conformance/test_optax.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax

import optperm


@dataclasses.dataclass(frozen=True)
class Transformation:
    """One transformation and how to build it.

    Attributes:
      name: Its public name.
      factory: What builds it.
      arguments: The numbers to build it with.
      permutes: Whether it keeps the values of the params, in another order.
      lenient: Whether it wraps optimizers of Optax, which promote dtypes freely.
      is_identity: Whether it hands on the updates as they came.
      knows_dtypes: Whether its state tells the dtypes of the params that it was made for.
      rows: For params of state entries with a leading axis, the lengths that occur.
      needs_params: Whether its `update` needs the params.
      extra_args: The extra arguments that it needs, for a case that does not pass them.
      sums_over_params: Whether an update sums over params, so that it rounds by where they lie.
      may_gather: For how a kernel is cut, the largest parameter that the update has to gather then.
      prepared: From a fresh state and params, the state with what training would put into it.
    """

    name: str
    factory: Callable[..., optax.GradientTransformationExtraArgs]
    arguments: Mapping[str, Any]
    permutes: bool = False
    lenient: bool = False
    is_identity: bool = False
    knows_dtypes: bool = True
    rows: tuple[int, ...] = ()
    needs_params: bool = True
    extra_args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sums_over_params: bool = False
    may_gather: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prepared: Callable[[Any, Any], Any] = lambda opt_state, params: opt_state

    def __hash__(self) -> int:
        return hash(self.name)

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

    def __str__(self) -> str:
        return self.name


def svrg_and_sgd(
    learning_rate: optax.ScalarOrSchedule, refresh_probability: float
) -> optax.GradientTransformationExtraArgs:
    """Loopless SVRG with something after it."""
    return optax.chain(
        optperm.svrg(refresh_probability=refresh_probability),
        optax.sgd(learning_rate, momentum=0.5),
    )


def bowl(params: optax.Params) -> optax.Updates:
    """The gradient of half the squared norm."""
    return params


# A loss that tells a line search nothing; before a basis is set none is made.
LOSS = {"value": jnp.zeros([]), "value_fn": lambda params: jnp.zeros([])}


def two_examples(params: optax.Params, **part: int) -> optax.Updates:
    """The gradients of two examples of a bowl with noise."""
    del part
    return jax.tree.map(lambda p: jnp.stack([p + jnp.ones_like(p), p - jnp.ones_like(p)]), params)


# A weight vector that lies on several devices has to be gathered to be permuted.
CUT_VECTORS = {"input": "kernel", "both": "kernel", "output": "bias"}


def with_basis(opt_state: Any, params: Any) -> Any:
    """The state with a basis of two orthonormal rows."""
    shapes = jax.tree.map(lambda p: np.zeros(p.shape, p.dtype), params)
    flat, unravel = jax.flatten_util.ravel_pytree(shapes)
    rows = np.linalg.qr(np.random.default_rng(0).normal(size=(flat.size, 2)))[0].T
    basis = jax.vmap(unravel)(jnp.asarray(rows, jnp.float32))
    return optperm.set_basis(opt_state, basis)


TRANSFORMATIONS = (
    Transformation(
        "sgperm",
        optperm.sgperm,
        {"aggressiveness": 0.3},
        permutes=True,
        may_gather=CUT_VECTORS,
    ),
    Transformation(
        "permute_by_cycles",
        optperm.permute_by_cycles,
        {"aggressiveness": 0.3, "partition_ratio": 0.5},
        permutes=True,
        may_gather=CUT_VECTORS,
    ),
    Transformation(
        "laperm",
        optperm.laperm,
        {"optimizer": optax.sgd(1e-2, 0.9), "sync_every": 3},
        permutes=True,
        lenient=True,
        may_gather=CUT_VECTORS,
    ),
    Transformation(
        "agn",
        optperm.agn,
        {"optimizer": optax.sgd(2e-3, 0.9), "communication_period": 2},
        lenient=True,
    ),
    Transformation(
        "diloco", optperm.diloco, {"inner": optax.sgd(1e-3), "sync_every": 2}, lenient=True
    ),
    Transformation(
        "diloco-streaming",
        optperm.diloco,
        {
            "inner": optax.sgd(1e-3),
            "sync_every": optperm.Every(2, delay=1),
            "mixing": 0.5,
        },
        lenient=True,
    ),
    Transformation(
        "record_trajectory",
        optperm.record_trajectory,
        {"every": 2, "capacity": 3},
        is_identity=True,
        rows=(3,),
    ),
    Transformation(
        "dim_reduce",
        optperm.dim_reduce,
        {"n_components": 2, "alpha": 2e-3},
        lenient=True,
        rows=(2,),
        extra_args=LOSS,
        sums_over_params=True,
        prepared=with_basis,
    ),
    Transformation(
        "dldr",
        optperm.dldr,
        {
            "optimizer": optax.sgd(1e-3, 0.9),
            "sample_every": 1,
            "num_samples": 2,
            "n_components": 1,
        },
        lenient=True,
        rows=(1,),
        extra_args=LOSS,
        sums_over_params=True,
    ),
    Transformation(
        "mask_elements", optperm.mask_elements, {}, is_identity=True, needs_params=False
    ),
    Transformation(
        "svrg",
        optperm.svrg,
        {"coefficient": 0.5, "refresh_every": 2},
        extra_args={"grad_fn": bowl, "full_grad_fn": bowl},
    ),
    Transformation(
        "svrg_and_sgd",
        svrg_and_sgd,
        {"learning_rate": 2e-3, "refresh_probability": 0.3},
        extra_args={"grad_fn": bowl, "full_grad_fn": bowl},
    ),
    Transformation(
        "switch_after",
        optperm.switch_after,
        {
            "num_steps": 2,
            "first": optperm.agn(optax.sgd(2e-3, 0.9), communication_period=2),
            "then": optax.sgd(2e-3, 0.9),
        },
        lenient=True,
    ),
    Transformation(
        "scale_by_gradient_noise",
        optperm.scale_by_gradient_noise,
        {"num_data": 1000, "batch_size": 2, "burn_in": 1, "max_step": 2e-3},
        knows_dtypes=False,
        extra_args={"per_example_grad_fn": two_examples},
    ),
    Transformation(
        "constant_sgd",
        optperm.constant_sgd,
        {
            "num_data": 1000,
            "batch_size": 2,
            "momentum": 0.5,
            "burn_in": 2,
            "burn_in_optimizer": optax.sgd(2e-3),
            "max_step": 2e-3,
        },
        lenient=True,
        knows_dtypes=False,
        extra_args={"per_example_grad_fn": two_examples},
    ),
)
