"""Pruning, freezing and sparse training.

A mask has an entry for each weight. See ``examples/sparse.py``.
"""

from optperm.sparsity._choice import erk_sparsity as erk_sparsity
from optperm.sparsity._export import remove_units as remove_units
from optperm.sparsity._export import to_sparse as to_sparse
from optperm.sparsity._gradual import prune_gradually as prune_gradually
from optperm.sparsity._masks import MaskElementsState as MaskElementsState
from optperm.sparsity._masks import freeze as freeze
from optperm.sparsity._masks import mask_elements as mask_elements
from optperm.sparsity._masks import prune as prune
from optperm.sparsity._masks import reset_masks as reset_masks
from optperm.sparsity._rigl import rigl as rigl
from optperm.sparsity._sparse_state import SparseState as SparseState
from optperm.sparsity._sparsity_report import SparsityReport as SparsityReport
from optperm.sparsity._sparsity_report import sparsity_report as sparsity_report
from optperm.sparsity._straight_through import keep_top as keep_top
from optperm.sparsity._structures import Blocks as Blocks
from optperm.sparsity._structures import NOfM as NOfM
from optperm.sparsity._structures import Units as Units
