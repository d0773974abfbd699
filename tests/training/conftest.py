import jax
import pytest

jax.devices()  # started here, with eight


@pytest.fixture(autouse=True)
def _as_users_run_it(lenient, one_device):
    """Flax and Optax do not keep to strict promotion. Tests of several devices pass a mesh."""
