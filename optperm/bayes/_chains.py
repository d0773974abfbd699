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
from optperm.core.dtypes import cast_like
from optperm.core.fresh_jit import fresh_jit, fresh_jit_once
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
      is_learned: Whether the kernels of constant SGD were learned from this loss and these data; None if
        this is not known.
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
    is_learned: Bool[Array, ""] | None = None

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
        if stacked:
            opt_state, is_shared = _share_counts(opt_state, num_chains)
        else:
            is_shared = (True,) * len(jax.tree.leaves(opt_state))
        if is_shared not in programs:
            static = num_chains, num_draws, stacked, is_shared
            programs[is_shared] = fresh_jit_once(functools.partial(_run_chains, step, *static))
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
    chain_keys = _keys_of_chains(key, num_chains)
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
                return params, opt_state, _update_means(means, opt_state, place)

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


def make_fed_runner(
    step: StepFn, read_parts: Callable[..., Any], *, num_chains: int, num_draws: int
) -> Callable[..., Samples]:
    """Return the function of `make_runner` for batches that are made on the host.

    Chain c takes its steps with batches from the key `fold_in(fold_in(key, c), first_step)`.

    Args:
      step: A function `step(params, opt_state, batch)`.
      read_parts: `Batches.parts`.
      num_chains: The number of chains.
      num_draws: The number of draws of each chain.
    """

    def take_steps(flags: tuple[bool, ...], now: Any, part: Any, numbers: Any) -> Any:
        place, count, burn_in, thinning = (
            numbers[name] for name in ("place", "count", "burn_in", "thinning")
        )

        def of_chain(params: Params, opt_state: Any, drawn: Any, part: Any) -> Any:
            def body(i: jax.Array, now: Any) -> Any:
                params, opt_state, (draws, means) = now
                batch = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, 0, False), part)
                params, opt_state = _cast_step(step(params, opt_state, batch), params, opt_state)
                # Each step replaces the draw, so the last of its steps remains
                after = jnp.maximum(place + i - burn_in, 0)
                index, taken = after // thinning, (after % thinning + 1).astype(jnp.float32)
                draws = _put(draws, index, wide_params(params, opt_state))
                before = jax.tree.map(lambda x: x[index], means)
                means = _put(means, index, _update_means(before, opt_state, taken))
                return params, opt_state, (draws, means)

            # Remove weak types, since a step need not return them
            first = cast_like(params, params), cast_like(opt_state, opt_state), drawn
            return jax.lax.fori_loop(0, count, body, first)

        params, opt_state, drawn = now
        axes = 0, _axes_of(opt_state, flags), 0, 1
        return jax.vmap(of_chain, in_axes=axes)(params, opt_state, drawn, part)

    @functools.cache
    def program(flags: tuple[bool, ...]) -> Callable[..., Any]:
        return fresh_jit(functools.partial(take_steps, flags))

    def begin(params: Params, opt_state: Any, key: jax.Array, first_step: jax.Array) -> Any:
        chain_keys = _keys_of_chains(key, num_chains)
        opt_state = _separate_keys(opt_state, chain_keys)

        def repeat(params: Params, opt_state: Any) -> Any:
            one = wide_params(params, opt_state), numbers_of(opt_state)
            return jax.tree.map(
                lambda x: jnp.broadcast_to(jnp.zeros_like(x), (num_draws, *x.shape)), one
            )

        keys = jax.vmap(lambda key: jax.random.fold_in(key, first_step))(chain_keys)
        return keys, opt_state, jax.vmap(repeat)(params, opt_state)

    start = fresh_jit(begin)

    def run(params: Params, opt_state: Any, key: jax.Array, **counts: Any) -> Samples:
        thinning, burn_in, first_step = (
            jnp.asarray(counts[name], jnp.int32) for name in ("thinning", "burn_in", "first_step")
        )
        keys, opt_state, drawn = start(params, opt_state, key, first_step)
        starts, most = params, num_draws * int(thinning)
        for place, count, part in read_parts(keys, int(burn_in) + most, most):
            one, flags = _share_counts(opt_state, num_chains)
            numbers = {"place": jnp.int32(place), "count": jnp.int32(count)}
            numbers |= {"burn_in": burn_in, "thinning": thinning}
            params, opt_state, drawn = program(flags)((params, one, drawn), part, numbers)
        draws, means = drawn
        step_sizes, temperatures = means or (None, None)
        return Samples(
            params=draws,
            last_params=params,
            last_opt_state=opt_state,
            next_step=first_step + burn_in + most,
            thinning=thinning,
            starts=starts,
            step_sizes=step_sizes,
            temperatures=temperatures,
        )

    return run


def _keys_of_chains(key: jax.Array, num_chains: int) -> jax.Array:
    """Return a key for each chain, which does not depend on the number of chains."""
    chains = jnp.arange(num_chains, dtype=jnp.int32)
    return jax.vmap(lambda chain: jax.random.fold_in(key, chain))(chains)


def _put(tree: Any, index: jax.Array, rows: Any) -> Any:
    """Return a tree with other rows at an index of the leading axis."""
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
    return jax.tree.map(lambda x, row: put(x, row.astype(x.dtype)), tree, rows)


def _share_counts(opt_state: Any, num_chains: int) -> tuple[Any, tuple[bool, ...]]:
    """Return the states with a single number for each count that all chains share, and which these are.

    With one count per chain, `jax.vmap` would turn a conditional into a select, which runs both branches
    in every step.
    """
    leaves, form = jax.tree.flatten(opt_state)
    flags = tuple(_is_shared(leaf, num_chains) for leaf in leaves)
    pairs = zip(leaves, flags, strict=True)
    return jax.tree.unflatten(form, [leaf[0] if one else leaf for leaf, one in pairs]), flags


def _axes_of(opt_state: Any, flags: Any) -> Any:
    """Return the axis of chains of each leaf of the states; None for a leaf that all chains share."""
    axes = [None if one else 0 for one in flags]
    return jax.tree.unflatten(jax.tree.structure(opt_state), axes)


def _update_means(means: Any, opt_state: Any, place: jax.Array) -> Any:
    """Return the means of the step size and the temperature, after `place` steps of a draw."""
    return jax.tree.map(lambda mean, x: mean + (x - mean) / place, means, numbers_of(opt_state))


def _separate_keys(opt_state: Any, chain_keys: jax.Array) -> Any:
    """Return the stacked states of all chains, each with its own key."""
    shared = jax.tree.map(lambda _: False, opt_state)
    return _separate_noise(opt_state, shared, chain_keys)[0]


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
