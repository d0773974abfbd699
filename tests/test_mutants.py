"""The mutants of mutants.toml keep up with the package; run_mutants.py runs them."""

import run_mutants

PACKAGE = run_mutants.ROOT / "optperm"
MUTANTS = run_mutants.read_mutants()


def test_mutants_of_the_package_are_each_one_change_of_one_place():
    wrong = []
    for mutant in MUTANTS:
        text = (PACKAGE / mutant["file"]).read_text(encoding="utf-8")
        if text.count(mutant["line"]) != 1 or mutant["line"] == mutant["becomes"]:
            wrong.append(f"{mutant['file']}: {mutant['line']}")
            continue
        compile(run_mutants.mutate(text, mutant), mutant["file"], "exec")
    assert not wrong


def test_mutants_name_tests_that_exist():
    wrong = []
    for mutant in MUTANTS:
        named = [f"tests/{test}" for test in mutant.get("tests", [])]
        for test in [*named, run_mutants.tests_of(run_mutants.room_of(mutant))]:
            path, _, name = test.partition("::")
            found = run_mutants.ROOT / path
            if not found.exists() or (name and f"def {name}(" not in found.read_text("utf-8")):
                wrong.append(f"{mutant['file']}: {test}")
    assert not wrong


def test_mutants_are_of_all_rooms():
    rooms = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))} - {"cli"}
    rooms |= {path.stem for path in PACKAGE.glob("[a-z]*.py")}
    assert rooms <= {run_mutants.room_of(mutant) for mutant in MUTANTS}
    assert len({(m["file"], m["line"], m["becomes"]) for m in MUTANTS}) == len(MUTANTS) >= 100


def test_a_mutant_whose_line_is_gone_is_refused():
    mutant = {"file": "exact.py", "line": "a + b", "becomes": "a - b"}
    assert run_mutants.mutate("s = a + b", mutant) == "s = a - b"
    for text in ("s = a", "s = a + b + (a + b)"):
        try:
            run_mutants.mutate(text, mutant)
        except ValueError:
            continue
        raise AssertionError(text)
