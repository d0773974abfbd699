import pytest


@pytest.fixture(autouse=True)
def _as_users_run_it(lenient):
    """The command line runs optimizers of Optax, which do not keep to strict promotion."""
