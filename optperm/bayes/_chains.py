"""Run chains of a stochastic optimizer, and keep their draws with the data that describe them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes._constant_sgd import ConstantSgdState
from optperm.bayes._langevin import SghmcState, SgldState
from optperm.bayes._mandt_sgd import MandtSgdState
from optperm.bayes._remainders import wide_params
from optperm.core import checks
from optperm.core.current import jit_current
from optperm.core.dtypes import cast_like
from optperm.core.keys import is_key
from optperm.core.noise import fold
from optperm.core.shapes import Array, Bool, Float, Int32, Params, PyTree, Shaped
from optperm.core.states import find_states
from optperm.core.trees import without_variables

# NOISY samplers have a key, and each chain needs its own key.
NOISY = (ConstantSgdState, SgldState, SghmcState)
SAMPLERS = (*NOISY, MandtSgdState)

# (params, opt_state, key) -> (params, opt_state), on a batch drawn with the key.
StepFn = Callable[[Params, Any, jax.Array], tuple[Params, Any]]


class Samples(NamedTuple):
    r"""The draws of `draw_samples`, and the state from which the chains continue.

    Attributes:
      params: The draws; in float32 where a sampler of this library keeps a copy of 16-bit params.
      last_params: The iterates at the end, whose leaves have a leading axis of chains.
      last_opt_state: The optimizer states at the end, with the same axis.
      next_step: Number of steps that each chain has taken; the `first_step` of a later call.
      thinning: Number of steps from one draw to the next.
      starts: The first params of the chains, with a leading axis of chains.
      batch_noise: For draws of `optperm.bayes.sample` with SGLD or SGHMC, the variances of a batch's
        gradient, a tree like params. For constant SGD with `kernel=`, the variances of
        :math:`w_i^\top g`, with the structure of the kernel's noise. Otherwise None.
      batch_noise_norm: The maximum eigenvalue of the covariance R that has these variances; None if it
        was not measured.
      step_sizes: For draws of one `sgld`, `sghmc` or `constant_sgd`, the mean of the step size over the
        steps from the previous draw: :math:`\epsilon`, :math:`\eta` or c times the learning rate (0 for
        `sgld` with a preconditioner).
      temperatures: The mean of the temperature over the same steps.
      is_mean: Whether the loss of a batch is a mean over its examples; None if this was not checked.
      is_gradient: Whether the sampler gets the gradient of the loss; None if this was not checked.
    """

    params: PyTree[Shaped[Array, "chain draw ..."]]
    last_params: PyTree[Shaped[Array, "chain ..."]]
    last_opt_state: PyTree[Shaped[Array, "chain ..."]]
    next_step: Int32[Array, ""]
    thinning: Int32[Array, ""]
    starts: PyTree[Shaped[Array, "chain ..."]] = None
    batch_noise: PyTree[Shaped[Array, "..."]] = None
    batch_noise_norm: Float[Array, ""] | None = None
    step_sizes: Float[Array, "chain draw"] | None = None
    temperatures: Float[Array, "chain draw"] | None = None
    is_mean: Bool[Array, ""] | None = None
    is_gradient: Bool[Array, ""] | None = None

    def as_dict(self, *, separator: str = ".") -> dict[str, np.ndarray]:
        """Return the draws as a flat dictionary of arrays, which every version of ArviZ accepts.

        `arviz.rhat` and `arviz.ess` accept the dataset::

            arviz.convert_to_dataset(samples.as_dict())

        Args:
          separator: The string that joins the parts of a path to a name. ArviZ 1 and later reject a
            slash.

        Returns:
          A dictionary from names, such as "dense.kernel", to NumPy arrays `(chain, draw, *shape)`. If
          the params are a single array, its name is "params". 16-bit floats become float32.

        Example:
          >>> import jax, jax.numpy as jnp, optperm
          >>> step = lambda params, opt_state, key: (params, opt_state)  # no sampler
          >>> samples = optperm.bayes.draw_samples(
          ...     step, {"dense": {"bias": jnp.zeros(3)}}, (), 0, num_chains=2, num_draws=1
          ... )
          >>> {name: draws.shape for name, draws in samples.as_dict().items()}
          {'dense.bias': (2, 1, 3)}

        Raises:
          ValueError: If two leaves have the same name, or the axes of chains and draws differ between
            leaves.
        """
        params = without_variables(self.params)
        check_draws(params)
        arrays: dict[str, np.ndarray] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            name = jax.tree_util.keystr(path, simple=True, separator=separator) or "params"
            if name in arrays:
                raise ValueError(
                    f"Two leaves of params have the name {name!r}: rename a key, or pass another "
                    "separator."
                )
            is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
            arrays[name] = np.asarray(leaf, np.float32 if is_narrow else None)
        return arrays


def check_has_params(params: Any) -> None:
    """Raise a ValueError if there is nothing to sample."""
    if not jax.tree.leaves(params):
        raise ValueError(f"params must contain arrays to sample, got {params!r}.")


def check_draws(params: Any) -> None:
    """Raise unless all leaves have the same two leading axes, chains and draws."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    axes = {shape[:2] for shape in shapes}
    if len(axes) != 1 or any(len(shape) < 2 or 0 in shape[:2] for shape in shapes):
        raise ValueError(
            "The params of samples must be arrays whose first two axes are (chains, draws), the same in "
            f"all leaves, and not empty; got shapes {shapes}."
        )


