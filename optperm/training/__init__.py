"""Training: Flax's train states for any method, and `fit`."""

from optperm.training.train_state import Optimizer as Optimizer
from optperm.training.train_state import TrainState as TrainState
