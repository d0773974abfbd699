"""The traffic of a compiled program is what its collectives send."""

import collectives
import jax
import jax.numpy as jnp
import pytest

pytestmark = pytest.mark.programs


def test_traffic_is_read_from_the_compiled_program():
    """What a conditional guards counts once a period, also where it leads to a further one."""

    def on_replica(params, a, b):
        def commit():
            total = jax.lax.cond(params[1] > 0, lambda: jax.lax.psum(a, "replica"), lambda: a)
            return total, jax.lax.all_gather(b, "replica")

        rare = jax.lax.cond(params[0] > 0, commit, lambda: (a, jnp.stack([b] * 4)))
        return jax.lax.psum(params, "replica"), rare

    mapped = jax.pmap(on_replica, axis_name="replica", devices=jax.devices()[:4])
    arguments = jnp.ones((4, 2)), jnp.ones((4, 5)), jnp.ones((4, 3), jnp.int8)
    hlo = mapped.lower(*arguments).compile().as_text()
    found = set(map(tuple, collectives.find_collectives(hlo)))
    assert found == {
        ("all-reduce", 2 * 4, False),
        ("all-reduce", 5 * 4, True),
        ("all-gather", 3 * 1, True),
    }
    assert collectives.traffic(hlo, 4) == (1 + 2 / 4, 8 + 23 / 4)


def test_what_is_also_reached_without_a_conditional_is_in_every_step():
    """A computation that a branch calls counts as rare only if nothing else calls it."""
    hlo = """
%shared (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  ROOT %r = f32[4] all-reduce(%a), to_apply=%add
}

%branch (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  ROOT %c = f32[4] call(%p), to_apply=%shared
}

%rare (q: f32[4]) -> f32[4] {
  %q = f32[4] parameter(0)
  ROOT %s = f32[4] all-gather(%q), dimensions={0}
}

ENTRY %main (x: f32[4], i: s32[]) -> f32[4] {
  %x = f32[4] parameter(0)
  %i = s32[] parameter(1)
  %y = f32[4] call(%x), to_apply=%shared
  ROOT %z = f32[4] conditional(%i, %y, %y), branch_computations={%branch, %rare}
}
"""
    found = collectives.find_collectives(hlo)
    assert list(map(tuple, found)) == [("all-reduce", 16, False), ("all-gather", 16, True)]
