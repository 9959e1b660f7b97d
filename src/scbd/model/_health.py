"""Health of z_c after training: measures of collapse and overfitting, and warnings with advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from scbd.nn._contrastive import collapsed_loss, effective_rank, total_variance
from scbd.nn._encoders import on_sphere
from scbd.nn._explained_variance import Numbers, invariance_statistic
from scbd.nn._groups import Groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from scbd.model._objective import SCBDModule
    from scbd.nn._explained_variance import Environments

# maximum total variance of a collapsed embedding, in units of the temperature, the scale of distances in the losses
_MAX_COLLAPSED_VARIANCE = 0.25
# minimum validation/training ratio of supervised information before we warn of overfitting
_MIN_VALIDATION_RATIO = 0.5
# number of cells in a forward pass
_CELLS = 512
# permutation test of perturbation means: number of permutations, and p value below which the means differ
_N_PERMUTATIONS, _MAX_P_VALUE = 199, 0.01
# total variance of unit vectors below which they differ only by rounding in single precision
_ROUNDING = 1e-10
# minimum fraction of the invariance loss in the objective at which a warning names alpha as a possible cause
_MIN_INVARIANCE_FRACTION = 0.01
_MEANS_DO_NOT_DIFFER = "means of perturbations differ no more than those of permuted labels"


def collapse_measures(z_c: Tensor) -> dict[str, float]:
    """Return total variance and effective rank of embeddings ``(N, D)``, which show a collapse to a point or a line."""
    return {"spread": total_variance(z_c), "effective_rank": effective_rank(z_c)}


def measure_health(
    module: SCBDModule, batch: dict[str, Tensor], told: Callable[[], bool], remedy: Callable[[], str]
) -> tuple[dict[str, float], str]:
    """Compute the health of z_c on a batch, and a warning if z_c is collapsed, overfitted or without information.

    A small total variance, or a loss no better than that of a collapsed embedding, may also result from weak effects.
    Therefore z_c counts as collapsed or without information only if the means of perturbations do not differ either.

    Parameters
    ----------
    module
        Trained module.
    batch
        Batch of cells: inputs, labels and environments.
    told
        Function that tests whether the means of perturbations differ in z_c. It is called only if there is a reason for
        a warning.
    remedy
        Function that returns advice for the warning. It is called only for a warning that contains advice.

    Returns
    -------
    Health, a dictionary as in :attr:`scbd.SCBDModel.health`, and the text of the warning, which is empty if z_c is
    healthy.
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
        "ceiling": collapsed_loss(len(supervised.log_normaliser), include_self=module.include_self),
        "learned_c": float(supervised.learned),
        "environment_c": float(seen),
    } | collapse_measures(z_c)
    point = health["spread"] < _MAX_COLLAPSED_VARIANCE * module.temperature
    kept = 1.0 if module.auto_alpha is None else float(module.auto_alpha.kept)
    learned = float(module.learned(*matched, supervised.log_normaliser))
    in_doubt = point or kept < _MIN_VALIDATION_RATIO or learned <= 0
    tells = in_doubt and told()
    collapsed, warning = point and not tells, ""
    health |= {"collapsed": float(collapsed), "final_alpha": float(module.current_alpha)}
    if collapsed:
        warning = (
            f"z_c has collapsed to nearly one point (spread {health['spread']:.3f}, from 0 to 1), and "
            f"{_MEANS_DO_NOT_DIFFER}. {remedy()}"
        )
    elif kept < _MIN_VALIDATION_RATIO:
        warning = (
            f"z_c has learned training cells by heart: validation cells show {kept:.0%} of what training cells show of "
            f"the perturbations{', whose means they tell apart' * tells}. Look at new cells alone. More cells "
            f"help{_augmentation_advice(module)}; with few, a classifier may do better (scbd.baselines.ERMModel)."
        )
    elif learned <= 0 and not tells:
        warning = (
            f"z_c has learned to tell few perturbations apart, if any: it has {learned:.0%} of what the labels say, "
            f"and {_MEANS_DO_NOT_DIFFER}. {remedy()}"
        )
    return health, warning


def means_differ(z: Tensor, labels: Groups) -> bool:
    """Return whether the means of labels differ more than with permuted labels (199 permutations, p < 0.01).

    Parameters
    ----------
    z
        Embeddings, ``(N, D)``.
    labels
        Labels of the cells.
    """
    z = z.double() - z.double().mean(0)
    if not z.square().sum(1).mean() > _ROUNDING:
        return False
    generator = torch.Generator().manual_seed(0)
    orders = [torch.arange(len(z)), *(torch.randperm(len(z), generator=generator) for _ in range(_N_PERMUTATIONS))]
    # the statistic is the sum of squares between labels: each mean is weighted by the number of its cells
    size = (labels.n_others + 1)[:, None]
    between = torch.stack([(labels.sums(z[order]) / size).square().sum() for order in orders])
    return bool((between >= between[0] * (1 - 1e-9)).double().mean() < _MAX_P_VALUE)


def advice_on_collapse(module: SCBDModule, of_invariance: float) -> str:
    """Return advice, with code to run, for a z_c without information.

    Parameters
    ----------
    module
        Trained module.
    of_invariance
        Largest fraction of the invariance loss in the objective during training. From 0.01 on, the advice is to lower
        alpha; below, to train for longer.
    """
    if of_invariance >= _MIN_INVARIANCE_FRACTION:
        alpha = float(module.current_alpha)
        other = "0" if module.auto_alpha is not None else f"{alpha / 10:g}"
        return (
            f"Invariance was up to {of_invariance:.0%} of the objective, so alpha ({alpha:g}) may be too high: "
            f"SCBDModel(adata, alpha={other})."
        )
    controls = "" if module.controls is not None else " Name controls, if there are some (control=… in setup_anndata)."
    return f"Train on: model.train().{controls}"


def _augmentation_advice(module: SCBDModule) -> str:
    """Return advice to flip and rotate training images; empty if the model does so or its inputs are features."""
    of_images_as_they_are = getattr(module.preprocess, "augment", True) is False
    return ", and so does SCBDModel(adata, augment=True) where orientation means nothing" * of_images_as_they_are
