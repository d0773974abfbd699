"""Reading data: what comes out is what went in, and what cannot be used is refused by name."""

import io
import sys
import types
import zipfile

import numpy as np
import pytest

from optperm.cli import datasets
from optperm.cli.errors import CliError


def write_npz(path, **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.normal(size=(20, 6)),
        "y_train": rng.integers(0, 3, 20),
        "x_test": rng.normal(size=(5, 6)),
        "y_test": rng.integers(0, 3, 5),
    } | changes
    np.savez(path, **{key: array for key, array in arrays.items() if array is not None})
    return arrays


def test_digits_are_split_once_and_standardized_by_the_training_images():
    data = datasets.load("digits")
    assert (data.x_train.shape, data.x_test.shape) == ((1257, 8, 8), (540, 8, 8))
    assert data.x_train.dtype == np.float32
    train = data.x_train.astype(np.float64)
    varies = train.std(axis=0) > 0
    assert np.count_nonzero(varies) == 61
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(train.std(axis=0)[varies], 1, atol=1e-6)
    assert 0.9 < data.x_test[:, varies].std() < 1.1
    np.testing.assert_array_equal(data.x_test, datasets.load("digits").x_test)


def test_npz_takes_floats_as_they_are_and_scales_bytes(tmp_path):
    arrays = write_npz(tmp_path / "floats.npz")
    data = datasets.load(str(tmp_path / "floats.npz"))
    np.testing.assert_array_equal(data.x_train, arrays["x_train"].astype(np.float32))
    assert (data.name, data.num_classes) == ("floats", 3)
    as_bytes = np.full((20, 6), 51, np.uint8)
    write_npz(tmp_path / "bytes.npz", x_train=as_bytes, x_test=as_bytes[:5])
    np.testing.assert_allclose(datasets.load(str(tmp_path / "bytes.npz")).x_test, 0.2)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"x_test": None}, r"arrays x_train, .*x_test is not a file in the archive"),
        ({"x_train": np.full((20, 6), np.nan)}, "x_train contains 120 values that are NaN"),
        ({"x_test": np.full((5, 6), 1e60)}, "x_test contains 30 values that are NaN or inf"),
        ({"x_train": np.zeros((20, 6), int), "x_test": np.zeros((5, 6), int)}, "uint8 or floating"),
        ({"x_train": np.zeros(20), "x_test": np.zeros(5)}, "at least one more, got float64.20."),
        ({"x_test": np.zeros((0, 6)), "y_test": np.zeros(0, int)}, "for each example of x_test"),
        ({"x_test": np.zeros((5, 7))}, "one shape and dtype"),
        ({"x_test": np.zeros((5, 6), np.uint8)}, "one shape and dtype"),
        ({"y_train": np.zeros(20)}, "y_train must contain labels .*float64"),
        ({"y_train": np.full(20, -1)}, "got int64.20. with labels from -1 to -1"),
        (
            {"y_train": np.arange(20) * 1000},
            "labels from 0 to 9999, .* with labels from 0 to 19000",
        ),
        ({"y_train": np.full(20, 2)}, "all training examples are of class 2: nothing to learn"),
        ({"y_train": np.zeros(19, int)}, r"got int64.19. .* for 20 examples"),
        ({"y_train": np.array([None] * 20)}, r"cannot be read as an \.npz file .*\(no arrays\)"),
    ],
)
def test_unusable_npz_array_is_refused(changes, says, tmp_path):
    write_npz(tmp_path / "data.npz", **changes)
    with pytest.raises(CliError, match=says):
        datasets.load(str(tmp_path / "data.npz"))


