"""Training methods for JAX as composable Optax gradient transformations."""

import importlib as _importlib
import types as _types
import typing as _typing

from optperm.bayes.calibration import Calibration as Calibration
from optperm.bayes.calibration import Scores as Scores
from optperm.bayes.calibration import auroc as auroc
from optperm.bayes.calibration import calibration as calibration
from optperm.bayes.calibration import classification_scores as classification_scores
from optperm.bayes.calibration import interval_coverage as interval_coverage
from optperm.bayes.constant_sgd import ConstantSgdState as ConstantSgdState
from optperm.bayes.constant_sgd import constant_sgd as constant_sgd
from optperm.bayes.draws import sample_params as sample_params
from optperm.bayes.draws import swag_mean as swag_mean
from optperm.bayes.ivon import IvonState as IvonState
from optperm.bayes.ivon import ivon as ivon
from optperm.bayes.kernel import NoiseKernel as NoiseKernel
from optperm.bayes.kernel import adapted_kernel as adapted_kernel
from optperm.bayes.langevin import SghmcState as SghmcState
from optperm.bayes.langevin import SgldState as SgldState
from optperm.bayes.langevin import sghmc as sghmc
from optperm.bayes.langevin import sgld as sgld
from optperm.bayes.mandt_sgd import MandtSgdState as MandtSgdState
from optperm.bayes.mandt_sgd import mandt_sgd as mandt_sgd
from optperm.bayes.masters import MasterState as MasterState
from optperm.bayes.predictive import Ensemble as Ensemble
from optperm.bayes.predictive import Predictions as Predictions
from optperm.bayes.predictive import posterior_predictive as posterior_predictive
from optperm.bayes.prior import normal_prior as normal_prior
from optperm.bayes.report import PosteriorReport as PosteriorReport
from optperm.bayes.report import posterior_report as posterior_report
from optperm.bayes.sample import sample as sample
from optperm.bayes.sampling import Samples as Samples
from optperm.bayes.sampling import draw_samples as draw_samples
from optperm.bayes.sampling import samples_as_dict as samples_as_dict
from optperm.bayes.stationary import gaussian_kl as gaussian_kl
from optperm.bayes.stationary import stationary_covariance as stationary_covariance
from optperm.bayes.swag import SwagState as SwagState
from optperm.bayes.swag import swag as swag
from optperm.distributed.agn import AgnState as AgnState
from optperm.distributed.agn import agn as agn
from optperm.distributed.center import center_params as center_params
from optperm.distributed.compression import compress_quantized as compress_quantized
from optperm.distributed.compression import compress_top_k as compress_top_k
from optperm.distributed.diloco import DilocoState as DilocoState
from optperm.distributed.diloco import diloco as diloco
from optperm.distributed.plans import Every as Every
from optperm.evaluation import Evaluation as Evaluation
from optperm.evaluation import evaluate as evaluate
from optperm.exact import apply_updates as apply_updates
from optperm.permutation.export import apply_permutation as apply_permutation
from optperm.permutation.export import export_permutation as export_permutation
from optperm.permutation.export import permuted_params as permuted_params
from optperm.permutation.laperm import LapermState as LapermState
from optperm.permutation.laperm import laperm as laperm
from optperm.permutation.permute_by_cycles import PermuteByCyclesState as PermuteByCyclesState
from optperm.permutation.permute_by_cycles import permute_by_cycles as permute_by_cycles
from optperm.permutation.sgperm import sgperm as sgperm
from optperm.sparsity.export import remove_units as remove_units
from optperm.sparsity.export import to_sparse as to_sparse
from optperm.sparsity.gradual import prune_gradually as prune_gradually
from optperm.sparsity.masks import MaskElementsState as MaskElementsState
from optperm.sparsity.masks import freeze as freeze
from optperm.sparsity.masks import mask_elements as mask_elements
from optperm.sparsity.masks import prune as prune
from optperm.sparsity.masks import reset_masks as reset_masks
from optperm.sparsity.rigl import rigl as rigl
from optperm.sparsity.shares import erk_sparsity as erk_sparsity
from optperm.sparsity.sparse_state import SparseState as SparseState
from optperm.sparsity.straight_through import keep_top as keep_top
from optperm.sparsity.structures import Blocks as Blocks
from optperm.sparsity.structures import NOfM as NOfM
from optperm.sparsity.structures import Units as Units
from optperm.subspace.apollo import ApolloState as ApolloState
from optperm.subspace.apollo import apollo as apollo
from optperm.subspace.basis import set_basis as set_basis
from optperm.subspace.dim_reduce import DimReduceState as DimReduceState
from optperm.subspace.dim_reduce import dim_reduce as dim_reduce
from optperm.subspace.dldr import DldrState as DldrState
from optperm.subspace.dldr import dldr as dldr
from optperm.subspace.low_rank import LowRankState as LowRankState
from optperm.subspace.low_rank import low_rank as low_rank
from optperm.subspace.low_rank_report import LowRankReport as LowRankReport
from optperm.subspace.low_rank_report import low_rank_report as low_rank_report
from optperm.subspace.pca import pca_basis as pca_basis
from optperm.subspace.project import ProjectState as ProjectState
from optperm.subspace.project import project as project
from optperm.subspace.trajectory import TrajectoryState as TrajectoryState
from optperm.subspace.trajectory import record_trajectory as record_trajectory
from optperm.subspace.trajectory import trajectory as trajectory
from optperm.subspace.twa import TwaState as TwaState
from optperm.subspace.twa import twa as twa
from optperm.switching import SwitchAfterState as SwitchAfterState
from optperm.switching import switch_after as switch_after
from optperm.variance.full_gradient import full_gradient as full_gradient
from optperm.variance.katyusha import KatyushaState as KatyushaState
from optperm.variance.katyusha import katyusha as katyusha
from optperm.variance.learning_rate import svrg_learning_rate as svrg_learning_rate
from optperm.variance.mars import MarsState as MarsState
from optperm.variance.mars import mars as mars
from optperm.variance.proximal import ProximalState as ProximalState
from optperm.variance.proximal import proximal as proximal
from optperm.variance.recursive import recursive_gradient as recursive_gradient
from optperm.variance.svrg import SvrgState as SvrgState
from optperm.variance.svrg import svrg as svrg
from optperm.variance.svrg import take_snapshot as take_snapshot
from optperm.with_loss import WithLossState as WithLossState
from optperm.with_loss import with_loss as with_loss

if _typing.TYPE_CHECKING:
    from optperm import training as training


def __getattr__(name: str) -> _types.ModuleType:
    # Flax is loaded by those who train with it.
    if name == "training":
        return _importlib.import_module("optperm.training")
    raise AttributeError(f"module 'optperm' has no attribute {name!r}")


def __dir__() -> list[str]:
    own = {
        name
        for name, value in globals().items()
        if not name.startswith("_") and not isinstance(value, _types.ModuleType)
    }
    return sorted({*own, "training"})
