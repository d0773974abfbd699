"""Training by permuting weights: SGPerm and LaPerm.

The trained weights are the initial weights in another order. See ``examples/sgperm.py``.
"""

from optperm.permutation._export import apply_permutation as apply_permutation
from optperm.permutation._export import export_permutation as export_permutation
from optperm.permutation._export import permuted_params as permuted_params
from optperm.permutation._laperm import LapermState as LapermState
from optperm.permutation._laperm import laperm as laperm
from optperm.permutation._permute_by_cycles import PermuteByCyclesState as PermuteByCyclesState
from optperm.permutation._permute_by_cycles import permute_by_cycles as permute_by_cycles
from optperm.permutation._sgperm import falling as falling
from optperm.permutation._sgperm import sgperm as sgperm