def test_file_that_is_no_npz_is_refused(tmp_path):
    path = tmp_path / "data.npz"
    write_npz(path)
    np.save(tmp_path / "array.npy", np.zeros(3))
    for content in (b"x,y\n1,2\n", path.read_bytes()[:500], (tmp_path / "array.npy").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(CliError, match=r"cannot be read as an \.npz file") as caught:
            datasets.load(str(path))
        assert "allow_pickle" not in str(caught.value)


def test_header_that_claims_more_than_there_is_is_refused(tmp_path):
    """Whether or not the memory for it can be had."""
    path = tmp_path / "data.npz"
    for examples in (10**9, 10**13):
        header = io.BytesIO()
        claim = {"descr": "<f8", "fortran_order": False, "shape": (examples, 50)}
        np.lib.format.write_array_header_1_0(header, claim)
        write_npz(path, x_train=None)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr("x_train.npy", header.getvalue())
        with pytest.raises(CliError, match=r"cannot be read as an \.npz file"):
            datasets.load(str(path))


def test_missing_data_says_what_is_possible(tmp_path):
    says = r"no such file\. Pass digits, mnist, fashion_mnist, cifar10, or an \.npz"
    for source in (tmp_path / "nothing", tmp_path):
        with pytest.raises(CliError, match=says):
            datasets.load(str(source))


@pytest.mark.programs  # importing scikit-learn takes seconds
def test_digits_are_those_of_scikit_learn():
    sklearn = pytest.importorskip("sklearn.datasets")
    split = pytest.importorskip("sklearn.model_selection").train_test_split
    raw = sklearn.load_digits()
    parts = split(raw.images, raw.target, test_size=0.3, random_state=42)
    data = datasets.load("digits")
    np.testing.assert_array_equal(data.y_train, parts[2])
    np.testing.assert_array_equal(data.y_test, parts[3])
    varies = parts[0].std(axis=0) > 0
    back = data.x_test * np.where(varies, parts[0].std(axis=0), 1) + parts[0].mean(axis=0)
    np.testing.assert_allclose(back, parts[1], atol=1e-5)


def test_known_data_come_from_the_library_datasets(monkeypatch):
    """Their images are scaled as any others; without a network the error says what to do."""
    rng, asked = np.random.default_rng(0), []

    class Rows(dict):
        """The splits, or the columns of one, of which a slice takes all."""

        def with_format(self, kind):
            assert kind == "numpy"
            return self

        def __getitem__(self, key):
            return self if isinstance(key, slice) else super().__getitem__(key)

    def load_dataset(repository):
        asked.append(repository)
        if len(asked) > 3:
            raise ConnectionError(f"could not reach {repository}")
        column, splits = "img" if "cifar" in repository else "image", Rows()
        for part, count in (("train", 12), ("test", 5)):
            images = rng.integers(0, 256, (count, 4, 4), np.uint8)
            splits[part] = Rows({column: images, "label": np.arange(count) % 3})
        return splits

    library = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", library)
    for name in ("mnist", "fashion_mnist", "cifar10"):
        data = datasets.load(name)
        assert (data.name, data.source, data.num_classes) == (name, name, 3)
        assert (len(data.x_train), len(data.x_test)) == (12, 5)
        assert 0.9 < data.x_train.max() <= 1
    assert asked == ["ylecun/mnist", "zalando-datasets/fashion_mnist", "uoft-cs/cifar10"]
    with pytest.raises(CliError, match=r"could not load ylecun/mnist \(Conn.*needs the internet"):
        datasets.load("mnist")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'optperm\[data\]'"):
        datasets.load("mnist")


def test_validation_examples_are_taken_from_training(tmp_path):
    """The same for every seed, each example once."""
    arrays = write_npz(tmp_path / "data.npz")
    data = datasets.load(str(tmp_path / "data.npz"), valid_fraction=0.3)
    assert (len(data.x_train), len(data.x_valid), len(data.x_test)) == (14, 6, 5)
    both = np.concatenate([data.x_train, data.x_valid])
    np.testing.assert_array_equal(
        np.sort(both, axis=0), np.sort(arrays["x_train"].astype(np.float32), axis=0)
    )
    assert "14 to train, 6 to validate, 5 to test; shape 6, 3 classes" in data.about


def test_classes_of_the_test_that_training_lacks_are_warned_of(tmp_path):
    write_npz(tmp_path / "data.npz", y_test=np.array([0, 1, 2, 4, 5]))
    with pytest.warns(UserWarning, match="classes that the training examples lack: 4, 5"):
        assert datasets.load(str(tmp_path / "data.npz")).num_classes == 6
