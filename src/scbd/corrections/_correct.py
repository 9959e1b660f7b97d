"""Function that applies a correction by name, and the table of corrections that it uses.

The table lists the required and the optional arguments of each correction.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from scbd._shared.checks import check_choice
from scbd.corrections._external import combat, harmony
from scbd.corrections._standardize import standardize_by_environment
from scbd.corrections._whitening import lda, plda, sphering, tvn, wccn

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike

# descriptions of arguments, which appear in the error message if a correction lacks a required argument
_ARGUMENT_DESCRIPTIONS = {
    "environments": "the environment of each cell",
    "labels": "the perturbation of each cell",
    "controls": "which cells are controls",
}


class Correction(NamedTuple):
    """Entry of the table of corrections: a function, with the names of its required and optional arguments."""

    function: Callable[..., np.ndarray]
    """Function that corrects features. Further arguments are those named in ``needs`` and ``takes``."""
    needs: tuple[str, ...]
    """Names of the required arguments."""
    takes: tuple[str, ...] = ("fit",)
    """Names of the optional arguments. A correction that does not take ``"fit"`` is always estimated from all cells."""


# optional arguments of WCCN, LDA and PLDA, which use the variation among cells of the same perturbation
_LABEL_ARGUMENTS = ("fit", "controls", "positions")
CORRECTIONS: dict[str, Correction] = {
    "centred": Correction(partial(standardize_by_environment, scale=False), ("environments", "controls")),
    "standardised": Correction(standardize_by_environment, ("environments",)),
    "standardised on controls": Correction(standardize_by_environment, ("environments", "controls")),
    "ComBat": Correction(combat, ("environments",), ()),
    "Harmony": Correction(harmony, ("environments",), ()),
    "sphering": Correction(sphering, ("controls",)),
    "TVN": Correction(tvn, ("environments", "controls")),
    "WCCN": Correction(wccn, ("labels",), _LABEL_ARGUMENTS),
    "LDA": Correction(lda, ("labels",), _LABEL_ARGUMENTS),
    "PLDA": Correction(plda, ("labels",), _LABEL_ARGUMENTS),
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
    """Correct features or an embedding with the correction of the given name.

    ==============================  ==================================  =================================
    name                            function                            learns from
    ==============================  ==================================  =================================
    ``"centred"``                   :func:`standardize_by_environment`  means of controls in ``fit``
    ``"standardised"``              :func:`standardize_by_environment`  all cells in ``fit``
    ``"standardised on controls"``  :func:`standardize_by_environment`  controls in ``fit``
    ``"sphering"``                  :func:`sphering`                    controls in ``fit``
    ``"TVN"``                       :func:`tvn`                         controls in ``fit``
    ``"WCCN"``                      :func:`wccn`                        perturbations of cells in ``fit``
    ``"LDA"``                       :func:`lda`                         perturbations of cells in ``fit``
    ``"PLDA"``                      :func:`plda`                        perturbations of cells in ``fit``
    ``"ComBat"``                    :func:`combat`                      all cells, by construction
    ``"Harmony"``                   :func:`harmony`                     all cells, by construction
    ==============================  ==================================  =================================

    A correction uses the arguments that it needs and ignores all others, so that the same call works for every
    correction.

    Parameters
    ----------
    features
        Features or embeddings of the cells, ``(N, D)``.
    correction
        Name of the correction, from the table above.
    environments
        Environment of each cell, ``(N,)``.
    labels
        Perturbation of each cell, ``(N,)``.
    controls
        Boolean mask ``(N,)`` or row numbers of the controls.
    positions
        Position of each cell's well on the plate, such as ``"A01"``, ``(N,)``.
    fit
        Cells from which the correction is estimated, as a boolean mask ``(N,)`` or row numbers. Default: all cells. The
        correction is applied to all cells.
    **settings
        Further arguments of the function that the table above lists for the correction, for example ``regularization``
        of :func:`sphering`.

    Returns
    -------
    Corrected features, float32 ``(N, K)``. The function of the correction determines the number of columns K.

    Raises
    ------
    ValueError
        If there is no correction of this name, or a required argument is missing; see also the function of the
        correction.
    ImportError
        If the correction needs a package that is not installed.

    Examples
    --------
    >>> known = {"environments": adata.obs["well"], "controls": adata.obs["gene"] == "nontargeting"}
    >>> z = scbd.corrections.correct(adata.obsm["X_scbd_c"], "TVN", **known, fit=np.arange(240) < 200)
    >>> z.shape == adata.obsm["X_scbd_c"].shape
    True
    """
    known = {"environments": environments, "labels": labels, "controls": controls, "positions": positions, "fit": fit}
    known = {name: given for name, given in known.items() if given is not None}
    check_correction(correction, known)
    function, needs, takes = CORRECTIONS[correction]
    return function(features, **{name: known[name] for name in (*needs, *takes) if name in known}, **settings)


def check_correction(correction: str, known: Any) -> None:
    """Raise a ``ValueError`` if the correction does not exist, or if one of its required arguments is missing.

    ``known`` holds the given arguments by name.
    """
    check_choice("correction", correction, CORRECTIONS.keys())
    for name in CORRECTIONS[correction].needs:
        if name not in known:
            msg = (
                f"{correction} learns from {name}, and none are given: say {_ARGUMENT_DESCRIPTIONS[name]} ({name}=...)."
            )
            raise ValueError(msg)
