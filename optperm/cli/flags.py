"""What flags are made of, and those of the data, the network and the run.

The help of a flag is what the docstring says of it.
"""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from cyclopts import Group, Parameter, Token, validators

from optperm.cli.errors import UsageError

# In the order in which the help shows them: what a method takes comes first.
MACHINES = Group("Machines", sort_key=3)
DATA_AND_MODEL = Group("Data and model", sort_key=2)


def whole_from(low: int, high: int | None = None) -> Parameter:
    """A whole number within bounds; of 2.5, cyclopts by itself would take 2."""

    def whole(kind: Any, tokens: Sequence[Token]) -> int:
        return int(tokens[0].value)

    return Parameter(converter=whole, validator=validators.Number(gte=low, lte=high))


def finite(kind: Any, value: float) -> None:
    """Raises a ValueError for an infinite number, and for what is none."""
    if not math.isfinite(value):
        raise ValueError("Must be a finite number.")


Whole = Annotated[int, whole_from(1)]
Switch = Annotated[bool, Parameter(negative=())]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network:
    """What is trained on what, and where it is written.

    Attributes:
      data: 'digits' (scikit-learn's), a folder of MNIST-format IDX files, or an .npz file with x_train,
        y_train, x_test and y_test.
      model: The network.
      hidden: Units of the hidden layer.
      batch_size: Examples a step, on each device.
      seed: Seed of the initial params, the shuffles and the method; the first one, of several.
      epochs: Passes through the data.
      out: Folder for the results, which must be new or empty. Without it one in runs/ that is named by
        METHOD-MODEL-DATA-sSEED, with -2, -3, ... where that exists.
      quiet: Print nothing but errors.
    """

    data: str = "digits"
    model: Literal["mlp", "cnn"] = "mlp"
    hidden: Annotated[int, whole_from(1, 2**20)] = 256
    batch_size: Whole = 50
    seed: Annotated[int, whole_from(0, 2**32 - 1)] = 0
    epochs: Whole = 10
    out: str | None = None
    quiet: Switch = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(Network):
    """What to keep.

    Attributes:
      checkpoint_every: Epochs from one checkpoint to the next, from which the run can be resumed; where
        it ends it leaves one as well, after Ctrl-C too. 0 for none.
      checkpoint_keep: How many of the newest checkpoints to keep. Without it all.
      resume: Go on from the newest checkpoint of this run folder, in a new one, up to --epochs in all;
        the other flags have to be those of that run.
      from_epoch: With --resume: go on from the checkpoint after this epoch instead.
    """

    checkpoint_every: Annotated[int, whole_from(0)] = 0
    checkpoint_keep: Whole | None = None
    resume: pathlib.Path | None = None
    from_epoch: Annotated[int, whole_from(0)] | None = None

    def __post_init__(self) -> None:
        if self.from_epoch is not None and self.resume is None:
            raise UsageError("--from-epoch goes with --resume FOLDER: pass that as well.")
        if self.checkpoint_keep is not None and not self.keeps:
            raise UsageError("--checkpoint-keep goes with --checkpoint-every: pass that as well.")

    @property
    def keeps(self) -> bool:
        """Whether there are checkpoints."""
        return self.checkpoint_every > 0 or self.resume is not None
