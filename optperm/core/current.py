"""Compile users' functions with the current values of all variables that the functions read."""

import hashlib
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

_T = TypeVar("_T")
_CONFIG: Any = jax.config  # whose attributes not every release has types for
# Compiled programs by the properties on which they depend, the least recently used first.
_PROGRAMS: dict[Any, Callable[..., Any]] = {}
_MOST_PROGRAMS, _MOST_ENTRIES = 64, 2**18
# A program text with one of these words is incomplete: it does not contain the host function that it
# calls, the Python rule of a partition, or the values of a constant with too many entries.
_INCOMPLETE = "callback", "is_host_transfer", "CustomSPMDPartitioning", "__elided__"
_read_types = operator.attrgetter("aval", "sharding", "committed")


def jit_current(
    function: Callable[..., _T], *, donate_argnums: tuple[int, ...] = (), out_shardings: Any = None
) -> Callable[..., _T]:
    """Compile a function as `jax.jit` does, but never with old values of outside variables.

    `jax.jit` finds a program by the function and the types of its arguments, and does not notice that a
    global, an attribute or a captured value has changed. (JAX also keeps the traces of functions that
    are passed to `jax.lax.scan`, `jax.lax.cond` or `jax.checkpoint`; these keep their old values.) The
    returned function traces again, once for each type of its arguments, so make it in each call of a
    public function. A program is compiled only if no recent program has the same text, or if its text is
    not complete, as with calls of host functions or captured arrays of more than 2**18 entries.

    Args:
      function: A function of trees of arrays, given by position. It may be unhashable.
      donate_argnums: As in `jax.jit`.
      out_shardings: As in `jax.jit`, on the devices of the arguments.

    Returns:
      The compiled function. Pass large or changing arrays as arguments, because captured arrays are
      constants of the program.
    """

    def call_function(*args: Any) -> _T:  # a new object, which is in no cache of JAX
        return function(*args)

    options: dict[str, Any] = {} if out_shardings is None else {"out_shardings": out_shardings}
    fresh = jax.jit(call_function, donate_argnums=donate_argnums, **options)
    found: dict[Any, Callable[..., _T]] = {}
    latest: tuple[Any, Callable[..., _T]] = None, fresh

    def call(*args: Any) -> _T:
        nonlocal latest
        leaves, structure = jax.tree.flatten(args)
        # Each type of leaf is checked only once, since a loop may call this in each step.
        is_traced = any(issubclass(kind, jax.core.Tracer) for kind in set(map(type, leaves)))
        if is_traced or _CONFIG.jax_disable_jit:
            return fresh(*args)
        form = structure, tuple([_describe(leaf) for leaf in leaves])
        # In a loop, the types are the same objects as in the last call, and are quick to compare.
        program = latest[1] if form == latest[0] else found.get(form)
        if program is None:
            # A program that captures traced values belongs to the trace around it.
            consts = jax.make_jaxpr(fresh)(*args).consts
            is_inner = any(isinstance(const, jax.core.Tracer) for const in consts)
            program = fresh if is_inner else _find_or_compile(fresh, form, args)
            found[form] = program
        latest = form, program
        return program(*args)

    return call


def _describe(leaf: Any) -> Any:
    """Return the properties of an argument, except its values, on which a program depends."""
    try:
        return _read_types(leaf)
    except AttributeError:  # not a JAX array
        return jax.typeof(leaf)


def _find_or_compile(fresh: Any, form: Any, args: tuple[Any, ...]) -> Callable[..., Any]:
    """Return the program of a jitted function for arguments of this form."""
    traced = fresh.trace(*args)
    lowered = traced.lower()
    text = lowered.compiler_ir().operation.get_asm(large_elements_limit=_MOST_ENTRIES)
    is_complete, leaves = not any(word in text for word in _INCOMPLETE), jax.tree.leaves(args)
    digest = hashlib.sha256(text.encode()).digest()
    if is_complete and not all(getattr(x, "is_fully_addressable", True) for x in leaves):
        _check_processes(digest)
    # The form contains the devices of committed arguments. A text does not contain the devices of a mesh
    # that is known only to the function.
    is_placed = any(getattr(x, "committed", False) for x in leaves)
    if not is_complete or not (is_placed or "mhlo.num_partitions = 1 " in text):
        compiled: Callable[..., Any] = lowered.compile()
        return compiled
    # A text does not contain the containers and weak types of the results either.
    results = jax.tree.structure(lowered.out_info), tuple(traced.jaxpr.out_avals)
    place = _CONFIG.jax_default_device
    key = form, results, place, digest
    program = _PROGRAMS.pop(key, None)
    _PROGRAMS[key] = program = lowered.compile() if program is None else program
    if len(_PROGRAMS) > _MOST_PROGRAMS:
        _PROGRAMS.pop(next(iter(_PROGRAMS)), None)
    return program


def _check_processes(digest: bytes) -> None:
    """Raise in all processes if their programs differ, because exchanges would wait forever."""
    digests = multihost_utils.process_allgather(np.frombuffer(digest, np.uint8))
    if (digests != digests[0]).any():
        advice = "pass the same functions, periods (such as every), rates and other numbers in each"
        raise ValueError(f"The processes compiled different programs: {advice} process.")
