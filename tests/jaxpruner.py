"""Sequences of JaxPruner itself, in float32.

They were made by google-research/jaxpruner at f133ee5 with jax 0.4.25, optax 0.2.2 and flax 0.8.2:
40 steps on a noisy quadratic, whose gradients at the masked params are kept with the masks after each
step and the params after each tenth one. Of methods that choose between steps only the params before
each choice and the masks after it are kept.
"""

import collections
import functools
import pathlib

import chex
import loops
import numpy as np

FILE = pathlib.Path(__file__).parent / "data" / "jaxpruner_reference.npz"


@functools.cache
def load(case):
    """The arrays of a case by their kind, as trees by the names of the leaves."""
    trees = collections.defaultdict(dict)
    with np.load(FILE) as arrays:
        for name in arrays.files:
            case_name, kind, leaf = name.split("/", 2)
            if case_name == case:
                trees[kind][leaf] = arrays[name]
    return dict(trees)


def num_zeros(masks):
    """How many entries of each leaf are zero in each step."""
    return {name: (~mask).reshape(len(mask), -1).sum(axis=1) for name, mask in masks.items()}


def assert_followed(case, tx, masks=lambda opt_state: opt_state.mask, opt_state=None):
    """Train on the gradients of a case, and assert that masks and params are JaxPruner's."""
    z = load(case)
    grads = [{name: g[t] for name, g in z["grad"].items()} for t in range(40)]
    trail = loops.train(tx, z["params0"], grads, how="scan", opt_state=opt_state, init="jit")
    for t, (found, state) in enumerate(trail):
        for name, wanted in z["mask"].items():
            np.testing.assert_array_equal(masks(state)[name], wanted[t], err_msg=f"{name} at {t}")
        if t % 10 == 9:
            expected = {name: p[t // 10] for name, p in z["params"].items()}
            chex.assert_trees_all_close(found, expected, atol=1e-5, rtol=0)
