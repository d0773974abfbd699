"""Every public function: arguments it works with, what kind each is of, and what is refused.

The tables are data; `test_fuzz.py` reads them. What an argument may be is told by its annotation and by
its limits. A new function joins `FUNCTIONS`, a new transformation has its entry in `transformations.py`;
what either refuses because of its other arguments joins `REFUSED`.
"""

import collections.abc
import inspect
import typing

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import optax
from jax.experimental import sparse
from optax.contrib import GaLoreDimensionNumbers
from support import PUBLIC
from transformations import TRANSFORMATIONS, options_of

import optperm

INF = float("inf")
KEY, EYE = jax.random.key(0), np.eye(2)
# Each operation on arrays of JAX would be a program for each process that collects the tests.
VALUES = {
    "w": np.float32([[0.1, 0.5], [0.2, -0.3], [0.7, 0.4]]),
    "b": np.float32([0.3, -0.2]),
}
PARAMS, GRADS = jax.device_put((VALUES, jax.tree.map(lambda p: np.float32(0.5 * p + 0.1), VALUES)))
BATCH = jax.device_put(np.float32([1.0, 2.0]))
SNAPSHOTS = jax.device_put(
    jax.tree.map(lambda p: np.float32([i * p + i * i for i in range(4)]), VALUES)
)


def loss_fn(params, batch):
    """Return a loss of any params and any batch."""
    del batch
    parts = [jnp.sum(jnp.real(p).astype(jnp.float32) ** 2) for p in jax.tree.leaves(params)]
    return sum(parts, start=jnp.float32(0.0))


def sgd():
    return optax.sgd(0.1)


def rows(k):
    """Return orthonormal rows over the params."""
    q = np.linalg.qr(np.random.default_rng(0).normal(size=(8, k)))[0].T.astype(np.float32)
    return {"b": q[:, :2], "w": q[:, 2:].reshape(k, 3, 2)}


def draws(number):
    """Return draws of two chains that all equal the params."""
    stacked = jax.tree.map(lambda p: np.tile(p, (2, number, *[1] * p.ndim)), PARAMS)
    return optperm.bayes.Samples(stacked, PARAMS, (), jnp.int32(4), jnp.int32(1))


def state(tx):
    return jax.jit(tx.init)(PARAMS)


SWAG = optperm.swag(1)
MADE = {
    "adam": optax.adam(0.1),
    "adam in 8 bits": optperm.quantize_state(optax.adam(0.1), min_size=1),
    "agn": optperm.agn(sgd()),
    "agn in 4 bits": optperm.agn(sgd(), compress=optperm.distributed.Compression(bits=4)),
    "agn of sgperm": optperm.agn(optperm.sgperm()),
    "dim_reduce": optperm.dim_reduce(n_components=2),
    "ivon": optperm.ivon(0.1, 10.0),
    "laperm": optperm.laperm(sgd(), 2),
    "mask_elements": optperm.mask_elements(),
    "sgperm": optperm.sgperm(),
    "svrg": optperm.svrg(),
    "trajectory": optperm.record_trajectory(1, 2),
}


@jax.jit
def make_states(params):
    """Return a state of each, and one of SWAG after a step, in one program."""
    states = {name: tx.init(params) for name, tx in MADE.items()}
    return states | {"swag": SWAG.update(params, SWAG.init(params), params)[1]}


STATES = make_states(PARAMS)


