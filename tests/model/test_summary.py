from __future__ import annotations

import pytest
from small_models import make_model

pytestmark = pytest.mark.filterwarnings("ignore:z_c has")


def test_summary_tells_the_next_step(trained):
    said = repr(trained)
    for part in (
        "96 cells",
        "4 perturbations (gene)",
        "3 environments (well)",
        "2 × 16 × 16 uint8",
        "alpha auto, 0 in the end (variance)",
        "12 steps",
    ):
        assert part in said
    assert "not trained\n  next      train()" in repr(make_model())


def test_a_model_that_was_called_trained_from_outside_can_be_printed():
    model = make_model()
    model.is_trained = True
    assert "state     trained\n" in repr(model)
