"""Variance reduction: SVRG and its relatives.

This package contains SVRG, the full gradients that SVRG needs, Katyusha, recursive estimators (STORM,
SARAH, SPIDER, PAGE), MARS, and proximal steps for penalties and bounds. These methods solve convex
problems accurately. On networks, SGD with a tuned learning rate is better after the same number of
gradients: `benchmarks/variance.py` prints the tables. See ``examples/svrg.py``.
"""

from optperm.variance._full_gradient import full_gradient as full_gradient
from optperm.variance._katyusha import KatyushaState as KatyushaState
from optperm.variance._katyusha import katyusha as katyusha
from optperm.variance._learning_rate import svrg_learning_rate as svrg_learning_rate
from optperm.variance._mars import MarsState as MarsState
from optperm.variance._mars import mars as mars
from optperm.variance._minimize import minimize as minimize
from optperm.variance._minimum import Minimum as Minimum
from optperm.variance._minimum import MinimumHistory as MinimumHistory
from optperm.variance._proximal import ProximalState as ProximalState
from optperm.variance._proximal import proximal as proximal
from optperm.variance._recursive import recursive_gradient as recursive_gradient
from optperm.variance._svrg import RecursiveGradientState as RecursiveGradientState
from optperm.variance._svrg import SvrgState as SvrgState
from optperm.variance._svrg import svrg as svrg
from optperm.variance._svrg import take_snapshot as take_snapshot
