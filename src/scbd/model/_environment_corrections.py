"""Estimation of what each environment does to all of its cells, from reference cells, and removal from inputs and z_c.

Reference cells are the cells from which the mean and the standard deviation of an environment are estimated.
"""

from __future__ import annotations

import copy
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from scbd._shared.checks import check_choice, inflect, join_first
from scbd._shared.keys import E_REGISTRY, Y_REGISTRY
from scbd._shared.labels import CROSS_SEPARATOR, as_columns, encode_labels, label_values, split_crossed_label
from scbd.model._design import has_separate_environments
from scbd.model._interfaces import ReferenceBatches
from scbd.model._reference_cells import (
    ReferenceKind,
    StandardizeBy,
    choose_reference_kind,
    draw_reference_cells,
    frequencies,
    median_overlap,
    select_reference_cells,
)
from scbd.model._setup import SetupMixin
from scbd.nn._environment_scaling import EnvironmentScaling, Moments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from anndata import AnnData

    from scbd.data._sources import ImageSource
    from scbd.model._interfaces import EmbeddingModule
    from scbd.model._minified import StoredEmbeddings
    from scbd.nn._feature_scaling import FeatureScaling
    from scbd.nn._image_preprocessing import Preprocess

logger = logging.getLogger(__name__)


class EnvironmentCorrections(NamedTuple):
    """Environments of the cells of a table, with their estimated effects."""

    codes: np.ndarray
    """Codes of the environments in each of K columns, int64 ``(N, K)``; -1 if missing."""
    inputs: EnvironmentScaling
    """Standardisation of the inputs per environment."""
    outputs: EnvironmentScaling | None = None
    """Residual environment offsets of z_c; `None` if they are not subtracted."""


