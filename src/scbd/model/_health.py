"""Checks of the embedding z_c after training: measures of collapse and overfitting, and warnings with advice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import adaptive_avg_pool2d

from scbd._shared.messages import warn_user
from scbd.nn._contrastive import collapsed_loss, effective_rank, total_variance
from scbd.nn._encoders import on_sphere
from scbd.nn._explained_variance import environment_effects, invariance_statistic
from scbd.nn._groups import Groups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from scbd.model._objective import SCBDModule

# z_c counts as collapsed if its total variance, divided by the temperature of the losses, is below this value; the
# temperature is the scale of distances in the losses
_MAX_COLLAPSED_VARIANCE = 0.25
# we warn of overfitting if the supervised information of z_c in validation cells, divided by that in training cells, is
# below this ratio
_MIN_VALIDATION_RATIO = 0.5
# number of cells per forward pass of the encoder while the health of z_c is computed
_CELLS = 512
# permutation test of differences between the mean embeddings of perturbations: the number of permutations, and the
# p value below which the means count as different
_N_PERMUTATIONS, _MAX_P_VALUE = 199, 0.01
# embeddings of unit length with a total variance below this value differ only by rounding errors of single precision
_ROUNDING = 1e-10
# a warning names a large alpha as a possible cause if the invariance loss has made up at least this fraction of the
# objective during training
_MIN_INVARIANCE_FRACTION = 0.01
# we warn if environments change the relation between inputs and labels, and the interaction of environment and label in
# standardised images is at least this proportion of the variance: it is 0.17 to 0.19 in Colored MNIST, and at most 0.06
# in simulated screens, in four sets of real cells and in PACS
_MIN_MISLEADING_INTERACTION = 0.1
# number of squares per side of an image whose mean and standard deviation are the features for this interaction
_N_SQUARES = 4
_MEANS_DO_NOT_DIFFER = "means of perturbations differ no more than those of permuted labels"


def collapse_measures(z_c: Tensor) -> dict[str, float]:
    """Return the total variance and the effective rank of embeddings ``(N, D)``, which show a collapse.

    The total variance is small if all embeddings lie near one point. The effective rank is small if they lie near one
    line.
    """
    return {"spread": total_variance(z_c), "effective_rank": effective_rank(z_c)}


def measure_health(
    module: SCBDModule, batch: dict[str, Tensor], have_different_means: Callable[[], bool], remedy: str
) -> tuple[dict[str, float], str]:
    """Compute measures of the health of z_c on a batch of cells, and the text of a warning if z_c is not healthy.

    We warn if z_c has collapsed, is overfitted, or has no information on perturbations. A small total variance, or a
    loss no better than that of a collapsed embedding, may also result from weak effects of perturbations. Therefore z_c
    counts as collapsed, or without information, only if in addition the mean embeddings of perturbations do not differ.

    Parameters
    ----------
    module
        Trained module.
    batch
        Batch of cells: inputs, perturbation labels and environments.
    have_different_means
        Function that tests whether the mean embeddings of perturbations differ in z_c. It is called only if there is a
        reason for a warning.
    remedy
        Advice for the warning, see :func:`advice_on_collapse`.

    Returns
    -------
    The measures, a dictionary as in :attr:`scbd.SCBDModel.health`; and the text of the warning, which is empty if z_c
    is healthy.
    """
    labels = Groups(batch["y"])
    parts = zip(batch["inputs"].split(_CELLS), batch["e"].split(_CELLS), strict=True)
    with torch.no_grad():
        r_c = torch.cat([module.embed(part.to(module.device), "c", "intermediate", e) for part, e in parts])
        h = module.content.project(r_c).cpu()
        z_c, of_sets = on_sphere(h), h if module.set_size > 1 else None
        matched = module.matched(z_c, labels, of_sets)
        supervised = module.supervised(z_c, labels, of_sets)
        seen = invariance_statistic([z_c], module.side_by_side(Groups(batch["e"])), labels)
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
    tells = in_doubt and have_different_means()
    collapsed, warning = point and not tells, ""
    health |= {"collapsed": float(collapsed), "final_alpha": float(module.current_alpha)}
    if collapsed:
        warning = (
            f"z_c has collapsed to nearly one point (spread {health['spread']:.3f}, from 0 to 1), and "
            f"{_MEANS_DO_NOT_DIFFER}. {remedy}"
        )
    elif kept < _MIN_VALIDATION_RATIO:
        # images can be flipped and rotated at random, features cannot
        can_augment = getattr(module.preprocess, "augment", True) is False
        augment = ", and so does augment=True where orientation means nothing" * can_augment
        warning = (
            f"z_c has overfitted the training cells: validation cells have {kept:.0%} of the supervised information of "
            f"training cells{', although perturbation means differ' * tells}. Evaluate new cells only. More cells "
            f"help{augment}; with few cells, a classifier may be better (scbd.baselines.ERMModel)."
        )
    elif learned <= 0 and not tells:
        warning = (
            f"z_c has learned to distinguish few perturbations, if any: its normalised supervised information is "
            f"{learned:.0%}, and {_MEANS_DO_NOT_DIFFER}. {remedy}"
        )
    return health, warning


def warn_if_environments_mislead(module: SCBDModule, images: Iterable[Tensor], y: Tensor, e: Tensor) -> None:
    """Warn if environments change the meaning of image features, so that standardised images mislead.

    The same feature then indicates different labels in different environments. This shows as an interaction of
    environment and label, see :func:`scbd.nn.environment_effects`, which is computed before and after images are
    standardised per environment. The features are the mean and the standard deviation of each channel in squares of the
    image.

    Parameters
    ----------
    module
        Module whose preprocessing is fitted.
    images
        Batches of raw images, N in total.
    y, e
        Codes of perturbation and environment of the N cells, int64 ``(N,)``.
    """
    features: tuple[list[Tensor], list[Tensor]] = ([], [])
    start = 0
    with torch.no_grad():
        for batch in images:
            part = slice(start, start := start + len(batch))
            for found, values in zip(features, module.prepare(batch.to(module.device), e[part]), strict=True):
                mean, square = (adaptive_avg_pool2d(power, _N_SQUARES) for power in (values, values.square()))
                deviation = (square - mean.square()).clamp(min=0).sqrt()
                found.append(torch.cat([mean.flatten(1), deviation.flatten(1)], 1).double().cpu())
        columns = list(module.columns(e).T)
        before, after = (float(environment_effects([torch.cat(found)], columns, y).interaction) for found in features)
    if after >= _MIN_MISLEADING_INTERACTION:
        warn_user(
            "Environments change the meaning of image features: the interaction of environment and perturbation is "
            f"{after:.2f} of the variance of images standardised per environment ({before:.2f} before). To predict "
            "labels in environments that were not trained on, use SCBDModel(adata, preset='domain_generalization')."
        )


def means_differ(z: Tensor, labels: Groups) -> bool:
    """Return whether the mean embeddings of labels differ, by a permutation test (199 permutations, p < 0.01).

    The means differ if they vary more than the means after random permutation of the labels among the cells.

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
    # the test statistic is the sum of squares between labels: squared distances of the mean of each label from the mean
    # of all cells, weighted by the number of cells of the label
    size = (labels.n_others + 1)[:, None]
    between = torch.stack([(labels.sums(z[order]) / size).square().sum() for order in orders])
    return bool((between >= between[0] * (1 - 1e-9)).double().mean() < _MAX_P_VALUE)


def advice_on_collapse(module: SCBDModule, of_invariance: float) -> str:
    """Return advice, with code to run, if z_c has collapsed or has no information on perturbations.

    Parameters
    ----------
    module
        Trained module.
    of_invariance
        Maximum fraction of the objective that the invariance loss has made up during training. From 0.01 on, the
        advice is to lower alpha, the weight of the invariance loss. Below 0.01, the advice is to train for longer.
    """
    if of_invariance >= _MIN_INVARIANCE_FRACTION:
        alpha = float(module.current_alpha)
        other = "0" if module.auto_alpha is not None else f"{alpha / 10:g}"
        return (
            f"Invariance was up to {of_invariance:.0%} of the objective, so alpha ({alpha:g}) may be too high: make "
            f"the model with alpha={other}, and with its other arguments unchanged."
        )
    controls = "" if module.controls is not None else " Name controls, if there are some (control=… in setup_anndata)."
    return f"Train on: model.train().{controls}"
