"""Training methods for JAX as composable Optax gradient transformations."""

from optperm.distributed.agn import agn as agn
from optperm.distributed.diloco import diloco as diloco
from optperm.distributed.local_steps import LocalStepsState as LocalStepsState
from optperm.distributed.local_steps import center_params as center_params
from optperm.evaluation import Evaluation as Evaluation
from optperm.evaluation import evaluate as evaluate
from optperm.permutation.export import apply_permutation as apply_permutation
from optperm.permutation.export import export_permutation as export_permutation
from optperm.permutation.export import permuted_params as permuted_params
from optperm.permutation.sgperm import PermuteByCyclesState as PermuteByCyclesState
from optperm.permutation.sgperm import permute_by_cycles as permute_by_cycles
from optperm.permutation.sgperm import sgperm as sgperm
from optperm.placement import apply_updates as apply_updates
from optperm.subspace.dim_reduce import DimReduceState as DimReduceState
from optperm.subspace.dim_reduce import dim_reduce as dim_reduce
from optperm.subspace.dim_reduce import set_basis as set_basis
from optperm.subspace.dldr import DldrState as DldrState
from optperm.subspace.dldr import dldr as dldr
from optperm.subspace.pca import pca_basis as pca_basis
from optperm.subspace.trajectory import TrajectoryState as TrajectoryState
from optperm.subspace.trajectory import record_trajectory as record_trajectory
from optperm.subspace.trajectory import trajectory as trajectory
from optperm.variance.full_gradient import full_gradient as full_gradient
from optperm.variance.svrg import SvrgState as SvrgState
from optperm.variance.svrg import svrg as svrg
from optperm.variance.svrg import take_snapshot as take_snapshot
