"""Whether z_c is alive: what is measured, and what it means."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from scbd.nn._contrastive import Groups, contrastive_ceiling, effective_rank, spread
from scbd.nn._encoders import on_sphere
from scbd.nn._variance import Numbers, invariance_statistic

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from scbd.model._objective import SCBDModule
    from scbd.nn._variance import Environments

# a point, in units of the temperature, which is the scale on which the losses see distances
_COLLAPSED_SPREAD = 0.25
# of what training cells show of the labels, so much or more should validation cells show
_BY_HEART = 0.5
# cells in a forward pass
_CELLS = 512
# permuted labels that means of perturbations are compared with, and the p value below which these are told apart
_PERMUTATIONS, _TOLD = 199, 0.01
# of unit vectors in single precision: what differs by less is rounding
_ROUNDING = 1e-10
# share of the objective below which invariance is not the reason for anything
_NOTABLE = 0.01
_ALIKE = "means of perturbations differ no more than those of permuted labels"


def shape_of(z_c: Tensor) -> dict[str, float]:
    """Two numbers that tell a point, or a line, from an embedding ``(N, D)``."""
    return {"spread": spread(z_c), "effective_rank": effective_rank(z_c)}


def measure(
    module: SCBDModule, batch: dict[str, Tensor], told: Callable[[], bool], remedy: Callable[[], str]
) -> tuple[dict[str, float], str]:
    """Health of z_c on a batch, as :attr:`scbd.SCBDModel.health` names it, and a warning if it carries nothing.

    It carries something if perturbation means are ``told`` apart: little spread, or a loss that is none better than
    that of a point, is what weak effects leave. That is asked only where there is something to warn of, and so is what
    to do about it.
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
    point = health["spread"] < _COLLAPSED_SPREAD * module.temperature
    kept = 1.0 if module.auto_alpha is None else float(module.auto_alpha.kept)
    learned = float(module.learned(*matched, supervised.log_normaliser))
    in_doubt = point or kept < _BY_HEART or learned <= 0
    tells = in_doubt and told()
    collapsed, warning = point and not tells, ""
    health |= {"collapsed": float(collapsed), "final_alpha": float(module.current_alpha)}
    if collapsed:
        warning = (
            f"z_c has collapsed to nearly one point (spread {health['spread']:.3f}, from 0 to 1), and {_ALIKE}. "
            f"{remedy()}"
        )
    elif kept < _BY_HEART:
        warning = (
            f"z_c has learned training cells by heart: validation cells show {kept:.0%} of what training cells show of "
            f"the perturbations{', whose means they tell apart' * tells}. Look at new cells alone. More cells "
            f"help{_turned(module)}; with few, a classifier may do better (scbd.baselines.ERMModel)."
        )
    elif learned <= 0 and not tells:
        warning = (
            f"z_c has learned to tell few perturbations apart, if any: it has {learned:.0%} of what the labels say, "
            f"and {_ALIKE}. {remedy()}"
        )
    return health, warning


def means_differ(z: Tensor, labels: Groups) -> bool:
    """Whether means of labels of ``z (N, D)`` lie further apart than those of permuted labels."""
    z = z.double() - z.double().mean(0)
    if not z.square().sum(1).mean() > _ROUNDING:
        return False
    generator = torch.Generator().manual_seed(0)
    orders = [torch.arange(len(z)), *(torch.randperm(len(z), generator=generator) for _ in range(_PERMUTATIONS))]
    # a mean counts once for each cell of its label: the sum of squares between labels
    size = (labels.n_others + 1)[:, None]
    between = torch.stack([(labels.sums(z[order]) / size).square().sum() for order in orders])
    return bool((between >= between[0] * (1 - 1e-9)).double().mean() < _TOLD)


def remedy(module: SCBDModule, of_invariance: float) -> str:
    """What to do about a z_c that carries nothing, as lines that run; alpha is named where invariance had a share."""
    if of_invariance >= _NOTABLE:
        alpha = float(module.current_alpha)
        other = "0" if module.auto_alpha is not None else f"{alpha / 10:g}"
        return (
            f"Invariance was up to {of_invariance:.0%} of the objective, so alpha ({alpha:g}) may be too high: "
            f"SCBDModel(adata, alpha={other})."
        )
    controls = "" if module.controls is not None else " Name controls, if there are some (control=… in setup_anndata)."
    return f"Train on: model.train().{controls}"


def _turned(module: SCBDModule) -> str:
    """Advice to turn images, where they could be and are not."""
    of_images_as_they_are = getattr(module.preprocess, "augment", True) is False
    return ", and so does SCBDModel(adata, augment=True) where orientation means nothing" * of_images_as_they_are
