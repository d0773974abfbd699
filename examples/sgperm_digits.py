"""SGPerm: an MLP learns scikit-learn's digits while its initial weights only trade places.

`optperm.training.fit` trains a linen model. What was learned is exported as a permutation, with which
the network is built again from its seed, bit for bit. Draws, over the steps, the test accuracy and the
share of weights that are where they began, among them those of pixels that are always blank.

    python examples/sgperm_digits.py [--steps 512] [--out sgperm-digits.png]
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from digits import MLP, accuracy, cross_entropy, load
from flax import linen as nn
from matplotlib.figure import Figure

import optperm
from optperm.training import Event, TrainState, fit

# A bias whose entries are all equal could not be trained by permuting it.
MODEL = MLP(hidden=64, bias_init=nn.initializers.normal(0.1))


def draw_weights() -> Any:
    """The initial params, from a seed: never any other values."""
    return MODEL.init(jax.random.key(0), jnp.zeros((1, 64)))["params"]


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Mean cross-entropy."""
    x, y = batch
    return cross_entropy(MODEL.apply({"params": params}, x), y)


def share_at_home(params: Any, initial: Any) -> float:
    """The share of all weights with the value that their place had first."""
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(initial), strict=True)
    return float(np.mean(np.concatenate([np.ravel(now == first) for now, first in leaves])))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains, rebuilds, prints and draws; returns the curves, the trained and the rebuilt params."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--out", default="sgperm-digits.png")
    options = parser.parse_args(argv)
    train_data, (x, y) = load()
    initial, curves = draw_weights(), []

    def watch(event: Event) -> None:
        if event.step.bit_count() == 1:  # a power of two
            params = event.state.params
            reached = accuracy(MODEL.apply({"params": params}, x), y)
            curves.append((event.step, float(reached), share_at_home(params, initial)))

    state = TrainState.create(
        apply_fn=MODEL.apply, params=initial, tx=optperm.sgperm(aggressiveness=0.1)
    )
    result = fit(state, loss_fn, train_data, steps=options.steps, batch_size=32, every={1: watch})

    permutation = optperm.export_permutation(initial, result.state.opt_state)
    rebuilt = optperm.apply_permutation(draw_weights(), permutation)
    pairs = zip(jax.tree.leaves(rebuilt), jax.tree.leaves(result.state.params), strict=True)
    same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    step, reached, at_home = curves[-1]
    print(f"after {step} steps: test accuracy {reached:.3f}, {at_home:.1%} of the weights at home")
    print(f"rebuilt from the seed and the permutation, bit for bit: {same}")

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    steps, reached, at_home = zip(*curves, strict=True)
    axes.semilogx(steps, reached, "o-", base=2, label="test accuracy")
    axes.semilogx(steps, at_home, "o-", base=2, label="share of weights where they began")
    axes.set(xlabel="step", ylim=(0, 1))
    axes.legend()
    figure.savefig(options.out, dpi=120)
    trained = result.state.params
    return {"curves": np.array(curves), "trained": trained, "rebuilt": rebuilt}


if __name__ == "__main__":
    main()
