"""The examples run, and show what they claim."""

import importlib
import inspect
import pathlib
import re
import runpy

import jax
import matplotlib.image
import numpy as np
import pytest
import support

import optperm
from optperm.cli.methods import METHODS

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("one_device")]

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _modules_of_examples(monkeypatch):
    """A script finds the modules beside it."""
    monkeypatch.syspath_prepend(EXAMPLES)


def load(name):
    """What the example defines."""
    return runpy.run_path(str(EXAMPLES / name))


def run(name, folder, *flags, example=None, **smaller):
    """What the example's `main` returns, run in this process; its picture is not blank.

    Numbers of the example, in capitals, may be others; what `load` gave may be run.
    """
    out = folder / "curves.png"
    main = (example or load(name))["main"]
    inspect.unwrap(main).__globals__.update(smaller)
    found = main(["--out", str(out), *map(str, flags)])
    assert_is_picture(out)
    return found


def assert_is_picture(path):
    """Asserts that a PNG was written that is not blank."""
    assert np.std(matplotlib.image.imread(path)) > 0.01


def test_svrg_regression(tmp_path):
    """On the diabetes data SVRG ends a hundred times nearer to the optimum than SGD at any rate."""
    curves = run("svrg_regression.py", tmp_path)
    assert len(curves) == 5
    last = {name: curve[-1] for name, curve in curves.items()}
    assert 100 * last.pop("SVRG, 0.025") < min(last.values())


def test_svrg_regression_on_a_file(tmp_path):
    """A csv with the target in its first column is read and scaled."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(503, 4))
    y = 2000 + x @ np.arange(4.0) + rng.normal(size=503)
    np.savetxt(tmp_path / "data.csv", np.column_stack([y, x]), delimiter=",")
    curves = run("svrg_regression.py", tmp_path, "--csv", tmp_path / "data.csv", "--epochs", 40)
    last = {name: curve[-1] for name, curve in curves.items()}
    assert 1e4 * last.pop("SVRG, 0.025") < min(last.values())


def test_svrg_logistic(tmp_path):
    """At 4/L both forms come nearer to the optimum than SAGA with as many gradient evaluations."""
    curves = run("svrg_logistic.py", tmp_path, "--passes", 60)
    saga_count, of_saga = curves.pop("SAGA (scikit-learn)")[-1]
    for name, curve in curves.items():
        assert curve[-1][0] == pytest.approx(saga_count, rel=0.15)
        assert curve[-1][1] < (of_saga / 10 if "4/L" in name else 2 * of_saga)


def test_constant_sgd_posterior(tmp_path):
    """The full preconditioner samples the posterior; the diagonal one what it must, which is far off."""
    found = run("constant_sgd_posterior.py", tmp_path, "--draws", 250)
    # Of 2,000 draws of 10 coefficients the divergence is 0.02 above what it is of very many.
    assert found["full"][0] < 0.05
    assert found["injected"][0] < 0.05
    sampled, computed = found["diagonal"]
    assert computed > 3
    assert sampled == pytest.approx(computed, rel=0.1)


@pytest.mark.usefixtures("lenient")
def test_posterior_benchmark(capsys):
    """Constant SGD by its defaults, but for fewer steps, on the smallest problem: near the posterior."""
    flags = ["--problems", "quadratic", "--batch-sizes", "32", "--seeds", "1", "--steps", "5000"]
    (row,) = load("../benchmarks/posterior.py")["main"]([*flags, "--defaults"])
    (verdict,) = row["verdicts"]
    assert verdict.found.passes
    assert verdict.found.divergence < 0.1
    assert "quadratic    S  32" in capsys.readouterr().out


@pytest.mark.usefixtures("lenient")
def test_low_rank_bytes(tmp_path):
    """In less than half of Adam's numbers, with about its loss; a decoder that guesses has 5.5 nats."""
    found = run("low_rank_bytes.py", tmp_path, "--steps", 40, "--batch", 4)
    full, most = found.pop("AdamW")
    assert full == pytest.approx(2, abs=0.01)
    for words, nats in found.values():
        assert words < 1
        assert nats < most + 0.3 < 4


@pytest.mark.usefixtures("lenient")
def test_dldr_digits(tmp_path):
    """In the subspace of its trajectory P-BFGS ends at half the loss of SGD, and P-SGD beside it; TWA
    lowers the loss of the mean that it begins at."""
    curves = run("dldr_digits.py", tmp_path, SIZES=(12,))
    sgd, p_sgd, p_bfgs, twa = (curve[-1, 0] for curve in curves.values())
    assert p_bfgs < 0.5 * sgd
    assert p_sgd < 1.2 * sgd
    assert twa < 0.98 * list(curves.values())[-1][6, 0]


