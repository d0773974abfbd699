"""Rules for the docstrings of public names that the linter does not check."""

import inspect
import re

from support import PUBLIC

import optperm.training

METHODS = {
    f"{name}.{method}": function
    for name, kind in PUBLIC.items()
    if inspect.isclass(kind)
    for method, function in vars(kind).items()
    if inspect.isfunction(function) and not method.startswith("_")
}
TRAINING = {
    name: value
    for name, value in vars(optperm.training).items()
    if not name.startswith("_") and not inspect.ismodule(value)
}
# The order of use. Fields come in the place of arguments.
ORDER = ["Attributes", "Args", "Returns", "Example", "Notes", "Raises", "Warns", "References"]


def sections(documented):
    """The sections of a docstring by title, after its first lines."""
    parts = re.split(r"^([A-Z]\w+):\n", inspect.getdoc(documented), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(section):
    """The names that a section lists."""
    return re.findall(r"^  \*{0,2}(\w+): \S", section, flags=re.MULTILINE)


def test_docstrings_explain_all_arguments_in_order_with_an_example_and_errors():
    for name, documented in (PUBLIC | METHODS | TRAINING).items():
        found = sections(documented)
        assert [*found] == [title for title in ORDER if title in found], name
        if name in TRAINING:
            # What users make or call, and not what they are given.
            is_given = name in ("Event", "FitResult", "CheckpointError")
            assert is_given or ">>> " in found["Example"], name
        elif inspect.isclass(documented):
            assert entries(found.get("Attributes", "")) == [*documented.__annotations__], name
        else:
            wanted = [each for each in inspect.signature(documented).parameters if each != "self"]
            assert entries(found.get("Args", "")) == wanted, name
        if name in PUBLIC and inspect.isfunction(documented):
            assert found["Returns"].strip(), name
            assert re.search(rf"\boptperm\.(\w+\.)?{name}\b", found["Example"]), name
            assert ">>> " in found["Example"], name
            raised = entries(found["Raises"])
            assert raised, name
            assert all(error.endswith("Error") for error in raised), name
