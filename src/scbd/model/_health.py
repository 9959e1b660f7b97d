"""Whether z_c is alive: what is measured, and what it means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from scbd.nn._contrastive import Groups, contrastive_ceiling, effective_rank, spread
from scbd.nn._encoders import on_sphere
from scbd.nn._variance import Numbers, invariance_statistic

if TYPE_CHECKING:
    from torch import Tensor

    from scbd.model._objective import SCBDModule
    from scbd.nn._variance import Environments

# a point, in units of the temperature, which is the scale on which the losses see distances
_COLLAPSED_SPREAD = 0.25
# of what training cells show of the labels, so much or more should validation cells show
_BY_HEART = 0.5
# cells in a forward pass
_CELLS = 512


def shape_of(z_c: Tensor) -> dict[str, float]:
    """Two numbers that tell a point, or a line, from an embedding ``(N, D)``."""
    return {"spread": spread(z_c), "effective_rank": effective_rank(z_c)}


def measure(module: SCBDModule, batch: dict[str, Tensor]) -> tuple[dict[str, float], str]:
    """Health of z_c on a batch, as :attr:`scbd.SCBDModel.health` names it, and a warning if it carries nothing.

    It does not if it is a point, or tells no more of the labels than one, over all: a few of many it may tell.
    """
    labels, environments = Groups(batch["y"]), Groups(batch["e"])
    parts = zip(batch["inputs"].split(_CELLS), batch["e"].split(_CELLS), strict=True)
    with torch.no_grad():
        r_c = torch.cat([module.embed(part.to(module.device), "c", "intermediate", e) for part, e in parts])
        h = module.content.project(r_c).cpu()
        z_c, of_sets = on_sphere(h), h if module.set_size > 1 else None
        matched = module.matched(z_c, labels, of_sets)
        supervised = module.supervised(z_c, labels, environments, of_sets)
        every: list[Environments] = [*module.side_by_side(environments), *Numbers.columns(batch.get("numbers"))]
        seen = invariance_statistic([z_c], every, labels)
    health = {
        "supervised_c": float(supervised.shown),
        "ceiling": contrastive_ceiling(len(supervised.log_normaliser), include_self=module.include_self),
        "learned_c": float(supervised.learned),
        "environment_c": float(seen),
    } | shape_of(z_c)
    collapsed = health["spread"] < _COLLAPSED_SPREAD * module.temperature
    health |= {"collapsed": float(collapsed), "final_alpha": float(module.current_alpha)}
    learned = float(module.learned(*matched, supervised.log_normaliser))
    warning = ""
    if collapsed:
        warning = (
            f"z_c has collapsed to nearly one point (spread {health['spread']:.3f}, from 0 to 1): train for longer, "
            f"with a smaller alpha (it is {health['final_alpha']:g}) or another lr."
        )
    elif module.auto_alpha is not None and (kept := float(module.auto_alpha.kept)) < _BY_HEART:
        warning = (
            f"z_c has learned training cells by heart: validation cells show {kept:.0%} of what training cells show of "
            "the perturbations. Look at new cells alone. More cells help; with few, a classifier may do better."
        )
    elif learned <= 0:
        warning = (
            f"z_c has learned to tell few perturbations apart, if any: it has {learned:.0%} of what the labels say. "
            "Train for longer or with more cells, and name controls (control=… in setup_anndata)."
        )
    return health, warning
