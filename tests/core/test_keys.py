"""Random keys of what users pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from optperm.core import keys


@pytest.mark.parametrize("key", [7, np.uint32(7), jnp.int32(7)])
def test_an_int_seeds_a_threefry_key_whatever_the_default_is(key):
    wanted = jax.random.key_data(jax.random.key(7, impl="threefry2x32"))
    with jax.default_prng_impl("rbg"):
        support.assert_same_bits(keys.key_data(key), wanted)
    support.assert_same_bits(jax.jit(keys.key_data)(jnp.asarray(key)), wanted)


def test_a_typed_key_and_its_raw_data_are_the_same_key():
    key = jax.random.key(3)
    wanted = jax.random.key_data(key)
    for given in (key, wanted, np.asarray(wanted)):
        support.assert_same_bits(keys.key_data(given), wanted)
        support.assert_same_bits(jax.random.key_data(keys.make_key(given)), wanted)


def test_keys_of_another_kind_stay_what_they_are_and_seed_a_threefry_key():
    one, two = jax.random.key(0, impl="rbg"), jax.random.key(1, impl="rbg")
    assert keys.make_key(one).dtype == one.dtype
    assert keys.key_data(one).shape == (2,)
    assert (keys.key_data(one) != keys.key_data(two)).any()
    support.assert_same_bits(keys.key_data(jax.random.key_data(one)), keys.key_data(one))
