"""Many devices that talk rarely.

AGN and DiLoCo. See ``examples/agn_pmap.py`` and ``examples/agn_multiprocess.py``.
"""
