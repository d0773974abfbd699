"""What the suites over all transformations share."""

import pytest


@pytest.fixture(autouse=True)
def _lenient_where_optax_is_inside(request):
    """Lifts the strict promotion for a transformation that wraps optimizers of Optax."""
    if "ours" in request.fixturenames and request.getfixturevalue("ours").lenient:
        request.getfixturevalue("lenient")
