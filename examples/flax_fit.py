"""`optperm.training.fit` on a model with BatchNorm and dropout: with SVRG, and with SGPerm and Adam.

Each method trains for two epochs, writes a checkpoint, and resumes from it in a fresh state until the
test loss has hardly fallen in two epochs. SVRG takes a snapshot with the gradient over all images before
each epoch. SGPerm permutes the weights that were drawn at random; the params of BatchNorm start at equal
values, so Adam trains them. The script prints the accuracies, and draws loss and accuracy of both.

    python examples/flax_fit.py [--epochs 12] [--out FILE.png]
"""

import tempfile
from collections.abc import Sequence
from typing import Any

import flags
import jax
import matplotlib.style
import optax
from digits import accuracy, cross_entropy, load
from flax import linen as nn
from matplotlib.figure import Figure

import optperm
from optperm.training import EarlyStopping, FitResult, TrainState, fit

BREAK_AFTER = 2  # epochs


class Net(nn.Module):
    """One hidden layer with BatchNorm and dropout."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Maps (batch, 64) to logits (batch, 10)."""
        x = nn.Dense(64, bias_init=nn.initializers.normal(0.1))(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(10, bias_init=nn.initializers.normal(0.1))(x)


MODEL = Net()


def loss_fn(params: Any, batch: Any, *, model_state: Any, rng: jax.Array) -> tuple[jax.Array, Any]:
    """Mean cross-entropy and new batch statistics."""
    x, y = batch
    variables, kept = {"params": params, **model_state}, list(model_state)
    rngs = {"dropout": rng}
    logits, model_state = MODEL.apply(variables, x, train=True, mutable=kept, rngs=rngs)
    return cross_entropy(logits, y), model_state


def test(params: Any, batch: Any, *, model_state: Any) -> dict[str, jax.Array]:
    """Loss and accuracy without dropout, at the running averages."""
    x, y = batch
    logits = MODEL.apply({"params": params, **model_state}, x, train=False)
    return {"loss": cross_entropy(logits, y), "accuracy": accuracy(logits, y)}


def by_module(params: Any) -> Any:
    """Which of two optimizers trains each param."""
    kinds = {name: "adam" if "BatchNorm" in name else "sgperm" for name in params}
    return {name: jax.tree.map(lambda _, k=kinds[name]: k, params[name]) for name in params}


METHODS = {
    "svrg": optax.chain(optperm.svrg(0.5), optax.sgd(0.1)),
    "sgperm": optax.partition({"sgperm": optperm.sgperm(), "adam": optax.adam(1e-3)}, by_module),
}


def train(method: str, epochs: int, **checkpoint: Any) -> FitResult:
    """Trains from the start, or from a checkpoint, for so many epochs in all at the most."""
    (x, y), test_data = load()
    variables = MODEL.init(jax.random.key(0), x[:1], train=False)
    fresh = {"params": variables.pop("params"), "model_state": variables, "rng": jax.random.key(1)}
    state = TrainState.create(apply_fn=MODEL.apply, tx=METHODS[method], **fresh)
    return fit(
        state,
        loss_fn,
        (x, y),
        epochs=epochs,
        batch_size=32,
        eval_fn=test,
        eval_data=test_data,
        epoch_start=optperm.variance.take_snapshot if method == "svrg" else None,
        on_epoch_end=EarlyStopping("eval_loss", patience=2, min_delta=0.02),
        **checkpoint,
    )


@matplotlib.style.context("optperm.pictures")
def main(argv: Sequence[str] | None = None) -> dict[str, FitResult]:
    """Trains by each method, with a break; returns the results."""
    parser = flags.Parser(__doc__, "flax-fit.png")
    parser.count("epochs", 12, "the most to train", least=BREAK_AFTER)
    options = parser.parse_args(argv)
    results, figure = {}, Figure()
    panels = figure.subplots(1, 2)
    for method in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            train(method, BREAK_AFTER, checkpoints=folder)
            result = train(method, options.epochs, checkpoints=folder, resume=True)
        reached = [f"{value:.3f}" for value in result.history.epochs["eval_accuracy"]]
        print(f"{method:6} {result.ended} after epoch {result.epoch}; accuracy", *reached)
        results[method], epochs = result, result.history.epochs
        for axes, name in zip(panels, ("eval_loss", "eval_accuracy"), strict=True):
            axes.plot(epochs["epoch"], epochs[name], "o-")
            axes.set(xlabel="epoch", ylabel=name.replace("eval_", "test "))
    figure.legend(panels[0].lines, METHODS, loc="outside lower center", ncols=2)
    figure.savefig(options.out)
    return results


if __name__ == "__main__":
    main()
