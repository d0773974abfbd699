"""Small models with batch statistics and dropout, in linen and in nnx, and a method of each kind."""

import contextlib
import functools
import unittest.mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import optperm
from optperm import training
from optperm.training import _run as run

FEATURES, CLASSES, EXAMPLES, BATCH = 5, 3, 40, 8
MAPPED = ("mandt_sgd", "agn", "diloco")  # take the name of an axis


def method(name, axis_name=None):
    """A transformation; the same object each time, so that what it was compiled into is found."""
    return _method(name, axis_name)


@functools.cache
def _method(name, axis_name):
    return {
        "adam": lambda: optax.adam(1e-2),
        "sgperm": lambda: optperm.sgperm(0.3, partition_ratio=0.5, min_partition_size=2),
        "svrg": lambda: optax.chain(optperm.svrg(0.5), optax.sgd(0.05)),
        "dldr": lambda: optperm.dldr(
            optax.sgd(0.1), optperm.dim_reduce(n_components=3), every=2, num_snapshots=4
        ),
        # With batch statistics the examples of a batch cannot be told apart.
        "mandt_sgd": lambda: optperm.mandt_sgd(
            EXAMPLES, BATCH, estimator="two_batches", max_step=0.03, axis_name=axis_name
        ),
        "agn": lambda: optperm.agn(optax.sgd(0.1), every=3, axis_name=axis_name),
        "diloco": lambda: optperm.diloco(optax.adam(1e-2), every=3, axis_name=axis_name),
    }[name]()


def every_second(epoch):
    """The schedule of SVRG's snapshots."""
    return optperm.variance.take_snapshot if epoch % 2 == 1 else None


def make_data(features, classes):
    """Draw examples whose label is the largest of their first features."""
    x = np.random.default_rng(0).normal(size=(EXAMPLES, features)).astype(np.float32)
    return {"x": x, "y": np.argmax(x[:, :classes], axis=1).astype(np.int32)}


DATA = make_data(FEATURES, CLASSES)


def batches(epoch, *, source=DATA, key=0, replace=False, replicas=()):
    """Those of an epoch that `fit` takes from arrays, perhaps divided along a leading axis."""
    order = np.asarray(training.shuffled(key, epoch, EXAMPLES, replace)).reshape(-1, BATCH)
    for hand in order.reshape(len(order), *replicas, -1):
        yield {name: leaf[hand] for name, leaf in source.items()}


def all_batches(epochs, **options):
    """Those of the first epochs."""
    for epoch in range(1, epochs + 1):
        yield from batches(epoch, **options)


class Net(nn.Module):
    """One hidden layer; every parameter can be permuted."""

    @nn.compact
    def __call__(self, x, train):
        bias = nn.initializers.normal()
        x = nn.Dense(6, bias_init=bias)(x)
        x = nn.BatchNorm(use_running_average=not train, use_scale=False, use_bias=False)(x)
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(x))
        return nn.Dense(CLASSES, bias_init=bias)(x)


class NnxNet(nnx.Module):
    """The same in nnx."""

    def __init__(self):
        rngs, bias = nnx.Rngs(params=0, dropout=1), nnx.initializers.normal()
        self.hidden = nnx.Linear(FEATURES, 6, bias_init=bias, rngs=rngs)
        self.norm = nnx.BatchNorm(6, use_scale=False, use_bias=False, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(6, CLASSES, bias_init=bias, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))


net = Net()


def cross_entropy(logits, y):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


def accuracy(logits, y):
    return {"accuracy": jnp.mean((jnp.argmax(logits, axis=-1) == y).astype(jnp.float32))}


def linen_loss(params, batch, *, model_state, rng):
    logits, model_state = net.apply(
        {"params": params, **model_state},
        batch["x"],
        train=True,
        mutable=list(model_state),
        rngs={"dropout": rng},
    )
    return cross_entropy(logits, batch["y"]), model_state


def linen_accuracy(params, batch, *, model_state):
    logits = net.apply({"params": params, **model_state}, batch["x"], train=False)
    return accuracy(logits, batch["y"])


def nnx_loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def nnx_accuracy(model, batch):
    return accuracy(model(batch["x"]), batch["y"])


LOSS = {"linen": linen_loss, "nnx": nnx_loss}
ACCURACY = {"linen": linen_accuracy, "nnx": nnx_accuracy}


@functools.cache
def variables():
    x = np.zeros((1, FEATURES), np.float32)
    return jax.jit(net.init, static_argnames="train")(jax.random.key(0), x, train=False)


