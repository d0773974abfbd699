"""Training: Flax's train states for any method, and `fit`."""

from optperm.training.callbacks import EarlyStopping as EarlyStopping
from optperm.training.callbacks import Event as Event
from optperm.training.callbacks import metrics_writer as metrics_writer
from optperm.training.checkpoints import CheckpointError as CheckpointError
from optperm.training.data import shuffled as shuffled
from optperm.training.history import History as History
from optperm.training.loop import fit as fit
from optperm.training.run import FitResult as FitResult
from optperm.training.train_state import Optimizer as Optimizer
from optperm.training.train_state import TrainState as TrainState
