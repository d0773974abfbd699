"""Reading data: what comes out is what went in, and what cannot be used is refused by name."""

import gzip
import io
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest

from optperm.cli import datasets
from optperm.cli.errors import CliError


def random_images(count, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 4, 3), np.uint8), rng.integers(0, 5, count, np.uint8)


def idx_bytes(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_idx_folder(folder, *, dot="-", compress=False):
    x_train, y_train = random_images(20, 0)
    x_test, y_test = random_images(7, 1)
    arrays = {
        f"train-images{dot}idx3-ubyte": x_train,
        f"train-labels{dot}idx1-ubyte": y_train,
        f"t10k-images{dot}idx3-ubyte": x_test,
        f"t10k-labels{dot}idx1-ubyte": y_test,
    }
    for name, array in arrays.items():
        content = idx_bytes(array)
        if compress:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)
    return x_train, y_train, x_test, y_test


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
    assert data.x_train.shape == (1257, 8, 8)
    assert data.x_test.shape == (540, 8, 8)
    assert data.x_train.dtype == np.float32
    train = data.x_train.astype(np.float64)
    varies = train.std(axis=0) > 0
    assert np.count_nonzero(varies) == 61
    np.testing.assert_allclose(train.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(train.std(axis=0)[varies], 1, atol=1e-6)
    assert 0.9 < data.x_test[:, varies].std() < 1.1
    again = datasets.load("digits")
    np.testing.assert_array_equal(data.x_test, again.x_test)


def test_idx_folder_gives_the_images_scaled(tmp_path):
    for dot, compress in (("-", False), (".", True)):
        folder = tmp_path / f"idx{dot}"
        folder.mkdir()
        x_train, y_train, x_test, y_test = write_idx_folder(folder, dot=dot, compress=compress)
        data = datasets.load(str(folder))
        np.testing.assert_array_equal(data.x_train, x_train.astype(np.float32) / np.float32(255))
        np.testing.assert_array_equal(data.x_test, x_test.astype(np.float32) / np.float32(255))
        np.testing.assert_array_equal(data.y_train, y_train)
        np.testing.assert_array_equal(data.y_test, y_test)
        assert (data.num_classes, data.name) == (5, folder.name)


def damage(content, kind):
    return {
        "cut in the data": content[:-1],
        "cut in the header": content[:9],
        "empty": b"",
        "longer than promised": content + b"\0",
        "floats": content[:2] + b"\x0d" + content[3:],
        "labels instead": content[:3] + b"\1" + content[4:],
        "huge header": content[:4] + b"\xff" * 12 + content[16:],
        "gzip huge header": gzip.compress(content[:4] + b"\xff" * 12 + content[16:]),
        "gzip bomb": gzip.compress(content + bytes(50_000_000)),
        "gzip cut": gzip.compress(content)[:-12],
        "gzip damaged": gzip.compress(content)[:12] + b"\xff" * 40,
    }[kind]


def test_damaged_idx_files_are_refused(tmp_path):
    write_idx_folder(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    whole = path.read_bytes()
    for kind, says in [
        ("cut in the data", "promises 240 bytes of data"),
        ("cut in the header", "ends within its header"),
        ("empty", "begins with nothing"),
        ("longer than promised", "it holds more"),
        ("floats", "begins with 00 00 0d 03"),
        ("labels instead", "begins with 00 00 08 01"),
        ("huge header", "promises 79228162458924105385300197375 bytes of data .* it holds less"),
        ("gzip huge header", "promises 79228162458924105385300197375 bytes"),
        ("gzip bomb", "promises 240 bytes of data .* it holds more"),
        ("gzip cut", "cannot be decompressed"),
        ("gzip damaged", "cannot be decompressed"),
    ]:
        path.write_bytes(damage(whole, kind))
        tracemalloc.start()
        try:
            with pytest.raises(CliError, match=says) as caught:
                datasets.load(str(tmp_path))
            assert tracemalloc.get_traced_memory()[1] < 2_000_000  # a bomb is not unpacked
        finally:
            tracemalloc.stop()
        assert str(path) in str(caught.value)
    path.write_bytes(whole)
    labels = tmp_path / "t10k-labels-idx1-ubyte"
    labels.write_bytes(idx_bytes(np.zeros(6, np.uint8)))
    with pytest.raises(CliError, match=r"the 7 examples in x_test, got uint8\[6\]"):
        datasets.load(str(tmp_path))
    labels.unlink()
    with pytest.raises(CliError, match=r"no t10k-labels file: .*t10k-labels-idx1-ubyte\.gz"):
        datasets.load(str(tmp_path))


def test_npz_takes_floats_as_they_are_and_scales_bytes(tmp_path):
    arrays = write_npz(tmp_path / "floats.npz")
    data = datasets.load(str(tmp_path / "floats.npz"))
    np.testing.assert_array_equal(data.x_train, arrays["x_train"].astype(np.float32))
    assert (data.name, data.num_classes) == ("floats", 3)

    as_bytes = {
        key: np.full((size, 6), 51, np.uint8) for key, size in (("x_train", 20), ("x_test", 5))
    }
    write_npz(tmp_path / "bytes.npz", **as_bytes)
    np.testing.assert_allclose(datasets.load(str(tmp_path / "bytes.npz")).x_test, 0.2)


def test_unusable_npz_arrays_are_refused(tmp_path):
    cases = [
        ({"y_test": None, "x_test": None}, r"lacks x_test, y_test.*It holds x_train, y_train\."),
        ({"x_train": np.full((20, 6), np.nan)}, "x_train holds 120 values that are NaN"),
        ({"x_test": np.full((5, 6), 1e60)}, "x_test holds 30 values that are NaN, infinite or bey"),
        ({"x_train": np.zeros((20, 6), int), "x_test": np.zeros((5, 6), int)}, "uint8 .* or float"),
        ({"x_train": np.zeros(20), "x_test": np.zeros(5)}, "at least one more, got float64.20."),
        (
            {"x_train": np.zeros((0, 6)), "y_train": np.zeros(0, int)},
            "x_train and y_train must hold one",
        ),
        (
            {"x_test": np.zeros((0, 6)), "y_test": np.zeros(0, int)},
            "x_test and y_test must hold one ex",
        ),
        ({"x_test": np.zeros((5, 7))}, "one shape and dtype"),
        ({"x_test": np.zeros((5, 6), np.uint8)}, "one shape and dtype"),
        ({"y_train": np.zeros(20)}, "y_train must be a vector of integer labels, .*float64"),
        ({"y_train": np.zeros((20, 1), int)}, "y_train must be a vector of integer labels"),
        ({"y_train": np.full(20, -1)}, "labels from -1 to -1"),
        ({"y_test": np.full(5, 10**9)}, "labels from 1000000000"),
        ({"y_train": np.zeros(19, int)}, r"for each of the 20 examples in x_train, got int64.19."),
        ({"y_train": np.array([None] * 20)}, "of plain arrays: it holds Python objects"),
    ]
    for changes, says in cases:
        write_npz(tmp_path / "data.npz", **changes)
        with pytest.raises(CliError, match=says):
            datasets.load(str(tmp_path / "data.npz"))


def test_files_that_are_no_npz_are_refused(tmp_path):
    path = tmp_path / "data.npz"
    write_npz(path)
    whole = path.read_bytes()
    np.save(tmp_path / "array.npy", np.zeros(3))
    contents = (b"", b"x,y\n1,2\n", whole[: len(whole) // 2], (tmp_path / "array.npy").read_bytes())
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(CliError, match=r"cannot be read as an \.npz file") as caught:
            datasets.load(str(path))
        assert "allow_pickle" not in str(caught.value)


def test_a_header_that_claims_more_than_there_is_is_refused(tmp_path):
    """Whether or not the memory for it can be had."""
    path = tmp_path / "data.npz"
    arrays = write_npz(path)
    for examples in (10**9, 10**13):
        header = io.BytesIO()
        claim = {"descr": "<f8", "fortran_order": False, "shape": (examples, 50)}
        np.lib.format.write_array_header_1_0(header, claim)
        with zipfile.ZipFile(path, "w") as archive:
            for key, array in arrays.items():
                content = io.BytesIO()
                np.save(content, array)
                false_or_true = header if key == "x_train" else content
                archive.writestr(f"{key}.npy", false_or_true.getvalue())
        with pytest.raises(CliError, match=r"cannot be read as an \.npz file"):
            datasets.load(str(path))


def test_missing_data_says_what_is_possible(tmp_path):
    with pytest.raises(CliError, match=r"no such file or folder\. Pass 'digits'"):
        datasets.load(str(tmp_path / "nothing"))
