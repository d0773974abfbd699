"""Labeled data: scikit-learn's digits, folders of MNIST-format IDX files, and npz files."""

import dataclasses
import gzip
import math
import pathlib
import zipfile
import zlib

import numpy as np

from optperm.cli.errors import CliError, import_extra
from optperm.training import processes

KEYS = ("x_train", "y_train", "x_test", "y_test")
_IDX_PARTS = {"x_train": "train", "y_train": "train", "x_test": "t10k", "y_test": "t10k"}
_IDX_KINDS = {"x": ("images", 3), "y": ("labels", 1)}
# Deflate packs no more than so many bytes into one.
_DEFLATE = 1032
# A label far out of range is an error in the data, not a wish for so wide an output layer.
_MAX_CLASSES = 10_000


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A labeled data set, split into training and test examples."""

    name: str  # for the run folder
    source: str  # what `--data` has to say to get this data set from any working directory
    x_train: np.ndarray  # float32 (examples, *shape)
    y_train: np.ndarray  # int32 (examples,), in [0, num_classes)
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int

    @property
    def digest(self) -> str:
        """Tells whether two data sets hold the same examples in the same order."""
        return processes.digest([getattr(self, key) for key in KEYS])


def load(source: str) -> Dataset:
    """Loads `"digits"`, a folder of IDX files, or an npz file; a CliError if that is not possible.

    The digits are 1257 images to train on and 540 to test on, each pixel standardized by its mean and
    deviation in training. Of other data, inputs of uint8 are scaled to [0, 1] and floating ones are
    taken as they are.
    """
    if source == "digits":
        return _checked("digits", source, _digits())
    path = pathlib.Path(source).resolve()
    if path.is_dir():
        return _checked(path.name, str(path), {key: _read_idx(path, key) for key in KEYS})
    if path.is_file():
        return _checked(path.stem, str(path), _read_npz(path))
    raise CliError(
        f"--data {source}: there is no such file or folder. Pass 'digits', a folder of "
        f"MNIST-format IDX files, or an .npz file with {', '.join(KEYS)}."
    )


def _digits() -> dict[str, np.ndarray]:
    digits = import_extra("sklearn.datasets").load_digits()
    # The split belongs to the data set: runs with different seeds are tested on the same examples.
    x_train, x_test, y_train, y_test = import_extra("sklearn.model_selection").train_test_split(
        digits.images, digits.target, test_size=0.3, random_state=42
    )
    mean, deviation = x_train.mean(axis=0), x_train.std(axis=0)
    deviation[deviation == 0] = 1  # pixels that are blank in every image
    x_train, x_test = (x_train - mean) / deviation, (x_test - mean) / deviation
    return dict(zip(KEYS, (x_train, y_train, x_test, y_test), strict=True))


def _read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    says = f"{path} cannot be read as an .npz file of plain arrays"
    advice = f"Write it with numpy.savez, with {', '.join(KEYS)}."
    if not zipfile.is_zipfile(path):
        raise CliError(f"{says}: it is no archive of arrays, or is damaged. {advice}")
    try:
        with np.load(path, allow_pickle=False) as file:
            if missing := [key for key in KEYS if key not in file]:
                held = ", ".join(file) or "nothing"
                raise CliError(f"{path} lacks {', '.join(missing)}. It holds {held}. {advice}")
            return {key: np.asarray(file[key]) for key in KEYS}
    except (ValueError, EOFError, MemoryError, zipfile.BadZipFile, zlib.error) as error:
        why = "it holds Python objects" if "allow_pickle" in str(error) else str(error)
        raise CliError(f"{says}: {why}. {advice}") from error


def _read_idx(folder: pathlib.Path, key: str) -> np.ndarray:
    """Reads 0, 0, 8 (for uint8), the rank, the sizes as big-endian uint32, and then the data."""
    kind, rank = _IDX_KINDS[key[0]]
    stem = f"{_IDX_PARTS[key]}-{kind}"
    names = [f"{stem}{dot}idx{rank}-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise CliError(f"{folder} holds no {stem} file: looked for {', '.join(names)}.")
    magic, start = bytes([0, 0, 8, rank]), 4 + 4 * rank
    with path.open("rb") as file:
        is_compressed = file.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(path) if is_compressed else path.open("rb") as file:
            header = file.read(start)
            if header[:4] != magic:
                raise CliError(
                    f"{path} is not an IDX file of uint8 with {rank} axes: it begins with "
                    f"{header[:4].hex(' ') or 'nothing'}, not with {magic.hex(' ')}."
                )
            if len(header) < start:
                raise CliError(f"{path} is truncated: it ends within its header of {start} bytes.")
            shape = [int(size) for size in np.frombuffer(header, ">u4", count=rank, offset=4)]
            promised = math.prod(shape)
            # No more is unpacked than was promised, and no more promised than the file can hold.
            most = path.stat().st_size * (_DEFLATE if is_compressed else 1)
            content = file.read(promised + 1) if promised <= most else b""
    except (OSError, EOFError, zlib.error) as error:
        raise CliError(f"{path} cannot be decompressed ({error}).") from error
    if len(content) != promised:
        raise CliError(
            f"{path} is truncated or damaged: its header promises {promised} bytes of data "
            f"(shape {'x'.join(map(str, shape))}), it holds "
            f"{'more' if len(content) > promised else 'less'}."
        )
    return np.frombuffer(content, np.uint8).reshape(shape)


def _checked(name: str, source: str, arrays: dict[str, np.ndarray]) -> Dataset:
    x_train, y_train, x_test, y_test = (arrays[key] for key in KEYS)
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        raise CliError(
            f"{source}: x_train and x_test must hold examples of one shape and dtype, got "
            f"{x_train.dtype}{list(x_train.shape)} and {x_test.dtype}{list(x_test.shape)}."
        )
    for part, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if 0 in (*x.shape[:1], y.size):
            raise CliError(f"{source}: x_{part} and y_{part} must hold one example at least.")
        if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
            raise CliError(
                f"{source}: y_{part} must be a vector of integer labels, one for each of the "
                f"{len(x)} examples in x_{part}, got {y.dtype}{list(y.shape)}."
            )
        if y.min() < 0 or y.max() >= _MAX_CLASSES:
            raise CliError(
                f"{source}: y_{part} must hold labels from 0 to {_MAX_CLASSES - 1}, got labels from "
                f"{y.min()} to {y.max()}. Number the classes from 0."
            )
    train = _scaled(source, "x_train", x_train), y_train.astype(np.int32)
    test = _scaled(source, "x_test", x_test), y_test.astype(np.int32)
    return Dataset(name, source, *train, *test, 1 + int(max(y_train.max(), y_test.max())))


def _scaled(source: str, key: str, inputs: np.ndarray) -> np.ndarray:
    is_image = inputs.dtype == np.uint8
    if not (is_image or inputs.dtype.kind == "f") or inputs.ndim < 2 or not inputs.size:
        raise CliError(
            f"{source}: {key} must be uint8 (scaled by 1/255) or floating (taken as it is), with "
            f"an axis of examples and at least one more, got {inputs.dtype}{list(inputs.shape)}."
        )
    with np.errstate(over="ignore"):  # what overflows is counted below
        values = inputs.astype(np.float32)
    if bad := np.count_nonzero(~np.isfinite(values)):
        raise CliError(
            f"{source}: {key} holds {bad} values that are NaN, infinite or beyond float32. "
            "Replace them, or drop their examples."
        )
    return values / np.float32(255) if is_image else values
