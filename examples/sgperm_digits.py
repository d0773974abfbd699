"""SGPerm: an MLP learns scikit-learn's digits while its initial weights only trade places.

`optperm.training.fit` trains a linen model. The script exports the trained network as a permutation, and
rebuilds the network from its seed and the permutation, bit for bit. Over the steps it draws the test
accuracy and the fraction of weights that are at their initial places, among them the weights of pixels
that are always blank.

    python examples/sgperm_digits.py [--steps 512] [--out sgperm-digits.png]
"""

from collections.abc import Sequence
from typing import Any

import flags
import jax
import jax.numpy as jnp
import matplotlib.style
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
    """The fraction of all weights with the value that their place had first."""
    leaves = zip(jax.tree.leaves(params), jax.tree.leaves(initial), strict=True)
    return float(np.mean(np.concatenate([np.ravel(now == first) for now, first in leaves])))


@matplotlib.style.context("optperm.pictures")
def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Trains, rebuilds, prints and draws; returns the curves, the trained and the rebuilt params."""
    parser = flags.Parser(__doc__, "sgperm-digits.png")
    parser.count("steps", 512, "how many steps to train")
    options = parser.parse_args(argv)
    train_data, (x, y) = load()
    initial, curves = draw_weights(), []

    def watch(event: Event) -> None:
        if event.step.bit_count() == 1:  # a power of two
            params = event.state.params
            reached = accuracy(MODEL.apply({"params": params}, x), y)
            curves.append((event.step, float(reached), share_at_home(params, initial)))

    state = TrainState.create(
        apply_fn=MODEL.apply, params=initial, tx=optperm.sgperm(num_steps=options.steps)
    )
    result = fit(state, loss_fn, train_data, steps=options.steps, batch_size=32, every={1: watch})

    permutation = optperm.permutation.export_permutation(initial, result.state.opt_state)
    rebuilt = optperm.permutation.apply_permutation(draw_weights(), permutation)
    pairs = zip(jax.tree.leaves(rebuilt), jax.tree.leaves(result.state.params), strict=True)
    same = all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    step, reached, at_home = curves[-1]
    print(f"after {step} steps: test accuracy {reached:.3f}, {at_home:.1%} of the weights at home")
    print(f"rebuilt from the seed and the permutation, bit for bit: {same}")

    figure = Figure(figsize=(6, 4.2))
    above, below = figure.subplots(2, 1, sharex=True)
    steps, reached, at_home = zip(*curves, strict=True)
    above.semilogx(steps, reached, "o-", base=2)
    above.set(ylabel="test accuracy", ylim=(None, 1))
    below.semilogx(steps, at_home, "o-", base=2, color="C1")
    below.set(xlabel="step", ylabel="fraction of weights\nwhere they began", ylim=(0, None))
    figure.savefig(options.out)
    trained = result.state.params
    return {"curves": np.array(curves), "trained": trained, "rebuilt": rebuilt}


if __name__ == "__main__":
    main()
