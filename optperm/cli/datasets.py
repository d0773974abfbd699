"""Labeled data: scikit-learn's digits, npz files, and data sets of the library `datasets`."""

import dataclasses
import importlib.util
import pathlib
import warnings
import zipfile
import zlib

import numpy as np

from optperm.cli.errors import CliError, UsageError
from optperm.contract.extras import import_optional

KEYS = ("x_train", "y_train", "x_test", "y_test")
# Where the library `datasets` finds what it is asked for by name, and in which column the images are.
HUB = {
    "mnist": ("ylecun/mnist", "image"),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", "image"),
    "cifar10": ("uoft-cs/cifar10", "img"),
}
_SPLIT_SEED = (
    42  # splits belong to the data set: runs from all seeds are tested on the same examples
)
# A label far out of range is an error in the data, not a wish for so wide an output layer.
_MAX_CLASSES = 10_000


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A labeled data set, split into training and test examples, and into validation ones on request."""

    name: str  # for the run folder
    source: str  # what `--data` has to say to get this data set from any working directory
    x_train: np.ndarray  # float32 (examples, *shape)
    y_train: np.ndarray  # int32 (examples,), in [0, num_classes)
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    x_valid: np.ndarray | None = None
    y_valid: np.ndarray | None = None

    @property
    def about(self) -> str:
        """Sizes, classes and range in one line."""
        parts = {"train": self.x_train, "validate": self.x_valid, "test": self.x_test}
        sizes = ", ".join(f"{len(x):,} to {name}" for name, x in parts.items() if x is not None)
        shape = " x ".join(map(str, self.x_train.shape[1:]))
        low, high = self.x_train.min(), self.x_train.max()
        return (
            f"{self.name}: {sizes}; shape {shape}, {self.num_classes} classes, values from {low:.4g} to "
            f"{high:.4g}"
        )


def load(source: str, valid_share: float = 0.0) -> Dataset:
    """Load a data set by its name or from an npz file; raise a CliError if that is not possible.

    The digits are 1257 images to train on and 540 to test on, each pixel standardized by its mean and
    deviation in training. Of other data, inputs of uint8 are scaled to [0, 1] and floating ones are
    taken as they are. A share of the training examples may be set aside for validation.
    """
    path = pathlib.Path(source).resolve()
    if source == "digits":
        data = _checked(source, source, _digits())
    elif source in HUB:
        data = _checked(source, source, _download(source))
    elif path.is_file():
        data = _checked(path.stem, str(path), _read_npz(path))
    else:
        known = ", ".join(map(repr, ("digits", *HUB)))
        raise CliError(
            f"--data {source}: there is no such file. Pass {known}, or an .npz file with "
            f"{', '.join(KEYS)}."
        )
    if not valid_share:
        return data
    count = round(valid_share * len(data.x_train))
    if not 0 < count < len(data.x_train):
        says = f"of {len(data.x_train)} training examples leaves none to train or none to validate"
        raise UsageError(f"--valid-share {valid_share} {says}.")
    order = np.random.RandomState(_SPLIT_SEED).permutation(len(data.x_train))
    valid, train = order[:count], order[count:]
    return dataclasses.replace(
        data,
        x_train=data.x_train[train],
        y_train=data.y_train[train],
        x_valid=data.x_train[valid],
        y_valid=data.y_train[valid],
    )


def _digits() -> dict[str, np.ndarray]:
    """Read scikit-learn's file and split it as its `train_test_split` does, without importing it."""
    found = importlib.util.find_spec("sklearn")
    folder = found and found.submodule_search_locations and found.submodule_search_locations[0]
    if not folder:
        import_optional("sklearn", needed_by="--data digits", install="optperm[cli]")
    table = np.loadtxt(pathlib.Path(str(folder), "datasets/data/digits.csv.gz"), delimiter=",")
    order = np.random.RandomState(_SPLIT_SEED).permutation(len(table))
    test, train = np.split(order, [-(-3 * len(table) // 10)])
    x, y = table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(int)
    mean, deviation = x[train].mean(axis=0), x[train].std(axis=0)
    deviation[deviation == 0] = 1  # pixels that are blank in every image
    x = (x - mean) / deviation
    return dict(zip(KEYS, (x[train], y[train], x[test], y[test]), strict=True))


def _download(name: str) -> dict[str, np.ndarray]:
    what = {"needed_by": f"--data {name}", "install": "optperm[data]"}
    library, (repository, column) = import_optional("datasets", **what), HUB[name]
    try:
        splits = library.load_dataset(repository).with_format("numpy")
        rows = {split: splits[split][:] for split in ("train", "test")}
    except Exception as error:  # the library's own, its network's or its file system's
        raise CliError(
            f"--data {name}: the library 'datasets' could not load {repository} "
            f"({type(error).__name__}: {error}). It needs a network the first time; without one pass "
            f"an .npz file with {', '.join(KEYS)}."
        ) from error
    columns = {"x": column, "y": "label"}
    return {key: np.asarray(rows[key[2:]][columns[key[0]]]) for key in KEYS}


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


def _checked(name: str, source: str, arrays: dict[str, np.ndarray]) -> Dataset:
    x_train, y_train, x_test, y_test = (arrays[key] for key in KEYS)
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        raise CliError(
            f"{source}: x_train and x_test must hold examples of one shape and dtype, got "
            f"{x_train.dtype}{list(x_train.shape)} and {x_test.dtype}{list(x_test.shape)}."
        )
    for part, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        if y.dtype.kind not in "iu" or y.shape != x.shape[:1] or not y.size:
            raise CliError(
                f"{source}: y_{part} must be a vector of integer labels, one for each example in "
                f"x_{part} and one at least, got {y.dtype}{list(y.shape)} for x_{part} of shape "
                f"{list(x.shape)}."
            )
        if y.min() < 0 or y.max() >= _MAX_CLASSES:
            raise CliError(
                f"{source}: y_{part} must hold labels from 0 to {_MAX_CLASSES - 1}, got labels from "
                f"{y.min()} to {y.max()}. Number the classes from 0."
            )
    if len(known := np.unique(y_train)) == 1:
        raise CliError(
            f"{source}: all {len(y_train)} training examples are of class {known[0]}, so that there is "
            "nothing to learn. Was a part taken of data that are sorted by class?"
        )
    train = _scaled(source, "x_train", x_train), y_train.astype(np.int32)
    test = _scaled(source, "x_test", x_test), y_test.astype(np.int32)
    if (unknown := np.setdiff1d(y_test, known)).size:
        says = f"{source}: the test examples have classes that the training examples lack"
        warnings.warn(f"{says}: {', '.join(map(str, unknown))}.", stacklevel=2)
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
