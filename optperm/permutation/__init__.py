"""Training by permuting.

Networks whose weights only trade places. See ``examples/sgperm_digits.py`` and
``examples/laperm_digits.py``.
"""