ON_MESH = jax.device_put(
    jnp.zeros(1),
    jax.NamedSharding(
        jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,)), jax.P("d")
    ),
)
NARROW = jax.device_put(jax.tree.map(lambda p: p.astype(jnp.bfloat16), VALUES))
WIDENED = jax.jit(optperm.widen_params(sgd()).init)(NARROW)
CENTER = jax.jit(lambda params: optperm.distributed.init_center(params, sgd()))(PARAMS)
MESSAGE, _ = jax.jit(optperm.distributed.contribution)(PARAMS, STATES["agn"])
# Valid arguments for each public function. Each test replaces one argument by an invalid value.
FUNCTIONS = {
    "apply_permutation": {"initial_params": BATCH, "permutation": np.array([1, 0])},
    "apply_updates": {"params": PARAMS, "updates": GRADS, "opt_state": STATES["sgperm"]},
    "sample": {"loss_fn": loss_fn, "data": BATCH, "params": PARAMS, "key": KEY}
    | {"sampler": lambda num_data, batch_size: optperm.sgld(1e-4, num_data)}
    | {"batch_size": 2, "num_chains": 1, "num_draws": 4, "thinning": 1, "burn_in": 4},
    "sample_params": {"opt_state": STATES["ivon"], "params": PARAMS, "key": KEY},
    "posterior_mean": {"opt_state": STATES["swag"]},
    "center_params": {"opt_state": STATES["agn"]},
    "Compression": {"fraction": 0.5},
    "contribution": {"params": PARAMS, "opt_state": STATES["agn"]},
    "init_center": {"params": PARAMS, "outer": sgd()},
    "merge": {"center": CENTER, "contributions": [MESSAGE], "outer": sgd()},
    "pull": {"params": PARAMS, "opt_state": STATES["agn"], "center": CENTER},
    "draw_samples": {"step": lambda params, opt_state, key: (params, opt_state)}
    | {"params": PARAMS, "opt_state": (), "key": KEY, "num_chains": 2, "num_draws": 2},
    "erk_sparsity": {"params": PARAMS, "sparsity": 0.5},
    "evaluate": {"loss_fn": loss_fn, "params": PARAMS, "batch": BATCH},
    "export_permutation": {"initial_params": PARAMS, "opt_state": STATES["sgperm"]},
    "falling": {"init_value": 0.1},
    "freeze": {"opt_state": STATES["mask_elements"], "fraction": 0.5, "scores": GRADS},
    "full_gradient": {"loss_fn": loss_fn, "params": PARAMS, "batches": [BATCH, BATCH]},
    "gaussian_kl": {"mean": np.zeros(2), "covariance": EYE}
    | {"other_mean": np.ones(2), "other_covariance": EYE},
    "keep_top": {"params": PARAMS, "sparsity": 0.5},
    "traffic_report": {
        "tx": optperm.diloco(sgd(), every=2, axis_name="replica"),
        "params": PARAMS,
        "axis_name": "replica",
        "every": 2,
    },
    "state_report": {"tx": optperm.apollo(rank=1), "params": PARAMS},
    "normal_prior": {"params": PARAMS, "precision": 1.0, "num_data": 10},
    "learn_kernel": {"loss_fn": loss_fn, "data": BATCH, "params": PARAMS, "key": KEY}
    | {"steps": 32},
    "pca_basis": {"snapshots": SNAPSHOTS, "n_components": 1},
    "permuted_params": {"opt_state": STATES["laperm"], "params": PARAMS},
    "posterior_report": {"samples": draws(4)},
    "posterior_predictive": {"predict_fn": lambda params, inputs: jnp.ones(2)}
    | {"samples": draws(2), "inputs": BATCH},
    "prune": {"params": PARAMS, "opt_state": STATES["mask_elements"], "sparsity": 0.5},
    "remove_units": {"params": {"a": EYE, "b": EYE}, "groups": {"u": [("a", -1), ("b", 0)]}},
    "reset_masks": {"opt_state": STATES["mask_elements"]},
    "set_basis": {"opt_state": STATES["dim_reduce"], "basis": rows(2)},
    "stationary_covariance": {"preconditioner": 0.1, "hessian": EYE, "noise": EYE},
    "svrg_learning_rate": {"loss_fn": lambda p, batch: loss_fn(p, batch) + 0 * jnp.mean(batch)}
    | {"params": PARAMS, "data": BATCH, "batch_size": 1, "num_passes": 0},
    "minimize": {"loss_fn": lambda w, batch: jnp.sum(w**2) + 0 * jnp.mean(batch)}
    | {"data": BATCH, "params": jnp.ones(2)},
    "leaf_axes": {"params": PARAMS},
    "muon_axes": {"params": PARAMS},
    "quantize": {"opt_state": STATES["adam"], "like": STATES["adam in 8 bits"]},
    "dequantize": {"opt_state": STATES["adam in 8 bits"]},
    "wide_params": {"params": NARROW, "opt_state": WIDENED},
    "narrow_params": {"wide": PARAMS, "opt_state": WIDENED, "dtype": jnp.bfloat16},
    "lost_updates": {"params": PARAMS, "updates": GRADS},
    "register_moments": {"state_type": optax.TraceState, "trace": "mean"},
    "rank_for": {"params": {"w": jnp.ones((8, 16))}},
    "low_rank_adamw": {"learning_rate": 0.1, "rank": 1},
    "apollo_adamw": {"learning_rate": 0.1, "rank": 1},
    "fit_temperature": {"logits": jnp.array([[1.0, 0.0]] * 2), "labels": jnp.arange(2)},
    "calibration_report": {"probabilities": jnp.array([[0.7, 0.3]] * 2), "labels": jnp.arange(2)},
    "sparsity_report": {"params": PARAMS},
    "take_snapshot": {"opt_state": STATES["svrg"], "params": PARAMS, "full_grad": GRADS},
    "to_sparse": {"params": PARAMS},
    "trajectory": {"opt_state": STATES["trajectory"]},
    "with_loss": {"inner": sgd(), "loss_fn": loss_fn, "data": BATCH},
}
CASES = FUNCTIONS | {ours.name: ours.required for ours in TRANSFORMATIONS if ours.name in PUBLIC}
CASES["constant_sgd"] = {"kernel": kernels.kernel_for(PARAMS)}
PARAMETERS = {name: inspect.signature(PUBLIC[name], eval_str=True).parameters for name in CASES}


class Kind(typing.NamedTuple):
    """A kind of argument: values for which a ValueError names it, those for which a TypeError does, and
    its limits, which it may have."""

    out_of_range: tuple = ()
    mistyped: tuple = ()
    allowed: tuple = ()


def number(*, low=0.0, high=INF, is_open=False, is_below=False):
    """Take a number from `low` to `high`; with `is_open` above `low`, with `is_below` below `high`."""
    outside = (low if is_open else low - 0.1, float("nan"), jnp.array([0.1, 0.2]))
    if high < INF:
        outside += (high + 0.1,)
    least = max(low, -1.0)
    limits = (least, np.float64(least), int(least))
    if not is_below:
        limits += (min(high, 5.0), jnp.bfloat16(min(high, 1.0)))
    return Kind(outside, (True, "0.1", 1j, None), () if is_open else limits)