@pytest.mark.usefixtures("lenient")
def test_prune_freeze_sweep(tmp_path, capsys):
    """Nine tenths of the network can be frozen at no great cost, and not be pruned."""
    flags = ["--fractions", 11, "--repeats", 2, "--steps", 50, 200]
    found = run("prune_freeze_sweep.py", tmp_path, *flags)
    assert found.shape == (2, 5, 11, 2)
    magnitude, random, *frozen = np.moveaxis(found, 1, 0)[..., 1]
    for curve in (random, *frozen):
        np.testing.assert_array_equal(curve[:, 0], magnitude[:, 0])  # nothing is masked
    for curve in frozen:
        np.testing.assert_array_equal(curve[:, -1], frozen[0][:, -1])  # nothing has moved
        assert np.all(curve[:, 9] > magnitude[:, 9])
    np.testing.assert_array_equal(magnitude[:, -1], random[:, -1])  # nothing is left
    assert np.all(magnitude[:, -1] < 0.2)
    assert np.mean(magnitude[:, 8:10]) > np.mean(random[:, 8:10])
    assert np.mean(frozen[1][:, 9]) > np.mean(magnitude[:, 9]) + 0.1
    shown = capsys.readouterr().out.splitlines()
    assert [line.rsplit(maxsplit=6)[0] for line in shown[1:]] == [
        *("prune magnitude", "prune random", "freeze preconditioned_gradient", "freeze gradient"),
        "freeze random",
    ]
    assert shown[3].split()[-6] == f"{np.mean(frozen[0][:, 0]):.3f}"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("lenient")
def test_prune_freeze_sweep_as_it_was_first_made(tmp_path):
    """Each network goes on to estimate a preconditioner of its own, so that H and gradient part."""
    flags = ["--fractions", 3, "--repeats", 1, "--legacy", "--steps", 20, 60]
    _, _, by_h, by_gradient, _ = run("prune_freeze_sweep.py", tmp_path, *flags)[0, ..., 0]
    assert by_h[0] == by_gradient[0] != by_h[-1] == by_gradient[-1]
    assert by_h[1] != by_gradient[1]


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    "some",
    [
        ("in step", "top 1/16, 2 bits"),
        pytest.param(("in step", "alone", "agn", "4 bits"), marks=pytest.mark.exhaustive),
    ],
)
def test_byte_transformer(some, tmp_path, capsys, monkeypatch):
    """The methods learn on from one start, a smaller network; who commits less sends less."""
    small = importlib.import_module("library_bytes")
    monkeypatch.setattr(small, "LAYERS", 1)
    monkeypatch.setattr(small, "WIDTH", 16)
    monkeypatch.setattr(small, "CONTEXT", 16)
    listed = importlib.import_module("commit_methods")
    every = listed.methods
    monkeypatch.setattr(
        listed, "methods", lambda steps: {name: every(steps)[name] for name in some}
    )
    found = run("byte_transformer.py", tmp_path, "--steps", 10, "--common", 1)
    assert tuple(found) == some
    assert all(3.5 < loss < 5.5 for loss, *_ in found.values()), found
    table = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    in_step, *sent = (float(row[-2]) for row in table)
    if "agn" not in some:
        # An exchange, one step in ten, is padded to a multiple of 1,024 bytes.
        assert in_step > 150 * (sent[0] - 102.4) > 0
        return
    alone, agn, four_bits = sent
    assert (in_step / agn, alone) == (pytest.approx(10, rel=1e-3), 0)
    assert agn > 7 * four_bits


def test_byte_transformer_is_drawn_from_what_is_kept(tmp_path):
    """Three seeds of it take the better part of an hour."""
    kept = EXAMPLES.parent / "benchmarks" / "results" / "byte_transformer.json"
    found = run("byte_transformer.py", tmp_path, "--kept", kept)
    assert found["diloco"] == (1.831, 0.044, 146112, 1461124)


def test_sgperm_digits(tmp_path):
    """It learns without a new value, and the seed and the permutation are all of what it learned."""
    found = run("sgperm_digits.py", tmp_path, "--steps", 128)
    step, accuracy, at_home = found["curves"].T
    assert step.tolist() == [1, 2, 4, 8, 16, 32, 64, 128]
    assert accuracy[-1] > 0.9 > accuracy[0]
    assert at_home[0] > 2 * at_home[-1] > 0
    support.assert_permutes(found["trained"], load("sgperm_digits.py")["draw_weights"]())
    support.assert_same_bits(found["rebuilt"], found["trained"])


