"""All corrections by name, with the arguments that each of them takes."""

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

# descriptions of required arguments, for error messages
_ARGUMENT_DESCRIPTIONS = {
    "environments": "the environment of each cell",
    "labels": "the perturbation of each cell",
    "controls": "which cells are controls",
}


class Correction(NamedTuple):
    """A correction with the names of its arguments."""

    function: Callable[..., np.ndarray]
    """Function of features and these arguments."""
    needs: tuple[str, ...]
    """Required arguments."""
    takes: tuple[str, ...] = ("fit",)
    """Optional arguments, which are used if given. Corrections without ``"fit"`` learn from all cells."""


# optional arguments of corrections that use the variation within labels
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
    """Correct features, or any embedding, with a correction given by name.

    ==============================  ==================================  =================================
    name                            function                            learns from
    ==============================  ==================================  =================================
    ``"centred"``                   :func:`standardize_by_environment`  controls in ``fit``, only means
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

    Each correction uses the arguments that it learns from and ignores the others, so that the same call works for all
    corrections.

    Parameters
    ----------
    features
        Features ``(N, D)``.
    correction
        Name of the correction.
    environments
        Environment of each cell, ``(N,)``.
    labels
        Perturbation of each cell, ``(N,)``.
    controls
        The controls, booleans ``(N,)`` or row numbers.
    positions
        Position of each cell on its plate, ``(N,)``.
    fit
        Cells to learn from, booleans ``(N,)`` or row numbers; all by default.
    **settings
        Further arguments of the function.

    Returns
    -------
    float32 ``(N, K)``, see the function.

    Raises
    ------
    ValueError
        If there is no correction of this name, or an argument that it needs is missing; see also the function.
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
    """Raise a ValueError unless there is a correction of this name and ``known`` contains all that it requires."""
    check_choice("correction", correction, CORRECTIONS.keys())
    for name in CORRECTIONS[correction].needs:
        if name not in known:
            msg = (
                f"{correction} learns from {name}, and none are given: say {_ARGUMENT_DESCRIPTIONS[name]} ({name}=...)."
            )
            raise ValueError(msg)