_NO_INTEGERS = (2.5, True, "2", jnp.float32(2.0), None)
# An int of 32 bits that seeds a key, or a key: typed, or its raw data.
RANDOM_KEY = Kind((-1, 2**32), _NO_INTEGERS, (2**32 - 1, jax.random.key_data(KEY)))
CHOICE = Kind(out_of_range=("none", 3))
TRANSFORMATION = Kind(mistyped=(10,))
# The words in an annotation that mean a tree, or the axes of its leaves.
_NO_NUMBERS = (complex, collections.abc.Sequence[int])
SHARE, ABOVE_ZERO, FROM_ZERO = {"high": 1.0}, {"is_open": True}, {"minimum": 0}
DECAY = SHARE | {"is_below": True}
# What annotations and defaults do not tell of an argument, of that name in any function or in one: its
# limits, or None where it is of no kind, and what it refuses, if anything, stands in `REFUSED`.
LIMITS = {
    **dict.fromkeys(("rank", "bits", "lower", "upper", "group_axes", "sampler", "eps")),
    **dict.fromkeys(
        (
            "fit_temperature.ignore_label",
            "mars.b1",
            "freeze.key",
            "prune.key",
            "pca_basis.num_snapshots",
        )
    ),
    **dict.fromkeys(("stationary_covariance.preconditioner", "stationary_covariance.momentum")),
    # Optax checks none of its own.
    **{
        f"{name}.{argument}": None
        for name in ("low_rank_adamw", "apollo_adamw")
        for argument in ("learning_rate", "b1", "b2", "weight_decay")
    },
    **dict.fromkeys(("partition_ratio", "mixing", "rho", "gamma", "sigma", "ramp"), SHARE),
    **dict.fromkeys(("drop_fraction", "probability", "a", "sparsity", "decay", "momentum"), SHARE),
    **dict.fromkeys(("b1", "b2", "learn_kernel.momentum", "mandt_sgd.momentum"), DECAY),
    **dict.fromkeys(
        ("katyusha.probability", "friction", "Compression.fraction"), SHARE | ABOVE_ZERO
    ),
    **dict.fromkeys(("max_step", "max_norm", "clip_radius", "scale", "stability"), ABOVE_ZERO),
    **dict.fromkeys(("strong_convexity", "noise_ratio", "hess_init", "words"), ABOVE_ZERO),
    **dict.fromkeys(("katyusha.learning_rate", "ivon.weight_decay", "bandwidth"), ABOVE_ZERO),
    **dict.fromkeys(("ivon.num_data", "traffic_report.every"), ABOVE_ZERO),
    **dict.fromkeys(("tol", "max_passes"), ABOVE_ZERO),
    **dict.fromkeys(("burn_in", "start", "num_passes", "switch_after.num_steps"), FROM_ZERO),
    "first_step": FROM_ZERO,
    "mars.gamma": {},
    "limit": {"low": 1.0},
    "noise_estimate": {"high": 0.5},
    "replicas": {"minimum": 2},
}


def kind_of(name, parameter):
    """Return what an argument takes, by its annotation, its default and its limits, if it is a number or
    a choice; else None."""
    limits = LIMITS.get(f"{name}.{parameter.name}", LIMITS.get(parameter.name, {}))
    options, kind = options_of(parameter), None
    if limits is None or any(each in options for each in _NO_NUMBERS):
        pass
    elif all(isinstance(option, str) for option in options):
        kind = CHOICE
    elif optax.GradientTransformation in options and parameter.name != "tx":
        kind = TRANSFORMATION
    elif int in options and parameter.name == "key":
        kind = RANDOM_KEY
    elif int in options:
        minimum = limits.get("minimum", 0 if parameter.default == 0 else 1)
        kind = Kind((minimum - 1, -3), _NO_INTEGERS)
    elif float in options:
        kind = number(**limits)
    if kind and type(None) in options:
        kind = kind._replace(mistyped=[value for value in kind.mistyped if value is not None])
    return kind


ARGUMENTS = {
    name: {each.name: kind for each in parameters.values() if (kind := kind_of(name, each))}
    for name, parameters in PARAMETERS.items()
}


def cast(dtype):
    """Return the params with a leaf of another dtype."""
    return PARAMS | {"b": PARAMS["b"].astype(dtype)}


def of_examples(size):
    """Return what gives the gradients of a batch's examples."""
    return lambda params: jax.tree.map(lambda p: jnp.stack([p] * size), params)


def mean(params, start=0, size=None):
    """Return a gradient over a part of a batch."""
    del start, size
    return params


def of(argument, *values, **others):
    """Return changes of a function's arguments: one to each value, with the same others."""
    return [{argument: value, **others} for value in values]


def said(message, **change):
    """Return a change of a function's arguments, with what the sentence of its refusal has to match."""
    return change, message


def squares(w, x):
    """Return a loss that is a sum over examples."""
    return jnp.sum((x @ w - 3) ** 2)


