"""Every public function: arguments it works with, what kind each is of, and what is refused.

The tables are data; `test_fuzz.py` reads them. What an argument may be is told by its annotation and by
its limits. A new function joins `FUNCTIONS`, a new transformation has its entry in `transformations.py`;
what either refuses because of its other arguments joins `REFUSED`.
"""

import collections.abc
import dataclasses
import inspect
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import sparse
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
        "opt_state": optperm.swag(1).update(PARAMS, state(optperm.swag(1)), PARAMS)[1]
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
    "traffic_report": {"tx": optperm.diloco(sgd(), every=2, axis_name="replica"), "params": PARAMS},
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
        )
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
PARAMETERS = {name: inspect.signature(PUBLIC[name], eval_str=True).parameters for name in CASES}


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
    return Kind(refused, (2**32 - 1, jax.random.key_data(jax.random.key(1))))


def choice(*names):
    """One of several strings."""
    message = f"must be one of {', '.join(map(repr, names))}, got"
    return Kind(((["none", 3], ValueError, message),))


TRANSFORMATION = Kind((([10], TypeError, "must be an optax.GradientTransformation, got 10"),))
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
    is_optional, kind = type(None) in options, None
    if limits is None or any(each in options for each in _NO_NUMBERS):
        pass
    elif all(isinstance(option, str) for option in options):
        kind = choice(*options)
    elif optax.GradientTransformation in options and parameter.name != "tx":
        kind = TRANSFORMATION
    elif int in options and parameter.name == "key":
        kind = random_key()
    elif int in options:
        minimum = limits.get("minimum", 0 if parameter.default == 0 else 1)
        kind = count(minimum=minimum, is_optional=is_optional)
    elif float in options:
        kind = number(**limits, is_optional=is_optional)
    return kind


def kinds_of(name):
    """Each argument of a function that is a number or a choice, and what it takes."""
    limits = LIMITS.get(name, {})
    kinds = {
        argument: kind_of(each, limits.get(argument, {}))
        for argument, each in PARAMETERS[name].items()
    }
    return {argument: kind for argument, kind in kinds.items() if kind}


ARGUMENTS = {name: kinds_of(name) for name in CASES}


def with_leaf(**leaf):
    """The params with another leaf in the place of one."""
    return PARAMS | leaf


def cast(dtype):
    """The params with a leaf of another dtype."""
    return PARAMS | {"b": PARAMS["b"].astype(dtype)}


def of_examples(size):
    """The gradients of a batch's examples."""
    return lambda params: jax.tree.map(lambda p: jnp.stack([p] * size), params)


def mean(params, start=0, size=None):
    """A gradient over a part of a batch."""
    del start, size
    return params


def squares(w, x):
    """A loss that is a sum over examples."""
    return jnp.sum((x @ w - 3) ** 2)


