"""Optimizers with small states: GaLore, APOLLO, 8-bit states.

This package contains low-rank states, APOLLO, 8-bit and 4-bit states, 16-bit params with remainders, the
axes of kernels for Muon, and a report on the size of any optimizer's state.
"""

from optperm.memory._aliases import apollo_adamw as apollo_adamw
from optperm.memory._aliases import low_rank_adamw as low_rank_adamw
from optperm.memory._apollo import ApolloState as ApolloState
from optperm.memory._apollo import apollo as apollo
from optperm.memory._low_rank import LowRankState as LowRankState
from optperm.memory._low_rank import low_rank as low_rank
from optperm.memory._muon_axes import muon_axes as muon_axes
from optperm.memory._quantize_state import QuantizedState as QuantizedState
from optperm.memory._quantize_state import dequantize as dequantize
from optperm.memory._quantize_state import quantize as quantize
from optperm.memory._quantize_state import quantize_state as quantize_state
from optperm.memory._rank_for import rank_for as rank_for
from optperm.memory._register_moments import register_moments as register_moments
from optperm.memory._state_report import StateReport as StateReport
from optperm.memory._state_report import state_report as state_report
from optperm.memory._widen_params import WidenedState as WidenedState
from optperm.memory._widen_params import lost_updates as lost_updates
from optperm.memory._widen_params import narrow_params as narrow_params
from optperm.memory._widen_params import wide_params as wide_params
from optperm.memory._widen_params import widen_params as widen_params
