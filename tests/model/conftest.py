"""What tests of several files look at."""

from __future__ import annotations

import pytest
from helpers.small_models import QUICK, make_model

from scbd import SCBDModel


@pytest.fixture(scope="session")
def trained() -> SCBDModel:
    """SCBD after a few steps, which nobody may change."""
    model = make_model()
    model.train(**QUICK | {"max_steps": 12})
    return model
