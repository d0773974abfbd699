"""Labeled data sets: scikit-learn's digits, .npz files, and data sets from the library `datasets`."""

import dataclasses
import importlib.util
import pathlib
import warnings
import zipfile
import zlib

import numpy as np

from optperm.cli.errors import CliError, UsageError
from optperm.core.optional import import_optional

KEYS = ("x_train", "y_train", "x_test", "y_test")
# Errors of `np.load` for files of other kinds and damaged files; an .npy file gives a TypeError.
_NO_NPZ = (KeyError, TypeError, ValueError, EOFError, MemoryError)
# For each name, the repository for the library `datasets`, and the column of images.
HUB = {
    "mnist": ("ylecun/mnist", "image"),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", "image"),
    "cifar10": ("uoft-cs/cifar10", "img"),
}
_SPLIT_SEED = (
    42  # splits belong to the data set: runs from all seeds are tested on the same examples
)
# A larger label is an error in the data, not a request for such a wide output layer.
_MAX_CLASSES = 10_000


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A labeled data set, split into training, test and optionally validation examples."""

    name: str  # for the run folder
    source: str  # the value of `--data` that loads this data set from any working directory
    x_train: np.ndarray  # float32 (examples, *shape)
    y_train: np.ndarray  # int32 (examples,), in [0, num_classes)
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    x_valid: np.ndarray | None = None
    y_valid: np.ndarray | None = None

    @property
    def about(self) -> str:
        """One line with the sizes, shape, classes and range of values."""
        parts = {"train": self.x_train, "validate": self.x_valid, "test": self.x_test}
        sizes = ", ".join(f"{len(x):,} to {name}" for name, x in parts.items() if x is not None)
        shape = " x ".join(map(str, self.x_train.shape[1:]))
        low, high = self.x_train.min(), self.x_train.max()
        return (
            f"{self.name}: {sizes}; shape {shape}, {self.num_classes} classes, values from {low:.4g} to "
            f"{high:.4g}"
        )


def load(source: str, valid_fraction: float = 0.0) -> Dataset:
    """Load a data set by its name or from an npz file; raise a CliError if this is not possible.

    The digits have 1257 training and 540 test images, with each pixel standardized by the mean and
    deviation of the training images. In other data, uint8 inputs are scaled to [0, 1], and floating
    inputs are not changed. A fraction `valid_fraction` of the training examples is for validation.
    """
    path = pathlib.Path(source).resolve()
    if source == "digits":
        data = _make_dataset(source, source, _read_digits())
    elif source in HUB:
        data = _make_dataset(source, source, _download(source))
    elif path.is_file():
        data = _make_dataset(path.stem, str(path), _read_npz(path))
    else:
        known = ", ".join(("digits", *HUB))
        raise CliError(f"--data {source}: there is no such file. Pass {known}, or an .npz file.")
    if not valid_fraction:
        return data
    count = round(valid_fraction * len(data.x_train))
    if not 0 < count < len(data.x_train):
        says = f"leaves no examples for training or none for validation, out of {len(data.x_train)}"
        raise UsageError(f"--valid-fraction {valid_fraction} {says}.")
    order = np.random.RandomState(_SPLIT_SEED).permutation(len(data.x_train))
    valid, train = order[:count], order[count:]
    return dataclasses.replace(
        data,
        x_train=data.x_train[train],
        y_train=data.y_train[train],
        x_valid=data.x_train[valid],
        y_valid=data.y_train[valid],
    )


def _read_digits() -> dict[str, np.ndarray]:
    """Read scikit-learn's file and split the data like `train_test_split`, without that import."""
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
    except Exception as error:  # from the library, its network or its file system
        says = f"could not load {repository} ({type(error).__name__}: {error})"
        raise CliError(f"--data {name}: {says}. The first download needs the internet.") from error
    columns = {"x": column, "y": "label"}
    return {key: np.asarray(rows[key[2:]][columns[key[0]]]) for key in KEYS}


def _read_npz(path: pathlib.Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            return {key: np.asarray(file[key]) for key in KEYS}
    except (*_NO_NPZ, zipfile.BadZipFile, zlib.error) as error:
        # NumPy treats an unknown file as a pickle, and advises allowing pickles.
        why = "no arrays" if "allow_pickle" in str(error) else str(error)
        why = "one array, of an .npy file" if "context manager" in why else why
        says = f"cannot be read as an .npz file with arrays {', '.join(KEYS)} ({why})"
        raise CliError(f"{path} {says}.") from error


def _make_dataset(name: str, source: str, arrays: dict[str, np.ndarray]) -> Dataset:
    x_train, y_train, x_test, y_test = (arrays[key] for key in KEYS)
    if x_train.shape[1:] != x_test.shape[1:] or x_train.dtype != x_test.dtype:
        forms = " and ".join(f"{x.dtype}{list(x.shape)}" for x in (x_train, x_test))
        raise CliError(f"{source}: x_train and x_test must have one shape and dtype, got {forms}.")
    for part, x, y in (("train", x_train, y_train), ("test", x_test, y_test)):
        is_vector = y.dtype.kind in "iu" and y.shape == x.shape[:1] and y.size
        if not is_vector or y.min() < 0 or y.max() >= _MAX_CLASSES:
            wanted = f"labels from 0 to {_MAX_CLASSES - 1}, one for each example of x_{part}"
            has_range = y.dtype.kind in "iuf" and y.size
            labels = f" with labels from {y.min()} to {y.max()}" if has_range else ""
            came = f"{y.dtype}{list(y.shape)}{labels} for {len(x)} examples"
            raise CliError(f"{source}: y_{part} must contain {wanted}, got {came}.")
    if len(known := np.unique(y_train)) == 1:
        raise CliError(
            f"{source}: all training examples are of class {known[0]}: nothing to learn."
        )
    train = _scale_inputs(source, "x_train", x_train), y_train.astype(np.int32)
    test = _scale_inputs(source, "x_test", x_test), y_test.astype(np.int32)
    if (unknown := np.setdiff1d(y_test, known)).size:
        says = f"{source}: the test examples have classes that the training examples lack"
        warnings.warn(f"{says}: {', '.join(map(str, unknown))}.", stacklevel=2)
    return Dataset(name, source, *train, *test, 1 + int(max(y_train.max(), y_test.max())))


def _scale_inputs(source: str, key: str, inputs: np.ndarray) -> np.ndarray:
    is_image = inputs.dtype == np.uint8
    if not (is_image or inputs.dtype.kind == "f") or inputs.ndim < 2 or not inputs.size:
        wanted = "uint8 or floating, not empty, with an axis of examples and at least one more"
        came = f"{inputs.dtype}{list(inputs.shape)}"
        raise CliError(f"{source}: {key} must be {wanted}, got {came}.")
    with np.errstate(over="ignore"):  # the check below counts values that overflow
        values = inputs.astype(np.float32)
    if bad := np.count_nonzero(~np.isfinite(values)):
        raise CliError(
            f"{source}: {key} contains {bad} values that are NaN or infinite in float32."
        )
    return values / np.float32(255) if is_image else values
