"""`widen_params` with states of 8 bits and flashoptim-jax, the same in another library, in one run."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optperm

pytestmark = [pytest.mark.libraries, pytest.mark.usefixtures("lenient")]
if "flashoptim_jax" in os.environ.get("OPTPERM_LIBRARIES", "").split():
    import flashoptim_jax
else:
    flashoptim_jax = pytest.importorskip("flashoptim_jax")

RATE, DECAY = 1e-2, 0.1


def ours():
    """Return AdamW with 24 bits per parameter and moments in 8 bits."""
    return optperm.widen_params(optperm.quantize_state(optax.adamw(RATE, weight_decay=DECAY)))


def theirs(**options):
    """Return the same of the other library; its kernels need a GPU."""
    return flashoptim_jax.flash_adamw(RATE, weight_decay=DECAY, fused=False, **options)


def make_params(dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(0))
    params = {"up": jax.random.normal(keys[0], (64, 256)), "down": jnp.zeros((256, 64))}
    return optax.tree.cast(params, dtype)


def count_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_states_of_both_take_about_as_many_bytes():
    params = make_params()
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    mine, other = ours().init(params), theirs().init(params)
    # 8 bits of each parameter, and two moments of 8 bits: one exponent of 8 bits for each 32 entries
    # here, and one scale of 16 bits there. Counts, keys and tables of the whole state have no share.
    assert 0 <= count_bytes(mine) - size * (3 + 2 / 32) < 64
    assert 0 <= count_bytes(other) - size * (3 + 4 / 32) < 64


def test_both_follow_adamw_in_float32():
    """On a noisy quadratic, up to the rounding of moments and params."""
    target = jax.random.normal(jax.random.key(1), (64, 256))
    targets = {"up": target, "down": target.T}
    start = make_params()
    adamw, mine, other = optax.adamw(RATE, weight_decay=DECAY), ours(), theirs()
    wide = optax.tree.cast(start, jnp.float32)
    carry = (wide, adamw.init(wide)), (start, mine.init(start)), (start, other.init(start))

    def find_grads(params, key):
        noise = optax.tree.random_like(key, targets, jax.random.normal)
        return jax.tree.map(lambda p, t, n: (p - t + n).astype(p.dtype), params, targets, noise)

    def take(tx, params, state, key):
        updates, state = tx.update(find_grads(params, key), state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def train(carry):
        def step(carry, key):
            plain, own, foreign = carry
            plain, own = take(adamw, *plain, key), take(mine, *own, key)
            params, state = foreign
            foreign = other.step(params, state, find_grads(params, key))
            return (plain, own, foreign), None

        return jax.lax.scan(step, carry, jax.random.split(jax.random.key(2), 300))[0]

    (plain, _), (own, state), (foreign, theirs_) = train(carry)
    widened = optperm.memory.wide_params(own, state)
    foreign = flashoptim_jax.reconstruct_weights(foreign, theirs_.ecc)
    moved = optax.tree.norm(optax.tree.sub(plain, wide))
    apart = [optax.tree.norm(optax.tree.sub(x, plain)) / moved for x in (widened, foreign)]
    # First moments in int8 have more digits than in float8, and rounding to the nearest has less noise.
    np.testing.assert_array_less(np.float32(apart), [0.06, 0.01])


def test_what_each_accepts():
    """Optax's loops take a transformation; the other library has steps of its own."""
    params = make_params()
    tx = optax.chain(optax.clip_by_global_norm(1.0), ours())
    updates, _ = tx.update(params, tx.init(params), params)
    assert jax.tree.structure(optax.apply_updates(params, updates)) == jax.tree.structure(params)
    assert not hasattr(theirs(), "update")
    with pytest.raises(TypeError, match="GradientTransformation"):
        optperm.widen_params(theirs())
    # Params in float32 need no remainder here, and are refused there.
    wide = make_params(jnp.float32)
    assert {leaf.size for leaf in jax.tree.leaves(ours().init(wide).remainder)} == {1}
    with pytest.raises(ValueError, match="already fp32"):
        theirs().init(wide)
    # Any optimizer can be inside.
    lion = optperm.widen_params(optperm.quantize_state(optax.lion(RATE)))
    assert jax.tree.leaves(lion.init(params))