Blocks, NOfM, Units = optperm.sparsity.Blocks, optperm.sparsity.NOfM, optperm.sparsity.Units
Compression = optperm.distributed.Compression
PLAN = optperm.distributed.Every(4, 2)
TABLE = np.arange(28.0, dtype=np.float32).reshape(4, 7)
EYE, THREE, ONES, SQUARE = np.eye(2), np.eye(3), np.ones(4), np.ones((2, 2), bool)
EXAMPLES = {"x": jnp.ones((4, 2)), "y": jnp.ones(4)}
NO_EXAMPLES = {"x": np.ones((0, 2))}
FOUR_AND_TWO = [EXAMPLES, EXAMPLES, jax.tree.map(lambda x: x[:2], EXAMPLES)]
KERNEL = {"kernel": jnp.arange(24.0).reshape(4, 3, 2)}
ROWS_2, ROWS_3 = rows(2), rows(3)
DILOCO, DIM_REDUCE = FUNCTIONS["traffic_report"]["tx"], optperm.dim_reduce(n_components=2)
PRUNING, TWA = optperm.prune_gradually(sgd(), 0.5, 1.0), optperm.twa(sgd(), n_components=1)
FOUR_STEPS = optax.MultiSteps(sgd(), 4).gradient_transformation()
# A fraction of a leaf of rank 1, which is not included.
NOT_INCLUDED = {"w": 0.5, "b": 0.5}
BAD_WEIGHTS = [dict(weight=wrong) for wrong in (-1.0, float("nan"), INF, jnp.ones(2), True, 1j)]
BAD_FLAGS = [dict(commit=wrong) for wrong in (1, "yes", jnp.zeros(2, bool), jnp.int32(1))]
NO_FULL_GRADIENT = [dict(every=2, grad_fn=mean), dict(probability=0.5, grad_fn=mean)]
# Trees that must match params; another structure or shape is named, with the tree that it should match.
TREES = {
    "apply_updates": {"updates": "params"},
    "export_permutation": {"initial_params": "the optimizer"},
    "freeze": {"scores": "the mask"},
    "permuted_params": {"params": "the optimizer"},
    "prune": {"params": "the mask", "scores": "the mask"},
    "take_snapshot": {"params": "the optimizer", "full_grad": "the optimizer"},
}
# What else a function refuses: arguments of which the message has to name one, or has to have the words
# `says`. "f.init" and "f.update" mean those of what f gives, for other params, or with these extra
# arguments, of which one that is missing is named with `optperm.evaluate`.
REFUSED = {
    "Compression": [dict(fraction=None)],
    "agn.init": [
        dict(inner=optperm.switch_after(2, sgd(), optperm.sgperm()), says="switch_after"),
        dict(inner=FOUR_STEPS),
    ],
    "agn.update": [dict(axis_name="r"), *BAD_WEIGHTS, *BAD_FLAGS],
    "apply_permutation": [
        dict(permutation=permutation)
        for permutation in (
            {"w": jnp.arange(2)},
            *map(jnp.array, ([1, 1], [0, 99], [0, -1], [1, 2], [0, 1, 2, 3], [0.0, 1.0])),
        )
    ],
    "apply_updates": [
        dict.fromkeys(("params", "updates"), with_leaf(b=jnp.ones(3))),
        dict(updates=with_leaf(b="x")),
    ],
    "constant_sgd": [dict(num_data=5, batch_size=10)],
    "diloco": [
        dict(center_dtype="int32"),
        dict(center_dtype="complex64"),
        dict(compress=4),
        dict(compress=Compression(0.5), combine="pairs"),
        dict(axis_name=("a", "b"), combine="pairs", says="axis"),
    ],
    "diloco.init": [
        dict(outer=FOUR_STEPS, says="MultiSteps"),
        dict(fragment_of={"w": 0}, every=PLAN, says="'b'"),
        dict(inner=optperm.sgperm(), every=4, says="PermuteByCyclesState"),
        dict(inner=optperm.sgperm(), every=PLAN, says="PermuteByCyclesState|fragment"),
        dict(fragment_of={"w": 0, "b": 1}, every=4),
        *(
            dict(fragment_of=fragment_of, every=PLAN)
            for fragment_of in (
                *({"w": w, "b": b} for w, b in (([0, 1], 0), (2, 0), (0, -1), (1, 1))),
                lambda path, leaf: None,
                lambda path, leaf: 0.5,
            )
        ),
    ],
    "diloco.update": [dict(axis_name="r"), *BAD_WEIGHTS, *BAD_FLAGS],
    "dim_reduce": [dict(n_components=jnp.array(2))],
    "dim_reduce.init": [dict(axis_name="r")],
    "dim_reduce.update": [dict(value_fn=loss_fn), dict(value=0.0)],
    "dldr": [dict(every=2**20, num_snapshots=2**11 + 2), dict(num_snapshots=jnp.array(2))],
    "dldr.init": [
        dict(num_snapshots=3, subspace_optimizer=optperm.dim_reduce(n_components=3)),
        dict(num_snapshots=2, subspace_optimizer=optperm.twa(sgd(), n_components=3)),
        dict(inner=optperm.sgperm()),
        dict(subspace_optimizer=sgd(), says="got 0"),
        dict(subspace_optimizer=optax.chain(TWA, TWA), says="got 2"),
    ],
    "dldr.update": [{}],
    "draw_samples": [
        dict(params={"b": jnp.zeros(2)}, num_chains=3, stacked=True, says="vmap"),
        dict(step=lambda p, s, k: (p | {"b": p["w"]}, s)),
        dict(step=lambda p, s, k: (p, 1.0)),
    ],
    "evaluate": [
        dict(axis_name="data"),
        *(
            dict(loss_fn=lambda p, b, x=x: x)
            for x in (BATCH, 1j, jnp.int32(1), (jnp.zeros([]), {}))
        ),
    ],
    "export_permutation": [
        dict(initial_params=GRADS),
        dict(initial_params=cast("bfloat16")),
        dict(output_axes=0),
    ],
    "freeze": [
        dict(key="0"),
        dict(criterion="random", says="key="),
        dict(criterion="gradient", scores=None),
        dict(criterion="preconditioned_gradient", scores=None),
        dict(fraction=optax.constant_schedule(0.5)),
        dict(fraction=NOT_INCLUDED),
        dict(scores=cast("complex64")),
    ],
    "full_gradient": [
        dict(axis_name="data"),
        dict(params=cast(int)),
        dict(loss_fn=lambda p, b: (loss_fn(p, b), 0)),
        *(
            dict(batches=batches, weights=weights)
            for batches, weights in (
                ([], None),
                (iter(()), ()),
                ([NO_EXAMPLES], None),
                ([NO_EXAMPLES], [np.ones(0)]),
                ([EXAMPLES | {"y": jnp.ones(3)}], None),
                ([{"scale": np.float32(1.0)}], None),
                ([{"x": BATCH}, {"x": "ab"}], None),
                (EXAMPLES, None),
                ("batches", None),
            )
        ),
        *(
            dict(batches=FOUR_AND_TWO, weights=weights, says="weights|shorter|longer")
            for weights in (
                [ONES, ONES],
                [ONES, ONES, ONES[:2], ONES],
                [ONES, ONES[:3], ONES[:2]],
                [ONES, ONES[:, None], ONES[:2]],
                [ONES, -ONES, ONES[:2]],
                [ONES, np.inf * ONES, ONES[:2]],
                [0.0 * ONES, 0.0 * ONES, 0.0 * ONES[:2]],
            )
        ),
    ],
    "gaussian_kl": [
        dict(covariance=np.diag([1.0, -1.0])),
        dict(other_covariance=np.diag([1.0, -1.0])),
        dict(mean=np.zeros(3)),
        dict(other_covariance=THREE),
    ],
    "ivon.update": [dict(says="draw")],
    "katyusha.update": [dict(grad_fn=mean)],
    "keep_top": [dict(sparsity=NOT_INCLUDED)],
    "laperm.init": [
        dict(inner=optperm.sgperm()),
        dict(inner=optax.chain(sgd(), optperm.mask_elements())),
        dict(inner=PRUNING),
        dict(output_axes=3, params=KERNEL),
    ],
    "mandt_sgd.update": [
        {},
        dict(estimator="single_example"),
        dict(estimator="two_batches"),
        dict(estimator="two_batches", batch_size=1, grad_fn=mean, says="2 examples"),
        dict(batch_size=8, per_example_grad_fn=of_examples(4)),
        dict(batch_size=1, per_example_grad_fn=of_examples(1), says="2 examples, got 1"),
        dict(per_example_grad_fn=lambda p: {"w": jnp.ones((2, 3, 1)), "b": jnp.ones((2, 2))}),
    ],
    "mars": [dict(b1=wrong) for wrong in (1.0, -0.1, float("nan"), "0.9")],
    "mars.update": [dict(exact=True)],
    "mask_elements.init": [
        dict(mask=mask) for mask in ({"w": SQUARE, "b": True}, {"w": 1.0, "b": True}, {"w": True})
    ],
    "pca_basis": [
        dict(snapshots=TABLE, n_components=4),
        dict(snapshots=TABLE, n_components=3, num_snapshots=3),
        dict(snapshots={"a": TABLE, "b": np.zeros(3, np.float32)}),
        dict(snapshots={}),
        dict(snapshots=TABLE.astype(int)),
    ],
    "posterior_predictive": [
        dict(samples=DRAWS),
        dict(predict_fn=lambda params, inputs: jnp.ones(2, jnp.int32)),
    ],
    "project": [dict(n_components=jnp.array(2))],
    "project.init": [dict(axis_name="r")],
    "proximal": [dict(group=0.1, lower=0.0), dict(lower=1.0, upper=0.0)],
    "proximal.update": [
        dict(group=0.1, group_axes=axes, says="axes|[Dd]uplicate") for axes in ((2,), (0, -2))
    ],
    "prune": [
        dict(key="0"),
        dict(criterion="random", says="key="),
        dict(sparsity=optax.constant_schedule(0.5)),
        dict(sparsity=1.5),
        dict(sparsity={"w": 0.5}),
        dict(sparsity={"w": 0.5, "b": np.ones(2)}, says=r"\['b'\] must be a single number"),
        dict(sparsity=NOT_INCLUDED),
        dict(sparsity=0.5, structure=NOfM(2, 3)),
        dict(sparsity=None, structure=NOfM(2, 4), says=r"NOfM\(.* does not fit \['w'\]"),
        dict(structure=Blocks(2, 2), include=True, says=r"Blocks\(.* does not fit \['b'\]"),
        dict(structure=Units),
        dict(scope="unit", structure=Units()),
        dict(scope="global", sparsity={"w": 0.5, "b": 0.0}),
    ],
    "prune_gradually": [dict(structure=NOfM(2, 4))],
    "prune_gradually.init": [
        dict(sparsity=1.5),
        dict(sparsity={"w": 0.5}),
        dict(sparsity=NOT_INCLUDED),
        dict(scope="global", sparsity={"w": 0.5, "b": 0.0}),
        dict(structure=Blocks(2, 2), include=True, says=r"Blocks\(.* does not fit \['b'\]"),
        dict(params=jnp.ones(3), says="include="),
    ],
    "record_trajectory": [dict(num_snapshots=jnp.array(3)), dict(dtype=jnp.int32)],
    "recursive_gradient": [dict(every=2, probability=0.5)],
    "recursive_gradient.update": [{}, *NO_FULL_GRADIENT],
    "remove_units": [
        dict(params={"a": EYE, "b": THREE}, says="lengths"),
        *(
            dict(groups=groups, says=says)
            for groups, says in (
                ({"u": [("d", -1)]}, "'d'"),
                ({"u": [("a", -3)]}, "-3.*'a'"),
                ({"u": [("a", -1, "of")]}, "'in', 'out'"),
                ({"u": [("a", -1), ("a", 1)]}, "before"),
                ({"u": [("a", -1), ("b", 0)], "v": [("a", -1), ("b", 0)]}, "before"),
                ({"u": [("a", -1)]}, "incoming"),
            )
        ),
    ],
    "rigl": [dict(end=100)],
    "rigl.init": [
        dict(sparsity=1.5),
        dict(sparsity=[0.5, 0.5]),
        dict(sparsity=NOT_INCLUDED),
        dict(params=jnp.ones(3), says="include="),
    ],
    "set_basis": [
        dict(basis=jax.tree.map(jnp.zeros_like, ROWS_2)),
        dict(basis=ROWS_3),
        dict(basis={"w": ROWS_2["w"]}),
        dict(basis=jax.tree.map(lambda r: r * np.nan, ROWS_2)),
        dict(basis=jax.tree.map(lambda r: r.astype(int), ROWS_2)),
        dict(opt_state=state(optax.MultiSteps(DIM_REDUCE, 2)), says="MultiSteps"),
        dict(
            opt_state=state(optax.MultiSteps(optax.chain(sgd(), DIM_REDUCE), 2)), says="MultiSteps"
        ),
    ],
    "sgperm": [
        dict(aggressiveness=0.1, num_steps=5),
        dict(aggressiveness=optax.constant_schedule(0.1), num_steps=5),
    ],
    "sgperm.init": [
        dict(output_axes=axes, params=KERNEL) for axes in (3, -4, (0, 3), (0, 0), (0, -3))
    ],
    "stationary_covariance": [
        *(dict(hessian=h) for h in (np.ones(2), np.triu(np.ones((2, 2))), np.full((2, 2), np.inf))),
        dict(noise=THREE),
        dict(noise=EYE * 1j),
        dict(preconditioner=np.ones(3)),
        dict(preconditioner=np.nan, says="stationary"),
        dict(momentum=1.0),
        dict(momentum=-0.1),
    ],
    "svrg": [dict(every=2, probability=0.5)],
    "svrg.update": [{}, *NO_FULL_GRADIENT],
    "svrg_learning_rate": [
        dict(batch_size=3),
        dict(data={"x": BATCH, "y": 1.0}),
        dict(loss_fn=lambda p, _: p["b"].sum(), says="curvature"),
        dict(loss_fn=lambda p, _: p["b"]),
        # Orthogonal rows have the same curvature in a sum as alone.
        *(
            dict(loss_fn=squares, params=jnp.ones(2), data=data, batch_size=size, says=says)
            for data, size, says in ((TABLE[:, 2:4], 1, "mean"), (EYE, 2, "mean"))
        ),
    ],
    "swag": [dict(rank=1)],
    "switch_after.update": [
        dict(first=optax.identity(), then=optax.sgd(0.1, 0.9), params=cast("bfloat16"))
    ],
    "take_snapshot": [
        dict(params=cast("bfloat16")),
        dict(
            opt_state=state(optax.masked(optperm.svrg(), {"w": True, "b": False})),
            params={"v": jnp.ones(3)},
        ),
    ],
    "to_sparse": [
        dict(params={"w": sparse.BCOO.fromdense(jnp.eye(2))}),
        dict(params=jnp.eye(2, dtype="bfloat16"), format="scipy", says="float64"),
    ],
    "traffic_report": [
        dict(tx=None),
        dict(tx=sgd(), says="got 0"),
        dict(tx=optax.chain(DILOCO, DILOCO), says="got 2"),
        dict(tx=optperm.diloco(sgd(), every=2), says="axis_name"),
        dict(tx=optperm.diloco(sgd(), every=lambda c: 5 + c, axis_name="r"), says="every="),
    ],
    "twa": [dict(n_components=jnp.array(2))],
    "twa.init": [dict(axis_name="r")],
}
# What is at a limit, and works.
ALLOWED = {"dldr": {"every": 2**20, "num_snapshots": 2**11}}


