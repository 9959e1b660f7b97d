"""Tests of warnings that point to the user's line, and of silenced messages of other packages."""

from __future__ import annotations

import logging
import warnings

import pytest

from scbd._shared.messages import warn_user, without_messages


def test_warn_user_points_to_line_outside_package():
    with pytest.warns(UserWarning, match="lower lr") as caught:
        warn_user("lower lr")
    assert [warning.filename for warning in caught] == [__file__]


def test_without_messages_silences_notes_and_given_warnings_only():
    logger = logging.getLogger("test_without_messages")
    logger.setLevel(logging.INFO)
    with without_messages(logger.name, ["many workers"]):
        warnings.warn("many workers", UserWarning, stacklevel=1)
        assert not logger.isEnabledFor(logging.INFO) and logger.isEnabledFor(logging.WARNING)
        with pytest.warns(UserWarning, match="few workers"):
            warnings.warn("few workers", UserWarning, stacklevel=1)
    assert logger.isEnabledFor(logging.INFO)
