"""Optax's own cases for optimizers, run on every transformation of this library.

They are those of `optax/contrib/_common_test.py` in the installed Optax, which are parametrized over
lists of Optax's optimizers; here the lists are noted down instead of expanded, and ours are put in their
place. `optax/_src/alias_test.py` asks the same.
"""

import importlib.util
import itertools
import pathlib
from unittest import mock

import jax
import jax.numpy as jnp
import optax
import pytest
from absl.testing import parameterized
from transformations import TRANSFORMATIONS

_INJECTED = "test_optimizers_can_be_wrapped_in_inject_hyperparams"
_NO_MINIMUM = {
    "has only the values that the params start with": ("sgperm", "permute_by_cycles", "laperm"),
    "hands on the updates": ("record_trajectory", "mask_elements", "proximal", "swag"),
    "stays in a line or a plane": ("project", "twa", "dldr", "dldr-twa"),
    "keeps half of the params at zero": ("prune_gradually", "rigl", "set"),
    "corrects gradients for an optimizer after it": ("svrg", "mars"),
    "needs gradients elsewhere": ("mars-exact", "recursive_gradient", "recursive-page", "ivon"),
    "samples": ("constant_sgd", "sgld", "sghmc"),
}
_SHAPES = "a number that decides shapes cannot be traced; test_contract.py has it in static_args"
# With which transformations a case is not run, and why.
LEFT_OUT = {
    "test_optimizers": {name: why for why, names in _NO_MINIMUM.items() for name in names},
    _INJECTED: {ours.name: _SHAPES for ours in TRANSFORMATIONS if ours.static},
}


def note(*sequences, **grid):
    """Keep the lists of `absl.testing.parameterized.product` with the case."""

    def keep(case):
        case.sequences, case.grid = sequences, grid
        return case

    return keep


_PATH = pathlib.Path(optax.__file__).parent / "contrib/_common_test.py"
_SPEC = importlib.util.spec_from_file_location("optax_contrib_test", _PATH)
OPTAX = importlib.util.module_from_spec(_SPEC)
with mock.patch.object(parameterized, "product", note):
    _SPEC.loader.exec_module(OPTAX)

# Cases, and values of those that they are parametrized over. What the others ask, test_contract.py asks
# too, and of schedules test_fuzz.py.
RUNS = [
    ("test_optimizers", {"_setup_parabola"}),
    *(
        pytest.param(*run, marks=pytest.mark.entries)
        for run in (
            ("test_optimizers", set()),
            (_INJECTED, set()),
            ("test_gradient_accumulation", {"bfloat16"}),
        )
    ),
    *(
        pytest.param(name, set(), marks=pytest.mark.exhaustive)
        for name in dir(OPTAX.ContribTest)
        if name.startswith("test")
    ),
]


_assert_close = OPTAX.test_utils.assert_trees_all_close


def assert_close(actual, desired, **options):
    """Compare two trees; in a fingerprint, the number 0 of a traced argument counts as any number."""

    def know(path, one, other):
        is_fingerprint = "fingerprint" in jax.tree_util.keystr(path)
        return jnp.where(one == 0, other, one) if is_fingerprint else one

    if jax.tree.structure(actual) == jax.tree.structure(desired):
        actual = jax.tree_util.tree_map_with_path(know, actual, desired)
    _assert_close(actual, desired, **options)


@pytest.mark.spans("agn", "dim_reduce", "svrg_and_sgd")
@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore:(low_rank|apollo) leaves .* alone")
@pytest.mark.filterwarnings("ignore:In .*all weights that enter an output unit are equal")
@pytest.mark.filterwarnings("ignore:quantize_state saves nothing")  # of params in float64
@pytest.mark.parametrize(
    ("name", "wanted"), RUNS, ids=lambda part: part if isinstance(part, str) else " ".join(part)
)
def test_optax_case_holds(ours, name, wanted, monkeypatch):
    if reason := LEFT_OUT.get(name, {}).get(ours.name):
        pytest.skip(reason)
    monkeypatch.setattr(OPTAX, "_get_opt_factory", lambda opt_name: ours.build)
    monkeypatch.setattr(OPTAX.test_utils, "assert_trees_all_close", assert_close)
    case = getattr(OPTAX.ContribTest(name), name)
    # The one list of optimizers becomes one entry, ours.
    (optimizers,), is_run = case.sequences, False
    entry = dict.fromkeys(optimizers[0]) | {"opt_name": ours.name, "opt_kwargs": ours.arguments}
    for values in itertools.product(*case.grid.values()):
        if wanted <= {getattr(value, "__name__", str(value)) for value in values}:
            case(**entry, **dict(zip(case.grid, values, strict=True)))
            is_run = True
    assert is_run