def check_samples(samples: Any) -> None:
    """Raise a TypeError unless these are `Samples`; bare arrays do not show which axes are chains."""
    if not isinstance(samples, Samples):
        raise TypeError(
            f"samples must be Samples, got {type(samples).__name__}. To use draws from elsewhere, "
            "a tree of arrays of shape (chain, draw, ...), wrap them: optperm.bayes.Samples(draws, "
            "jax.tree.map(lambda x: x[:, -1], draws), (), num_draws, 1)."
        )


def make_runner(
    step: StepFn, *, num_chains: int, num_draws: int, stacked: bool
) -> Callable[..., Samples]:
    """Return `run(params, opt_state, key, **counts)`, which neither checks arguments nor warns.

    A runner traces the step once, and uses one program for all calls.
    """
    programs: dict[tuple[bool, ...], Callable[..., Samples]] = {}

    def run(params: Params, opt_state: Any, key: jax.Array, **counts: int | jax.Array) -> Samples:
        leaves, form = jax.tree.flatten(opt_state)
        # A count that all chains share stays one number. With one count per chain, vmap would turn a
        # conditional into a select, which runs both branches in every step
        is_shared = tuple(not stacked or _is_shared(leaf, num_chains) for leaf in leaves)
        if stacked:
            pairs = zip(leaves, is_shared, strict=True)
            opt_state = jax.tree.unflatten(form, [leaf[0] if one else leaf for leaf, one in pairs])
        if is_shared not in programs:
            static = num_chains, num_draws, stacked, is_shared
            programs[is_shared] = jit_current(functools.partial(_run_chains, step, *static))
        numbers = {name: jnp.asarray(count, jnp.int32) for name, count in counts.items()}
        return programs[is_shared](params, opt_state, key, numbers)

    return run


