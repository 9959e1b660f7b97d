"""Scores of the tables of real wells: mechanisms of drugs, the week of controls, and genes in several screens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from sklearn.metrics import balanced_accuracy_score
from sklearn.model_selection import StratifiedKFold

from paper.datasets import in_part
from scbd.metrics import predict_labels

if TYPE_CHECKING:
    from anndata import AnnData

_N_PROBE_FOLDS = 5


def mechanism_scores(adata: AnnData, embedding: np.ndarray) -> dict[str, float]:
    """Compute how often the nearest treatment of another compound has the same mechanism (Ljosa et al., 2013).

    The profile of a treatment is the mean of its wells; profiles are compared by cosine.

    Parameters
    ----------
    adata
        Wells with the columns ``treatment``, ``compound`` (``"DMSO"`` for controls), ``moa``, ``week`` and ``split``.
        If there are test wells, only the treatments of these wells are scored, among all treatments.
    embedding
        ``(N, D)``.

    Returns
    -------
    ``NSC``: fraction of treatments whose nearest neighbour of another compound has the same mechanism; ``NSCB``: the
    same among treatments that do not share a week with the scored treatment, of the treatments for which such a
    neighbour of the same mechanism exists. ``NSC n`` and ``NSCB n``: numbers of scored treatments. A score of no
    treatments is 0.
    """
    treated = (adata.obs["compound"] != "DMSO").to_numpy()
    obs = adata.obs[treated]
    names, codes = np.unique(obs["treatment"].astype(str), return_inverse=True)
    cosines = _cosines(*[_means(embedding[treated], codes)] * 2)
    first = obs.iloc[np.unique(codes, return_index=True)[1]]
    compound, moa = (first[key].astype(str).to_numpy() for key in ("compound", "moa"))
    weeks = (pd.crosstab(codes, obs["week"].astype(str).to_numpy()) > 0).to_numpy(int)
    is_query = (first["split"] == "test").to_numpy()
    # if no treatment is held out, all are scored
    is_query = is_query if is_query.any() else np.ones(len(names), dtype=bool)
    other_compound = compound[:, None] != compound
    same_moa = moa[:, None] == moa
    scores: dict[str, float] = {}
    for name, allowed in {"NSC": other_compound, "NSCB": other_compound & (weeks @ weeks.T == 0)}.items():
        nearest = np.where(allowed, cosines, -np.inf).argmax(1)
        # without this condition, NSC counts treatments whose mechanism has a single compound as errors, as published
        scored = is_query & ((same_moa & allowed).any(1) if name == "NSCB" else True)
        found = same_moa[np.arange(len(names)), nearest] & allowed.any(1)
        scores |= {name: float(found[scored].mean()) if scored.any() else 0.0, f"{name} n": float(scored.sum())}
    return scores


def control_week_scores(adata: AnnData, embedding: np.ndarray) -> dict[str, float]:
    """Compute the balanced accuracy with which a linear probe predicts the week of DMSO wells, cross-validated.

    Read this score from wells that the embedding did not learn from. Whitening of 330 wells with 516 features leaves
    these wells nearly orthogonal to each other, so that a probe finds nothing in them; and if the wells of each plate
    sum to 0, the whitened wells that are left out are determined by the others.

    Returns
    -------
    ``week``, of the test wells among DMSO wells, or of all if none is a test well; and ``week chance``, which is 1
    divided by the number of weeks.
    """
    controls = (adata.obs["compound"] == "DMSO").to_numpy()
    if (controls & in_part(adata, "test")).any():
        controls &= in_part(adata, "test")
    z, week = np.asarray(embedding)[controls], adata.obs["week"].astype(str).to_numpy()[controls]
    predicted = week.copy()
    folds = StratifiedKFold(_N_PROBE_FOLDS, shuffle=True, random_state=0)
    for train, test in folds.split(z, week):
        predicted[test] = predict_labels(z[train], week[train], z[test])
    return {"week": float(balanced_accuracy_score(week, predicted)), "week chance": 1 / len(np.unique(week))}


def gene_scores(adata: AnnData, embedding: np.ndarray) -> dict[str, float]:
    """Compute how often a gene is the nearest gene to itself in another screen.

    Two pairs of screens share the cell line and differ in the siRNA library, in which genes lie at other positions: the
    fair test. Two pairs share the library and so the positions: what is found there may be an effect of position.

    Parameters
    ----------
    adata
        Wells with the columns ``gene`` (``"control"`` for negative controls), ``cell_line``, ``library`` and
        ``split``. If a library has test wells, pairs within the other library are not scored, as their labels were
        learned from.
    embedding
        ``(N, D)``.

    Returns
    -------
    ``other library, <cell line>`` and ``other line, <library>``: top-1 accuracy by cosine of mean profiles, the mean of
    both directions, of the genes that all screens contain; ``chance``.
    """
    perturbed = (adata.obs["gene"] != "control").to_numpy()
    obs, z = adata.obs[perturbed], np.asarray(embedding)[perturbed]
    gene, line, library = (obs[key].astype(str).to_numpy() for key in ("gene", "cell_line", "library"))
    screens = pd.DataFrame({"gene": gene, "screen": line + library})
    n_screens = screens.groupby("gene")["screen"].nunique()
    genes = n_screens.index[n_screens == screens["screen"].nunique()].to_numpy()
    kept, codes = np.isin(gene, genes), np.searchsorted(genes, gene)
    profiles = {}
    for a, b in set(zip(line, library, strict=True)):
        here = kept & (line == a) & (library == b)
        profiles[a, b] = _means(z[here], codes[here])
    held_out = np.unique(library[in_part(adata[perturbed], "test")])
    scores: dict[str, float] = {}
    for a in np.unique(line):
        scores[f"other library, {a}"] = _same_row_is_nearest(*(profiles[a, b] for b in np.unique(library)))
    for b in held_out if len(held_out) else np.unique(library):
        scores[f"other line, {b}"] = _same_row_is_nearest(*(profiles[a, b] for a in np.unique(line)))
    return scores | {"chance": 1 / len(genes)}


def control_position_scores(adata: AnnData, embedding: np.ndarray) -> dict[str, float]:
    """Compute how often the negative controls at a position are nearest to those at this position in the other line.

    Compared with ``other line, <library>`` of :func:`gene_scores`, this shows how much of that score is due to
    position: controls share the position, genes the position and the siRNA.

    Returns
    -------
    For each library top-1 accuracy by cosine, the mean of both directions, and ``<library> n``, the number of positions
    with controls in both lines. A position is a well of one of the two layouts of a library.
    """
    controls = (adata.obs["gene"] == "control").to_numpy()
    obs, z = adata.obs[controls], np.asarray(embedding)[controls]
    line, library = (obs[key].astype(str).to_numpy() for key in ("cell_line", "library"))
    # plates are called LM2_siGENOME_1A: layout 1, replicate A
    position = obs["plate"].astype(str).str.split("_").str[-1].str[:-1] + obs["well"].astype(str)
    scores: dict[str, float] = {}
    for name in np.unique(library):
        here = [(library == name) & (line == each) for each in np.unique(line)]
        shared = np.intersect1d(*(position[rows] for rows in here))
        here = [rows & position.isin(shared).to_numpy() for rows in here]
        scores[name] = _same_row_is_nearest(*(_means(z[rows], position[rows].to_numpy()) for rows in here))
        scores[f"{name} n"] = float(len(shared))
    return scores


def _same_row_is_nearest(one: np.ndarray, other: np.ndarray) -> float:
    """Return the fraction of rows whose nearest row of the other table is the same, the mean of both directions."""
    cosines, rows = _cosines(one, other), np.arange(len(one))
    return float(np.mean([cosines.argmax(axis) == rows for axis in (0, 1)]))


def _means(z: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the mean of the rows of each code."""
    return pd.DataFrame(np.asarray(z, dtype=np.float64)).groupby(codes).mean().to_numpy()


def _cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    one, other = (table / np.linalg.norm(table, axis=1, keepdims=True) for table in (one, other))
    return one @ other.T
