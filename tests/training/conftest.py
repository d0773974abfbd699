import jax
import pytest

jax.devices()  # started here, with eight


@pytest.fixture(autouse=True)
def _as_users_run_it(lenient):
    """Flax and Optax do not keep to strict promotion."""


@pytest.fixture(autouse=True)
def _on_one_device():
    """The first of the eight devices is chosen, as `fit` warns of devices that stay idle."""
    jax.config.update("jax_default_device", jax.devices()[0])
    yield
    jax.config.update("jax_default_device", None)
