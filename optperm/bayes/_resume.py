"""Keep the results of the phases of a run in a folder, so that a run that was killed resumes.

Each phase is one NumPy file, which is written under a temporary name and then renamed. So a file is
complete, or missing, whenever the process is killed.
"""

from __future__ import annotations

import json
import os
import pathlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core.keys import is_key
from optperm.core.trees import without_variables

_FACTS = "run.json"
_FORMAT = 1
# The number of rows that are compared, of arrays on disk.
_ROWS = 1000


class Progress:
    """The phases of one run, in a folder or in memory alone."""

    def __init__(self, folder: Any, facts: Mapping[str, Any]) -> None:
        """Open a folder.

        Args:
          folder: The path of a folder; None to keep nothing.
          facts: The values that the run depends on, for JSON.

        Raises:
          TypeError: If `folder` is not a path.
          ValueError: If the folder contains a run with other facts, or is not a folder.
        """
        if not isinstance(folder, str | os.PathLike | None):
            raise TypeError(f"resume must be the path of a folder, got {folder!r}.")
        self.folder = None if folder is None else pathlib.Path(folder).expanduser()
        if self.folder is None:
            return
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"resume must be a folder, got the file {self.folder}.")
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / _FACTS
        here = json.loads(json.dumps({"format": _FORMAT, **facts}))
        if not path.exists():
            self._write(_FACTS, lambda file: file.write(json.dumps(here, indent=1).encode()))
            return
        there = _read(path, lambda: json.loads(path.read_text(encoding="utf-8")))
        which = [
            f"{name} is {there.get(name)} there and {fact} here"
            for name, fact in here.items()
            if there.get(name) != fact
        ]
        if which:
            raise ValueError(
                f"The folder {self.folder} contains a run with other arguments: {'; '.join(which)}. "
                "Pass the arguments of this run, or another folder as resume=."
            )

    def phase(
        self, name: str, compute: Callable[[], tuple[Any, list[str]]], like: Callable[[], Any]
    ) -> tuple[Any, list[str]]:
        """Return the result of a phase, from its file if there is one; otherwise compute and keep it.

        Args:
          name: The name of the phase.
          compute: A function that returns a tree of arrays, and sentences.
          like: A function that returns a tree with the structure, shapes and dtypes of the result.
        """
        if self.folder is None:
            return compute()
        if not self._path(name).exists():
            self.save(name, *compute())
        # The arrays are read even if they were computed just now, so both ways lead to the same bits
        return self._load(name, like())

    def load(self, name: str, like: Any) -> Any:
        """Return a tree that was saved; None if there is none."""
        if self.folder is None or not self._path(name).exists():
            return None
        return self._load(name, like)[0]

    def save(self, name: str, tree: Any, texts: Sequence[str] = ()) -> None:
        """Keep a tree of arrays, and sentences, in place of an earlier file of the same name."""
        if self.folder is None:
            return
        # NumPy has no file format for keys and for bfloat16
        arrays: dict[str, Any] = {
            f"leaf{i}": _as_bytes(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))
        }
        arrays["texts"] = np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)
        self._write(self._path(name).name, lambda file: np.savez(file, **arrays))

    def _path(self, name: str) -> pathlib.Path:
        assert self.folder is not None
        return self.folder / f"{name}.npz"

    def _load(self, name: str, like: Any) -> tuple[Any, list[str]]:
        path, (leaves, form) = self._path(name), jax.tree.flatten(like)

        def load() -> tuple[Any, list[str]]:
            with np.load(path, allow_pickle=False) as arrays:
                found = [_from_bytes(arrays[f"leaf{i}"], leaf) for i, leaf in enumerate(leaves)]
                return jax.tree.unflatten(form, found), json.loads(arrays["texts"].tobytes())

        return _read(path, load)

    def _write(self, name: str, write: Callable[[Any], Any]) -> None:
        """Write a file of the folder under a temporary name, and rename the file."""
        assert self.folder is not None
        temporary = self.folder / f".{name}.{os.getpid()}"
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / name)


def _read(path: pathlib.Path, load: Callable[[], Any]) -> Any:
    """Return what `load` reads; raise a ValueError if a file is damaged."""
    try:
        return load()
    except Exception as error:  # damaged files have different error types
        raise ValueError(
            f"{path} is damaged, or was written by another version: delete this file and the later "
            f"files of the folder ({type(error).__name__}: {str(error).partition(chr(10))[0]})."
        ) from error


def _as_bytes(leaf: Any) -> np.ndarray:
    """Return the bytes of an array with its shape: (*shape, bytes of an entry)."""
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return np.ascontiguousarray(array[..., None]).view(np.uint8)


def _from_bytes(stored: np.ndarray, like: Any) -> jax.Array:
    """Return an array of the shape and dtype of `like`."""
    is_typed_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    data = jax.eval_shape(jax.random.key_data, like) if is_typed_key else like
    if stored.shape != (*data.shape, np.dtype(data.dtype).itemsize):
        raise ValueError(f"an array has the shape {stored.shape[:-1]}, expected {data.shape}")
    array = jnp.asarray(stored.view(data.dtype)[..., 0])
    if not is_typed_key:
        return array
    impl = jax.random.key_impl(jnp.empty((), like.dtype))
    return jax.random.wrap_key_data(array, impl=impl)


def fingerprint(tree: Any) -> str:
    """Return a text for the shapes, the dtypes and the bytes of a tree of arrays.

    Of arrays on disk, evenly spaced rows count.

    Args:
      tree: A tree of arrays in memory, or of arrays with many rows that are read by `leaf[rows]`.
    """
    number = 0
    leaves = jax.tree_util.tree_leaves_with_path(without_variables(tree))
    for path, leaf in leaves:
        if isinstance(leaf, jax.Array) or type(leaf) is np.ndarray or not hasattr(leaf, "shape"):
            array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        else:
            last = max(leaf.shape[0] - 1, 0)
            array = np.asarray(leaf[np.unique(np.linspace(0, last, _ROWS).astype(np.int64))])
        header = f"{jax.tree_util.keystr(path)} {np.shape(leaf)} {array.dtype}"
        number = zlib.crc32(array.tobytes(), zlib.crc32(header.encode(), number))
    return f"{number:08x}"
