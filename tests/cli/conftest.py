import jax
import pytest

jax.devices()  # started here, with eight: a test of --devices does not decide how many there are


@pytest.fixture(autouse=True)
def _as_users_run_it(lenient):
    """The command line runs optimizers of Optax, which do not keep to strict promotion."""
