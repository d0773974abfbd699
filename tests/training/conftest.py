import jax
import pytest

from optperm.training import _conditions as conditions

jax.devices()  # started here, with eight


@pytest.fixture(autouse=True)
def _as_users_run_it(lenient, one_device):
    """Flax and Optax do not keep to strict promotion. Tests of several devices pass a mesh."""


@pytest.fixture
def unchecked(monkeypatch):
    """What methods need of the loss is not checked: `test_conditions` tests these checks."""
    monkeypatch.setattr(conditions, "find_broken_conditions", lambda *_: [])
