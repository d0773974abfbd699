"""Training methods for JAX as composable Optax gradient transformations."""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from optperm import bayes as bayes
    from optperm import distributed as distributed
    from optperm import memory as memory
    from optperm import permutation as permutation
    from optperm import sparsity as sparsity
    from optperm import subspace as subspace
    from optperm import training as training
    from optperm import variance as variance
    from optperm._leaf_axes import LeafAxes as LeafAxes
    from optperm._leaf_axes import leaf_axes as leaf_axes
    from optperm._with_loss import with_loss as with_loss
    from optperm.bayes import constant_sgd as constant_sgd
    from optperm.bayes import ivon as ivon
    from optperm.bayes import mandt_sgd as mandt_sgd
    from optperm.bayes import sghmc as sghmc
    from optperm.bayes import sgld as sgld
    from optperm.bayes import swag as swag
    from optperm.distributed import agn as agn
    from optperm.distributed import diloco as diloco
    from optperm.evaluation import Evaluation as Evaluation
    from optperm.evaluation import evaluate as evaluate
    from optperm.exact import Exact as Exact
    from optperm.exact import apply_updates as apply_updates
    from optperm.memory import apollo as apollo
    from optperm.memory import low_rank as low_rank
    from optperm.memory import quantize_state as quantize_state
    from optperm.memory import widen_params as widen_params
    from optperm.permutation import laperm as laperm
    from optperm.permutation import permute_by_cycles as permute_by_cycles
    from optperm.permutation import sgperm as sgperm
    from optperm.sparsity import mask_elements as mask_elements
    from optperm.sparsity import prune_gradually as prune_gradually
    from optperm.sparsity import rigl as rigl
    from optperm.subspace import dim_reduce as dim_reduce
    from optperm.subspace import dldr as dldr
    from optperm.subspace import project as project
    from optperm.subspace import record_trajectory as record_trajectory
    from optperm.subspace import twa as twa
    from optperm.switching import switch_after as switch_after
    from optperm.variance import katyusha as katyusha
    from optperm.variance import mars as mars
    from optperm.variance import proximal as proximal
    from optperm.variance import recursive_gradient as recursive_gradient
    from optperm.variance import svrg as svrg

_ROOMS = (
    *("bayes", "distributed", "memory", "permutation"),
    *("sparsity", "subspace", "variance", "training"),
)
# Each public name is loaded at its first use, from the module whose list contains it.
_NAMES = {
    "_leaf_axes": ["LeafAxes", "leaf_axes"],
    "_with_loss": ["with_loss"],
    "evaluation": ["Evaluation", "evaluate"],
    "exact": ["Exact", "apply_updates"],
    "switching": ["switch_after"],
    "bayes": ["constant_sgd", "ivon", "mandt_sgd", "sghmc", "sgld", "swag"],
    "distributed": ["agn", "diloco"],
    "memory": ["apollo", "low_rank", "quantize_state", "widen_params"],
    "permutation": ["laperm", "permute_by_cycles", "sgperm"],
    "sparsity": ["mask_elements", "prune_gradually", "rigl"],
    "subspace": ["dim_reduce", "dldr", "project", "record_trajectory", "twa"],
    "variance": ["katyusha", "mars", "proximal", "recursive_gradient", "svrg"],
}
# What other libraries call a method, and the call that makes it here.
_ELSEWHERE = {
    "adamw8bit": "optperm.quantize_state(optax.adamw(...))",
    "galore": 'optperm.low_rank(inner, rank, projection="svd", residual=None, carry=False)',
    "muon8bit": "optperm.quantize_state(optax.contrib.muon(...))",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
if not _TYPE_CHECKING:
    __all__ = [*_MODULE_OF, *_ROOMS]  # noqa: PLE0604


def __getattr__(name: str) -> _Any:
    if name in _ROOMS:
        return _importlib.import_module(f"optperm.{name}")
    if name in _MODULE_OF:
        value = getattr(_importlib.import_module(f"optperm.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if name == "__version__":
        return _importlib.import_module("importlib.metadata").version("optperm")
    message = f"module 'optperm' has no attribute {name!r}"
    if name.lower() in _ELSEWHERE:
        raise AttributeError(f"{message}: use {_ELSEWHERE[name.lower()]}.")
    if not name.startswith("_"):
        for room in _ROOMS:
            if hasattr(_importlib.import_module(f"optperm.{room}"), name):
                raise AttributeError(f"{message}: it is optperm.{room}.{name}.")
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted([*_MODULE_OF, *_ROOMS])
