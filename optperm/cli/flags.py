"""The flags of the data, the network and the run, whose help is what the docstrings say."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Group, Parameter, Token, validators

# The help shows it after what a method takes.
DATA_AND_MODEL = Group("Data and model", sort_key=2)


def whole_from(low: int, high: int | None = None) -> Parameter:
    """A whole number within bounds; of 2.5, cyclopts by itself would take 2."""

    def whole(kind: Any, tokens: Sequence[Token]) -> int:
        return int(tokens[0].value)

    return Parameter(converter=whole, validator=validators.Number(gte=low, lte=high))


def finite(kind: Any, value: float) -> None:
    """Raise a ValueError for an infinite number, and for what is none."""
    if not math.isfinite(value):
        raise ValueError("Must be a finite number.")


Whole = Annotated[int, whole_from(1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained on what, and what is kept.

    Attributes:
      data: 'digits' (scikit-learn's), 'mnist', 'fashion_mnist' or 'cifar10' (by the library `datasets`),
        or an .npz file with x_train, y_train, x_test and y_test.
      valid_share: The share of the training examples to validate on after each epoch; the test examples
        are then left for the end. 0 tests after each epoch.
      model: 'mlp', 'cnn', or module:Class, a flax.linen.Module of your own that maps a batch to logits;
        it gets num_classes and hidden where it has such fields.
      hidden: Units of the hidden layer.
      batch_size: Examples a step, on each device.
      devices: Devices, each with a replica of the network. Where JAX has fewer, the processor stands in
        for them.
      seed: Seed of the initial params, the shuffles and the method.
      epochs: Passes through the data.
      out: Folder for the results, which must be new or empty. Without it one in runs/ that is named by
        METHOD-MODEL-DATA-sSEED, with -2, -3, ... where that exists.
      quiet: Print nothing but errors.
      cache: Keep compiled programs in the cache folder of the user, for a second run.
      checkpoint_every: Epochs from one checkpoint to the next, from which the run can be resumed; where
        it ends it leaves one as well, after Ctrl-C too. 0 for none.
      resume: Go on from the newest checkpoint of this run folder, in a new one, up to --epochs in all;
        the other flags have to be those of that run.
    """

    data: str = "digits"
    valid_share: Annotated[float, Parameter(validator=validators.Number(gte=0, lt=1))] = 0.0
    model: str = "mlp"
    hidden: Annotated[int, whole_from(1, 2**20)] = 256
    batch_size: Whole = 50
    devices: Whole = 1
    seed: Annotated[int, whole_from(0, 2**32 - 1)] = 0
    epochs: Whole = 10
    out: str | None = None
    quiet: Annotated[bool, Parameter(negative=())] = False
    cache: bool = True
    checkpoint_every: Annotated[int, whole_from(0)] = 0
    resume: pathlib.Path | None = None

    @property
    def keeps(self) -> bool:
        """Whether there are checkpoints."""
        return self.checkpoint_every > 0 or self.resume is not None
