"""Training: Flax train states for any method, and `fit`."""

from optperm.training._callbacks import EarlyStopping as EarlyStopping
from optperm.training._callbacks import Event as Event
from optperm.training._callbacks import metrics_writer as metrics_writer
from optperm.training._checkpoints import CheckpointError as CheckpointError
from optperm.training._checkpoints import Checkpoints as Checkpoints
from optperm.training._data import shuffled as shuffled
from optperm.training._history import History as History
from optperm.training._loop import fit as fit
from optperm.training._run import FitResult as FitResult
from optperm.training._train_state import Optimizer as Optimizer
from optperm.training._train_state import TrainState as TrainState
from optperm.training._validation import Validation as Validation
