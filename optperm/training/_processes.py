"""Exchanges between the processes of a run. All processes must call each of these functions."""

import collections
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from optperm.core.keys import is_key


def gather(value: Any) -> np.ndarray:
    """Stack the arrays of all processes."""
    if jax.process_count() == 1:
        return np.asarray(value)[None]
    gathered = np.asarray(multihost_utils.process_allgather(np.asarray(value)))
    return gathered.reshape(jax.process_count(), *np.shape(value))


def gather_texts(text: str) -> list[str]:
    """Return the text of each process."""
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = gather(np.int32(content.size))
    rows = gather(np.pad(content, (0, int(sizes.max()) - content.size)))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def check_devices() -> None:
    """Raise a ValueError in all processes if their numbers of devices differ."""
    found = collections.Counter(device.process_index for device in jax.devices())
    counts = [found[index] for index in range(jax.process_count())]
    if len(set(counts)) > 1:
        raise ValueError(f"The processes have {counts} devices: fit needs the same number in each.")


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raise an error in all processes if the code in the context fails in any process."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    has_failed = bool(gather(np.bool_(failure is not None)).any())
    if failure is not None:
        raise failure
    if has_failed:
        raise RuntimeError("Another process has failed before the first step: see its error.")


def check_same(facts: Mapping[str, Any]) -> None:
    """Raise a ValueError that names the facts, JSON values, that differ between processes."""
    others = [json.loads(text) for text in gather_texts(json.dumps(facts, default=str))]
    values = {name: [other[name] for other in others] for name in facts}
    which = "; ".join(f"{k} {v}" for k, v in values.items() if any(each != v[0] for each in v))
    if which:
        advice = (
            "Pass the same arguments in all processes. As data, each process may instead pass an "
            "iterable over its own part of each batch"
        )
        raise ValueError(
            f"The arguments of fit are not the same in all processes: {which}. {advice}."
        )


def compare_programs(program: Any) -> Callable[..., Any]:
    """Make a jitted function that raises in all processes if their programs differ.

    The exchanges of one program would wait forever for the exchanges of another program.
    """
    if jax.process_count() == 1:
        return program
    compared = set[Any]()

    def call(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        form = structure, tuple(map(jax.typeof, leaves))
        if form not in compared:
            hashed = hashlib.sha256(program.lower(*args).as_text().encode())
            own = np.frombuffer(hashed.digest(), np.uint8)
            if (multihost_utils.process_allgather(own) != own).any():
                advice = "the same functions, periods (such as every), rates and other numbers"
                raise ValueError(
                    f"The processes compiled different programs: pass {advice} in each process."
                )
            compared.add(form)
        return program(*args)

    return call


def digest(tree: Any) -> str:
    """Return a digest of a tree's names and bits, without arrays that are sharded over processes."""
    hashed = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        hashed.update(jax.tree_util.keystr(path, simple=True, separator="/").encode())
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            if not leaf.is_fully_replicated:
                continue
            leaf = leaf.addressable_data(0)  # noqa: PLW2901
        host = jax.random.key_data(leaf) if is_key(leaf) else leaf
        hashed.update(np.ascontiguousarray(host).tobytes())
    return hashed.hexdigest()[:16]
