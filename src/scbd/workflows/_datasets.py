"""The data sets of the experiments: how each is loaded, and what its columns are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from scbd import datasets
from scbd._keys import IMAGE_KEY
from scbd._labels import as_columns
from scbd.data import INFERRED, Inputs, digest_cells
from scbd.workflows._folds import (
    breinig2015_fold,
    cpjump1_fold,
    simulated_screen_fold,
    simulated_screen_plates,
)
from scbd.workflows._hidden import environments_hidden

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    import pandas as pd
    from anndata import AnnData


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

    @property
    def label_columns(self) -> list[str]:
        """Columns that a model looks at: of perturbation, environments and position."""
        further = (self.setup.get(name) for name in ("position_key", "continuous_covariate_keys"))
        keys = [self.y_key, self.e_key, *(key for key in further if key is not None)]
        return list(dict.fromkeys(column for key in keys for column in as_columns(key)))

    def inputs(self, adata: AnnData) -> Inputs:
        """Where in a table the images, or the features, are."""
        return Inputs.found(adata, *(self.setup.get(name) for name in Inputs._fields))

    def digest(self, adata: AnnData) -> str:
        """Of all that is known of each cell, and of what it is learned from; tables of profiles are no inputs."""
        learned_from = IMAGE_KEY in adata.obsm or any(name in self.setup for name in Inputs._fields)
        return digest_cells(self.inputs(adata).source(adata) if learned_from else None, adata.obs)

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
            name = self.loader.__name__.removesuffix("_fold")
            msg = f"{name} is not downloaded by scbd: see scbd.datasets.{name} for its source, and give path=…"
            raise ValueError(msg)


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

DATASETS: dict[str, Dataset] = {
    "breinig2015": Dataset(breinig2015_fold, "target", "replicate", setup={"layer": "X"}),
    "camelyon17": Dataset(datasets.camelyon17, "tumor", "hospital"),
    "colored_digits": Dataset(datasets.colored_digits, "digit", "environment", has_files=False),
    "colored_mnist": Dataset(datasets.colored_mnist, "digit", "environment", needs_path=False),
    "cpjump1": _wells(cpjump1_fold, setup=_WELLS),
    "funk22": _screen(datasets.funk22, guide_key="sgRNA", relations=lambda adata: datasets.corum()),
    "funk22_cellprofiler": _screen(
        datasets.funk22_cellprofiler, guide_key="sgRNA", relations=lambda adata: datasets.corum()
    ),
    "pacs": Dataset(datasets.pacs, "class", "domain"),
    "rxrx1": Dataset(datasets.rxrx1, "sirna", "experiment"),
    "simulated_screen": _screen(datasets.simulated_screen, **_SIMULATED),
    "simulated_screen_fold": _screen(simulated_screen_fold, group_key="plate", **_SIMULATED),
    "simulated_screen_plates": _screen(
        simulated_screen_plates, group_key="plate", setup={"control": "nontargeting"}, **_SIMULATED
    ),
    "vlcs": Dataset(datasets.vlcs, "class", "domain"),
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
