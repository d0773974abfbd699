"""A user's optimizer may give the fields of its state any names, also the protocols' names."""

import collections
import importlib
import inspect
import pkgutil
import re
import typing
import warnings

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from transformations import EXTRA_ARGS

import optperm
from optperm.core.states import _is_protocol, _list_methods


def method_names():
    """Return the names of the methods in all protocols of the package."""
    modules = [
        importlib.import_module(each.name)
        for each in pkgutil.walk_packages(optperm.__path__, "optperm.")
    ]
    kinds = {v for m in modules for v in vars(m).values() if inspect.isclass(v) and _is_protocol(v)}
    own = [kind for kind in kinds if kind.__module__.startswith("optperm.")]
    return sorted({name for kind in own for name in _list_methods(kind)})


NAMES = (*method_names(), "get_value", "todense")
Named = collections.namedtuple("Named", NAMES)
Plain = collections.namedtuple("Plain", [f"field_{name}" for name in NAMES])


def momentum(kind):
    """Return an optimizer with momentum, whose state has a tree like params for each name."""

    def init(params):
        return kind(*(jax.tree.map(jnp.zeros_like, params) for _ in NAMES))

    def update(updates, state, params=None):
        del params
        moved = [jax.tree.map(lambda m, u: 0.9 * m + u, each, updates) for each in state]
        return jax.tree.map(lambda m: -1e-3 * m, moved[0]), kind(*moved)

    return optax.GradientTransformation(init, update)


def places_of_optimizers(ours):
    """Return the arguments of a factory that are optimizers."""
    hints = typing.get_type_hints(ours.factory, localns={"ArrayTree": typing.Any})
    return [name for name, hint in hints.items() if "GradientTransformation" in str(hint)][:-1]


def evaluate(params, batch):
    e = optperm.evaluate(loops.linear_loss, params, batch)
    return e.grad, EXTRA_ARGS | e.extra_args | {"full_grad_fn": loops.full_gradient}


def trace(tx):
    """Return the program of two steps and the warnings of a state, or the error."""

    def take_steps(params, batches):
        step, start = loops.make_step(tx, evaluate), (params, tx.init(params))
        return jax.tree.leaves([start := step(*start, batch) for batch in batches])

    params = support.random_params()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            program = jax.make_jaxpr(take_steps)(params, loops.linear_batches(2))
            zeros = jax.tree.map(
                lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(tx.init, params)
            )
            optperm.core.states.find_warnings(zeros, params)
        except (ValueError, TypeError) as error:
            return str(error)
    return re.sub("0x[0-9a-f]+", "", str(program)), [str(each.message) for each in seen]


@pytest.mark.spans("sgperm", "diloco", "quantize_state")
def test_fields_with_the_names_of_methods_change_nothing(ours, lenient):
    """Before and after each method, and in the place of each optimizer that it takes: JAX traces the
    same program."""
    assert {"exact", "draw", "phases", "warnings"} <= {*NAMES}
    makers = {
        "before": lambda user: optax.chain(user, ours.factory(**ours.arguments)),
        "after": lambda user: optax.chain(ours.factory(**ours.arguments), user),
    }
    for place in places_of_optimizers(ours):
        makers[place] = lambda user, place=place: ours.factory(**ours.arguments | {place: user})
    for make in makers.values():
        named, plain = (trace(make(momentum(kind))) for kind in (Named, Plain))
        if isinstance(plain, str):
            named = named.replace("Named", "Plain")
        assert named == plain


WRAPPERS = {
    "masked": lambda tx: optax.masked(tx, {"kernel": True, "bias": False}),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "with_loss": lambda tx: optperm.with_loss(tx, loops.linear_loss, jnp.arange(5.0), 2),
    "switch_after": lambda tx: optperm.switch_after(1, tx, tx),
    "lookahead": lambda tx: optax.chain(tx, optax.trace(0.5)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_fields_with_the_names_of_methods_change_nothing_in_wrappers(wrap, lenient):
    named, plain = (trace(wrap(momentum(kind))) for kind in (Named, Plain))
    assert isinstance(plain, tuple)
    assert named == plain


@pytest.mark.usefixtures("one_device")
def test_fit_trains_with_fields_of_any_name():
    x = support.normal((16, 3))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params["w"] - 1) ** 2)

    def train(kind):
        state = optperm.training.TrainState.create(
            apply_fn=None, params={"w": jnp.zeros(3)}, tx=momentum(kind)
        )
        return optperm.training.fit(state, loss_fn, x, batch_size=8, epochs=2).state.params

    support.assert_same_bits(train(Named), train(Plain))
