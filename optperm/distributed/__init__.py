"""Training on devices that rarely communicate.

AGN and DiLoCo. See ``examples/agn_pmap.py`` and ``examples/agn_multiprocess.py``.
"""
