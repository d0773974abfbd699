"""Fragments of one's own, and MaxText's schedule of them, against a plain loop."""

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm

pytestmark = pytest.mark.usefixtures("lenient")

SIZE, STEPS, LAYERS = 2, 21, 5
SHAPES = {"embed": (4, 3), "layers": {"kernel": (LAYERS, 3, 2), "bias": (LAYERS, 2)}, "norm": (2,)}
RATE, OUTER_RATE, MOMENTUM = 0.1, 0.7, 0.9


def draw(rng, *lead):
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: rng.normal(size=(*lead, *shape)), SHAPES, is_leaf=is_shape)


def of_layers(number):
    """Fragment 0 is what is not scanned; layer i is in fragment 1 + i modulo the others."""

    def fragment_of(path, leaf):
        if path[0].key != "layers":
            return 0
        return [1 + i % (number - 1) for i in range(LAYERS)]

    return fragment_of


def slices(tree, fragment, number):
    """For each leaf the index of its part in a fragment, or None; replicas stand along a first axis."""
    assign = of_layers(number)

    def index(path, leaf):
        of = assign(path, leaf)
        if isinstance(of, int):
            return slice(None) if of == fragment else None
        return np.flatnonzero(np.array(of) == fragment)

    return jax.tree_util.tree_map_with_path(index, tree)


def simulate(start, targets, *, number, sync_period, delay, alpha):
    """MaxText's loop: a fragment each n-th of the period moves the outer params, and later the inner.

    The period is rounded to a multiple of the fragments.
    """
    gap = round(sync_period / number)
    leaves, structure = jax.tree.flatten(start)
    outer = [np.array(leaf) for leaf in leaves]
    inner = [[np.array(leaf) for leaf in leaves] for _ in range(SIZE)]
    trace = [np.zeros_like(leaf) for leaf in leaves]
    parts = [
        jax.tree.leaves(slices(start, f, number), is_leaf=lambda x: x is None)
        for f in range(number)
    ]
    for step, target in enumerate(targets, start=1):
        wanted = jax.tree.leaves(target)
        for replica, own in enumerate(inner):
            for leaf, goal in zip(own, wanted, strict=True):
                leaf[...] = leaf - RATE * (leaf - goal[replica])
        if step % gap == 0:
            for i, at in enumerate(parts[step % (gap * number) // gap]):
                if at is not None:
                    delta = outer[i][at] - np.mean([own[i][at] for own in inner], axis=0)
                    trace[i][at] = delta + MOMENTUM * trace[i][at]
                    outer[i][at] -= OUTER_RATE * (delta + MOMENTUM * trace[i][at])
        since = step - delay
        if since > 0 and since % gap == 0:
            for i, at in enumerate(parts[since % (gap * number) // gap]):
                if at is not None:
                    for own in inner:
                        own[i][at] = alpha * own[i][at] + (1 - alpha) * outer[i][at]
        yield [structure.unflatten([leaf.copy() for leaf in own]) for own in inner]


CELLS = [(n, delay, alpha) for n in (2, 3, 5) for delay in (0, 1, 4) for alpha in (0.0, 0.5)]


@pytest.mark.parametrize(
    ("number", "delay", "alpha"), support.every_night(CELLS, [(3, 4, 0.5), (2, 0, 0.0)])
)
def test_equals_maxtexts_streaming_schedule(number, delay, alpha):
    """Scanned layers, a period that is rounded, a delay beyond the next fragment: 1e-12 in float64."""
    rng = np.random.default_rng(0)
    start, targets = draw(rng), [draw(rng, SIZE) for _ in range(STEPS)]
    sync_period = 3 * number + 1
    plan = optperm.distributed.Every(number * round(sync_period / number), number, delay)
    with jax.enable_x64(True):
        tx = optperm.diloco(
            optax.sgd(RATE),
            optax.sgd(OUTER_RATE, momentum=MOMENTUM, nesterov=True),
            every=plan,
            axis_name=replicas.AXIS,
            mixing=alpha,
            fragment_of=of_layers(number),
        )
        evaluate = lambda p, target: (jax.tree.map(jnp.subtract, p, target), {})  # noqa: E731
        trail = loops.train(tx, start, targets, evaluate=evaluate, how="vmap", size=SIZE)
        options = {"number": number, "sync_period": sync_period, "delay": delay, "alpha": alpha}
        wanted = simulate(start, targets, **options)
        for (params, _), each in zip(trail, wanted, strict=True):
            support.assert_close(params, replicas.stack(each), atol=1e-12)


def test_slices_land_exactly_and_on_stacked_states():
    """After an exchange the slices of its fragment are the center's bits, within vmap and outside."""
    plan, params = (
        optperm.distributed.Every(4, 2),
        {"layers": jnp.linspace(0.1, 0.7, 12).reshape(4, 3)},
    )
    fragment_of = {"layers": (0, 1, 1, 0)}
    tx = optperm.diloco(
        optax.sgd(0.3), every=plan, axis_name=replicas.AXIS, fragment_of=fragment_of
    )
    targets = jnp.array([1.0, 2.0])
    p, s = jax.tree.map(lambda x: jnp.stack([x, x]), params), None
    s = jax.vmap(tx.init)(p)

    def update(p, s, target):
        grads = jax.tree.map(lambda p: p - target, p)
        updates, s = tx.update(grads, s, p)
        return updates, s, optperm.apply_updates(p, updates, s)

    step = jax.jit(jax.vmap(update, axis_name=replicas.AXIS))
    for number, rows in ((1, []), (2, [1, 2]), (3, []), (4, [0, 3])):
        updates, s, within = step(p, s, targets)
        p = optperm.apply_updates(p, updates, s)
        support.assert_same_bits(p, within)
        center = optperm.distributed.center_params(s)["layers"]
        is_same = np.array((p["layers"] == center).all(axis=(0, 2)))
        assert np.flatnonzero(is_same).tolist() == rows, number


def test_a_state_of_another_plan_is_refused():
    params, plan = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}, optperm.distributed.Every(4, 2)
    state = optperm.diloco(optax.sgd(0.1), every=plan).init(params)
    for other in (optperm.distributed.Every(4, 3), optperm.distributed.Every(4, 2, 1), 4):
        tx = optperm.diloco(optax.sgd(0.1), every=other)
        with pytest.raises(
            ValueError, match="belongs to a plan with fragments=2 and no delay, not to"
        ):
            tx.update(params, state, params)
