"""state_report against the arrays of real states and the published tables."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optperm

Numbers = optax.contrib.GaLoreDimensionNumbers
GPT2 = {"embed": (50257 + 1024, 768), "qkv": (12, 768, 2304), "out": (12, 768, 768)}
GPT2 |= {"up": (12, 768, 3072), "down": (12, 3072, 768)}
LLAMA = {"embed": (32000, 4096), "head": (32000, 4096)}
LLAMA |= {"attention": (128, 4096, 4096), "mlp": (96, 4096, 11008)}
SHAPES = {"embed": (64, 16), "kernel": (16, 64), "stack": (2, 8, 8)}
PARAMS = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
SIZE = sum(leaf.size for leaf in PARAMS.values())
LOW = optax.chain(optperm.low_rank(optax.scale_by_adam(), 1 / 4), optax.scale(-1e-3))
LABELS = {"embed": "full", "kernel": "low", "stack": "full"}
PARTED = optax.partition({"low": LOW, "full": optax.adam(1e-3)}, LABELS)
# For each optimizer the words of each leaf for each of its entries.
IN_PARTS = {
    # Of 16 x 64: a basis of 16 x 4, two moments of 4 x 64, and 2 words for the norm and the next basis
    "partition": (PARTED, [2.0, 0.5625 + 2 / 1024, 2.0]),
    "chain": (optax.chain(optax.scale_by_adam(), optax.trace(0.9)), [3.0, 3.0, 3.0]),
    "MultiSteps": (optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(), [3.0] * 3),
    "bits": (
        # Of two booleans per entry: whether it may move, and whether it is kept at zero
        optax.chain(optax.scale_by_lion(mu_dtype="bfloat16"), optperm.mask_elements()),
        3 * [1.0],
    ),
    "flatten": (optax.flatten(optax.scale_by_adam()), [0.0] * 3),
}


def words_of(tx, params):
    """Return the words of four bytes that the optimizer state takes."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tx.init(params))) / 4


def test_words_of_published_tables():
    """GPT-2 and Llama 7B with GaLore and APOLLO, from shapes alone."""
    adam = optax.scale_by_adam()
    cases = [
        (GPT2, lambda **how: optperm.low_rank(adam, 192, **how), 1.03),
        (GPT2, lambda **how: optperm.low_rank(adam, 192, side="larger", **how), 0.92),
        (GPT2, lambda **how: optperm.apollo(rank=1 / 4, **how), 0.98),
        (LLAMA, lambda **how: optperm.low_rank(adam, 1024, **how), 0.70),
        (LLAMA, lambda **how: optperm.apollo(rank=1, **how), 0.08),
    ]
    for shapes, make, words in cases:
        params = {k: jax.ShapeDtypeStruct(s, np.float32) for k, s in shapes.items()}
        numbers = {k: Numbers(-2, -1) if len(s) == 3 else None for k, s in shapes.items()}
        tx = optax.chain(make(axes=numbers), optax.scale_by_learning_rate(0.1))
        found = optperm.memory.state_report(tx, params)
        assert abs(found.words_per_param - words) <= 0.005 + 0.02 * words


@pytest.mark.parametrize("name", IN_PARTS)
def test_every_array_counts_by_its_bytes(name):
    """The report counts the words of leaves and other arrays as in the state that `init` makes."""
    tx, of_leaves = IN_PARTS[name]
    report = optperm.memory.state_report(tx, PARAMS)
    assert {leaf.name: leaf.shape for leaf in report.leaves} == {
        f"['{k}']": s for k, s in SHAPES.items()
    }
    np.testing.assert_allclose([leaf.words_per_param for leaf in report.leaves], of_leaves)
    words = [leaf.words for leaf in report.leaves]
    np.testing.assert_allclose(words, np.multiply(of_leaves, [p.size for p in PARAMS.values()]))
    assert report.words == sum(words) + report.other_words == words_of(tx, PARAMS)
    assert report.words_per_param == report.words / SIZE


def test_what_belongs_to_no_leaf():
    """Counts, keys and arrays of another tree, also if the params are a single array."""
    for tx, params, words in (
        (optax.add_noise(0.1, 0.55, key=jax.random.key(0)), PARAMS, 3.0),
        (optax.adam(0.1), PARAMS["kernel"], 1.0),
        (optperm.svrg(), PARAMS["kernel"], 3.25),
    ):
        assert optperm.memory.state_report(tx, params).other_words == words


def treatments(tx, params):
    return [leaf.treatment for leaf in optperm.memory.state_report(tx, params).leaves]


def test_ranks_are_those_of_the_method():
    """Of each side, of leaves of several axes, without moments, in codes, and under a partition."""
    shapes = [(16, 64), (64, 4, 16), (2, 8, 12), (4,)]
    params = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]
    numbers = [Numbers(), Numbers(0, (1, 2)), Numbers(-2, -1), None]
    smaller = ["rank 4 of 16 x 64", "rank 4 of 64 x 64", "rank 4 of 2 x 8 x 12", "full rank"]
    larger = ["rank 4 of 64 x 16", "rank 4 of 64 x 64", "rank 4 of 2 x 12 x 8", "full rank"]
    how = {"rank": 4, "axes": numbers}
    four_bits = functools.partial(optperm.quantize_state, bits=4, min_size=1)
    for tx, wanted in (
        (optperm.low_rank(optax.scale_by_adam(), **how), smaller),
        (optperm.low_rank(optax.scale_by_adam(), side="larger", **how), larger),
        (optperm.low_rank(optax.identity(), **how), smaller),
        (optax.chain(optax.clip(1.0), optperm.apollo(**how), optax.scale(-0.1)), smaller),
        (four_bits(optperm.apollo(optax.scale_by_lion(), **how)), smaller),
        (optperm.apollo(optax.identity(), **how), [""] * 4),
        (optax.adam(0.1), [""] * 4),
    ):
        assert treatments(tx, params) == wanted
    # Of 4 x 4 a basis and two moments of rank 3 would be more numbers than two moments at full rank.
    both = [jnp.zeros((6, 9)), jnp.zeros((4, 4))]
    low = optperm.low_rank(optax.scale_by_adam(), 3)
    assert treatments(low, both) == ["rank 3 of 6 x 9", "full rank"]
    for tx in (low, optperm.apollo(rank=3)):  # params may be a single array
        assert treatments(tx, jnp.zeros((6, 9))) == ["rank 3 of 6 x 9"]
        assert treatments(tx, jnp.zeros(6)) == ["full rank"]
    assert treatments(PARTED, PARAMS) == ["", "rank 4 of 16 x 64", ""]
    wanted = ["full rank", "rank 4 of 16 x 64", "full rank, axes not named"]
    assert treatments(LOW, PARAMS) == wanted


def test_wrappers_whose_parts_take_turns_are_reported():
    """Of a state that is known by its shapes alone no flag can be read, and none has to be."""
    sgd, params = optax.sgd(0.1, momentum=0.9), {"w": jnp.ones((8, 6))}
    low = optperm.low_rank(sgd, 2)
    assert treatments(optperm.switch_after(3, sgd, low), params) == ["rank 2 of 6 x 8"]
    dldr = optperm.dldr(sgd, optperm.dim_reduce(n_components=2), every=2, num_snapshots=3)
    for tx in (optperm.mandt_sgd(32, 8), dldr):
        report = optperm.memory.state_report(tx, params)
        np.testing.assert_allclose(report.words, words_of(tx, params))