@pytest.mark.usefixtures("lenient")
def test_sgperm_values(tmp_path):
    """Two values in the right places classify better than Adam's network rounded to two, in fewer bits
    than one a weight; a permutation of any values takes less than log2 of the longest vector."""
    curves = run("sgperm_values.py", tmp_path, "--steps", 300, "--seeds", 1, "--hidden", 24)
    assert list(curves) == ["Adam", "Adam, rounded", "permuted"]
    (bits, two_values), *_, (most, _) = curves["permuted"]
    assert 0.8 < bits < 1
    assert 3 < most < 6
    (rounded_bits, rounded), *_ = curves["Adam, rounded"]
    assert rounded_bits == 1
    assert two_values > max(0.75, rounded + 0.05)


@pytest.mark.usefixtures("lenient")
def test_laperm_digits(tmp_path):
    """Seldom put in order, the initial weights classify; after every step they learn nothing."""
    found = run("laperm_digits.py", tmp_path, "--epochs", 3)
    assert found[1].accuracy < 0.3
    for period, trained in found.items():
        assert period == 1 or trained.accuracy > 0.85
        support.assert_permutes(trained.params, trained.initial)
        rebuilt = optperm.permutation.apply_permutation(trained.initial, trained.permutation)
        support.assert_same_bits(rebuilt, trained.params)


@pytest.mark.usefixtures("lenient")
def test_flax_fit(tmp_path):
    """Each method is stopped early; with the break svrg ends bit for bit as without."""
    example = load("flax_fit.py")
    results = run("flax_fit.py", tmp_path, example=example)
    assert list(results) == ["svrg", "sgperm"]
    for result in results.values():
        assert result.ended == "stopped"
        epochs = result.history.epochs
        assert epochs["epoch"].tolist() == list(range(1, result.epoch + 1))
        assert epochs["eval_accuracy"][-1] > 0.95
    without, result = example["train"]("svrg", 12), results["svrg"]
    assert (without.ended, without.epoch) == (result.ended, result.epoch)
    support.assert_same_bits(
        *((r.state.params, r.state.model_state, r.state.opt_state) for r in (result, without))
    )
    fresh, trained = (
        {name: jax.device_get(r.state.params[name]) for name in ("Dense_0", "Dense_1")}
        for r in (example["train"]("sgperm", 1), results["sgperm"])
    )
    support.assert_permutes(trained, fresh)


def test_every_method_of_the_command_has_an_example():
    """Each in a script of fewer than 120 lines."""
    scripts = {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}
    for name, text in scripts.items():
        assert len(text.splitlines()) < 120, name
    methods = {name.replace("-", "_") for name in METHODS} & set(dir(optperm))
    assert {"sgperm", "constant_sgd"} <= methods
    for name in methods:
        assert any(f"optperm.{name}(" in text for text in scripts.values()), name


WITH_FLAGS = sorted(p.name for p in EXAMPLES.glob("*.py") if "flags.Parser(" in p.read_text())


def said(name, arguments, monkeypatch, capsys):
    """What an example prints as its error, before it has trained anything."""
    monkeypatch.setattr("sys.argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        load(name)["main"]()
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", WITH_FLAGS)
def test_out_is_a_file(name, tmp_path, monkeypatch, capsys):
    """Its folders are made; a folder, or a kind that matplotlib cannot write, is told in one line."""
    monkeypatch.chdir(tmp_path)
    for wrong in (".", "curves.doc"):
        error = f"{name}: error: argument --out: got {wrong}; give a file that ends in "
        found = said(name, ["--out", wrong], monkeypatch, capsys)
        assert found.startswith(error)
        assert found.count("\n") == 1
    found = said(name, ["--out", "new/folders/curves.png", "--other"], monkeypatch, capsys)
    assert found == f"{name}: error: unrecognized arguments: --other\n"
    assert (tmp_path / "new" / "folders").is_dir()


@pytest.mark.parametrize(
    ("name", "flag", "wrong"),
    [
        ("agn_pmap.py", "--seeds", "0"),
        ("agn_multiprocess.py", "--timeout", "nan"),
        ("constant_sgd_posterior.py", "--draws", "1"),
        ("flax_fit.py", "--epochs", "1"),
        ("prune_freeze_sweep.py", "--fractions", "few"),
        ("svrg_regression.py", "--batch-size", "443"),
        ("svrg_regression.py", "--csv", "none.csv"),
    ],
)
def test_a_wrong_value_is_told_in_one_line(name, flag, wrong, monkeypatch, capsys):
    """What came, and what is allowed."""
    found = said(name, [flag, wrong], monkeypatch, capsys)
    assert re.fullmatch(rf"{name}: error: argument {flag}: [^\n]*\b{wrong}\b[^\n]*\n", found)
