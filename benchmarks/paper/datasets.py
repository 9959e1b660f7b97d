"""The data sets of the experiments: how each is loaded, what is held out of it, and what its columns are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from anndata import AnnData
from scipy.ndimage import gaussian_filter

from paper import loaders, real_images
from scbd import datasets
from scbd._shared.keys import IMAGE_KEY
from scbd._workflows.training_runs import locate_inputs
from scbd.data import hold_out_perturbations, infer_environments, stratified_split
from scbd.data._inferred import INFERRED
from scbd.data._input_location import InputLocation
from scbd.data._sources import digest_cells

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from scbd.data import Split

# compounds that are never trained on, beside those with several positions
_UNSEEN = 100
# groups of compounds of BBBC021, each of which is left out in turn
_N_FOLDS = 5
# plates, and a share of compounds, that are left out in turn to choose settings by
_INNER_SHARE = 1 / 3


@dataclass(frozen=True)
class Dataset:
    """A loader and its columns.

    Attributes
    ----------
    loader
        Makes the table; takes ``seed``, and ``path`` where there are files.
    y_key, e_key
        Columns of the label and of the environment (several are crossed, or side by side: ``e_columns`` of ``setup``).
    has_files
        Whether there are files to give a path to.
    needs_path
        Whether they cannot be downloaded.
    guide_key
        Column of the guides, where each label has several; tables may lack it, such as raw crops of Funk et al.
    relations
        Known relations between labels, as a frame of ``source`` and ``target``.
    labels
        Columns of what perturbations have in common, such as mechanisms, by their names in tables.
    setup
        Further arguments of ``setup_anndata``: where the inputs are, if not images at their usual key, or features in
        ``X``; and which cells are controls, where models are told of them.
    control
        Label of the cells that were not perturbed, which corrections learn from.
    group_key
        What a probe of the label holds out as a whole, where labels are not in all environments alike: else it would
        read the environment, and know the labels that there are.
    """

    loader: Callable[..., AnnData]
    y_key: str | Sequence[str]
    e_key: str | Sequence[str]
    has_files: bool = True
    needs_path: bool = True
    guide_key: str | None = None
    relations: Callable[[AnnData], pd.DataFrame] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    setup: Mapping[str, Any] = field(default_factory=dict)
    control: str | None = None
    group_key: str | None = None

    @property
    def label_keys(self) -> dict[str, Any]:
        """What a score or a correction is told of the columns."""
        return {"y_key": self.y_key, "e_key": self.e_key, "control": self.control}

    @property
    def columns(self) -> dict[str, Any]:
        """Arguments of ``setup_anndata``."""
        return {"y_key": self.y_key, "e_key": self.e_key, **self.setup}

    def inputs(self, adata: AnnData) -> InputLocation:
        """Where in a table the images, or the features, are."""
        return locate_inputs(adata, self.setup)

    def digest(self, adata: AnnData) -> str:
        """Of all that is known of each cell, and of what it is learned from; tables of profiles are no inputs."""
        has_inputs = IMAGE_KEY in adata.obsm or any(name in self.setup for name in InputLocation._fields)
        return digest_cells(self.inputs(adata).source(adata) if has_inputs else None, adata.obs)

    @property
    def needed(self) -> str:
        """Files to give a path to, in a word."""
        if not self.has_files:
            return ""
        name = self.loader.__name__.removesuffix("_fold")
        return name if self.needs_path else "MNIST, or downloaded"

    def load(self, path: str | os.PathLike[str] | None, seed: int, **kwargs: Any) -> AnnData:
        """Load the cells.

        Raises
        ------
        ValueError
            If the files are needed and no path was given.
        """
        self.check_path(path)
        return self.loader(path, seed=seed, **kwargs) if self.has_files else self.loader(seed=seed, **kwargs)

    def check_path(self, path: str | os.PathLike[str] | None) -> None:
        """Raise if files are needed and no path was given."""
        if path is None and self.has_files and self.needs_path:
            msg = f"{self.needed} is not downloaded: its loader names the source, and give --data."
            raise ValueError(msg)


def in_part(adata: AnnData, part: str) -> np.ndarray:
    """Which cells are of this part of the split, such as ``"train"``, boolean ``(N,)``."""
    return (adata.obs["split"] == part).to_numpy()


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
        See :func:`paper.loaders.breinig2015`.
    seed
        Not used: all seeds of training have the same folds.
    fold
        Which draw: a random half for each number, so that the halves of two folds share half of their cells.

    Returns
    -------
    Cells with ``obs["split"]``, ``"train"`` or ``"test"``.
    """
    cells = loaders.breinig2015(path)
    labels = [cells.obs[key].to_numpy() for key in ("target", "replicate")]
    known = stratified_split(labels, train_size=0.5, seed=fold).train
    cells.obs["split"] = np.where(np.isin(np.arange(cells.n_obs), known), "train", "test")
    return cells


