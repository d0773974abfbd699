"""Random keys of what users pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

from optperm.core import keys

KEY = jax.random.key(7, impl="threefry2x32")
WANTED = jax.random.key_data(KEY)


@pytest.mark.parametrize("given", [KEY, WANTED, np.asarray(WANTED), 7, np.uint32(7), jnp.int32(7)])
def test_a_key_its_raw_data_and_its_seed_are_the_same_key(given):
    """Seed a threefry key under any default implementation."""
    with jax.default_prng_impl("rbg"):
        support.assert_same_bits(keys.key_data(given), WANTED)
        support.assert_same_bits(jax.random.key_data(keys.make_key(given)), WANTED)
    support.assert_same_bits(jax.jit(keys.key_data)(given), WANTED)


def test_keys_of_another_kind_stay_what_they_are_and_seed_a_threefry_key():
    one, two = jax.random.key(0, impl="rbg"), jax.random.key(1, impl="rbg")
    assert keys.make_key(one).dtype == one.dtype
    assert keys.key_data(one).shape == (2,)
    assert (keys.key_data(one) != keys.key_data(two)).any()
    support.assert_same_bits(keys.key_data(jax.random.key_data(one)), keys.key_data(one))