class EnvironmentMixin(SetupMixin):
    """Mixin that adds standardisation per environment, of inputs and of z_c, to a model."""

    standardized_by_: dict[str, ReferenceKind]
    could_be_known_by_: dict[str, ReferenceKind]
    centered_by_: dict[str, ReferenceKind]
    label_shares_: np.ndarray
    in_common_: dict[str, float]
    leftover_: dict[str, np.ndarray]
    _standardize_by: StandardizeBy

    @property
    def _standardized_by(self) -> dict[str, ReferenceKind]:
        """Reference cells by column of environments, without columns that are not standardised per environment."""
        return getattr(self, "standardized_by_", {})

    def _make_preprocess(self, *, standardize_by: StandardizeBy = None, **settings: Any) -> Preprocess | FeatureScaling:
        """Create the module that prepares the inputs, including their standardisation per environment.

        Parameters
        ----------
        standardize_by
            Kind of reference cells, see :class:`scbd.SCBDModel`; `None` for no standardisation per environment.
        **settings
            Arguments of :class:`scbd.nn.Preprocess` or :class:`scbd.nn.FeatureScaling`.

        Raises
        ------
        ValueError
            If ``standardize_by`` is not one of the choices, or is ``"controls"`` and controls were not named.
        """
        preprocess, asked = super()._make_preprocess(**settings), standardize_by
        by = {"auto": "by what fits", "controls": "by these", "cells": "by all of them", None: "not at all"}
        check_choice("standardize_by", asked, by)
        if asked == "controls" and self._control_codes is None:
            msg = "standardize_by='controls': name controls with control=… in setup_anndata."
            raise ValueError(msg)
        if asked is not None and preprocess.standardize:
            columns = self._environment_columns
            preprocess.environments = EnvironmentScaling(preprocess.output_shape[0], len(columns))
        self._standardize_by = asked
        return preprocess

    @property
    def _environment_columns(self) -> list[tuple[str, ...]]:
        """Columns of ``obs`` with environments; crossed columns form one tuple."""
        columns = self._registered(E_REGISTRY)["columns"]
        return [(column,) for column in columns] if has_separate_environments(self.registry_) else [tuple(columns)]

    def _environment_codes(self, adata: AnnData) -> tuple[np.ndarray, list[list[Any]]]:
        """Return the codes of each cell's environments, int64 ``(N, K)``, and the names of the environments by column.

        New environments get codes above those of the registered ones. The code is -1 if a value or column is missing.
        """
        categories = self._registered(E_REGISTRY)["categories"]
        known: Sequence[Sequence[Any]] = [categories]
        if has_separate_environments(self.registry_):
            known = [list(dict.fromkeys(values)) for values in zip(*map(split_crossed_label, categories), strict=True)]
        codes, names = [], []
        for columns, values in zip(self._environment_columns, known, strict=True):
            unknown: list[Any] = []
            of_cells = np.full(adata.n_obs, -1)
            if all(column in adata.obs for column in columns):
                of_cells, unknown = encode_labels(label_values(adata.obs, columns, allow_missing=True), values)
            codes.append(of_cells)
            names.append([*values, *unknown])
        return np.stack(codes, 1), names

    def _training_reference(self, adata: AnnData, source: ImageSource, rows: np.ndarray) -> ReferenceBatches:
        """Return the reference cells among the training rows; the first call chooses between controls and all cells."""
        codes, _ = self._environment_codes(adata)
        if not hasattr(self, "standardized_by_"):
            controls, y, of_rows = self._control_mask(adata), self._label_codes(adata)[rows], codes[rows]
            names = list(map(column_name, self._environment_columns))
            decide = partial(
                choose_reference_kind, self._standardize_by, y, controls=None if controls is None else controls[rows]
            )
            found = {name: decide(of) for name, of in zip(names, of_rows.T, strict=True)}
            self.standardized_by_ = {name: by for name, (by, _) in found.items() if by is not None}
            self.could_be_known_by_ = {name: by for name, (_, by) in found.items() if by is not None}
            self.label_shares_ = frequencies(y)
            self.in_common_ = {name: median_overlap(y, of) for name, of in zip(names, of_rows.T, strict=True)}
        return self._draw_reference_of(self.standardized_by_, adata, source, codes, rows)

    def _label_codes(self, adata: AnnData) -> np.ndarray:
        """Return the codes of the perturbations, int64 ``(N,)``.

        New perturbations get codes above those of the registered ones. The code is -1 if a label or column is missing.
        """
        registered = self._registered(Y_REGISTRY)
        if not all(column in adata.obs for column in registered["columns"]):
            return np.full(adata.n_obs, -1)
        labels = label_values(adata.obs, registered["columns"], allow_missing=True)
        return encode_labels(labels, registered["categories"])[0]

    def _draw_reference_of(
        self,
        by: Mapping[str, ReferenceKind],
        adata: AnnData,
        source: ImageSource,
        codes: np.ndarray,
        rows: np.ndarray,
        of: np.ndarray | None = None,
    ) -> ReferenceBatches:
        """Draw the reference cells of the environments from some rows.

        Parameters
        ----------
        by
            ``"controls"`` or ``"cells"`` for each column of environments.
        adata
            Table of the cells.
        source
            Inputs of all cells.
        codes
            Codes of the environments, int64 ``(N, K)``.
        rows
            Rows to draw from.
        of
            Mask that restricts the choice, boolean ``(N, K)``; `None` for no restriction.
        """
        y, named = self._label_codes(adata), self._control_mask(adata)
        controls = np.zeros(len(codes), dtype=bool) if named is None else named
        used, beside = np.zeros(codes.shape, dtype=bool), np.zeros(codes.shape, dtype=bool)
        for column, name in enumerate(map(column_name, self._environment_columns)):
            known = rows[codes[rows, column] >= 0]
            if of is not None:
                known = known[of[known, column]]
            if by.get(name) == "controls":
                used[known, column] = controls[known]
            elif by.get(name) == "cells" and self._standardize_by == "cells":
                used[known, column] = True
            elif by.get(name) == "cells":
                cells = y[known], codes[known, column], controls[known]
                used[known, column], beside[known, column] = select_reference_cells(
                    *cells, self.label_shares_, self.in_common_[name]
                )
        return draw_reference_cells(source, rows, codes, used, beside if beside.any() else None)

    def _environment_corrections(self, adata: AnnData, *, leftover: bool) -> EnvironmentCorrections | None:
        """Return the environments of a table with their estimated effects.

        Effects of environments that were not seen in training are estimated from the cells of the table. The result is
        `None` if inputs are not standardised per environment.

        Parameters
        ----------
        adata
            Cells, with or without labels.
        leftover
            Whether to include the residual environment offsets of z_c.
        """
        inputs, device = self.module.preprocess.environments, self.module.device
        if inputs is None or not self._standardized_by:
            return None
        codes, names = self._environment_codes(adata)
        outputs = (
            _restore_residual_offsets(self.leftover_).to(device)
            if leftover and getattr(self, "leftover_", {})
            else None
        )
        asked = np.array([column_name(columns) in self._standardized_by for columns in self._environment_columns])
        of_cells = torch.from_numpy(codes).to(device)
        self._warn_of_absent_columns(adata)
        new = asked & (codes >= 0) & ~inputs.known(of_cells).cpu().numpy()
        if new.any():
            (module, source), rows = self._module_and_source(adata), np.flatnonzero(new.any(1))
            if module is self.module:  # embeddings stored in a minified table are those of standardised inputs already
                inputs = copy.deepcopy(inputs)
                known = self._draw_reference_of(self.standardized_by_, adata, source, codes, rows, new)
                scaled = self.module.preprocess.scaled_inputs
                _estimate_scaling(inputs, lambda: (scaled(batch.to(device)) for batch in known.batches()), known)
                _warn_of_unestimated(new & ~inputs.known(of_cells).cpu().numpy(), codes, names)
            if outputs is not None:
                there = self._draw_reference_of(self.centered_by_, adata, source, codes, rows, new)
                _estimate_scaling(outputs, partial(reference_embeddings, module, there, inputs), there)
        return EnvironmentCorrections(codes, inputs, outputs)

    def _warn_of_absent_columns(self, adata: AnnData) -> None:
        """Warn in the log of environment columns that a table lacks, since a column may be misspelt."""
        columns = self._registered(E_REGISTRY)["columns"]
        absent = [column for column in columns if column not in adata.obs]
        if absent:
            names = " and no ".join(map(repr, absent))
            logger.warning("obs has no %s: inputs are standardised over all training cells alone.", names)

    def _estimate_residual_offsets(self) -> None:
        """Estimate the residual offset of z_c in each environment from training cells.

        If inputs are standardised with controls, and all cells could be reference cells as well, both are tried. The
        choice with the smaller standard error of the mean is kept.
        """
        self.leftover_ = {}
        environments = self._environment_corrections(self.adata, leftover=False)
        if environments is None:
            return
        codes, inputs, _ = environments
        errors, source = [], self._source(self.adata)
        choices = [self.standardized_by_]
        if self.could_be_known_by_ != self.standardized_by_:
            choices.append(self.could_be_known_by_)
        for by in choices:
            outputs = EnvironmentScaling(self.module.width("c", "embedding"), codes.shape[1], scale=False)
            reference = self._draw_reference_of(by, self.adata, source, codes, self.train_indices)
            batches = partial(reference_embeddings, self.module, reference, inputs)
            _estimate_scaling(outputs.to(self.module.device), batches, reference)
            error = float(outputs.reference[:, Moments._fields.index("mean_error")].sum())
            errors.append(error if outputs.reference.any() else np.inf)
            if errors[-1] == min(errors):
                self.centered_by_ = by
                self.leftover_ = {name: values.cpu().numpy() for name, values in outputs.state_dict().items()}


