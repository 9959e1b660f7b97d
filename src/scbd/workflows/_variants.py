"""Several scores of one run side by side in its row: of blocks, as they are and corrected, and what chance gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd.baselines import MCVAEModel

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from scbd.model import ImageModel

# whose scores have their plain names
AS_IT_IS = "as it is"
# before the name of a score, of other variants
SEPARATOR = ": "
CHANCE = "chance"


def blocks_of(model: ImageModel, rows: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """What is scored of a model, by name: its content; of the mcVAE, the salient block and both side by side.

    Its authors' code scores both (``contrastive-ops``), their paper the salient one.
    """
    content = model.get_latent_representation(indices=rows)
    if not isinstance(model, MCVAEModel):
        return {AS_IT_IS: content}
    background = model.get_latent_representation(indices=rows, block="s")
    return {"salient block": content, "both blocks": np.hstack([content, background])}


def of_variant(variant: str, scores: Mapping[str, Any]) -> dict[str, Any]:
    """Scores by their names in a row that has those of other variants, too."""
    return dict(scores) if variant == AS_IT_IS else {variant + SEPARATOR + name: scores[name] for name in scores}


def side_by_side(frame: pd.DataFrame) -> dict[str, float]:
    """A frame of :func:`scbd.workflows.compare` as scores of one row; chance is that of its representations on average.

    What is not known is left out.
    """
    frame = frame[frame["metric"] != "effective_rank"]  # the model's own health has that of a batch
    scores: dict[str, float] = {}
    for representation, part in frame.groupby("representation", sort=False):
        variant = str(representation).removeprefix(f"{AS_IT_IS}, ")
        scores |= of_variant(variant, part.set_index("metric")["value"].dropna().to_dict())
    return scores | of_variant(CHANCE, frame.groupby("metric", sort=False)["chance"].mean().dropna().to_dict())
