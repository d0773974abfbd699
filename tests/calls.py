"""Every public function: arguments it works with, what kind each is of, and what is refused.

The tables are data; `test_fuzz.py` reads them. What a number, a flag or a choice may be is told by its
annotation and by its limits. A new function joins `FUNCTIONS`, a new transformation has its entry in
`transformations.py`; what else either refuses, with its message, joins `REFUSED`.
"""

import collections.abc
import dataclasses
import inspect
import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support import PUBLIC
from transformations import INF, LOW_RANK, SHARE, TRANSFORMATIONS

import optperm

PARAMS = {"w": jnp.array([[0.1, 0.5], [0.2, -0.3], [0.7, 0.4]]), "b": jnp.array([0.3, -0.2])}
GRADS = jax.tree.map(lambda p: 0.5 * p + 0.1, PARAMS)
BATCH = jnp.array([1.0, 2.0])


def loss_fn(params, batch):
    """Of any params and any batch."""
    del batch
    parts = [jnp.sum(jnp.real(p).astype(jnp.float32) ** 2) for p in jax.tree.leaves(params)]
    return sum(parts, start=jnp.float32(0.0))


def sgd():
    return optax.sgd(0.1)


def rows(k):
    """Orthonormal rows over the params."""
    q = np.linalg.qr(np.random.default_rng(0).normal(size=(8, k)))[0].T.astype(np.float32)
    return {"b": q[:, :2], "w": q[:, 2:].reshape(k, 3, 2)}


def state(tx):
    return tx.init(PARAMS)


SNAPSHOTS = jax.tree.map(lambda p: jnp.stack([i * p + i * i for i in range(4)]), PARAMS)
DRAWS = jax.tree.map(lambda p: jnp.stack([jnp.stack([p, p])] * 2), PARAMS)
MASKED = optperm.mask_elements().init(PARAMS)