OWN = optperm.LeafAxes
Blocks, NOfM, Units = optperm.sparsity.Blocks, optperm.sparsity.NOfM, optperm.sparsity.Units
Compression = optperm.distributed.Compression
PLAN = optperm.distributed.Every(4, 2)
TABLE = np.arange(28.0, dtype=np.float32).reshape(4, 7)
THREE, ONES, SQUARE = np.eye(3), np.ones(4), np.ones((2, 2), bool)
EXAMPLES = {"x": jnp.ones((4, 2)), "y": jnp.ones(4)}
KERNEL = {"kernel": jnp.arange(24.0).reshape(4, 3, 2)}
# Without a role for the first axis.
STACK = {"kernel": optperm.LeafAxes("kernel", 1, 2)}
FLIPPED = {"w": optperm.LeafAxes("kernel", 1, 0), "b": optperm.LeafAxes("bias", (), 0)}
ROWS_2, ROWS_3 = rows(2), rows(3)
DILOCO, DIM_REDUCE = FUNCTIONS["traffic_report"]["tx"], optperm.dim_reduce(n_components=2)
PRUNING, TWA = optperm.prune_gradually(sgd(), 0.5, 1.0), optperm.twa(sgd(), n_components=1)
FOUR_STEPS = optax.MultiSteps(sgd(), 4).gradient_transformation()
W_ALONE = {"w": True, "b": False}
# A fraction of a leaf of rank 1, which is not included.
NOT_INCLUDED = {"w": 0.5, "b": 0.5}
# Axes that do not fit the params, of a leaf or of the tree.
WRONG_AXES = [
    *of(
        "axes",
        {"w": OWN("kernel", 0, 2), "b": None},
        {"w": OWN("kernel", 0, 1)},
        OWN("kernel", 0, 1),
    ),
    *of("axes", {"w": "kernel", "b": None}),
]
NO_FULL_GRADIENT = [dict(every=2, grad_fn=mean), dict(probability=0.5, grad_fn=mean)]
KERNELS_FOR = {form: kernels.kernel_for(PARAMS, form) for form in ("diagonal", "full")}
UNKNOWN = optperm.bayes.NoiseKernel.unknown(PARAMS, "diagonal", control_variates=False)
# Two stacked matrices beside one.
MATRICES = {"w": jnp.zeros((6, 9)), "s": jnp.zeros((2, 6, 9))}
WITH_FUNCTION = {"w": EYE, "activation": jax.nn.relu}
MASKED_EYES = optperm.mask_elements().init({"w": EYE, "activation": jnp.ones(())})
# For a leaf of three axes: out of range, one missing, and no axes at all.
NO_AXES = [OWN("kernel", 0, 3, (1, 2)), OWN("kernel", 0, 1), 3]
PLACED = [
    *(
        said(r"axes, for \['kernel'\] with the shape \(4, 3, 2\), must", axes=given, params=KERNEL)
        for axes in NO_AXES
        for given in ({"kernel": axes}, lambda params, axes=axes: {"kernel": axes})
    ),
    *(
        said("axes must be a tree like params of optperm.LeafAxes", axes=axes)
        for axes in ({"a": None}, {"w": None, "b": None, "v": None}, [None])
    ),
    *(
        said("axes names no kernels, .* so each leaf would stay", axes={"w": axes, "b": axes})
        for axes in (None, OWN("other"))
    ),
]
# Trees that must match params, of whose structure and shapes others are refused.
TREES = {
    "apply_updates": ("updates",),
    "contribution": ("params",),
    "export_permutation": ("initial_params",),
    "freeze": ("scores",),
    "lost_updates": ("updates",),
    "permuted_params": ("params",),
    "prune": ("params", "scores"),
    "pull": ("params",),
    "take_snapshot": ("params", "full_grad"),
}
# What else a function refuses, one case for each check: "f.init" and "f.update" are those of what
# f gives, for other params, or with these extra arguments. The message names an argument or a function,
# or has what `said` asks for.
REFUSED = {
    "narrow_params": [
        *of("dtype", jnp.int32, jnp.float32, {"w": jnp.bfloat16}),
        said(
            "opt_state has no params of 16 bits",
            opt_state=optperm.widen_params(sgd()).init(PARAMS),
        ),
    ],
    "wide_params": [
        said("widen_params", opt_state=STATES["adam"]),
        said(r"params\['b'\] is bfloat16\[3\]", params=NARROW | {"b": jnp.ones(3, "bfloat16")}),
    ],
    "widen_params": [said("bits must be 0, 8 or 16, got 4", bits=4)],
    "widen_params.init": [
        said(
            r"params\['w'\] must have at least 16 bits", params={"w": EYE.astype("float8_e4m3fn")}
        ),
    ],
    "Compression": of("fraction", None),
    "contribution": [
        *of("weight", -1.0, float("nan"), INF, jnp.ones(2), True, 1j),
        *of("compress", 4),
        said("compress=", compress=Compression(bits=4)),
        said("compress=", opt_state=STATES["agn in 4 bits"]),
        said("compress=", opt_state=STATES["agn in 4 bits"], compress=Compression(0.5)),
        said("without fragments or a delay", opt_state=state(optperm.agn(sgd(), every=PLAN))),
        said("exact params", opt_state=STATES["agn of sgperm"]),
    ],
    "calibration_report": [
        *of("probabilities", jnp.ones((2, 2)), jnp.ones((2, 2), int)),
        said(
            "probabilities must .* need jax.nn.softmax",
            probabilities=jnp.log(jnp.full((2, 2), 0.5)),
        ),
        said(r"shape \(n, classes\)", probabilities=jnp.ones(2)),
        *(said(r"labels must be in \[0, 1\]", labels=jnp.array(x)) for x in ([0, 2], [-1, 0])),
        said("labels integers", labels=jnp.ones(2)),
        said(r"labels \(n,\), got \(2, 2\) and \(3,\)", labels=jnp.arange(3)),
    ],
    "constant_sgd": [
        said("max_stability times learning_rate must be below 2, got 4", learning_rate=20.0)
    ],
    "constant_sgd.init": [
        said(r"kernel.noise\['b'\] is float32\[2\]", params=PARAMS | {"b": jnp.ones(3)}),
        said("kernel.noise has a different tree structure", params={"w": PARAMS["w"]}),
        said(r"kernel.basis.w is .*\[8, 8\]", kernel=KERNELS_FOR["full"], params=jnp.zeros(9)),
        said("no finite curvature, which learn_kernel measures", kernel=UNKNOWN),
        said(
            r"axis of chains \(of length 3\).*jax.tree.map\(lambda a: a\[0\]",
            kernel=jax.tree.map(lambda a: jnp.stack([a, a, a]), KERNELS_FOR["diagonal"]),
        ),
        said(
            "must be a NoiseKernel, got dict.*NoiseKernel.unknown",
            kernel=KERNELS_FOR["diagonal"]._asdict(),
        ),
    ],
    "init_center": of("params", {"w": "x"}, {"w": jnp.ones(2, int)}),
    "merge": [
        *of("center", PARAMS, CENTER._replace(params=jnp.ones(3))),
        *of("contributions", [PARAMS], [MESSAGE._replace(weight=jnp.ones(2))]),
        *of("contributions", [MESSAGE._replace(move=jnp.ones(3))]),
        said("at least one", contributions=[]),
        said(r"pass \[contribution\]", contributions=MESSAGE),
        said(r"center\.opt_state has a different tree.*outer\.init", outer=optax.adam(0.1)),
        *of("combine", "pairs", "median"),
    ],
    "pull": [
        *(said(r"center must be an .*Center", center=x) for x in (PARAMS, CENTER._asdict())),
        said(
            r"center\.params\['b'\] is float32\[3\]",
            center=CENTER._replace(params=PARAMS | {"b": jnp.ones(3)}),
        ),
        *of("center", CENTER._replace(params=jnp.ones(3))),
        *of("center", CENTER._replace(version=jnp.int32(-1))),
        *of("mixing", -0.1, 1.5, float("nan"), "0.5"),
        *of("allow_older", 1),
        *of("opt_state", state(optperm.agn(sgd(), every=PLAN)), STATES["agn of sgperm"]),
    ],
    "agn.init": [
        *of("inner", optperm.switch_after(2, sgd(), optperm.sgperm()), FOUR_STEPS),
        *of("inner", optax.sgd(lambda count: 0.1 / (1 + count))),
        *of("inner", optperm.sgperm(), compress=Compression(bits=4)),
        *of("fragment_of", {"w": 2, "b": 0}, every=PLAN),
    ],
    "agn.update": [
        *of("axis_name", "r"),
        *of("weight", -1.0, float("nan"), INF, jnp.ones(2), True, 1j),
        *of("commit", 1, "yes", jnp.zeros(2, bool), jnp.int32(1)),
    ],
    "agn": [
        *of("combine", "pairs", "median"),
        *of("center_dtype", "int32"),
        *of("compress", 4),
        *of("combine", "sequential", every=optperm.distributed.Every(4, 2, 1)),
    ],
    "apply_permutation": [
        *of("permutation", {"w": jnp.arange(2)}, jnp.arange(3), jnp.ones(2)),
        *of("permutation", *map(jnp.array, ([1, 1], [0, 99], [0, -1]))),
    ],
    "apply_updates": [
        dict.fromkeys(("params", "updates"), PARAMS | {"b": jnp.ones(3)}),
        *of("updates", PARAMS | {"b": "x"}),
    ],
    "diloco": [
        *of("center_dtype", "int32", "complex64"),
        *of("compress", 4),
        *of("compress", Compression(0.5), combine="pairs"),
        *of("combine", "sequential", every=optperm.distributed.Every(4, 2, 1)),
        *of("axis_name", ("a", "b"), combine="pairs"),
    ],
    "diloco.init": [
        *of("outer", FOUR_STEPS),
        *of("every", 4, PLAN, inner=optperm.sgperm()),
        *of("fragment_of", {"w": 0, "b": 1}, every=4),
        *of("fragment_of", lambda path, leaf: 0.5, every=PLAN),
        *of("fragment_of", {"w": [0, 1], "b": 0}, {"w": 2, "b": 0}, every=PLAN),
        *of("fragment_of", {"w": 0, "b": -1}, {"w": 1, "b": 1}, every=PLAN),
    ],
    "diloco.update": [*of("axis_name", "r"), *of("weight", -1.0), *of("commit", 1)],
    "dim_reduce.init": of("axis_name", "r"),
    "dim_reduce.update": [*of("value_fn", loss_fn), *of("value", 0.0)],
    "dldr": of("num_snapshots", 2**11 + 2, every=2**20),
    "dldr.init": [
        *of("inner", optperm.sgperm()),
        *of("subspace_optimizer", sgd(), optax.chain(TWA, TWA)),
        *of("subspace_optimizer", optperm.dim_reduce(n_components=3), num_snapshots=3),
        *of("subspace_optimizer", optperm.twa(sgd(), n_components=3), num_snapshots=2),
    ],
    "dldr.update": [{}],
    "draw_samples": [
        *of("params", {"b": jnp.zeros(2)}, num_chains=3, stacked=True),
        *of("step", lambda p, s, k: (p | {"b": p["w"]}, s), lambda p, s, k: (p, 1.0)),
    ],
    "evaluate": [
        *of("axis_name", "data"),
        *of("loss_fn", lambda p, b: b, lambda p, b: 1j, lambda p, b: jnp.int32(1)),
        *of("loss_fn", lambda p, b: (jnp.zeros([]), {})),
    ],
    "export_permutation": [*of("initial_params", GRADS, cast("bfloat16")), *of("axes", FLIPPED)],
    "freeze": [
        *of("key", "0"),
        *of("criterion", "random"),
        *of("criterion", "gradient", "preconditioned_gradient", scores=None),
        *of("fraction", optax.constant_schedule(0.5), NOT_INCLUDED),
        *of("scores", cast("complex64")),
        *WRONG_AXES,
    ],
    "full_gradient": [
        *of("axis_name", "data"),
        *of("params", cast(int)),
        *of("loss_fn", lambda p, b: (loss_fn(p, b), 0)),
        *of("batches", [], EXAMPLES, "batches", [{"x": np.ones((0, 2))}]),
        *of("batches", [EXAMPLES | {"y": jnp.ones(3)}], [{"scale": np.float32(1.0)}]),
        *of("batches", [{"x": BATCH}, {"x": "ab"}]),
        *of("weights", [], [ONES, ONES], [ONES[:3]], [ONES[:, None]], batches=[EXAMPLES]),
        *of("weights", [-ONES], [np.inf * ONES], [0.0 * ONES], batches=[EXAMPLES]),
    ],
    "gaussian_kl": [
        *of("covariance", np.diag([1.0, -1.0])),
        *of("mean", np.zeros(3)),
        *of("other_covariance", np.diag([1.0, -1.0]), THREE),
    ],
    "ivon.update": of("draw", None),
    "katyusha.update": of("grad_fn", mean),
    "erk_sparsity": [
        *WRONG_AXES,
        said(r"params\['activation'\] must be an array", params=WITH_FUNCTION),
    ],
    "keep_top": [
        *of("sparsity", NOT_INCLUDED),
        *WRONG_AXES,
        said(r"params\['activation'\] must be an array", params=WITH_FUNCTION),
    ],
    "laperm.init": [
        *of("inner", optperm.sgperm(), optax.chain(sgd(), optperm.mask_elements()), PRUNING),
        *of("axes", STACK, {"kernel": None}, {}, params=KERNEL),
        *PLACED,
    ],
    "learn_kernel": [
        said("stability", stability=2.0),
        said(r"momentum must be in \[0, 1\) in float32, got 1.0", momentum=1.0),
        said("steps must be at least 16", steps=15),
        said("num_data must be the number of rows of data, 2, got 3", num_data=3),
        said("batch_size must be at most the number of examples, 2", batch_size=3),
        said("log_prior must return a real scalar", log_prior=lambda w: w),
        said(r"params\['b'\] has dtype int32, but must be real floating", params=cast(int)),
    ],
    "low_rank": [
        said("rank must be at least 1, got 0", rank=0),
        said(r"rank must be an integer, or a ratio in \(0, 1\)", rank=1.0),
        *(said("rank must be an integer", rank=rank) for rank in (True, "1/8")),
        said(r"b2 must be in \[0, 1\)", b2=1 - 1e-9),
    ],
    "low_rank.init": [
        said(
            "the smaller side of every kernel, of which the largest is 6", rank=7, params=MATRICES
        ),
        *(
            said(message, axes=axes, params=MATRICES)
            for axes, message in (
                (
                    {"w": None, "s": GaLoreDimensionNumbers(0, 0)},
                    r"\['s'\] .* must name distinct axes of it",
                ),
                ({"w": None, "s": OWN("kernel", 0, 3)}, r"\['s'\] .* give each of its axes"),
                ({"w": None, "s": True}, r"axes, for \['s'\] .* must be an optperm.LeafAxes"),
                ({"w": None, "s": None}, "axes names no kernels"),
                ({"w": GaLoreDimensionNumbers()}, "axes .* like params"),
            )
        ),
    ],
    "apollo": [said("rank must be at least 1, got 0", rank=0)],
    "mandt_sgd.update": [
        {},
        *of("estimator", "single_example", "two_batches"),
        *of("estimator", "two_batches", batch_size=1, grad_fn=mean),
        *of("per_example_grad_fn", of_examples(4), batch_size=8),
        *of("per_example_grad_fn", of_examples(1), batch_size=1),
        *of("per_example_grad_fn", lambda p: {"w": jnp.ones((2, 3, 1)), "b": jnp.ones((2, 2))}),
    ],
    "minimize": [
        *of("data", {"x": BATCH, "y": 1.0}, iter([BATCH]), []),
        said("pass arrays of the same examples as a tuple", data=[BATCH, jnp.ones((2, 2))]),
        said(r"data\[1\] must contain numbers, got the dtype <U1", data=(BATCH, np.full(2, "a"))),
        *of("loss_fn", lambda w, _: w),
        said(
            "must be a mean over examples",
            loss_fn=lambda w, batch: jnp.sum(batch * jnp.sum(w**2)),
        ),
        *of("params", jnp.ones(2, int)),
        said("float32 or float64, got bfloat16", params=jnp.ones(2, "bfloat16")),
        said("params must contain at least one array", params={}),
        *of("proximal", 3, lambda rate: rate),
        *(said("another direction", proximal=each) for each in (optax.sgd, optax.adamw)),
        said("does not depend on the rate", proximal=lambda _: optperm.proximal(0.1, l1=0.1)),
        *of("batch_size", 3),
        said("callback must be a function of the history, got 3", callback=3),
    ],
    "mars": of("b1", 1.0, -0.1, float("nan"), "0.9"),
    "mars.update": of("exact", True),
    "mask_elements.init": of("mask", {"w": SQUARE, "b": True}, {"w": 1.0, "b": True}, {"w": True}),
    "pca_basis": [
        *of("n_components", 4, snapshots=TABLE),
        *of("n_components", 3, snapshots=TABLE, num_snapshots=3),
        *of("snapshots", {"a": TABLE, "b": np.zeros(3, np.float32)}, {}, TABLE.astype(int)),
    ],
    "fit_temperature": [
        *of("weights", -jnp.ones(2), jnp.zeros(2), jnp.ones(3), jnp.ones(2, bool)),
        *of("ignore_label", 0.5, True, "0", labels=jnp.array([0, 0])),
    ],
    "posterior_predictive": [
        *of("samples", draws(2).params),
        *of("predict_fn", lambda params, inputs: jnp.ones(2, jnp.int32)),
    ],
    "project.init": of("axis_name", "r"),
    "proximal": [*of("lower", 0.0, group=0.1), *of("lower", 1.0, upper=0.0)],
    "proximal.update": of("group_axes", (2,), group=0.1),
    "prune": [
        *of("key", "0"),
        *of("criterion", "random"),
        *of("sparsity", optax.constant_schedule(0.5), 1.5, NOT_INCLUDED),
        *of("sparsity", {"w": 0.5}, {"w": 0.5, "b": np.ones(2)}),
        said(
            r"params\['activation'\] must be an array", params=WITH_FUNCTION, opt_state=MASKED_EYES
        ),
        *of("structure", Units, NOfM(2, 3)),
        *of("structure", NOfM(2, 4), sparsity=None),
        *of("structure", Blocks(2, 2), include=True),
        *of("structure", Units(), scope="unit"),
        *of("scope", "unit", include=True),
        *of("scope", "global", sparsity={"w": 0.5, "b": 0.0}),
        *WRONG_AXES,
    ],
    "quantize_state": [said("bits must be 8 or 4, got", bits=bits) for bits in (16, True, "8")],
    "quantize_state.init": [
        said("no state with known moments: it has .*EmptyState", inner=sgd()),
        said("no state with known moments: it has .*ScaleBySM3State", inner=optax.scale_by_sm3()),
        said(r"include\['v'\]|include does not fit", include={"v": True}),
    ],
    "rank_for": [
        said(
            r"words=0\.6 cannot be reached: .* needs 1\.89 .* full rank is params\['experts'\]\.",
            params={"experts": jnp.ones((4, 64, 256)), "w": jnp.ones((64, 64))},
            words=0.6,
        )
    ],
    "sample": [
        said("at most the number of examples, 2, got 3", batch_size=3),
        said("agree in their leading", data={"x": jnp.ones(3), "y": jnp.ones(4)}),
        said("sampler must be a function", sampler=optperm.sgld(1e-5, 2)),
        said(r"^log_prior .* got .*float32\[2\]", log_prior=lambda w: -w["b"]),
        said("^log_prior must return a real scalar", log_prior=lambda w: (w, w)),
        said("starts", starts=jnp.ones(3)),
        said("explicit axes of a mesh", params=ON_MESH),
        said("params must contain arrays to sample, got {}", params={}),
        said("preconditioner is for sampler", preconditioner="diagonal"),
        said("preconditioner", preconditioner="whole"),
        said("num_data must be given", data=lambda key: BATCH),
        said("batch_size=2 examples, got 1", data=lambda key: BATCH[:1], num_data=9),
    ],
    "sghmc": [
        said(r"noise_estimate must be in \[0, 0.1\]", friction=0.1, noise_estimate=0.2),
        said(r"1 - friction.* must be in \[0, 1\) in float32", friction=1e-9),
    ],
    "sgld": [
        said("preconditioner must be above 0", preconditioner=jax.tree.map(jnp.zeros_like, PARAMS))
    ],
    "sgld.init": [
        said(
            r"preconditioner\['b'\] is float32\[3\]",
            preconditioner=jax.tree.map(jnp.ones_like, PARAMS | {"b": jnp.ones(3)}),
        )
    ],
    "state_report": [
        said(r"tx must be an optax\.GradientTransformation", tx=tx)
        for tx in (0.25, 4, optax.adam, optax.MultiSteps(optax.adam(0.1), 2))
    ],
    "prune_gradually": of("structure", NOfM(2, 4)),
    "prune_gradually.init": [
        *of("sparsity", 1.5, {"w": 0.5}, NOT_INCLUDED),
        *of("scope", "global", sparsity={"w": 0.5, "b": 0.0}),
        *of("structure", Blocks(2, 2), include=True),
        *of("params", jnp.ones(3)),
        *WRONG_AXES,
    ],
    "record_trajectory": of("dtype", jnp.int32),
    "recursive_gradient": of("probability", 0.5, every=2),
    "recursive_gradient.update": [{}, *NO_FULL_GRADIENT],
    "remove_units": [
        *of("params", {"a": EYE, "b": THREE}),
        *of("groups", {"u": [("d", -1)]}, {"u": [("a", -3)]}, {"u": [("a", -1, "of")]}),
        *of("groups", {"u": [("a", -1), ("a", 1)]}, {"u": [("a", -1)]}),
        *of("groups", {"u": [("a", -1), ("b", 0)], "v": [("a", -1), ("b", 0)]}),
        *of("axes", {"a": OWN("kernel", 0, 2), "b": None}, {"a": None, "b": OWN("kernel", 0, 1)}),
    ],
    "rigl": of("end", 100),
    "rigl.init": [
        *of("sparsity", 1.5, [0.5, 0.5], NOT_INCLUDED),
        *of("params", jnp.ones(3)),
        *WRONG_AXES,
    ],
    "set_basis": [
        *of("basis", ROWS_3, {"w": ROWS_2["w"]}, jax.tree.map(jnp.zeros_like, ROWS_2)),
        *of("basis", jax.tree.map(lambda r: r * np.nan, ROWS_2)),
        *of("basis", jax.tree.map(lambda r: r.astype(int), ROWS_2)),
        *of("opt_state", state(optax.MultiSteps(DIM_REDUCE, 2))),
    ],
    "sgperm": of("aggressiveness", 0.1, optax.constant_schedule(0.1), num_steps=5),
    "permute_by_cycles.init": of("axes", {"kernel": None}, params=KERNEL),
    "permuted_params": [
        said(r"for \['w'\] with the shape \(3, 2\)", axes={"w": OWN("bias", (), 1), "b": None})
    ],
    "sgperm.init": [*of("axes", STACK, {"kernel": None}, {}, params=KERNEL), *PLACED],
    "stationary_covariance": [
        *of("hessian", np.ones(2), np.triu(np.ones((2, 2))), np.full((2, 2), np.inf)),
        *of("noise", THREE, EYE * 1j),
        *of("preconditioner", np.ones(3)),
        *of("momentum", 1.0, -0.1),
    ],
    "svrg": of("probability", 0.5, every=2),
    "svrg.update": [{}, *NO_FULL_GRADIENT],
    "svrg_learning_rate": [
        *of("batch_size", 3),
        *of("data", {"x": BATCH, "y": 1.0}),
        *of("loss_fn", lambda p, _: p["b"].sum(), lambda p, _: p["b"]),
        # Sums over examples; orthogonal rows have the same curvature in a sum as alone.
        *of("loss_fn", squares, params=jnp.ones(2), data=TABLE[:, 2:4]),
        *of("loss_fn", squares, params=jnp.ones(2), data=EYE, batch_size=2),
    ],
    "swag": of("rank", 1),
    "switch_after.update": of(
        "params", cast("bfloat16"), first=optax.identity(), then=optax.sgd(0.1, 0.9)
    ),
    "take_snapshot": [
        *of("params", cast("bfloat16")),
        *of("params", {"v": jnp.ones(3)}, opt_state=state(optax.masked(optperm.svrg(), W_ALONE))),
    ],
    "sparsity_report": [*of("params", {"w": "x"}), *WRONG_AXES],
    "to_sparse": [
        *WRONG_AXES,
        *of("params", {"w": sparse.BCOO((np.ones(2), np.array([[0, 0], [1, 1]])), shape=(2, 2))}),
        *of("params", jnp.eye(2, dtype="bfloat16"), format="scipy"),
    ],
    "traffic_report": [
        *of("tx", None, sgd(), optperm.diloco(sgd(), every=2)),
        *of("axis_name", "r"),
        *of("every", PLAN),
    ],
    "twa.init": of("axis_name", "r"),
    "with_loss": of("data", {"x": EYE, "y": THREE}, {"x": jnp.ones([])}, {"x": EYE[:0]}, {}),
}
# What is at a limit, and works.
ALLOWED = {"dldr": {"every": 2**20, "num_snapshots": 2**11}}


