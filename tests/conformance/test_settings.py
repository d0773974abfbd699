"""Every transformation under JAX's own checks: of NaN, of tracers, of transfers and of random keys."""

import contextlib

import jax
import jax.numpy as jnp
import loops
import pytest
import support
from transformations import TRANSFORMATIONS

SETTINGS = {
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "checking_leaks": jax.checking_leaks,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
}


@pytest.mark.parametrize("ours", TRANSFORMATIONS, ids=str)
@pytest.mark.usefixtures("lenient")
def test_steps_hold_under_all_settings(ours):
    """As without them."""
    tx, params = ours.make(), support.random_params()
    state = jax.block_until_ready(ours.prepared(tx.init(params), params))
    batches = jax.block_until_ready(loops.linear_batches(3))

    def run(step):
        carry = params, state
        for batch in batches:
            carry = jax.block_until_ready(step(*carry, batch))
        return carry

    expected = run(loops.compiled(tx, loops.linear))
    with contextlib.ExitStack() as stack:
        for name, setting in SETTINGS.items():
            # jax.custom_partitioning, by which the kernel is called, keeps tracers of its own.
            if not (name == "checking_leaks" and ours.permutes):
                stack.enter_context(setting())
        # A new function, so that it is traced here.
        found = run(jax.jit(loops.make_step(tx, loops.linear)))
    support.assert_close(*(jax.tree.leaves(tree[0]) for tree in (found, expected)), rtol=1e-6)


def test_the_settings_see_what_they_are_for():
    """Or the tests above would pass in any case."""
    x, key, leaked = jnp.ones(2), jax.random.key(0), []
    bad = {
        "debug_nans": lambda x: x * jnp.nan,
        "debug_infs": lambda x: x / 0.0,
        "checking_leaks": lambda x: leaked.append(x) or x,
        "debug_key_reuse": lambda x: (
            x + jax.random.normal(key, (2,)) + jax.random.normal(key, (2,))
        ),
    }
    for name, function in bad.items():
        with SETTINGS[name](), pytest.raises(Exception, match=r"(?i)nan|inf|leak|reuse"):
            jax.block_until_ready(jax.jit(function)(x))
    with SETTINGS["transfer_guard"](), pytest.raises(Exception, match="Disallowed host-to-device"):
        x + 1