def bbbc021_wells_fold(
    path: str | os.PathLike[str], *, seed: int = 0, fold: int | None = None, new_controls: bool = False
) -> AnnData:
    """BBBC021 wells, with a fifth of the compounds, or a third of the DMSO wells, held out.

    Parameters
    ----------
    path
        See :func:`paper.loaders.bbbc021_wells`.
    seed
        Not used: all seeds of training have the same folds.
    fold
        Number of the fold of compounds, 0 to 4. Folds have nearly equal numbers of treatments. `None`: hold out none.
    new_controls
        Whether to hold out the DMSO wells at two of the six positions of each plate.

    Returns
    -------
    Wells with ``obs["split"]``, ``"train"`` or ``"test"``, and ``obs["known_position"]``, whether this is a DMSO well
    that is learned from.
    """
    wells = loaders.bbbc021_wells(path)
    compound, well = (wells.obs[key].astype(str) for key in ("compound", "well"))
    is_control = compound == "DMSO"
    n_treatments = wells.obs["treatment"].groupby(compound).nunique().drop("DMSO")
    n_treatments = n_treatments.sample(frac=1, random_state=0).sort_values(ascending=False, kind="stable")
    n_held, fold_of = np.zeros(_N_FOLDS), {}
    for name, n in n_treatments.items():
        fold_of[name] = int(n_held.argmin())
        n_held[fold_of[name]] += n
    held_out = compound.map(fold_of) == (-1 if fold is None else fold)
    if new_controls:
        positions = np.random.default_rng(0).permutation(np.unique(well[is_control]))
        held_out |= is_control & well.isin(positions[: len(positions) // 3])
    wells.obs["split"] = np.where(held_out, "test", "train")
    wells.obs["known_position"] = is_control & ~held_out
    return wells


def rhogtpase_wells_fold(path: str | os.PathLike[str], *, seed: int = 0, library: str | None = None) -> AnnData:
    """RhoGTPase wells, with the genes of one siRNA library held out in both cell lines.

    Parameters
    ----------
    path
        See :func:`paper.loaders.rhogtpase_wells`.
    seed
        Not used.
    library
        Library whose genes are training wells. `None`: hold out nothing.

    Returns
    -------
    Wells with ``obs["split"]``, ``"train"`` or ``"test"``. All negative controls are training wells.
    """
    wells = loaders.rhogtpase_wells(path)
    known = (wells.obs["gene"] == "control") | (library is None) | (wells.obs["library"] == library)
    wells.obs["split"] = np.where(known, "train", "test")
    return wells


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
    cells.obs["split"] = _split_names(parts, cells.n_obs)
    cells.obs["unseen"] = np.isin(np.arange(cells.n_obs), held)
    return cells[~cells.obs["unseen"].to_numpy() | in_part(cells, "test")].copy()


def simulated_screen_plates(*, seed: int = 0, fold: int = 0, n_left_out: int = 1, **screen: Any) -> AnnData:
    """A simulated screen of which a plate, or several, are not learned from.

    Parameters
    ----------
    seed
        Of the screen.
    fold
        Which plate, from 0 on; of several, the first.
    n_left_out
        How many.
    **screen
        Arguments of :func:`scbd.datasets.simulated_screen`.

    Returns
    -------
    Cells with ``obs["split"]``: ``"test"`` on those plates, ``"validation"`` one in forty of the others.

    Raises
    ------
    ValueError
        If the screen has not so many plates, or no other.
    """
    cells = datasets.simulated_screen(seed=seed, **screen)
    plates = cells.obs["plate"].astype(str).to_numpy()
    names = np.unique(plates)
    if not 0 <= fold < len(names) or len(names) <= n_left_out:
        msg = (
            f"fold={fold}: the screen has {len(names)} plates, of which {n_left_out} are left out and others are "
            "learned from."
        )
        raise ValueError(msg)
    left_out = np.isin(plates, np.roll(names, -fold)[:n_left_out])
    cells.obs["split"] = loaders.leave_out(left_out, [seed, fold])
    return cells


def funk22_plates(path: str | os.PathLike[str], *, seed: int = 0, n_cells: int | None = None) -> AnnData:
    """The screen of Funk et al. (2022) with guides, split as Yao et al. (2024) do: two plates are not learned from.

    Parameters
    ----------
    path, n_cells
        See :func:`scbd.datasets.funk22`.
    seed
        Of the choice of cells, and of those to validate on.

    Returns
    -------
    Cells with ``obs["split"]``: ``"test"`` on plates LaC024B and LaC024C, ``"validation"`` one in forty of the others.

    Raises
    ------
    ValueError
        If there are no cells of these plates, or of no others.
    """
    cells = datasets.funk22(path, n_cells=n_cells, guides=True, seed=seed)
    left_out = cells.obs["plate"].astype(str).str.endswith(_LEFT_OUT).to_numpy()
    if left_out.all() or not left_out.any():
        plates = ", ".join(sorted(set(cells.obs["plate"].astype(str))))
        msg = f"Plates {' and '.join(_LEFT_OUT)} are scored, and others learned from; there are {plates}."
        raise ValueError(msg)
    cells.obs["split"] = loaders.leave_out(left_out, [seed])
    return cells


def _split_names(parts: Split, n_cells: int) -> np.ndarray:
    """``"train"`` and ``"validation"`` for the cells of these parts, ``"test"`` for all others."""
    names = np.full(n_cells, "test", dtype=object)
    names[parts.train], names[parts.validation] = "train", "validation"
    return names


def drawn_screen_fold(*, seed: int = 0, n_cells: int = 3_000) -> AnnData:
    """A small screen that is drawn by other code than scbd's own: nothing of scbd was chosen on it.

    Forty genes in ten complexes, controls, and six wells that hold all of them and differ in gain, shading and blur.
    Outlines are waves around a circle, vesicles are spots, what a gene does is seen in half of its cells.

    Parameters
    ----------
    seed
        Of all there is.
    n_cells
        Crops of 3 × 64 × 64 pixels, uint8.

    Returns
    -------
    Cells with ``obs["gene"]``, ``obs["well"]``, and ``obs["split"]``, ``"test"`` for a third of each gene's cells, of a
    quarter of the genes for all; and the cells' traits as ``obsm["X_oracle"]``.
    """
    rng = np.random.default_rng([seed, 46])
    size, n_genes, n_complexes, n_wells, n_traits = 64, 40, 10, 6, 6
    effects = rng.normal(size=(n_complexes, n_traits)).repeat(n_genes // n_complexes, axis=0)
    effects = np.vstack([np.zeros(n_traits), effects + 0.25 * rng.normal(size=effects.shape)])
    gene = np.where(rng.random(n_cells) < 0.12, 0, 1 + np.arange(n_cells) % n_genes)
    well = rng.integers(n_wells, size=n_cells)
    traits = rng.normal(size=(n_cells, n_traits)) + effects[gene] * (rng.random((n_cells, 1)) < 0.5)
    gain, blur = rng.lognormal(0, 0.4, (n_wells, 3)), rng.uniform(0.3, 2.0, n_wells)
    shading = rng.uniform(-0.5, 0.5, (n_wells, 2))
    across = np.linspace(-1, 1, size)
    images = np.empty((n_cells, 3, size, size), dtype=np.uint8)
    for cell, (area, waves, lobes, vesicles, spread, grain) in enumerate(traits):
        where = well[cell]
        y, x = across[:, None] - 0.1 * rng.normal(), across - 0.1 * rng.normal()
        radius, angle = np.hypot(x, y), np.arctan2(y, x) + rng.uniform(0, 2 * np.pi)
        outline = 0.65 * (1 + (0.1 + 0.03 * waves) * np.sin(3 * angle) + (0.06 + 0.03 * lobes) * np.sin(5 * angle))
        nucleus = 1 / (1 + np.exp(25 * (radius - 0.28 * np.exp(0.12 * area))))
        body = 1 / (1 + np.exp(15 * (radius - outline)))
        texture = gaussian_filter(rng.normal(size=(size, size)), 1.5)
        spots = np.zeros((size, size))
        for _ in range(rng.poisson(8 * np.exp(0.3 * vesicles))):
            far, turn = (0.3 + 0.06 * spread) * (1 + 0.3 * rng.normal()), rng.uniform(0, 2 * np.pi)
            spots += np.exp(-((x - far * np.cos(turn)) ** 2 + (y - far * np.sin(turn)) ** 2) / 0.004)
        seen = np.stack([nucleus * (1 + (0.8 + 0.3 * grain) * texture), body * (1 - 0.5 * nucleus), body * spots])
        seen = gaussian_filter(seen, (0, blur[where], blur[where])) * gain[where][:, None, None]
        seen = 60 * seen * (1 + shading[where, 0] * across[:, None] + shading[where, 1] * across) + 8
        images[cell] = rng.poisson(seen.clip(0)).clip(0, 255)
    names = np.array(["nontargeting", *(f"gene {g}" for g in range(n_genes))])
    obs = pd.DataFrame({"gene": names[gene], "well": [f"well {w}" for w in well]}, index=np.arange(n_cells).astype(str))
    known = stratified_split([names[gene], obs["well"].to_numpy()], train_size=0.65, validation_size=0.02, seed=seed)
    held = hold_out_perturbations(names[gene], share=0.25, validation_share=0, keep="nontargeting", seed=seed).test
    obs["split"] = _split_names(known, n_cells)
    obs.loc[obs.index[held], "split"] = "test"
    complexes = [f"complex {g // (n_genes // n_complexes)}" for g in range(n_genes)]
    network = pd.DataFrame({"source": complexes, "target": names[1:]})
    network.attrs["kind"] = "sets"
    return AnnData(
        obs=obs, obsm={IMAGE_KEY: images, "X_oracle": traits.astype(np.float32)}, uns={"truth": {"network": network}}
    )


def environments_hidden(
    loader: Callable[..., AnnData], y_key: str, e_key: str | None = None, **inputs: Any
) -> Callable[..., AnnData]:
    """A loader that infers environments, so many as ``n_inferred`` says, from training cells alone.

    Parameters
    ----------
    loader
        Of cells with ``obs["split"]``.
    y_key
        Column of the label.
    e_key
        Environments that stay known, beside which others are inferred.
    **inputs
        Where the inputs are, see :func:`scbd.data.infer_environments`.
    """

    @wraps(loader)
    def load(*path: Any, seed: int = 0, n_inferred: int = 2, **kwargs: Any) -> AnnData:
        adata = loader(*path, seed=seed, **kwargs)
        learned = in_part(adata, "train")
        found = infer_environments(adata, y_key, n_inferred, e_key=e_key, fit=learned, seed=seed, **inputs)
        adata.obs[INFERRED] = found.labels
        return adata

    return load


# plates that Yao et al. (2024) test on
_LEFT_OUT = ("LaC024B", "LaC024C")
_CONTROLS = {"control": "nontargeting"}
# genes in wells
_screen = partial(Dataset, y_key="gene", e_key="well", control="nontargeting")
_wells = partial(
    Dataset,
    y_key="Metadata_broad_sample",
    e_key="Metadata_Plate",
    labels={"mechanism": "Metadata_moa", "target": "Metadata_gene"},
    control="DMSO",
)
_WELLS: dict[str, Any] = {"layer": "X", "control": "DMSO", "position_key": "Metadata_Well"}
_SIMULATED: dict[str, Any] = {
    "has_files": False,
    "guide_key": "sgRNA",
    "relations": lambda adata: adata.uns["truth"]["network"],
}
_FUNK22: dict[str, Any] = {"guide_key": "sgRNA", "relations": lambda adata: datasets.corum()}

DATASETS: dict[str, Dataset] = {
    "bbbc021_wells": Dataset(
        bbbc021_wells_fold,
        "treatment",
        "plate",
        control="DMSO",
        setup={"layer": "X", "control": "DMSO", "position_key": "well"},
    ),
    "bbbc021_crops": Dataset(real_images.bbbc021_crops, "moa", "week", control="DMSO", setup={"control": "DMSO"}),
    "breinig2015": Dataset(breinig2015_fold, "target", "replicate", setup={"layer": "X"}),
    "camelyon17": Dataset(loaders.camelyon17, "tumor", "hospital"),
    "colored_digits": Dataset(datasets.colored_digits, "digit", "environment", has_files=False),
    "colored_mnist": Dataset(datasets.colored_mnist, "digit", "environment", needs_path=False),
    "cpjump1": _wells(cpjump1_fold, setup=_WELLS),
    "drawn_screen_fold": _screen(
        drawn_screen_fold, has_files=False, relations=_SIMULATED["relations"], setup=_CONTROLS
    ),
    "funk22": _screen(datasets.funk22, **_FUNK22),
    "funk22_plates": _screen(funk22_plates, setup=_CONTROLS, **_FUNK22),
    "funk22_cellprofiler": _screen(loaders.funk22_cellprofiler, **_FUNK22),
    "mitocheck_crops": Dataset(real_images.mitocheck_crops, "phenotype", "plate"),
    "mitosis_scanners": Dataset(real_images.mitosis_scanners, "label", "scanner"),
    "pacs": Dataset(loaders.pacs, "class", "domain"),
    "rhogtpase_wells": Dataset(
        rhogtpase_wells_fold,
        "gene",
        "plate",
        control="control",
        setup={"layer": "X", "control": "control", "position_key": "well"},
    ),
    "rxrx1": Dataset(loaders.rxrx1, "sirna", "experiment"),
    "simulated_screen": _screen(datasets.simulated_screen, **_SIMULATED),
    "simulated_screen_fold": _screen(simulated_screen_fold, group_key="plate", setup=_CONTROLS, **_SIMULATED),
    "simulated_screen_plates": _screen(simulated_screen_plates, group_key="plate", setup=_CONTROLS, **_SIMULATED),
    "vlcs": Dataset(loaders.vlcs, "class", "domain"),
}

# models are told of environments that were inferred, scores of those that there are
DATASETS |= {
    "colored_mnist_hidden": replace(
        DATASETS["colored_mnist"],
        loader=environments_hidden(datasets.colored_mnist, "digit"),
        setup={"e_key": INFERRED},
    ),
    "cpjump1_hidden": replace(
        DATASETS["cpjump1"],
        loader=environments_hidden(cpjump1_fold, "Metadata_broad_sample", layer="X"),
        setup=_WELLS | {"e_key": INFERRED},
    ),
    # where environments are to be found, nobody says which cells are controls
    "simulated_screen_untold": replace(DATASETS["simulated_screen_fold"], setup={}),
    "simulated_screen_hidden": replace(
        DATASETS["simulated_screen_fold"],
        loader=environments_hidden(simulated_screen_fold, "gene"),
        setup={"e_key": INFERRED},
    ),
    "simulated_screen_half_hidden": replace(
        DATASETS["simulated_screen_fold"],
        loader=environments_hidden(simulated_screen_fold, "gene", "plate"),
        setup={"e_key": ["plate", INFERRED]},
    ),
}
