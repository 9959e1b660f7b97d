"""Whether z_c is alive: what is measured, what it means, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from scbd.model._alpha import GENTLE_ALPHA
from scbd.nn import Groups, IdentityLinear, Numbers, contrastive_ceiling, effective_rank, invariance_statistic, spread

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

    from scbd.model._module import SCBDModule
    from scbd.nn import Environments

# a point, in units of the temperature, which is the scale on which the losses see distances
_COLLAPSED_SPREAD = 0.25
# share of the labels of training cells beyond which one that tells nothing of others has memorised them
_BY_HEART = 0.05
# steps below which a run is short: running statistics and weights have hardly moved, whatever the settings
_FEW_STEPS = 200
# standard errors of a batch beyond which an environment is seen
_SEEN = 5.0
# that are worth a comparison, and how many times that of alpha="auto", 0.05 at most, the first of them is
_WEIGHTS, _MORE = (0.003, 0.01, 0.03, 0.1, 0.3), 1.5
# training batches, as far as they are logged, over which that is averaged
_LAST = 5
# cells in a forward pass
_CELLS = 512


class Verdict(NamedTuple):
    """What a measurement says."""

    collapsed: bool
    """z_c is a point."""
    told: float
    """Share of what the labels say that it tells: 0 if it is a point, less if cells are like those of other labels."""

    @property
    def tells_nothing(self) -> bool:
        """It tells no more of the labels than a point, over all: a few of many it may tell."""
        return self.told <= 0


def shape_of(z_c: Tensor) -> dict[str, float]:
    """Two numbers that tell a point, or a line, from an embedding ``(N, D)``."""
    return {"spread": spread(z_c), "effective_rank": effective_rank(z_c)}


def measure(module: SCBDModule, batch: dict[str, Tensor]) -> tuple[dict[str, float], Verdict]:
    """Health of z_c on a batch, as :attr:`scbd.SCBDModel.health` names it, and what it says."""
    parts, labels, environments = batch["inputs"].split(_CELLS), Groups(batch["y"]), Groups(batch["e"])
    with torch.no_grad():
        z_c = torch.cat([module.embed(part.to(module.device), "c", "embedding").cpu() for part in parts])
        supervised = module.supervised(z_c, labels, environments)
        every: list[Environments] = [*module.side_by_side(environments), *Numbers.columns(batch.get("numbers"))]
        seen = invariance_statistic([z_c], every, labels)
    found = {
        "supervised_c": float(supervised.shown),
        "ceiling": contrastive_ceiling(len(z_c), include_self=module.include_self),
        "learned_c": float(supervised.learned),
        "environment_c": float(seen),
    } | shape_of(z_c)
    collapsed = found["spread"] < _COLLAPSED_SPREAD * module.temperature
    told = float(module.told(z_c, labels, supervised.log_normaliser))
    found |= {"collapsed": float(collapsed), "final_alpha": float(module.current_alpha)}
    return found, Verdict(collapsed, told)


def complaint(
    health: dict[str, float],
    verdict: Verdict,
    module: SCBDModule,
    *,
    n_steps: int,
    batch_size: int,
    learned_of_training: float,
) -> str:
    """What is wrong with z_c and what to do; nothing if it is alive.

    Parameters
    ----------
    health, verdict
        From :func:`measure`.
    module
        That was measured.
    n_steps, batch_size
        It was trained with.
    learned_of_training
        Share of what the labels of training cells say that it told of them, see :func:`learned_lately`; 0 where there
        were no others to compare with.
    """
    if not (verdict.collapsed or verdict.tells_nothing):
        return ""
    by_heart = not verdict.collapsed and learned_of_training > _BY_HEART
    numbers = (
        f"spread {health['spread']:.3f}, from 0 (a point) to 1; supervised loss {health['supervised_c']:.2f}; a "
        f"collapsed embedding has {health['ceiling']:.2f}"
    )
    if verdict.collapsed:
        fact = f"z_c has collapsed to nearly the same embedding for all cells ({numbers})."
    else:
        whose = "perturbations of validation cells" if by_heart else "perturbations"
        fact = (
            f"z_c has learned to tell few {whose} apart, if any: it has {verdict.told:.0%} of what their labels say, "
            f"where a collapsed embedding has 0% ({numbers})."
        )
    if by_heart:
        remedy = (
            f"It has memorised the training cells: it tells {learned_of_training:.0%} of what their labels say. "
            "Use more cells, augment=True, or fewer steps (early_stopping=True)."
        )
    else:
        remedy = _remedy(module, verdict, n_steps, batch_size)
    return f"{fact} {remedy}"


def environment_left(health: dict[str, float], module: SCBDModule) -> str:
    """What ``alpha="auto"`` held back for and what to do; nothing if z_c alive is blind to its environments."""
    if module.alpha_rule is None or health["collapsed"] or health["environment_c"] < _SEEN:
        return ""
    ended = health["final_alpha"]
    gentle, strong = [alpha for alpha in _WEIGHTS if alpha > _MORE * ended][:2]
    return (
        f"z_c still shows its environments, by {health['environment_c']:.0f} standard errors of a batch (by "
        f"chance -2 to 2): alpha='auto' ended at {ended:.2g}. If they should go, compare alpha={gentle:g} and "
        f"alpha={strong:g}, and what they cost in learned_c."
    )


def learned_lately(history: dict[str, pd.DataFrame]) -> float:
    """What z_c told of the labels of the cells that it was last trained on, a share."""
    logged = history.get("train_learned_c")  # a run of a few steps may have logged nothing
    return 0.0 if logged is None else float(logged.iloc[-_LAST:, 0].astype(float).mean())


def _remedy(module: SCBDModule, verdict: Verdict, n_steps: int, batch_size: int) -> str:
    """What to do about an embedding that tells nothing of any cells: a short run is the first suspect, then alpha."""
    alpha = float(module.current_alpha)
    short = n_steps < _FEW_STEPS
    if not alpha:
        settings = f"There is no invariance to blame (alpha 0): raise lr{'' if short else ', or train for longer'}."
        if isinstance(module.content.encoder, IdentityLinear):  # as long and as fast as you like, it stays that
            settings = f"Of single cells, encoder='mlp' learns more than this linear map. {settings}"
    else:
        if module.alpha_rule is not None:
            instead = f"about {alpha / 10:.2g}"
        elif module.invariance == "variance":
            instead = f"'auto', or about {min(alpha / 10, GENTLE_ALPHA):g}"
        else:
            instead = f"invariance='variance' with alpha='auto', or about {alpha / 10:g}"
        is_high = "is" if verdict.collapsed else "may be"
        settings = f"alpha {alpha:g} {is_high} too high for batches of {batch_size:,}: try {instead}."
    if short:
        steps = f"{n_steps:,} {'step' if n_steps == 1 else 'steps'}"
        settings = f"First train for longer: {steps} may be too few for any settings. If it stays so: {settings}"
    if verdict.collapsed:
        return settings
    # cells of no effect, which are like those of any label, hide what is told of others
    name = "" if module.controls is not None else " If many cells are controls, name them (control=… in setup_anndata)."
    return f"{settings}{name} Whether some are told apart, scbd.metrics.label_probe says."