def call(name, change):
    """Call a function, or `init` or `update` of what it gives, with changed arguments."""
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


# Functions that convert or return any state.
OF_ANY_STATE = {"apply_updates", "draw_samples", "quantize", "dequantize"}


def word(*names):
    """Return an expression that matches one of the names as a word."""
    return rf"\b({'|'.join(names)})\b"


def refusals():
    """Yield functions with changed arguments, the errors they may raise, and what these must match."""
    for function, arguments in ARGUMENTS.items():
        for argument, kind in arguments.items():
            for error, values in ((ValueError, kind.out_of_range), (TypeError, kind.mistyped)):
                for value in values:
                    yield function, {argument: value}, error, word(argument)
    for function, given in CASES.items():
        if function not in OF_ANY_STATE and (here := given.get("opt_state")):
            for opt_state in (STATES["adam"], (here, here)):
                yield function, {"opt_state": opt_state}, ValueError, word("optperm")
    for function, trees in TREES.items():
        for tree in trees:
            for wrong in ({"w": PARAMS["w"]}, PARAMS | {"b": jnp.ones(3)}):
                yield function, {tree: wrong}, ValueError, word(tree)
    for function, changes in REFUSED.items():
        for each in changes:
            change, message = each if isinstance(each, tuple) else (each, None)
            # By `zip`, which names none, batches and their weights are paired.
            names = [*PARAMETERS[function.partition(".")[0]], *change, *CASES, "zip"]
            yield function, change, (ValueError, TypeError, LookupError), message or word(*names)