def call(name, change):
    """Calls a function, or `init` or `update` of what it gives, with changed arguments."""
    function, _, method = name.partition(".")
    given = CASES[function] | change
    given.pop("says", None)
    if not method:
        return PUBLIC[function](**given)
    own = {argument: given.pop(argument) for argument in PARAMETERS[function] if argument in given}
    tx = PUBLIC[function](**own)
    params = given.pop("params", PARAMS)
    if method == "init":
        return tx.init(params)
    return tx.update(GRADS, tx.init(PARAMS), params, **given)


# Functions that convert or hand on whatever state they are given.
OF_ANY_STATE = {"apply_updates", "draw_samples", "quantize", "dequantize"}


def refusals():
    """Each function with changed arguments, the errors that they may raise and their message."""
    for function, arguments in ARGUMENTS.items():
        for argument, kind in arguments.items():
            for values, error, message in kind.refused:
                for value in values:
                    yield function, {argument: value}, error, rf"\b{argument} {message}"
    for function, given in CASES.items():
        if function not in OF_ANY_STATE and (here := given.get("opt_state")):
            for found, opt_state in (("none", state(optax.adam(0.1))), ("2", (here, here))):
                message = rf"(State|Subspace|Kernel)\b.*optperm\.\w+.* found {found}"
                yield function, {"opt_state": opt_state}, ValueError, message
    for function, trees in TREES.items():
        for tree, source in trees.items():
            for wrong, message in (
                ({"w": PARAMS["w"]}, f"{tree} has a different tree structure from {source}"),
                (with_leaf(b=jnp.ones(3)), rf"{tree}\['b'\] is float32\[3\], but {source}.* has "),
            ):
                yield function, {tree: wrong}, ValueError, message
    for function, changes in REFUSED.items():
        for change in changes:
            named = "|".join([*change, *["optperm.evaluate"] * function.endswith(".update")])
            says = change.get("says", rf"\b({named})\b")
            yield function, change, (ValueError, TypeError, LookupError), says
