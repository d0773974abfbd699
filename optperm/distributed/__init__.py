"""Training on devices that rarely communicate: DiLoCo and AGN.

See ``examples/diloco.py``.
"""

from optperm.distributed._agn import AgnState as AgnState
from optperm.distributed._agn import agn as agn
from optperm.distributed._compression import Compression as Compression
from optperm.distributed._diloco import DilocoState as DilocoState
from optperm.distributed._diloco import diloco as diloco
from optperm.distributed._every import Every as Every
from optperm.distributed._find_center import center_params as center_params
from optperm.distributed._traffic_report import TrafficReport as TrafficReport
from optperm.distributed._traffic_report import traffic_report as traffic_report