def linen_state(tx):
    return training.TrainState.create(
        apply_fn=net.apply,
        params=variables()["params"],
        tx=tx,
        model_state={"batch_stats": variables()["batch_stats"]},
        rng=jax.random.key(1),
    )


def subject(kind, tx):
    """What `fit` takes first, and the arguments that go with it."""
    if kind == "linen":
        return (linen_state(tx),), {}
    model = NnxNet()
    return (model,), {"optimizer": training.Optimizer(model, tx, wrt=nnx.Param)}


def on(devices, *, mapped=False):
    """The arguments of `fit` for a number of devices of each process, perhaps as replicas."""
    if devices is None:
        return {}
    here = [jax.local_devices(index)[:devices] for index in range(jax.process_count())]
    mesh = Mesh(np.array(here).ravel(), ("replica",))
    return {"mesh": mesh, "axis_name": "replica"} if mapped else {"mesh": mesh}


def arguments(options):
    """Gather flat options in the values and the dict that `fit` takes."""
    options = {name: value for name, value in options.items() if value is not None}

    own, values = dict(options), {}
    words = {"eval_fn": "fn", "eval_data": "data", "eval_batch_size": "batch_size"}
    words |= {"eval_every": "every", "keep_best": "keep_best"}
    given = {word: own.pop(name) for name, word in words.items() if name in own}
    if given:
        values["validation"] = training.Validation(**given)
    words = {"checkpoints": "folder", "checkpoint_every": "every", "checkpoint_keep": "keep"}
    words |= {"resume": "resume", "on_signal": "on_signal"}
    given = {word: own.pop(name) for name, word in words.items() if name in own}
    if given:
        values["checkpoints"] = training.Checkpoints(**given)
    callbacks = dict(own.pop("every", {}))
    words = {"on_epoch_end": "epoch", "epoch_start": "epoch_start"}
    callbacks |= {word: own.pop(name) for name, word in words.items() if name in own}
    return own | values | ({"callbacks": callbacks} if callbacks else {})


def fit(kind, name, *, loss_fn=None, train_data=DATA, devices=None, **options):
    """`training.fit` of a model by a method, from the start."""
    mapped = devices is not None and name in MAPPED
    positional, keywords = subject(kind, method(name, "replica" if mapped else None))
    keywords |= {"batch_size": BATCH if train_data is DATA else None}
    keywords |= {"epoch_start": every_second if name == "svrg" else None, **options}
    where = on(devices, mapped=mapped)
    return training.fit(
        *positional, loss_fn or LOSS[kind], train_data, **where, **arguments(keywords)
    )


@contextlib.contextmanager
def runs():
    """Collect the runs of `fit` in a context: where they lie, and what each replica has."""
    made, init = [], run.Run.__init__
    with unittest.mock.patch.object(
        run.Run, "__init__", lambda self, given: made.append(self) or init(self, given)
    ):
        yield made


def arrays(result):
    """All arrays of what was trained, as NumPy's."""
    if result.state is not None:
        state = result.state.replace(rng=jax.random.key_data(result.state.rng))
        return jax.tree.map(np.asarray, state)
    return jax.tree.map(
        np.asarray,
        [
            nnx.to_pure_dict(nnx.state(result.model, nnx.Not(nnx.RngKey))),
            jax.tree.leaves(nnx.as_pure(result.optimizer.opt_state)),
            result.optimizer.step.get_value(),
        ],
    )


def params_of(trained):
    """The params of a `TrainState` or of a model of `flax.nnx`, by name."""
    is_model = isinstance(trained, nnx.Module)
    return nnx.to_pure_dict(nnx.state(trained, nnx.Param)) if is_model else trained.params


def linear_loss(params, batch):
    return cross_entropy(batch["x"] @ params["w"], batch["y"])


EVALUATION = {"eval_fn": lambda *of: {"loss": linear_loss(*of)}, "eval_data": DATA}


def linear_params(dtype=jnp.float32):
    return {"w": jnp.ones((FEATURES, CLASSES), dtype)}


def linear_fit(loss_fn=linear_loss, train_data=DATA, tx=None, params=None, **options):
    """`training.fit` of few params, or of those that are given; options may be parts of the state."""
    params = linear_params() if params is None else params
    tx = method("adam") if tx is None else tx
    parts = options.keys() & {"opt_state", "model_state", "rng"}
    start = {name: options.pop(name) for name in parts}
    state = training.TrainState.create(apply_fn=None, params=params, tx=tx, **start)
    options = {"batch_size": BATCH if train_data is DATA else None, **options}
    return training.fit(state, loss_fn, train_data, **arguments(options))
