"""Training in small subspaces: DLDR, P-BFGS and TWA.

DLDR first trains all params, and then trains in a subspace with P-BFGS, P-SGD or TWA. See
``examples/dldr.py``.
"""

from optperm.subspace._dim_reduce import DimReduceState as DimReduceState
from optperm.subspace._dim_reduce import dim_reduce as dim_reduce
from optperm.subspace._dldr import DldrState as DldrState
from optperm.subspace._dldr import dldr as dldr
from optperm.subspace._pca import pca_basis as pca_basis
from optperm.subspace._project import ProjectState as ProjectState
from optperm.subspace._project import project as project
from optperm.subspace._subspace import set_basis as set_basis
from optperm.subspace._trajectory import TrajectoryState as TrajectoryState
from optperm.subspace._trajectory import record_trajectory as record_trajectory
from optperm.subspace._trajectory import trajectory as trajectory
from optperm.subspace._twa import TwaState as TwaState
from optperm.subspace._twa import twa as twa