# Arguments with which each public function works, of which one at a time is spoiled.
FUNCTIONS = {
    "apply_permutation": {"initial_params": BATCH, "permutation": jnp.array([1, 0])},
    "apply_updates": {"params": PARAMS, "updates": GRADS, "opt_state": state(optperm.sgperm())},
    "sample": {
        "loss_fn": loss_fn,
        "data": BATCH,
        "params": PARAMS,
        "key": jax.random.key(0),
        "batch_size": 2,
        "sampler": lambda num_data, batch_size: optperm.sgld(1e-4, num_data),
        "num_chains": 1,
        "num_draws": 4,
        "thinning": 1,
        "burn_in": 4,
    },
    "sample_params": {
        "opt_state": state(optperm.ivon(0.1, 10.0)),
        "params": PARAMS,
        "key": jax.random.key(0),
    },
    "posterior_mean": {
        "opt_state": optperm.swag(1).update(PARAMS, state(optperm.swag(1)), PARAMS)[1],
    },
    "center_params": {"opt_state": state(optperm.agn(sgd()))},
    "Compression": {"fraction": 0.5},
    "draw_samples": {
        "step": lambda params, opt_state, key: (params, opt_state),
        "params": PARAMS,
        "opt_state": (),
        "key": jax.random.key(0),
        "num_chains": 2,
        "num_draws": 2,
    },
    "erk_sparsity": {"params": PARAMS, "sparsity": 0.5},
    "evaluate": {"loss_fn": loss_fn, "params": PARAMS, "batch": BATCH},
    "export_permutation": {"initial_params": PARAMS, "opt_state": state(optperm.sgperm())},
    "falling": {"init_value": 0.1},
    "freeze": {"opt_state": MASKED, "fraction": 0.5, "scores": GRADS},
    "full_gradient": {"loss_fn": loss_fn, "params": PARAMS, "batches": [BATCH, BATCH]},
    "gaussian_kl": {
        "mean": jnp.zeros(2),
        "covariance": jnp.eye(2),
        "other_mean": jnp.ones(2),
        "other_covariance": jnp.eye(2),
    },
    "keep_top": {"params": PARAMS, "sparsity": 0.5},
    "traffic_report": {
        "tx": optperm.diloco(sgd(), every=2, axis_name="replica"),
        "params": PARAMS,
    },
    "state_report": {"tx": optperm.apollo(rank=1), "params": PARAMS},
    "normal_prior": {"params": PARAMS, "precision": 1.0, "num_data": 10},
    "adapted_kernel": {"opt_state": state(optperm.constant_sgd(10, 2))},
    "pca_basis": {"snapshots": SNAPSHOTS, "n_components": 1},
    "permuted_params": {"opt_state": state(optperm.laperm(sgd(), 2)), "params": PARAMS},
    "posterior_report": {
        "samples": optperm.bayes.Samples(
            jax.tree.map(lambda x: jnp.repeat(x, 2, axis=1), DRAWS),
            PARAMS,
            (),
            jnp.int32(4),
            jnp.int32(1),
        ),
    },
    "posterior_predictive": {
        "predict_fn": lambda params, inputs: jnp.ones(2),
        "samples": optperm.bayes.Samples(DRAWS, PARAMS, (), jnp.int32(4), jnp.int32(1)),
        "inputs": BATCH,
    },
    "prune": {"params": PARAMS, "opt_state": MASKED, "sparsity": 0.5},
    "remove_units": {
        "params": {"a": np.eye(2), "b": np.eye(2)},
        "groups": {"u": [("a", -1), ("b", 0)]},
    },
    "reset_masks": {"opt_state": MASKED},
    "set_basis": {"opt_state": state(optperm.dim_reduce(n_components=2)), "basis": rows(2)},
    "stationary_covariance": {"preconditioner": 0.1, "hessian": jnp.eye(2), "noise": jnp.eye(2)},
    "svrg_learning_rate": {
        "loss_fn": lambda params, batch: loss_fn(params, batch) + 0 * jnp.mean(batch),
        "params": PARAMS,
        "data": BATCH,
        "batch_size": 1,
        "num_passes": 0,
    },
    "matrix_axes": {"params": PARAMS},
    "quantize": {
        "opt_state": state(optax.adam(0.1)),
        "like": state(optperm.quantize_state(optax.adam(0.1), min_size=1)),
    },
    "dequantize": {"opt_state": state(optperm.quantize_state(optax.adam(0.1), min_size=1))},
    "rank_for": {"params": {"w": jnp.ones((8, 16))}},
    "low_rank_adamw": {"learning_rate": 0.1, "rank": 1},
    "apollo_adamw": {"learning_rate": 0.1, "rank": 1},
    "fit_temperature": {"logits": jnp.zeros((2, 2)).at[:, 0].set(1.0), "labels": jnp.arange(2)},
    "take_snapshot": {"opt_state": state(optperm.svrg()), "params": PARAMS, "full_grad": GRADS},
    "to_sparse": {"params": PARAMS},
    "trajectory": {"opt_state": state(optperm.record_trajectory(1, 2))},
    "with_loss": {"inner": sgd(), "loss_fn": loss_fn, "data": BATCH},
}
CASES = FUNCTIONS | {ours.name: ours.required for ours in TRANSFORMATIONS if ours.name in PUBLIC}
PARAMETERS = {name: tuple(inspect.signature(PUBLIC[name]).parameters) for name in CASES}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of argument.

    Attributes:
      refused: Values, the error that each raises, and what its message says after the name.
      allowed: Values that it may have, at its limits.
    """

    refused: tuple
    allowed: tuple = ()


def number(*, low=0.0, high=INF, is_open=False, is_below=False, is_optional=False):
    """A single number from `low` to `high`; with `is_open` above `low`, with `is_below` below `high`."""
    outside = [low if is_open else low - 0.1, float("nan"), *([high + 0.1] if high < INF else [])]
    strange = [True, "0.1", 1j, *([] if is_optional else [None])]
    refused = (
        (outside, ValueError, "must be (at least|above|in|finite).*, got "),
        ([jnp.array([0.1, 0.2])], ValueError, "must be a single number"),
        (strange, TypeError, "must be a number"),
    )
    least = max(low, -1.0)
    limits = (least, np.float64(least), int(least))
    if not is_below:
        limits += (min(high, 5.0), jnp.bfloat16(min(high, 1.0)))
    return Kind(refused, () if is_open else limits)


def count(*, minimum, is_optional=False):
    """An integer of at least `minimum`."""
    strange = [2.5, True, "2", jnp.float32(2.0), *([] if is_optional else [None])]
    refused = (
        ([minimum - 1, -3], ValueError, f"must be at least {minimum}, got "),
        (strange, TypeError, "(must be an integer, got|decides the shapes)"),
    )
    return Kind(refused)


def random_key():
    """An int of 32 bits that seeds a key, or a key: typed, or its raw data."""
    refused = (
        ([-1, 2**32], ValueError, "must be at (least 0|most 4294967295), got "),
        ([2.5, True, "2", None, jnp.float32(2.0)], TypeError, "must be an int or a random key"),
    )
    typed = jax.random.key(1)
    return Kind(refused, (0, 2**32 - 1, typed, jax.random.key_data(typed)))


def choice(*names):
    """One of several strings."""
    message = f"must be one of {', '.join(map(repr, names))}, got"
    return Kind(((["none", 3], ValueError, message),))


# What tells trees, and axes of their leaves, from single numbers.
_NO_NUMBERS = (complex, collections.abc.Sequence[int])
# What the annotation and the default of a function's argument do not tell: its limits, or None where it
# is of no kind, and what it refuses, if anything, stands in `REFUSED`. Those of a transformation's
# arguments stand in its entry in `transformations.py`.
LIMITS = {
    "Compression": {"fraction": SHARE | {"is_open": True}, "decay": SHARE},
    "draw_samples": {"burn_in": {"minimum": 0}},
    "erk_sparsity": {"sparsity": SHARE},
    "freeze": {"key": None},
    "sample": {"sampler": None, "burn_in": {"minimum": 0}},
    "pca_basis": {"num_snapshots": None},
    # Those of their directions; Optax checks none of its own.
    **dict.fromkeys(
        ("low_rank_adamw", "apollo_adamw"),
        LOW_RANK["limits"]
        | dict.fromkeys(("learning_rate", "rank", "b1", "b2", "eps", "weight_decay")),
    ),
    "rank_for": {"words": {"is_open": True}},
    "traffic_report": {
        "bandwidth": {"is_open": True},
        "every": {"is_open": True},
        "replicas": {"minimum": 2},
    },
    "prune": {"key": None},
    "svrg_learning_rate": {"num_passes": {"minimum": 0}},
    "stationary_covariance": {"preconditioner": None, "momentum": None},
} | {ours.name: ours.limits for ours in TRANSFORMATIONS}


def kind_of(parameter, limits):
    """What an argument takes, by its annotation, its default and its limits; or None."""
    options = typing.get_args(parameter.annotation) or (parameter.annotation,)
    is_optional = type(None) in options
    if limits is None or any(each in options for each in _NO_NUMBERS):
        return None
    if all(isinstance(option, str) for option in options):
        return choice(*options)
    if int in options and parameter.name == "key":
        return random_key()
    if int in options:
        minimum = limits.get("minimum", 0 if parameter.default == 0 else 1)
        return count(minimum=minimum, is_optional=is_optional)
    if float in options:
        return number(**limits, is_optional=is_optional)
    return None


def kinds_of(name):
    """Each argument of a function that is a number or a choice, and what it takes."""
    parameters = inspect.signature(PUBLIC[name], eval_str=True).parameters
    limits = LIMITS.get(name, {})
    kinds = {
        argument: kind_of(each, limits.get(argument, {})) for argument, each in parameters.items()
    }
    return {argument: kind for argument, kind in kinds.items() if kind}


ARGUMENTS = {name: kinds_of(name) for name in CASES}


def one_leaf(**leaf):
    """The params with another leaf in the place of one."""
    return PARAMS | leaf


TABLE = np.arange(28.0, dtype=np.float32).reshape(4, 7)
TWO, THREE, ONES = np.eye(2), np.eye(3), np.ones(4)
EXAMPLES = {"x": jnp.ones((4, 2)), "y": jnp.ones(4)}
NO_EXAMPLES = {"x": np.ones((0, 2))}
FOUR_AND_TWO = [EXAMPLES, EXAMPLES, jax.tree.map(lambda x: x[:2], EXAMPLES)]
KERNEL = {"kernel": jnp.arange(24.0).reshape(4, 3, 2)}
ROWS_2, ROWS_3 = rows(2), rows(3)


def of_examples(size):
    """The gradients of a batch's examples."""
    return lambda params: jax.tree.map(lambda p: jnp.stack([p] * size), params)


