"""The injected noise: its bits, its moments, and how it is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import support
from jax.extend.random import threefry2x32_p

from optperm.core import noise
from optperm.core.keys import key_data


def test_bits_are_those_of_jax():
    """Of Threefry, of a key that a number is folded into, and of arrays by their numbers."""
    data = key_data(12345)
    high, low = (jax.random.bits(jax.random.key(seed), (1000,), jnp.uint32) for seed in range(2))
    wanted = threefry2x32_p.bind(*data, high, low)
    support.assert_same_bits([*noise.threefry(data, high, low)], [*wanted])
    key = jax.random.key(5, impl="threefry2x32")
    for number in (3, -5, 2**31 - 1):
        wanted = jax.random.key_data(jax.random.fold_in(key, jnp.int32(number)))
        support.assert_same_bits(noise.fold(key_data(key), jnp.int32(number)), wanted)
    shapes = [(5, 4), (), (5, 4), (0, 3), (7,)]
    wanted = [jax.random.bits(jax.random.fold_in(key, i), shape) for i, shape in enumerate(shapes)]
    support.assert_same_bits(noise.bits(key_data(key), shapes), wanted)
    assert noise.bits(key_data(key), []) == []


def test_signs_are_minus_one_and_one_alike():
    ones = np.asarray(noise.signs_like(key_data(2), {"a": jnp.zeros((300, 400))})["a"])
    assert set(np.unique(ones)) == {-1, 1}
    assert abs(ones.mean()) < 4 / np.sqrt(ones.size)


def test_normal_numbers_are_the_quantiles_of_their_places():
    """Of every 64th of the 2^24 places and the ends, to four of float32's roundings."""
    k = np.r_[0, 1, np.arange(2, 2**24 - 2, 64), 2**24 - 2, 2**24 - 1]
    drawn = np.asarray(noise._normal(jnp.asarray(k << 8, jnp.uint32), jnp.float32), np.float64)
    wanted = np.sqrt(2) * scipy.special.erfinv((2 * k + 1) / 2**24 - 1)
    np.testing.assert_allclose(drawn, wanted, rtol=5e-7)


@pytest.mark.parametrize(("dtype", "drawn_in"), [("float64", "float64"), ("bfloat16", "float32")])
def test_three_points_have_the_moments_of_a_normal(dtype, drawn_in):
    """To the fifth, each within five of its standard errors; neighbors are not correlated."""
    with jax.enable_x64(dtype == "float64"):
        tree = {"a": jnp.zeros((500, 800), dtype), "b": jnp.zeros((400_000,), dtype)}
        drawn = noise.three_point_like(key_data(3), tree)
        assert all(leaf.dtype == drawn_in for leaf in drawn.values())
        a, b = (np.asarray(leaf, np.float64).ravel() for leaf in drawn.values())
    moments = {power: (0 if power % 2 else 3 ** (power // 2 - 1)) for power in range(1, 11)}
    for x in (a, b):
        assert len(np.unique(x)) == 3
        for power in range(1, 6):
            error = np.sqrt((moments[2 * power] - moments[power] ** 2) / x.size)
            assert abs(np.mean(x**power) - moments[power]) < 5 * error
        rows = x.reshape(500, 800)
        for one, other in ((rows[1:], rows[:-1]), (rows[:, 1:], rows[:, :-1])):
            assert abs(np.mean(one * other)) < 5 / np.sqrt(x.size)
    assert abs(np.mean(a * b)) < 5 / np.sqrt(a.size)


def test_three_points_of_other_leaves_steps_and_keys_are_independent():
    """Entries in the same place, in neighboring places, and squares, which show equal zeros."""
    size, draws = 400_000, []
    for key, step, name in ((0, 0, "a"), (0, 0, "b"), (0, 1, "a"), (0, 2, "a"), (1, 0, "a")):
        data = noise.fold(key_data(key), step)
        draws.append(
            np.asarray(noise.three_point_like(data, {name: jnp.zeros(size)})[name], np.float64)
        )
    for i, one in enumerate(draws):
        for other in draws[:i]:
            for shift in (0, 1, 2, 4, 256):
                moved = np.roll(other, shift)
                assert abs(np.mean(one * moved)) < 5 / np.sqrt(size)
                assert abs(np.mean((one**2 - 1) * (moved**2 - 1))) < 5 * 2 / np.sqrt(size)


def test_a_cut_leaf_draws_what_a_whole_one_does_and_gathers_nothing():
    """On a mesh with automatic axes and with explicit ones."""
    whole = jnp.zeros((16, 24))
    wanted = noise.three_point_like(key_data(5), whole)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
        spec = jax.sharding.NamedSharding(mesh, jax.P(None, "x"))
        with jax.set_mesh(mesh):
            cut = jax.device_put(whole, spec)
            draw = lambda data, leaf: leaf + noise.three_point_like(data, leaf)  # noqa: E731
            compiled = jax.jit(draw, out_shardings=spec).lower(key_data(5), cut).compile()
            found = compiled(key_data(5), cut)
        assert found.sharding.is_equivalent_to(spec, 2)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
        text = compiled.as_text()
        assert not any(name in text for name in ("all-gather", "all-reduce", "permute("))


def test_leaves_of_one_shape_share_a_kernel():
    """XLA compiles equal kernels once: what differs between leaves is an operand of their kernels."""

    def constants(num_leaves):
        tree = {str(i): jnp.zeros((8, 16)) for i in range(num_leaves)}
        program = jax.jit(noise.normal_like).lower(key_data(0), tree)
        assert program.as_text().count("func.func private @_draw") == 1
        text = program.compile().as_text()
        return text.count(" fusion("), text.count("u32[8,16]{1,0} constant(")

    (few, none), (many, still_none) = constants(2), constants(8)
    assert (none, still_none) == (0, 0)
    assert many - few == 6


def test_numbers_steps_and_keys_give_independent_normal_numbers():
    """A step folds its count into the key, and each leaf has a number."""
    shape = (200, 500)
    draws = []
    for key, step, number in ((0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)):
        drawn = noise.normal(noise.fold(key_data(key), step), number, shape, jnp.float32)
        draws.append(np.asarray(drawn, np.float64))
    error = 1 / np.sqrt(np.prod(shape))
    for i, one in enumerate(draws):
        moments = [np.mean(one**power) for power in (1, 2, 4)]
        assert np.all(np.abs(np.subtract(moments, [0, 1, 3])) < 5 * error * np.sqrt([1, 2, 96]))
        assert all(abs(np.mean(one * other)) < 5 * error for other in draws[:i])
