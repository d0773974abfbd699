"""What the processes of a run tell one another. With one process none of it costs anything."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


class LostProcessError(RuntimeError):
    """Another process of the run has ended, and what this one still runs may never come to an end."""


def gathered(value: Any) -> np.ndarray:
    """An array of each process, stacked. All processes have to ask.

    Raises:
      LostProcessError: If another process cannot be reached.
    """
    try:
        return np.asarray(multihost_utils.process_allgather(np.asarray(value)))
    except (ValueError, RuntimeError) as error:  # a collective that fails raises either
        raise LostProcessError(
            f"another process has ended or cannot be reached ({error})."
        ) from error


def highest(number: int) -> int:
    """The largest number that any process has. All of them have to ask."""
    return number if jax.process_count() == 1 else int(gathered(np.int32(number)).max())


def check_same(facts: Mapping[str, Any]) -> None:
    """Raises a ValueError that names the facts that differ between processes. All have to ask.

    Args:
      facts: JSON values, of the same names in all of them.
    """
    if jax.process_count() == 1:
        return
    digests = [hashlib.sha256(json.dumps(fact, default=str).encode()) for fact in facts.values()]
    rows = gathered(np.stack([np.frombuffer(each.digest(), np.uint8) for each in digests]))
    different = [
        f"{name} ({fact} in process {jax.process_index()})"
        for index, (name, fact) in enumerate(facts.items())
        if np.any(rows[:, index] != rows[0, index])
    ]
    if different:
        raise ValueError(
            f"The arguments of fit are not the same in all processes: {'; '.join(different)}."
        )


def digest(tree: Any) -> str:
    """Tells whether two trees of arrays hold the same bits under the same names.

    Of an array that several processes share it sees the part that lies on this one's first device, if
    that is all of it, and else nothing.
    """
    hashed = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        hashed.update(jax.tree_util.keystr(path, simple=True, separator="/").encode())
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            hashed.update(np.ascontiguousarray(leaf).data.cast("B") if np.size(leaf) else b"")
        elif leaf.is_fully_replicated:
            hashed.update(np.ascontiguousarray(leaf.addressable_data(0)).data.cast("B"))
    return hashed.hexdigest()


def gathered_texts(text: str) -> list[str]:
    """The text of each process. All of them have to ask."""
    if jax.process_count() == 1:
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = gathered(np.int32(content.size))
    rows = gathered(np.pad(content, (0, int(sizes.max()) - content.size)))
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]
