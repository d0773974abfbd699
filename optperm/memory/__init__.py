"""Optimizers with small states.

Low-rank states and APOLLO, and a report on the size of any state.
"""

from optperm.core.public import show_names as _show_names
from optperm.memory._apollo import ApolloState as ApolloState
from optperm.memory._apollo import apollo as apollo
from optperm.memory._low_rank import LowRankState as LowRankState
from optperm.memory._low_rank import low_rank as low_rank
from optperm.memory._state_report import StateReport as StateReport
from optperm.memory._state_report import state_report as state_report

_show_names(__name__)
