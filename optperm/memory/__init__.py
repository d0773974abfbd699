"""Optimizers with small states.

Low-rank states and APOLLO.
"""

from optperm.core.public import show_names as _show_names
from optperm.memory._apollo import ApolloState as ApolloState
from optperm.memory._apollo import apollo as apollo
from optperm.memory._low_rank import LowRankState as LowRankState
from optperm.memory._low_rank import low_rank as low_rank
from optperm.memory._state_report import LowRankReport as LowRankReport
from optperm.memory._state_report import low_rank_report as low_rank_report

_show_names(__name__)
