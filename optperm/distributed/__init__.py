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
from optperm.distributed._messages import Center as Center
from optperm.distributed._messages import Contribution as Contribution
from optperm.distributed._messages import contribution as contribution
from optperm.distributed._messages import init_center as init_center
from optperm.distributed._messages import merge as merge
from optperm.distributed._messages import pull as pull
from optperm.distributed._traffic_report import TrafficReport as TrafficReport
from optperm.distributed._traffic_report import traffic_report as traffic_report
