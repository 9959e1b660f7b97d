"""The rule by which a setting is chosen, in searches and in tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def best_setting(accuracy: pd.Series, setting: pd.Series) -> Any:
    """One setting for all seeds: the one whose mean accuracy in distribution is highest.

    Chosen seed by seed, a mean over seeds would be that of a mixture, which nobody could train again.

    Parameters
    ----------
    accuracy
        Of each run, ``(N,)``, on cells like those that were learned from.
    setting
        What was tried in each run, ``(N,)``, anything but its seed.

    Returns
    -------
    The setting; of several that are equally good, the one that was tried first. One with a run whose accuracy is NaN is
    none of them, whatever its other runs do.

    Raises
    ------
    ValueError
        If each setting has a run whose accuracy is NaN.
    """
    of_setting = accuracy.groupby(setting.to_numpy(), sort=False)
    # those runs of a setting that were not lost are the lucky ones
    mean = of_setting.mean().where(of_setting.count() == of_setting.size())
    if mean.isna().all():
        msg = f"Each of {len(mean)} settings has a run whose accuracy is NaN: there is nothing to choose by."
        raise ValueError(msg)
    return mean.idxmax()
