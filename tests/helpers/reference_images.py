"""Check the content of pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def is_drawn(path: Path) -> bool:
    """Return whether something is drawn in colour; axes, ticks and text alone are grey."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    return bool((pixels.max(2) - pixels.min(2)).max() > 40)
