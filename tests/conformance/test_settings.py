"""Every transformation under JAX's own checks: of NaN, of tracers, of transfers and of random keys."""

import contextlib
import functools

import jax
import loops
import numpy as np
import pytest
import support

SETTINGS = {
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "checking_leaks": jax.checking_leaks,
    "transfer_guard": lambda: jax.transfer_guard("disallow"),
    "debug_key_reuse": lambda: jax.debug_key_reuse(True),
}


@pytest.mark.spans("sgperm", "agn", "mandt_sgd")
@pytest.mark.usefixtures("lenient")
def test_steps_hold_under_all_settings(ours):
    """As a scan's carry, in donated buffers, training is what the loop gives without them, to the last
    digit: XLA may round a product and a sum at once."""
    tx, params = ours.make(), support.random_params()
    state = ours.prepared(tx.init(params), params)
    batches = loops.linear_batches(3)
    expected = loops.train(tx, params, batches, evaluate=loops.linear, opt_state=state)[-1]
    given = jax.block_until_ready((params, state, jax.device_put(np.stack(batches))))
    with contextlib.ExitStack() as stack:
        for name, setting in SETTINGS.items():
            # jax.custom_partitioning, by which the kernel is called, keeps tracers of its own.
            if not (name == "checking_leaks" and ours.permutes):
                stack.enter_context(setting())
        # A new function, so that it is traced here.
        run = functools.partial(loops.carry, loops.make_step(tx, loops.linear))
        found = jax.block_until_ready(jax.jit(run, donate_argnums=(0, 1))(*given))
    support.assert_close(found, expected, rtol=1e-5 if ours.sums_over_params else 1e-6)
