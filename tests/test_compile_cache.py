"""Where compiled programs are kept between runs, and what happens where they cannot be."""

import compile_cache
import pytest


def test_folder_is_kept_between_runs(tmp_path):
    folder = tmp_path / "kept"
    assert compile_cache.choose(folder) == (folder, None)
    (folder / "program").touch()
    assert compile_cache.choose(folder) == (folder, None)


def spoil_by_version(folder):
    folder.mkdir()
    (folder / "jax-version.txt").write_text("0.4.1")


def spoil_by_other_files(folder):
    folder.mkdir()
    (folder / "thesis.tex").touch()


def test_a_relative_folder_is_the_same_from_everywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert compile_cache.choose("kept") == (tmp_path / "kept", None)


def spoil_by_bytes(folder):
    folder.mkdir()
    (folder / "jax-version.txt").write_bytes(b"\xff")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (spoil_by_version, "holds programs of jax 0.4.1, and this is jax"),
        (spoil_by_other_files, "holds other files"),
        (spoil_by_bytes, "holds other files"),
        (lambda folder: folder.touch(), "cannot be written"),
    ],
)
def test_folder_that_cannot_be_used_is_left_alone(spoil, reason, tmp_path):
    folder = tmp_path / "named"
    spoil(folder)
    before = sorted(tmp_path.rglob("*"))
    chosen, why = compile_cache.choose(folder)
    assert chosen != folder
    assert not any(chosen.iterdir())
    assert reason in why
    assert sorted(tmp_path.rglob("*")) == before
    chosen.rmdir()