def mean(params, start=0, size=None):
    """A gradient over a part of a batch."""
    del start, size
    return params


class Each(tuple):
    """Several values of an argument, one at a time."""


def value_error(message, **change):
    """What a ValueError says of changed arguments."""
    return change, ValueError, message


def type_error(message, **change):
    """What a TypeError says of changed arguments."""
    return change, TypeError, message


NOT_BOUND = value_error("axis_name 'replica' is not bound here.*jax.pmap", axis_name="replica")
NO_KEY = type_error("key must be an int or a random key", key="0")
NO_PLAIN_INTEGER = type_error("static_args", n_components=jnp.array(2))
FULL_GRADIENT_MISSING = [
    value_error(r"extra argument full_grad_fn.*optperm\.evaluate", grad_fn=mean, **options)
    for options in ({"every": 2}, {"probability": 0.5})
]
# Functions that look for a state, and what they call it.
STATES = {
    "center_params": "AgnState or DilocoState .*optperm.agn or optperm.diloco",
    "export_permutation": "PermuteByCyclesState .*optperm.sgperm",
    "freeze": r"a MaskElementsState \(the state of optperm.mask_elements\)",
    "sample_params": r"IvonState or SwagState \(the state of optperm.ivon or optperm.swag\)",
    "posterior_mean": r"SwagState \(the state of optperm.swag\)",
    "adapted_kernel": "NoiseKernel .*optperm.constant_sgd",
    "permuted_params": "PermuteByCyclesState .*optperm.sgperm",
    "prune": r"a MaskElementsState or SparseState \(the state of optperm.mask_elements\)",
    "reset_masks": r"a MaskElementsState or SparseState \(the state of optperm.mask_elements\)",
    "set_basis": "Subspace .*optperm.dim_reduce, project or twa",
    "take_snapshot": r"SvrgState \(the state of optperm.svrg\)",
    "trajectory": "TrajectoryState .*optperm.record_trajectory",
}
# Trees that must match params; another structure or shape is named, with the tree that it should match.
TREES = {
    "apply_updates": {"updates": "params"},
    "export_permutation": {"initial_params": "the optimizer"},
    "freeze": {"scores": "the mask"},
    "permuted_params": {"params": "the optimizer"},
    "prune": {"params": "the mask", "scores": "the mask"},
    "take_snapshot": {"params": "the optimizer", "full_grad": "the optimizer"},
}
# What else is refused. "f.init" and "f.update" mean those of what f gives, for other params, or with
# these extra arguments.
REFUSED = {
    "Compression": [value_error("needs a fraction, bits or both", fraction=None)],
    "agn.init": [
        value_error(
            "switch_after around agn",
            inner=optperm.switch_after(2, sgd(), optperm.sgperm()),
        )
    ],
    "agn.update": [NOT_BOUND],
    "apply_permutation": [
        value_error(
            r"permutation must hold each index from 0 to 1",
            permutation=Each(map(jnp.array, ([1, 1], [0, 99], [0, -1], [1, 2]))),
        ),
        value_error("permutation has another tree structure", permutation={"w": jnp.arange(2)}),
        value_error(r"permutation is int32\[4\]", permutation=jnp.arange(4)),
        type_error("must hold integers, got float32", permutation=jnp.arange(2.0)),
    ],
    "apply_updates": [
        value_error(
            r"params\['b'\] is float32\[3\], but the optimizer",
            params=one_leaf(b=jnp.ones(3)),
            updates=one_leaf(b=jnp.ones(3)),
        ),
        type_error(r"updates\['b'\] must be an array", updates=one_leaf(b="x")),
    ],
    "swag": [value_error("at least 2", rank=1)],
    "ivon.update": [value_error(r"extra argument draw.*sample_params")],
    "constant_sgd": [
        value_error("num_data must be at least batch_size, got 5", num_data=5, batch_size=10)
    ],
    "diloco.init": [
        value_error("PermuteByCyclesState.* could not be pulled", inner=optperm.sgperm())
    ],
    "diloco.update": [NOT_BOUND],
    "dim_reduce": [NO_PLAIN_INTEGER],
    "project": [NO_PLAIN_INTEGER],
    "twa": [NO_PLAIN_INTEGER],
    "dim_reduce.init": [NOT_BOUND],
    "project.init": [NOT_BOUND],
    "twa.init": [NOT_BOUND],
    "dim_reduce.update": [
        value_error("extra argument value, .*optperm.evaluate", value_fn=loss_fn),
        value_error("extra argument value_fn, .*optperm.evaluate", value=0.0),
    ],
    "dldr": [
        value_error("every must be at most 2147483647", every=2**20, num_snapshots=2**11 + 2),
        type_error("static_args", num_snapshots=jnp.array(2)),
    ],
    "dldr.init": [
        value_error(
            "n_components=3 needs num_snapshots of at least 4, got 3",
            num_snapshots=3,
            subspace_optimizer=optperm.dim_reduce(n_components=3),
        ),
        value_error(
            "n_components=3 needs num_snapshots of at least 3, got 2",
            num_snapshots=2,
            subspace_optimizer=optperm.twa(sgd(), n_components=3),
        ),
        value_error("inner places params", inner=optperm.sgperm()),
        value_error("must hold one of dim_reduce, project or twa, got 0", subspace_optimizer=sgd()),
        value_error(
            "must hold one of dim_reduce, project or twa, got 2",
            subspace_optimizer=optax.chain(
                optperm.project(sgd(), n_components=1), optperm.dim_reduce(n_components=1)
            ),
        ),
    ],
    "dldr.update": [value_error("dim_reduce needs the extra arguments value, .*optperm.evaluate")],
    "draw_samples": [
        value_error("vmap", stacked=True, num_chains=3, params={"b": jnp.zeros(2)}),
        value_error(
            r"the params that step returns\['b'\] is float32\[3, 2\]",
            step=lambda p, s, k: (p | {"b": p["w"]}, s),
        ),
        value_error("the opt_state that step returns has", step=lambda p, s, k: (p, 1.0)),
    ],
    "evaluate": [
        type_error(r"real scalar.* got float32\[2\]", loss_fn=lambda p, b: p["b"]),
        type_error(
            r"real scalar.* got complex64\[\]",
            loss_fn=lambda p, b: jnp.sum(p["b"]).astype(jnp.complex64),
        ),
        type_error(r"real scalar.* got int32\[\]", loss_fn=lambda p, b: jnp.int32(1)),
        type_error("has_aux=True, got a tuple", loss_fn=lambda p, b: (jnp.sum(p["b"]), {})),
        value_error("axis_name 'data' is not bound here", axis_name="data"),
    ],
    "export_permutation": [
        value_error(
            r"initial_params\['b'\] is not what the optimizer",
            initial_params=one_leaf(b=PARAMS["b"] + 1),
        ),
        value_error(
            r"initial_params\['b'\] is bfloat16",
            initial_params=one_leaf(b=PARAMS["b"].astype("bfloat16")),
        ),
        value_error(r"initial_params\['w'\].*output_axes", output_axes=0),
    ],
    "freeze": [
        value_error(r"needs a key: pass key=jax.random.key\(0\)", criterion="random"),
        NO_KEY,
        value_error(
            r"needs scores, from optperm.variance.full_gradient",
            criterion=Each(["gradient", "preconditioned_gradient"]),
            scores=None,
        ),
        type_error("call the schedule first", fraction=optax.constant_schedule(0.5)),
        type_error(
            r"scores\['b'\] has dtype complex64", scores=one_leaf(b=jnp.ones(2, jnp.complex64))
        ),
    ],
    "full_gradient": [
        *(
            value_error("no examples in batches", batches=batches, weights=weights)
            for batches, weights in (
                ([], None),
                (iter(()), ()),
                ([NO_EXAMPLES], None),
                ([NO_EXAMPLES], [np.ones(0)]),
            )
        ),
        *(
            value_error(message, batches=FOUR_AND_TWO, weights=weights)
            for weights, message in (
                ([ONES, ONES], "argument 2 is shorter than argument 1"),
                ([ONES, ONES, ONES[:2], ONES], "argument 2 is longer than argument 1"),
                (
                    [ONES, ONES[:3], ONES[:2]],
                    r"weights\[1\] must be of shape \(4,\), got shape \(3,\)",
                ),
                ([ONES, ONES[:, None], ONES[:2]], r"weights\[1\] must be of shape .* \(4, 1\)"),
                ([ONES, -ONES, ONES[:2]], "finite and not negative"),
                ([ONES, np.inf * ONES, ONES[:2]], "finite and not negative"),
                ([0.0 * ONES, 0.0 * ONES, 0.0 * ONES[:2]], "not all zero, got the sum 0"),
            )
        ),
        value_error(
            "must agree in their leading axis",
            batches=Each([[EXAMPLES | {"y": jnp.ones(3)}], [{"scale": np.float32(1.0)}]]),
        ),
        value_error("axis_name 'data' is not bound here", axis_name="data"),
        type_error(r"batches\[0\] must be an array", batches=Each([EXAMPLES, "batches"])),
        type_error(
            "loss_fn must return a real scalar.* has_aux=True",
            loss_fn=lambda p, b: (loss_fn(p, b), 0),
        ),
        type_error(r"params\['b'\] has dtype int32", params=one_leaf(b=jnp.arange(2))),
        type_error(r"batches\[1\]\['x'\] must be an array", batches=[{"x": BATCH}, {"x": "ab"}]),
    ],
    "gaussian_kl": [
        value_error("^covariance.*must be positive definite", covariance=np.diag([1.0, -1.0])),
        value_error("^other.*must be positive definite", other_covariance=np.diag([1.0, -1.0])),
        value_error(r"mean must be real and of shape \(2,\)", mean=np.zeros(3)),
        value_error(r"other_covariance .*\(2, 2\), got float32\[3, 3\]", other_covariance=THREE),
    ],
    "laperm.init": [
        value_error("inner places params", inner=optperm.sgperm()),
        value_error("holds some", inner=optax.chain(sgd(), optperm.mask_elements())),
        value_error("keeps zeros", inner=optperm.prune_gradually(sgd(), 0.5, 1.0)),
        value_error(r"output_axes \(3,\) .*kernel", output_axes=3, params=KERNEL),
    ],
    "pca_basis": [
        value_error(
            "n_components=4 needs at least 5 snapshots.*got 4", snapshots=TABLE, n_components=4
        ),
        value_error(
            "at least 4 snapshots.*got 3", snapshots=TABLE, n_components=3, num_snapshots=3
        ),
        value_error(
            r"snapshots must be arrays that agree.* got shapes \[\(4, 7\), \(3,\)\]",
            snapshots={"a": TABLE, "b": np.zeros(3, np.float32)},
        ),
        value_error(r"snapshots must be arrays that agree.* got shapes \[\]", snapshots={}),
        type_error("dtype int32", snapshots=np.zeros((4, 7), np.int32)),
    ],
    "posterior_predictive": [
        type_error("samples must be Samples or an Ensemble, got dict", samples=DRAWS),
        type_error(
            "must return one array of a real floating dtype, got int32",
            predict_fn=lambda params, inputs: jnp.ones(2, jnp.int32),
        ),
    ],
    "mars": [
        value_error(r"b1 must be in \[0, 1[\])], got", b1=Each([1.0, -0.1, float("nan")])),
        type_error("b1 must be a number", b1="0.9"),
    ],
    "mars.update": [value_error(r"extra argument grad_fn.*optperm\.evaluate", exact=True)],
    "prune": [
        value_error(r"needs a key: pass key=jax.random.key\(0\)", criterion="random"),
        NO_KEY,
        type_error("call the schedule first", sparsity=optax.constant_schedule(0.5)),
    ],
    "record_trajectory": [
        type_error("static_args", num_snapshots=jnp.array(3)),
        type_error("dtype must be", dtype=jnp.int32),
    ],
    "recursive_gradient": [
        value_error("not both", every=2, probability=0.5),
        value_error(r"must be in \[0, 1\], got 1.5", a=1.5),
    ],
    "recursive_gradient.update": [
        value_error(r"extra argument grad_fn.*optperm\.evaluate", full_grad_fn=mean),
        *FULL_GRADIENT_MISSING,
    ],
    "mandt_sgd.update": [
        value_error(r"argument per_example_grad_fn.*optperm.evaluate\(loss_fn, params, batch\)"),
        value_error("example_grad_fn.*example=one_example", estimator="single_example"),
        value_error("argument grad_fn.*optperm.evaluate", estimator="two_batches"),
        value_error(
            "batch_size is 8, but .* of 4 examples",
            batch_size=8,
            per_example_grad_fn=of_examples(4),
        ),
        value_error("at least 2 examples, got 1", batch_size=1, per_example_grad_fn=of_examples(1)),
        value_error(
            "at least 2 examples each", batch_size=1, estimator="two_batches", grad_fn=mean
        ),
        value_error(
            r"per_example_grad_fn\(params\)",
            per_example_grad_fn=lambda p: {"w": jnp.ones((2, 3, 1)), "b": jnp.ones((2, 2))},
        ),
    ],
    "set_basis": [
        value_error("basis has only zero rows", basis=jax.tree.map(jnp.zeros_like, ROWS_2)),
        value_error(
            "inside optax.MultiSteps would.*use optperm.evaluate",
            opt_state=state(optax.MultiSteps(optperm.dim_reduce(n_components=2), 2)),
        ),
        value_error(r"basis\['b'\] is float32\[3, 2\].*\[2, 2\]", basis=ROWS_3),
        value_error("basis has another tree structure", basis={"w": ROWS_2["w"]}),
        value_error(
            "orthonormal rows, but .* is nan", basis=jax.tree.map(lambda r: r * np.nan, ROWS_2)
        ),
        type_error(
            r"basis\['w'\] has dtype int32", basis=ROWS_2 | {"w": np.zeros((2, 3, 2), np.int32)}
        ),
    ],
    "sgperm": [value_error("not both", aggressiveness=0.1, num_steps=5)],
    "sgperm.init": [
        value_error(
            "output_axes .*kernel",
            output_axes=Each([3, -4, (0, 3), (0, 0), (0, -3)]),
            params=KERNEL,
        )
    ],
    "stationary_covariance": [
        value_error(r"hessian must be a square matrix.*jnp\.diag", hessian=np.ones(2)),
        value_error("hessian must be .*symmetric", hessian=np.triu(np.ones((2, 2)))),
        value_error("hessian must be finite", hessian=np.full((2, 2), np.inf)),
        value_error(r"noise must be real and of shape \(2, 2\)", noise=THREE),
        value_error(r"preconditioner .*got float32\[3\]", preconditioner=np.ones(3)),
        value_error("No stationary distribution", preconditioner=np.nan),
        value_error("momentum must be in", momentum=1.0),
        value_error("momentum must be in", momentum=-0.1),
        value_error("noise must be real", noise=TWO * 1j),
    ],
    "svrg": [value_error("not both", every=2, probability=0.5)],
    "svrg.update": [
        value_error(r"extra argument grad_fn.*optperm\.evaluate"),
        *FULL_GRADIENT_MISSING,
    ],
    "switch_after.update": [
        value_error(
            r"then.init\(params\).*bfloat16\[2\].*float32\[2\]",
            first=optax.identity(),
            then=optax.sgd(0.1, 0.9),
            params=one_leaf(b=PARAMS["b"].astype("bfloat16")),
        )
    ],
    "take_snapshot": [
        value_error(
            r"params\['b'\] is bfloat16\[2\]", params=one_leaf(b=jnp.ones(2, jnp.bfloat16))
        ),
        value_error(
            "params has another tree structure than the optimizer",
            opt_state=state(optax.masked(optperm.svrg(), {"w": True, "b": False})),
            params={"v": jnp.ones(3)},
        ),
    ],
}
# What is at a limit, and works.
ALLOWED = {
    "dldr": {"every": 2**20, "num_snapshots": 2**11},
}


