"""Compile users' functions with the current values of all variables that the functions read."""

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax

_T = TypeVar("_T")
_CONFIG: Any = jax.config  # whose attributes not every release has types for
# Compiled programs by all properties on which they depend, the least recently used first. One call of
# `optperm.bayes.sample` needs about 15 programs.
_PROGRAMS: dict[Any, Callable[..., Any]] = {}
_MOST_PROGRAMS = 64


def fresh_jit(
    function: Callable[..., _T], *, donate_argnums: tuple[int, ...] = (), out_shardings: Any = None
) -> Callable[..., _T]:
    """Compile a function as `jax.jit` does, but never with old values of outside variables.

    `jax.jit` finds a program by the function and the types of its arguments, and does not notice that a
    global, an attribute or a captured value has changed. (JAX also keeps the traces of functions that
    are passed to `jax.lax.scan`, `jax.lax.cond` or `jax.checkpoint`; these keep their old values.) The
    returned function is in no cache of JAX, so make it in each call of a public function.

    Args:
      function: A function of trees of arrays, given by position. It may be unhashable.
      donate_argnums: As in `jax.jit`.
      out_shardings: As in `jax.jit`; None as without the argument.

    Returns:
      The compiled function. Pass large or changing arrays as arguments, because captured arrays are
      constants of the program.
    """

    def call_function(*args: Any) -> _T:
        return function(*args)

    options: dict[str, Any] = {} if out_shardings is None else {"out_shardings": out_shardings}
    return jax.jit(call_function, donate_argnums=donate_argnums, **options)


def fresh_jit_once(function: Callable[..., _T]) -> Callable[..., _T]:
    """Trace a function as `fresh_jit` does, but compile a recent program only once.

    The key of a program is the whole program, with all constants. A variable that the function reads is
    a constant, so another value is another key. The key also has the types and devices of the arguments,
    and the containers and types of the results. `jax.export` raises for a program that is incomplete
    without objects of this process, such as host functions, or that has a custom call unknown to JAX.
    Such programs, and programs for several devices, are compiled in each call.
    """
    fresh: Any = fresh_jit(function)
    found: dict[Any, Callable[..., _T]] = {}

    def call(*args: Any) -> _T:
        leaves, structure = jax.tree.flatten(args)
        if _CONFIG.jax_disable_jit or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return fresh(*args)
        places = [(getattr(x, "sharding", None), getattr(x, "committed", False)) for x in leaves]
        form = structure, tuple(map(jax.typeof, leaves)), tuple(places)
        if form not in found:
            # A program that captures traced values belongs to the trace around it.
            traced = jax.make_jaxpr(fresh)(*args)
            is_inner = any(isinstance(const, jax.core.Tracer) for const in traced.consts)
            found[form] = fresh if is_inner else _find_or_compile(fresh, traced, form, args)
        return found[form](*args)

    return call


def _find_or_compile(
    fresh: Any, traced: Any, form: Any, args: tuple[Any, ...]
) -> Callable[..., Any]:
    """Return the program of a jitted function for arguments of this form."""
    lowered = fresh.lower(*args)
    digest = hashlib.sha256(lowered.compiler_ir().operation.get_asm().encode()).digest()
    results = lowered.out_tree, tuple(traced.out_avals)
    key = form, results, _CONFIG.jax_default_device, digest
    program = _PROGRAMS.pop(key, None)
    if program is None:
        # What was kept has passed this check, which lowers the function once more.
        try:
            exported = jax.export.export(fresh)(*args)
        except (NotImplementedError, ValueError):
            return fresh
        if exported.nr_devices > 1:
            return fresh
        program = lowered.compile()
    _PROGRAMS[key] = program
    if len(_PROGRAMS) > _MOST_PROGRAMS:
        _PROGRAMS.pop(next(iter(_PROGRAMS)), None)
    return program
