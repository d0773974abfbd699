"""apollo against the authors' sequences, closed forms, and what fails."""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import support
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.memory import _apollo as module

sys.path.append(str(pathlib.Path(__file__).parent))
import low_rank_sequences as sequences
from low_rank_sequences import EVERY, LEAVES, RANK, adam

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))
from collectives import find_collectives

pytestmark = pytest.mark.usefixtures("lenient")
whole = functools.partial(optperm.apollo, rank=RANK, every=EVERY, scale=1.0)
mini = functools.partial(optperm.apollo, rank=1, every=EVERY, by="tensor", scale=128**0.5)
SEQUENCES = {
    "apollo_corrected": lambda: whole(adam()),
    "apollo_no_limiter": lambda: whole(adam(), limit=None),
    "apollo_official": lambda: sequences.in_official_order(whole(sequences.without_correction())),
    "apollo_mini_corrected": lambda: mini(adam()),
    "apollo_mini_official": lambda: sequences.in_official_order(
        mini(sequences.without_correction())
    ),
}
USUAL = [("apollo_official", "wide"), ("apollo_mini_corrected", "tall")]


@pytest.mark.parametrize(
    ("name", "leaf"),
    support.every_night([(name, leaf) for name in SEQUENCES for leaf in LEAVES], USUAL),
)
def test_sequences_of_the_authors(name, leaf, x64, monkeypatch):
    """APOLLO and APOLLO-Mini step for step, in float64, with the bases of the file."""
    method = "apollo_mini" if "mini" in name else "apollo"
    bases = jnp.asarray(sequences.reference()[f"{method}_bases_{leaf}"])
    monkeypatch.setattr(module, "fold", lambda _, number: number)
    monkeypatch.setattr(module, "draw_gaussian_basis", lambda number, *_: bases[number])
    found = sequences.sequence(SEQUENCES[name](), leaf)
    support.assert_close(found, sequences.of_leaf(name, leaf), atol=1e-9)


def test_identity_is_the_gradient_and_auto_is_the_root(x64):
    """U = G with nothing inside, times the root of d / r; a complete optimizer gives its sign."""
    grads = {
        "w": support.normal((6, 24), dtype=np.float64),
        "b": support.normal((3,), dtype=np.float64),
    }
    for inner, scale, factor in (
        (optax.identity(), 1.0, {"w": 1.0, "b": 1.0}),
        (optax.scale(-0.5), "auto", {"w": -0.5 * 3**0.5, "b": -0.5}),
    ):
        tx = optperm.apollo(inner, 2, scale=scale, limit=None)
        updates, _ = tx.update(grads, tx.init(grads))
        wanted = {k: factor[k] * g for k, g in grads.items()}
        support.assert_close(updates, wanted, atol=1e-6)


def test_a_gradient_of_zero_does_not_hold_back_the_next(x64):
    """The norm from which a step may grow stays, as if it had not been there; growth is of 1 %."""
    g = {"w": support.normal((4, 6), dtype=np.float64)}
    tx = optperm.apollo(optax.identity(), 2, scale=1.0)
    take, state, sizes = jax.jit(tx.update), tx.init(g), []
    for factor in (1.0, 0.0, 3.0, jnp.nan, 3.0, 1.0):
        u, state = take(optax.tree.scale(factor, g), state)
        sizes.append(float(jnp.linalg.norm(u["w"]) / jnp.linalg.norm(g["w"])))
    np.testing.assert_allclose(sizes, [1.0, 0.0, 1.01, np.nan, 1.01**2, 1.0], atol=1e-5)


def test_projections_keep_the_length_of_gradients_on_average():
    """|R|^2 is |G|^2: the first step of Adam gives f = sqrt(r) / |R|, and U = sqrt(d / r) f G."""
    d, rank = 256, 64
    g = support.normal((d, 400), 0)
    tx = optperm.apollo(rank=rank, limit=None)
    u, _ = tx.update(g, tx.init(g), g)
    squares = d / np.sum(np.square(u), axis=0)
    np.testing.assert_allclose(np.mean(squares), 1.0, rtol=0.05)


def test_projections_change_with_leaf_key_and_time_alone():
    """They are those of N(0, 1 / r), others for each leaf, and the same until the next refresh."""
    matrix = module.plan_matrices({"w": jnp.zeros((300, 400))}, 4, "smaller", None)["w"]
    leaf = jnp.zeros((300, 400))

    def draw(key, index, number):
        data = module.fold(module.key_data(key), jnp.int32(number))
        return np.asarray(module.draw_gaussian_basis(data, index, matrix, leaf))

    draws = {of: draw(*of) for of in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1))}
    for one in draws.values():
        assert abs(np.var(one) * 4 - 1) < 0.15
    pairs = [(a, b) for a in draws for b in draws if a < b]
    assert all(not np.array_equal(draws[a], draws[b]) for a, b in pairs)
    np.testing.assert_array_equal(draw(jax.random.key(1), 0, 0), draws[1, 0, 0])


def test_no_communication_but_norms():
    """By channel, of a gradient that is cut along k."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = optperm.apollo(rank=4)
    params = jax.device_put({"w": jnp.zeros((32, 64))}, NamedSharding(mesh, P(None, "x")))
    text = jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text()
    found = find_collectives(text)
    assert {each.operation for each in found} == {"all-reduce"}
    assert max(each.bytes for each in found) <= 16


def test_what_cannot_be_done_is_refused():
    """By name."""
    params = {"w": jnp.zeros((6, 9))}
    decayed = optperm.apollo(optax.adamw(1e-3), 2)
    numbers = optax.contrib.GaLoreDimensionNumbers()
    cases = [
        (
            lambda: optperm.apollo(1 / 4),
            TypeError,
            "inner must be an optax.GradientTransf.*got 0.25",
        ),
        (lambda: optperm.apollo(rank=0), ValueError, "rank must be at least 1"),
        (lambda: optperm.apollo(scale="one"), TypeError, "scale must be a number"),
        (lambda: optperm.apollo(limit=0.5), ValueError, "limit must be at least 1"),
        (lambda: optperm.apollo(by="row"), ValueError, "by must be one of 'channel', 'tensor'"),
        (
            lambda: optperm.apollo(rank=7, dimension_numbers=numbers).init(params),
            ValueError,
            r"rank=7 is above the smaller side 6 of params\['w'\]",
        ),
        (
            lambda: decayed.update(params, decayed.init(params), params),
            ValueError,
            "inner of apollo needs params",
        ),
    ]
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()
