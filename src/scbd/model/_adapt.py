"""A new plate, from its controls alone: what training cells look like is kept, and new cells are brought there."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pandas as pd
import torch

from scbd._checks import check_count
from scbd._keys import E_REGISTRY
from scbd._labels import CROSS, as_columns, column_values, label_text, label_values
from scbd._linear_maps import LinearMap
from scbd._messages import head
from scbd._progress import progress_bar
from scbd.model._adapted import Adaptation, AdaptedCells
from scbd.model._looks import adaptation_to, look
from scbd.model._parts import values_of_few

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData

    from scbd.model._contract import EmbeddingModule

Using = Literal["auto", "controls", "all"]
# cells of either kind whose look is kept
_REMEMBERED = 2_048
# fewer have no variance
_LEAST = 2
_COLUMNS = ["key", "environment", "using", "n_cells", "distance_before", "distance_after", "linear_map"]

logger = logging.getLogger(__name__)


class AdaptMixin:
    """Gives an image model :meth:`adapt`."""

    if TYPE_CHECKING:  # what the model brings
        module: EmbeddingModule
        adata: Any
        train_indices: np.ndarray
        _check_if_trained: Any
        _codes: Any
        _controls: Any
        _lacks_for_controls: Any
        _other_controls: Any
        _registered: Any
        _source: Any

    def adapt(
        self,
        adata: AnnData,
        key: str | Sequence[str],
        *,
        using: Using = "auto",
        linear_map: bool = False,
        max_cells: int = 2_048,
        enable_progress_bar: bool | None = None,
    ) -> pd.DataFrame:
        r"""Learn how to embed cells of new plates, donors or microscopes as well as those that were trained on.

        No weight changes. What changes are the statistics of batch normalisation, and the mean of each channel (in
        networks without batch normalisation, its standard deviation, too): they are set such that some cells of a new
        environment leave each layer with the mean and variance that such cells of the training environments have there.
        With controls, nothing is assumed of what else is on a plate; with all cells, that new plates hold the same
        perturbations in the same numbers as those of the training. It takes seconds, and is saved with the model; a
        further :meth:`train` forgets it.

        Embed by it with ``get_latent_representation(adata, adapt_key=key)``.

        Parameters
        ----------
        adata
            Cells with inputs as the model was set up with. It needs the column ``key`` and, to find controls, the
            column of the perturbation.
        key
            Column of ``obs`` with what the cells differ by, such as the plate, or a list of columns, which are crossed.
            Each of its values is an environment to adapt to, but for those the model was trained on. It knows these
            of ``e_key``, and of any column that held a value for eight training cells or more on average; not of other
            crosses. Variances are those within ``e_key`` of the training, such as wells, where new cells have it.
        using
            ``"controls"``: those named by ``control`` of :meth:`setup_anndata`; ``"all"``: all cells of an environment.
            By default controls where they were named, else all, with a warning: on MitoCheck, whose plates have few
            cells of few phenotypes, all cells cost 0.23 of 0.60 accuracy.
        linear_map
            Also bring z of these cells to the mean and covariance of those trained on, by the linear map between normal
            distributions that moves cells least. Covariances are shrunk as if as many cells more had been seen as
            there are dimensions, whose covariance is a multiple of the identity.
        max_cells
            Number of cells of an environment to look at, drawn at random (with seed 0).
        enable_progress_bar
            By default for more than 20,000 cells.

        Returns
        -------
        The rows of :attr:`adaptations` that are new.

        Raises
        ------
        KeyError, TypeError, ValueError
            If inputs or columns are missing, or inputs are not of the kind the model was trained on; if controls are
            asked for and there are fewer than two in the training or in an environment; if no environment is new; or if
            nothing in the model is normalised by statistics. The model then is as it was.

        Warns
        -----
        UserWarning
            If all cells are used because no controls are known.

        References
        ----------
        Li et al. (2018), Adaptive batch normalization for practical domain adaptation: of all cells. Controls in place
        of them, each layer in turn, and the shrinkage of what few cells tell are ours.

        Examples
        --------
        >>> new = adata[adata.obs["well"] == "A1"].copy()
        >>> new.obs["plate"] = "next month"
        >>> model.adapt(new, key="plate", using="all")[["environment", "using", "n_cells"]]
           environment using  n_cells
        0   next month   all       40
        >>> z = model.get_latent_representation(new, adapt_key="plate")
        """
        self._check_if_trained(warn=True)
        check_count("max_cells", max_cells, _LEAST)
        source, kind = self._source(adata), self._using(using, adata)
        labels = label_values(adata.obs, key).map(label_text)
        chosen = self._chosen(labels, adata, key, kind)
        reference = self._reference(kind)
        groups, found = self._groups(adata), {}
        n_cells = sum(min(len(rows), max_cells) for rows in chosen.values())
        with progress_bar("Adapting", n_cells, shown=enable_progress_bar) as bar:
            for name, rows in chosen.items():
                # those of one environment, whichever stand beside it
                rows = np.random.default_rng(0).permutation(rows)[:max_cells]
                part = adaptation_to(self.module, source, rows, groups[rows], reference, linear_map=linear_map)
                found[name] = part | {"using": kind}
                bar.update(len(rows))
        name = _column_name(key)
        self.adaptations_ = self._adaptations | {name: self._adaptations.get(name, {}) | found}
        table = self.adaptations
        return table[(table["key"] == name) & table["environment"].isin(list(found))].reset_index(drop=True)

    @property
    def adaptations(self) -> pd.DataFrame:
        """What :meth:`adapt` has learned, a row an environment.

        ``key``: the column; ``environment``; ``using``: controls or all; ``n_cells`` of them that were looked at;
        ``distance_before``, ``distance_after``: of the mean of their z_c from that of such cells of the training, in
        standard deviations of these within environments (the root of the trace of their covariance), of which chance
        leaves about one by the root of ``n_cells``; ``linear_map``.
        """
        rows = [
            {"key": key, "environment": name} | {column: known[column] for column in _COLUMNS[2:]}
            for key, environments in self._adaptations.items()
            for name, known in environments.items()
        ]
        return pd.DataFrame(rows, columns=_COLUMNS)

    def forget_adaptations(
        self, key: str | Sequence[str] | None = None, environments: Sequence[str] | None = None
    ) -> None:
        """Undo :meth:`adapt`.

        Parameters
        ----------
        key
            The column that it was called with; all by default.
        environments
            Those to forget; all of ``key`` by default.

        Raises
        ------
        KeyError
            If there is no such adaptation; none is forgotten then.
        ValueError
            If environments are given without a key.
        """
        if key is None:
            if environments is not None:
                msg = "forget_adaptations(environments=…) needs the key that they are values of."
                raise ValueError(msg)
            self.adaptations_ = {}
            return
        name = _column_name(key)
        known = self._known(name)
        names = list(known) if environments is None else [label_text(value) for value in environments]
        if unknown := [value for value in names if value not in known]:
            msg = f"The model was not adapted to {head(unknown)} of {name!r} (but to {head(known)})."
            raise KeyError(msg)
        left = {value: part for value, part in known.items() if value not in names}
        others = {other: part for other, part in self._adaptations.items() if other != name}
        self.adaptations_ = others | ({name: left} if left else {})

    def _adapted_cells(self, adata: AnnData, key: str | Sequence[str] | None) -> AdaptedCells | None:
        """Which cells are embedded by which adaptation; `None` without a key."""
        if key is None:
            return None
        name = _column_name(key)
        known = self._known(name)
        labels = label_values(adata.obs, key).map(label_text)
        codes = pd.Categorical(labels, categories=list(known)).codes.astype(np.int64)
        trained = self._trained_on(key)
        if strange := sorted(set(labels[codes < 0]) - trained):
            message = "%s of %r: the model was not adapted to them, and they are embedded as training cells are."
            logger.warning(message, head(strange), name)
        return AdaptedCells(codes, [self._ready(part) for part in known.values()])

    def _ready(self, known: Mapping[str, Any]) -> Adaptation:
        device = self.module.device  # put there once, not with each batch
        buffers = {name: torch.from_numpy(values).to(device) for name, values in known["buffers"].items()}
        return Adaptation(buffers, {block: LinearMap(**part) for block, part in known["maps"].items()})

    @property
    def _adaptations(self) -> dict[str, dict[str, Any]]:
        return getattr(self, "adaptations_", {})

    def _known(self, name: str) -> dict[str, Any]:
        """Environments of a column that there is an adaptation to."""
        if name not in self._adaptations:
            there = f" (but to values of {head(map(repr, self._adaptations))})" if self._adaptations else ""
            msg = f"The model was not adapted to any value of {name!r}{there}: call adapt(adata, key={name!r}) first."
            raise KeyError(msg)
        return self._adaptations[name]

    def _trained_on(self, key: str | Sequence[str]) -> set[str]:
        """Values of a column, or of all of ``e_key``, that were trained on; none of another cross."""
        known, asked = as_columns(self._registered(E_REGISTRY)["columns"]), as_columns(key)
        trained: list[str] = getattr(self, "environments_", [])
        if known == asked:
            return set(trained)
        if len(asked) > 1:
            return set()
        if asked[0] in known:
            return {column_values(name)[known.index(asked[0])] for name in trained}
        return set(getattr(self, "values_", {}).get(asked[0], []))

    def _using(self, using: str, adata: AnnData) -> str:
        if using not in get_args(Using):
            msg = f"using={using!r} is not known: use one of {', '.join(get_args(Using))}."
            raise ValueError(msg)
        named = self._controls(adata) is not None
        unknown, remedy = (
            "the model does not know which cells are controls",
            "name them with control=… in setup_anndata",
        )
        if missing := self._lacks_for_controls(adata):
            unknown, remedy = f"obs has no {head(map(repr, missing))} to tell controls by", "add it"
        if using == "controls" and not named:
            msg = f"using='controls': {unknown}: {remedy}."
            raise ValueError(msg)
        if using == "auto" and not named:
            msg = (
                f"All cells of each environment are used, as {unknown}. Effects of perturbations then count as effects "
                "of the environment, unless each holds the perturbations of the training in about the same numbers. "
                f"To use controls, {remedy}; to use all cells without a warning, give using='all'."
            )
            warnings.warn(msg, UserWarning, stacklevel=3)
        return ("controls" if named else "all") if using == "auto" else using

    def _chosen(self, labels: pd.Series, adata: AnnData, key: str | Sequence[str], kind: str) -> dict[str, np.ndarray]:
        """Rows of the cells to look at, of each environment that is new."""
        trained = self._trained_on(key)
        new = [name for name in dict.fromkeys(labels) if name not in trained]
        if not new:
            msg = (
                f"The model was trained on all {labels.nunique()} environments of {_column_name(key)!r}: none is new. "
                "If they are others of the same names, rename them."
            )
            raise ValueError(msg)
        usable = np.ones(len(labels), dtype=bool) if kind == "all" else self._controls(adata)
        values = labels.to_numpy()
        chosen = {name: np.flatnonzero((values == name) & usable) for name in new}
        if few := [f"{name} ({len(rows)})" for name, rows in chosen.items() if len(rows) < _LEAST]:
            what = "controls" if kind == "controls" else "cells"
            msg = f"Each environment needs at least two {what}; there are fewer in {head(few)}."
            if kind == "controls":
                there = adata.obs[np.isin(values, [name for name, rows in chosen.items() if len(rows) < _LEAST])]
                msg += f" {self._other_controls(there)}, or give using='all', which takes all cells."
            raise ValueError(msg)
        return chosen

    def _groups(self, adata: AnnData) -> np.ndarray:
        """Environments of new cells, told apart as those of the training, ``(N,)``; one where columns are missing."""
        columns = self._registered(E_REGISTRY)["columns"]
        if any(column not in adata.obs for column in columns):
            return np.zeros(adata.n_obs, dtype=np.int64)
        codes: np.ndarray = label_values(adata.obs, columns, allow_missing=True).cat.codes.to_numpy()
        return codes

    def _reference(self, kind: str) -> dict[str, Any]:
        """What training cells look like, controls or all."""
        looks = getattr(self, "looks_", {})
        if kind not in looks:
            what = "control" if kind == "controls" else "cell"
            msg = (
                f"The model has seen no training {what} that new cells could be adapted to: train it for at least one "
                "step, with its training cells attached."
            )
            raise ValueError(msg)
        if not looks[kind]["moments"]:
            msg = (
                "This model normalises nothing by statistics (standardize=False, and no batch normalisation): there "
                "is nothing to adapt."
            )
            raise ValueError(msg)
        return looks[kind]

    def _remember(self) -> None:
        """Keep what training cells look like now, all and controls alone: :meth:`adapt` has no need of them."""
        e, controls = self._codes(self.adata, E_REGISTRY), self._controls(self.adata)
        names = self._registered(E_REGISTRY)["categories"]
        self.environments_ = [label_text(names[code]) for code in np.unique(e[self.train_indices])]
        self.values_ = values_of_few(self.adata.obs.iloc[self.train_indices])
        kinds = {"all": self.train_indices}
        if controls is not None:
            kinds["controls"] = self.train_indices[controls[self.train_indices]]
        source, rng = self._source(self.adata), np.random.default_rng(0)
        drawn = {kind: np.sort(rng.permutation(rows)[:_REMEMBERED]) for kind, rows in kinds.items()}
        self.looks_ = {
            kind: look(self.module, source, rows, e[rows]) for kind, rows in drawn.items() if len(rows) >= _LEAST
        }


def _column_name(key: str | Sequence[str]) -> str:
    return CROSS.join(map(str, as_columns(key)))
