"""Corrections by name: features or an embedding go in, whatever each correction learns from."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from scbd.baselines._combat import combat
from scbd.baselines._discriminants import lda, plda
from scbd.baselines._harmony import harmony
from scbd.baselines._sphering import sphering
from scbd.baselines._standardize import standardize_by_environment
from scbd.baselines._tvn import tvn
from scbd.baselines._wccn import wccn

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import ArrayLike

_MEANT = {
    "environments": "the environment of each cell",
    "labels": "the perturbation of each cell",
    "controls": "which cells are controls",
}


class Correction(NamedTuple):
    """A function of features, and what it is told of cells."""

    function: Callable[..., np.ndarray]
    needs: tuple[str, ...]
    takes: tuple[str, ...] = ("fit",)
    """Beside what it needs, where it is known. Without ``fit``, all cells are learned from."""


_WITHIN = ("fit", "controls", "positions")
CORRECTIONS: dict[str, Correction] = {
    "centred": Correction(partial(standardize_by_environment, scale=False), ("environments", "controls")),
    "standardised": Correction(standardize_by_environment, ("environments",)),
    "standardised on controls": Correction(standardize_by_environment, ("environments", "controls")),
    "ComBat": Correction(combat, ("environments",), ()),
    "Harmony": Correction(harmony, ("environments",), ()),
    "sphering": Correction(sphering, ("controls",)),
    "TVN": Correction(tvn, ("environments", "controls")),
    "WCCN": Correction(wccn, ("labels",), _WITHIN),
    "LDA": Correction(lda, ("labels",), _WITHIN),
    "PLDA": Correction(plda, ("labels",), _WITHIN),
}


def correct(
    features: ArrayLike,
    correction: str,
    *,
    environments: ArrayLike | None = None,
    labels: ArrayLike | None = None,
    controls: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    fit: ArrayLike | None = None,
    **settings: Any,
) -> np.ndarray:
    """Correct features, or an embedding of any origin, by the name of a correction.

    ==============================  ==================================  ================================
    name                            function                            learns from
    ==============================  ==================================  ================================
    ``"centred"``                   :func:`standardize_by_environment`  controls in ``fit``; means alone
    ``"standardised"``              :func:`standardize_by_environment`  all cells in ``fit``
    ``"standardised on controls"``  :func:`standardize_by_environment`  controls in ``fit``
    ``"sphering"``                  :func:`sphering`                    controls in ``fit``
    ``"TVN"``                       :func:`tvn`                         controls in ``fit``
    ``"WCCN"``                      :func:`wccn`                        labels of cells in ``fit``
    ``"LDA"``                       :func:`lda`                         labels of cells in ``fit``
    ``"PLDA"``                      :func:`plda`                        labels of cells in ``fit``
    ``"ComBat"``                    :func:`combat`                      all cells, by construction
    ``"Harmony"``                   :func:`harmony`                     all cells, by construction
    ==============================  ==================================  ================================

    Each takes what it learns from of the following, and leaves the rest: the same call serves them all.

    Parameters
    ----------
    features
        ``(N, D)``.
    correction
        Name.
    environments, labels, controls, positions
        Of each cell its environment, its perturbation, whether it is a control, and its position on the plate, each
        ``(N,)``.
    fit
        Which cells anything is learned from, booleans ``(N,)`` or row numbers; all by default.
    **settings
        Further arguments of the function.

    Returns
    -------
    float32 ``(N, K)``, see the function.

    Raises
    ------
    ValueError
        If the name is not known, something that the correction learns from is not given, or see the function.
    ImportError
        If the correction needs a package that is not installed.

    Examples
    --------
    >>> known = {"environments": adata.obs["well"], "controls": adata.obs["gene"] == "nontargeting"}
    >>> z = scbd.baselines.correct(adata.obsm["X_scbd_c"], "TVN", **known, fit=np.arange(240) < 200)
    >>> z.shape == adata.obsm["X_scbd_c"].shape
    True
    """
    known = {"environments": environments, "labels": labels, "controls": controls, "positions": positions, "fit": fit}
    known = {name: given for name, given in known.items() if given is not None}
    check_correction(correction, known)
    function, needs, takes = CORRECTIONS[correction]
    return function(features, **{name: known[name] for name in (*needs, *takes) if name in known}, **settings)


def check_correction(correction: str, known: Any) -> None:
    """Raise a ValueError unless there is a correction of this name, and what it needs is among what is known."""
    if correction not in CORRECTIONS:
        msg = f"There is no correction {correction!r}: use one of {', '.join(CORRECTIONS)}."
        raise ValueError(msg)
    for name in CORRECTIONS[correction].needs:
        if name not in known:
            msg = f"{correction} learns from {name}, and none are given: say {_MEANT[name]} ({name}=...)."
            raise ValueError(msg)