def _estimate_scaling(
    scaling: EnvironmentScaling, batches: Callable[[], Iterator[torch.Tensor]], of: ReferenceBatches
) -> None:
    scaling.learn(batches, *of.as_tensors())


def reference_embeddings(
    module: EmbeddingModule | StoredEmbeddings, reference: ReferenceBatches, environments: EnvironmentScaling
) -> Iterator[torch.Tensor]:
    """Yield z_c of the reference cells in blocks of cells, from inputs that are standardised per environment."""
    module.eval()
    start, codes = 0, torch.from_numpy(reference.codes)
    with torch.inference_mode():
        for inputs in reference.batches():
            part = slice(start, start := start + len(inputs))
            yield module.embed(inputs.to(module.device), "c", "embedding", codes[part], environments).float()


def column_name(columns: str | Sequence[str]) -> str:
    """Return the name of a column, or one name for several crossed columns."""
    return CROSS_SEPARATOR.join(map(str, as_columns(columns)))


def _restore_residual_offsets(saved: Mapping[str, np.ndarray]) -> EnvironmentScaling:
    """Rebuild the residual environment offsets from saved arrays."""
    outputs = EnvironmentScaling(saved["shift"].shape[1], len(saved["reference"]), scale=False)
    outputs.load_state_dict({name: torch.as_tensor(values) for name, values in saved.items()})
    return outputs


def _warn_of_unestimated(unknown: np.ndarray, codes: np.ndarray, names: Sequence[Sequence[Any]]) -> None:
    """Log the environments of the marked cells, boolean ``(N, K)``, for which no mean and deviation is estimated."""
    left: list[str] = []
    for column, values in enumerate(names):
        left += [str(values[code]) for code in np.unique(codes[unknown[:, column], column])]
    if left:
        message = (
            "%d %s (%s) %s standardised with the mean and deviation of all training cells, since %s too few controls "
            "and not the same perturbations as the training cells."
        )
        pairs = ("environment", "environments"), ("is", "are"), ("it holds", "they hold")
        noun, verb, reason = (inflect(len(left), *pair) for pair in pairs)
        logger.warning(message, len(left), noun, join_first(left), verb, reason)
