"""Every public name says what it does, takes, gives and raises."""

import inspect
import pathlib
import re

from support import PUBLIC

import optperm.training

ROOT = pathlib.Path(__file__).parents[1]
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
METHODS = {
    f"{name}.{method}": function
    for name, kind in CLASSES.items()
    for method, function in vars(kind).items()
    if inspect.isfunction(function) and not method.startswith("_")
}


TRAINING = {
    name: value
    for name, value in vars(optperm.training).items()
    if not name.startswith("_") and not inspect.ismodule(value)
}


def sections(documented):
    """The sections of a docstring by title, after its first line under "summary"."""
    parts = re.split(r"^([A-Z]\w+):\n", inspect.getdoc(documented) or "", flags=re.MULTILINE)
    return {"summary": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def entries(section):
    """The names that a section lists."""
    return re.findall(r"^  \*{0,2}(\w+): \S", section, flags=re.MULTILINE)


# The order of use. Fields come in the place of arguments.
ORDER = [
    "summary",
    "Attributes",
    "Args",
    "Returns",
    "Example",
    "Notes",
    "Raises",
    "Warns",
    "References",
]


def parameters(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_all_public_names_are_functions_or_classes():
    """What is neither would be checked by nothing here."""
    assert FUNCTIONS.keys() | CLASSES.keys() == PUBLIC.keys()


def test_the_first_line_is_a_sentence():
    """One line, and nothing else beside it."""
    for name, documented in (PUBLIC | METHODS | TRAINING).items():
        first, *rest = inspect.getdoc(documented).splitlines()
        assert re.search(r"\S.*\.$", first), name
        assert not rest or not rest[0], name


def test_sections_stand_in_the_order_of_use():
    """What a reader needs first comes first; limits and errors come after the example."""
    found = {
        name: list(sections(documented))
        for name, documented in (PUBLIC | METHODS | TRAINING).items()
    }
    wrong = {
        name: titles
        for name, titles in found.items()
        if titles != [title for title in ORDER if title in titles]
    }
    assert not wrong


def test_all_arguments_are_explained_in_order():
    """Each parameter stands in Args, and nothing else does."""
    for name, function in (FUNCTIONS | METHODS).items():
        assert entries(sections(function).get("Args", "")) == parameters(function), name


def test_functions_say_what_they_return_and_raise_and_show_it():
    """And the example is one that doctest runs."""
    for name, function in FUNCTIONS.items():
        found = sections(function)
        assert found["Returns"].strip(), name
        assert re.search(rf"\boptperm\.(\w+\.)?{name}\b", found["Example"]), name
        assert ">>> " in found["Example"], name
        raised = entries(found["Raises"])
        assert raised, name
        assert all(error.endswith("Error") for error in raised), name


def test_classes_explain_their_fields_in_order():
    """Each field stands in Attributes, and nothing else does."""
    for name, kind in CLASSES.items():
        assert entries(sections(kind)["Attributes"]) == [*kind.__annotations__], name


def test_training_is_documented():
    """An example for what users make or call, and a place in the guide."""
    text = (ROOT / "docs" / "guides" / "fit.md").read_text(encoding="utf-8")
    for name, value in TRAINING.items():
        if name not in ("Event", "FitResult", "CheckpointError"):  # what one is given
            assert ">>> " in sections(value)["Example"], name
        assert re.search(rf"`(optperm\.)?(training\.)?{name}`", text), name


def test_the_readme_is_read_in_a_minute():
    """It is short, all that it links to is there, and each row with a figure names what prints it."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 124
    assert len(text.split()) <= 1200
    urls = dict(re.findall(r"^\[(\w+)\]: (\S+)$", text, re.MULTILINE))
    linked = [*urls.values(), *re.findall(r"\]\(([^)]+)\)", text)]
    missing = [
        path for path in linked if not path.startswith("https://") and not (ROOT / path).exists()
    ]
    assert not missing
    rows = [row for row in text.splitlines() if row.startswith("| ") and re.search(r"\d", row)]
    assert len(rows) == 7
    assert all(re.search(r"\[[^]]+\]\[\w+\]", row) for row in rows)