def _run_chains(
    step: StepFn,
    num_chains: int,
    num_draws: int,
    stacked: bool,
    is_shared: tuple[bool, ...],
    params: Params,
    opt_state: Any,
    key: jax.Array,
    counts: dict[str, jax.Array],
) -> Samples:
    thinning, burn_in, first_step = (counts[k] for k in ("thinning", "burn_in", "first_step"))
    chains = jnp.arange(num_chains, dtype=jnp.int32)
    chain_keys = jax.vmap(lambda chain: jax.random.fold_in(key, chain))(chains)
    shared = jax.tree.unflatten(jax.tree.structure(opt_state), is_shared)
    opt_state, axes = _separate_noise(opt_state, shared, chain_keys)

    def run_chain(chain_key: jax.Array, params: Params, opt_state: Any) -> tuple[Any, Any, Any]:

        def draw(carry: tuple[Any, Any], index: jax.Array) -> tuple[tuple[Any, Any], Any]:
            # The loop of the first draw includes the burn-in, so only one loop compiles the step
            end = burn_in + (index + 1) * thinning
            start = jnp.where(index == 0, 0, end - thinning)

            def take_step(t: jax.Array, now: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
                params, opt_state, means = now
                returned = step(params, opt_state, jax.random.fold_in(chain_key, first_step + t))
                params, opt_state = _cast_step(returned, params, opt_state)
                # The mean over the steps of this draw; the first of them forgets the burn-in
                place = jnp.maximum(t - (end - thinning) + 1, 1).astype(jnp.float32)
                numbers = numbers_of(opt_state)
                means = jax.tree.map(lambda mean, x: mean + (x - mean) / place, means, numbers)
                return params, opt_state, means

            zeros = optax.tree.zeros_like(numbers_of(carry[1]))
            *last, means = jax.lax.fori_loop(start, end, take_step, (*carry, zeros))
            return (last[0], last[1]), (wide_params(*last), means)

        # Remove weak types, since a step need not return them
        carry = cast_like(params, params), cast_like(opt_state, opt_state)
        carry, (draws, means) = jax.lax.scan(draw, carry, jnp.arange(num_draws, dtype=jnp.int32))
        return (draws, means), *carry

    (draws, means), last_params, last_opt_state = jax.vmap(
        run_chain, in_axes=(0, 0 if stacked else None, axes)
    )(chain_keys, params, opt_state)
    next_step = first_step + burn_in + num_draws * thinning
    starts = params
    if not stacked:
        starts = jax.tree.map(lambda p: jnp.broadcast_to(p, (num_chains, *jnp.shape(p))), params)
    step_sizes, temperatures = means or (None, None)
    return Samples(
        params=draws,
        last_params=last_params,
        last_opt_state=last_opt_state,
        next_step=next_step,
        thinning=thinning,
        starts=starts,
        step_sizes=step_sizes,
        temperatures=temperatures,
    )


def numbers_of(opt_state: Any) -> tuple[jax.Array, ...]:
    """Return the step size and the temperature of the last step of the only sampler, or ()."""
    states: list[Any] = find_states(opt_state, NOISY)
    return states[0].numbers() if len(states) == 1 else ()


def _is_shared(leaf: Any, num_chains: int) -> bool:
    """Return whether a leaf has one integer or bool per chain, the same in all chains."""
    if isinstance(leaf, jax.core.Tracer) or jnp.shape(leaf) != (num_chains,):
        return False
    if is_key(leaf) or jnp.issubdtype(leaf.dtype, jnp.inexact):
        return False
    values = np.asarray(leaf)
    return bool(np.all(values == values[0]))


def _separate_noise(opt_state: Any, shared: Any, chain_keys: jax.Array) -> tuple[Any, Any]:
    """Return the states of all chains, each with its own key, and the axes of the states.

    Args:
      opt_state: The states, in which some leaves may be shared by all chains.
      shared: Whether each leaf is shared.
      chain_keys: The keys of the chains.
    """

    def separate(node: Any, shared: Any) -> tuple[Any, Any]:
        if not isinstance(node, NOISY):
            return node, shared
        numbers = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(chain_keys)
        keys = jnp.broadcast_to(node.key, (len(chain_keys), node.key.shape[-1]))
        own = jax.vmap(fold)(keys, numbers)
        if not shared.key:
            # Chains that continue keep their keys, which differ. If some keys are equal, all but the
            # first of these are replaced; if all keys are equal, all are replaced
            equal = jnp.all(keys[:, None] == keys[None], axis=-1)
            is_copy = jnp.any(jnp.tril(equal, k=-1), axis=1) | jnp.all(equal[0]) & (len(keys) > 1)
            own = jnp.where(is_copy[:, None], own, keys)
        return node._replace(key=own), shared._replace(key=False)

    def is_noisy(node: Any) -> bool:
        return isinstance(node, NOISY)

    nodes, form = jax.tree.flatten(opt_state, is_leaf=is_noisy)
    flags = jax.tree.leaves(shared, is_leaf=is_noisy)
    pairs = [separate(*pair) for pair in zip(nodes, flags, strict=True)]
    states, flags = ([pair[i] for pair in pairs] for i in range(2))
    axes = jax.tree.map(lambda one: None if one else 0, jax.tree.unflatten(form, flags))
    return jax.tree.unflatten(form, states), axes


def _cast_step(returned: Any, params: Params, opt_state: Any) -> tuple[Any, Any]:
    """Return a step's result without weak types; raise if its structure, shapes or dtypes changed."""
    new_params, new_state = without_variables(returned)
    source = "its arguments"
    checks.check_same_tree("the params that step returns", new_params, params, source=source)
    checks.check_same_tree("the opt_state that step returns", new_state, opt_state, source=source)
    return cast_like(new_params, params), cast_like(new_state, opt_state)
