"""The flags for the data, the network and the run; their help is the docstring of `Run`."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Group, Parameter, Token, validators

# The help shows this group after the flags of the method.
DATA_AND_MODEL = Group("Data and model", sort_key=2)


def make_whole(low: int, high: int | None = None) -> Parameter:
    """Make the parameter for an integer within bounds; cyclopts alone would read 2.5 as 2."""

    def parse(kind: Any, tokens: Sequence[Token]) -> int:
        return int(tokens[0].value)

    return Parameter(converter=parse, validator=validators.Number(gte=low, lte=high))


def refuse_infinite(kind: Any, value: float) -> None:
    """Raise a ValueError for an infinite number or NaN."""
    if not math.isfinite(value):
        raise ValueError("Must be a finite number.")


Whole = Annotated[int, make_whole(1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The data, the network and the files of a run.

    Attributes:
      data: 'digits' (of scikit-learn), 'mnist', 'fashion_mnist' or 'cifar10' (by the library
        `datasets`), or an .npz file with x_train, y_train, x_test and y_test.
      valid_fraction: The fraction of the training examples for validation after each epoch; the test
        then runs only at the end. With 0, the test runs after each epoch.
      model: 'mlp', 'cnn', or module:Class, your own flax.linen.Module that maps a batch to logits, with
        num_classes and hidden if it has these fields.
      hidden: The number of units of the hidden layer.
      batch_size: The number of examples per step on each device.
      devices: The number of devices, each with a replica of the network. If JAX has fewer devices,
        virtual CPU devices are used.
      seed: The seed of the initial params, the shuffles and the method.
      epochs: The number of passes through the data.
      out: The folder for the results, which must be new or empty. The default is a folder in runs/ named
        METHOD-MODEL-DATA-sSEED, with -2, -3, ... if it exists.
      quiet: Print only errors.
      cache: Store compiled programs in the user's cache folder, for later runs.
      checkpoint_every: The number of epochs between checkpoints, from which the run can be resumed. The
        end of a run also writes a checkpoint, even after Ctrl-C. 0 for no checkpoints.
      checkpoint_keep: The number of newest checkpoints to keep; by default all.
      resume: Resume from the newest checkpoint of this run folder, in a new folder, up to a total of
        --epochs. The other flags must be the same as in the earlier run.
    """

    data: str = "digits"
    valid_fraction: Annotated[float, Parameter(validator=validators.Number(gte=0, lt=1))] = 0.0
    model: str = "mlp"
    hidden: Annotated[int, make_whole(1, 2**20)] = 256
    batch_size: Whole = 50
    devices: Whole = 1
    seed: Annotated[int, make_whole(0, 2**32 - 1)] = 0
    epochs: Whole = 10
    out: str | None = None
    quiet: Annotated[bool, Parameter(negative=())] = False
    cache: bool = True
    checkpoint_every: Annotated[int, make_whole(0)] = 0
    checkpoint_keep: Whole | None = None
    resume: pathlib.Path | None = None

    @property
    def keeps(self) -> bool:
        """True if the run writes checkpoints."""
        return self.checkpoint_every > 0 or self.resume is not None
