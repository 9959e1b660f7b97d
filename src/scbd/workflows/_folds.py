"""Data with a part held out: plates, perturbations, positions of controls, cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from scbd import datasets
from scbd.data import hold_out_perturbations, stratified_split

if TYPE_CHECKING:
    import os

    from anndata import AnnData

# compounds that are never trained on, beside those with several positions
_UNSEEN = 100
# plates, and a share of compounds, that are left out in turn to choose settings by
_INNER_SHARE = 1 / 3


def cpjump1_fold(path: str | os.PathLike[str], *, seed: int = 0, fold: int = 0, inner: int | None = None) -> AnnData:
    """CPJUMP1 with plates, compounds and control positions held out.

    Held out are a plate of each time point, 100 compounds (half, if they are few) and all that have several positions,
    on all plates, and half of the positions of the controls: controls that a transform was fitted on are no negatives.

    Parameters
    ----------
    path
        See :func:`scbd.datasets.cpjump1`.
    seed
        Not used: all seeds of training have the same folds.
    fold
        Which plates, compounds and positions; from 0 on.
    inner
        To choose settings: of what is trained on in this fold, the table of what is there to train and choose by, with
        the i-th plate, a third of the compounds and half of the control positions held out again.

    Returns
    -------
    Wells with ``obs["split"]``, ``"train"`` or ``"test"``, ``obs["unseen"]``, whether the compound is held out,
    ``obs["new_plate"]``, whether the plate is, and ``obs["known_position"]``, whether this is a control at a position
    that is learned from, on whatever plate.
    """
    wells = datasets.cpjump1(path)
    obs, rng = wells.obs, np.random.default_rng([fold, 0])
    plates = obs[["Metadata_Plate", "Metadata_hours"]].drop_duplicates().sort_values("Metadata_Plate")
    held = {str(group.iloc[fold % len(group)]) for _, group in plates.groupby("Metadata_hours")["Metadata_Plate"]}
    compounds = obs.loc[obs["Metadata_broad_sample"] != "DMSO"]
    n_positions = compounds.groupby("Metadata_broad_sample", observed=True)["Metadata_Well"].nunique()
    several = n_positions.index[n_positions > 1].astype(str).tolist()
    single = n_positions.index[n_positions == 1].astype(str).to_numpy()
    unseen = {*several, *rng.permutation(single)[: min(_UNSEEN, len(single) // 2)]}
    marked = _marked(wells, held, unseen, rng)
    if inner is None:
        return marked
    wells = marked[marked.obs["split"] == "train"].copy()
    rng = np.random.default_rng([fold, 1 + inner])
    held = {str(np.sort(wells.obs["Metadata_Plate"].astype(str).unique())[inner])}
    compounds = np.sort(wells.obs["Metadata_broad_sample"].astype(str).unique())
    compounds = rng.permutation(compounds[compounds != "DMSO"])
    return _marked(wells, held, set(compounds[: round(_INNER_SHARE * len(compounds))]), rng)


def _marked(wells: AnnData, held: set[str], unseen: set[str], rng: np.random.Generator) -> AnnData:
    """Wells with columns that say what is held out."""
    obs = wells.obs
    compound, plate, well = (obs[f"Metadata_{name}"].astype(str) for name in ("broad_sample", "Plate", "Well"))
    positions = np.sort(well[compound == "DMSO"].unique())
    fitted = rng.permutation(positions)[: len(positions) // 2]
    obs["unseen"], obs["new_plate"] = compound.isin(unseen), plate.isin(held)
    obs["known_position"] = (compound == "DMSO") & well.isin(fitted)
    known = obs["known_position"] | (~obs["unseen"] & (compound != "DMSO"))
    obs["split"] = np.where(known & ~obs["new_plate"], "train", "test")
    return wells


def breinig2015_fold(path: str | os.PathLike[str], *, seed: int = 0, fold: int = 0) -> AnnData:
    """The cells of Breinig et al., half of those of each target and replicate held out.

    Parameters
    ----------
    path
        See :func:`scbd.datasets.breinig2015`.
    seed
        Not used: all seeds of training have the same folds.
    fold
        Which draw: a random half for each number, so that the halves of two folds share half of their cells.

    Returns
    -------
    Cells with ``obs["split"]``, ``"train"`` or ``"test"``.
    """
    cells = datasets.breinig2015(path)
    labels = [cells.obs[key].to_numpy() for key in ("target", "replicate")]
    known = stratified_split(labels, train_size=0.5, seed=fold).train
    cells.obs["split"] = np.where(np.isin(np.arange(cells.n_obs), known), "train", "test")
    return cells


def simulated_screen_fold(*, seed: int = 0, unseen: float = 1 / 3, new: float = 1 / 3, **screen: Any) -> AnnData:
    """A simulated screen of which some genes, and of all genes some cells, are not learned from.

    Of the genes that are held out, the cells that would have been learned from are left out, so that all genes have as
    many new cells, and scores of seen and unseen genes can be compared.

    Parameters
    ----------
    seed
        Of screen, genes and cells.
    unseen
        Share of the genes that are held out.
    new
        Share of each gene's cells in each well that are not learned from; one in forty of the others is for validation.
    **screen
        Arguments of :func:`scbd.datasets.simulated_screen`.

    Returns
    -------
    Cells with ``obs["split"]``, ``"train"``, ``"validation"`` or ``"test"``, and ``obs["unseen"]``, whether the gene is
    held out.
    """
    cells = datasets.simulated_screen(seed=seed, **screen)
    genes, wells = (cells.obs[key].astype(str).to_numpy() for key in ("gene", "well"))
    held = hold_out_perturbations(genes, share=unseen, validation_share=0, keep="nontargeting", seed=seed).test
    parts = stratified_split([genes, wells], train_size=0.975 * (1 - new), validation_size=0.025 * (1 - new), seed=seed)
    cells.obs["split"] = "test"
    for name in ("train", "validation"):
        cells.obs.iloc[getattr(parts, name), cells.obs.columns.get_loc("split")] = name
    cells.obs["unseen"] = np.isin(np.arange(cells.n_obs), held)
    return cells[~cells.obs["unseen"].to_numpy() | (cells.obs["split"] == "test").to_numpy()].copy()


def simulated_screen_plates(*, seed: int = 0, fold: int = 0, **screen: Any) -> AnnData:
    """A simulated screen of which a plate is not learned from.

    Parameters
    ----------
    seed
        Of the screen.
    fold
        Which plate, from 0 on.
    **screen
        Arguments of :func:`scbd.datasets.simulated_screen`.

    Returns
    -------
    Cells with ``obs["split"]``: ``"test"`` on that plate, ``"validation"`` one in forty of the others.

    Raises
    ------
    ValueError
        If the screen has one plate, or not so many.
    """
    cells = datasets.simulated_screen(seed=seed, **screen)
    plates = cells.obs["plate"].astype(str).to_numpy()
    names = np.unique(plates)
    if not 0 <= fold < len(names) or len(names) < 2:
        msg = f"fold={fold}: the screen has {len(names)} plates, of which one is left out and others are learned from."
        raise ValueError(msg)
    validation = np.random.default_rng([seed, fold]).random(cells.n_obs) < 0.025
    cells.obs["split"] = np.where(plates == names[fold], "test", np.where(validation, "validation", "train"))
    return cells