def call(name, change):
    """Calls a function, or `init` or `update` of what it gives, with changed arguments."""
    function, _, method = name.partition(".")
    given = CASES[function] | change
    if not method:
        return PUBLIC[function](**given)
    own = {argument: given.pop(argument) for argument in PARAMETERS[function] if argument in given}
    tx = PUBLIC[function](**own)
    params = given.pop("params", PARAMS)
    if method == "init":
        return tx.init(params)
    return tx.update(GRADS, tx.init(PARAMS), params, **given)


# What has to be a transformation, in each function that wraps one.
WRAPPERS = {
    **dict.fromkeys(("project", "twa", "dim_reduce", "with_loss", "laperm", "rigl"), ("inner",)),
    **dict.fromkeys(("agn", "diloco"), ("inner", "outer")),
    "dldr": ("inner", "subspace_optimizer"),
    "switch_after": ("first", "then"),
    "quantize_state": ("inner",),
}
for function, arguments in WRAPPERS.items():
    message = "must be an optax.GradientTransformation, got 10"
    REFUSED.setdefault(function, []).extend(
        type_error(f"{argument} {message}", **{argument: 10}) for argument in arguments
    )
REFUSED["diloco"] += [type_error("compress must be an optperm.distributed.Compression", compress=4)]


def refusals():
    """Each function with changed arguments, the error that they raise and its message."""
    for function, arguments in ARGUMENTS.items():
        for argument, kind in arguments.items():
            for values, error, message in kind.refused:
                for value in values:
                    yield function, {argument: value}, error, rf"\b{argument} {message}"
    for function, wanted in STATES.items():
        here = CASES[function]["opt_state"]
        for found, opt_state in (("none", state(optax.adam(0.1))), ("2", (here, here))):
            yield function, {"opt_state": opt_state}, ValueError, f"{wanted}.* found {found}"
    for function, trees in TREES.items():
        for tree, source in trees.items():
            for wrong, message in (
                ({"w": PARAMS["w"]}, rf"{tree} has another tree structure than {source}"),
                (one_leaf(b=jnp.ones(3)), rf"{tree}\['b'\] is float32\[3\], but {source}.* has "),
            ):
                yield function, {tree: wrong}, ValueError, message
    for function, table in REFUSED.items():
        for change, error, message in table:
            options = [each if isinstance(each, Each) else (each,) for each in change.values()]
            for values in itertools.product(*options):
                yield function, dict(zip(change, values, strict=True)), error, message
