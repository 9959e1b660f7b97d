"""Estimation of the effect of each environment on its cells, and removal of this effect from inputs and z_c.

An environment (such as a plate) shifts and scales the inputs of all of its cells. The mean and the standard deviation
of each environment are estimated from its reference cells, which are its controls or all of its cells. Inputs are
standardised with them. A residual offset of each environment in z_c is then estimated in the same way and subtracted.
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
    """Environments of all cells of a table, with the estimated effects of these environments on inputs and on z_c."""

    codes: np.ndarray
    """Integer codes of each cell's environment in each of K environment columns, int64 ``(N, K)``; -1 if missing."""
    inputs: EnvironmentScaling
    """Module that standardises inputs with the mean and standard deviation of each environment."""
    outputs: EnvironmentScaling | None = None
    """Module that subtracts from z_c the residual offset of each environment; `None` if z_c is not corrected."""


class EnvironmentMixin(SetupMixin):
    """Mixin for models that standardise inputs per environment and subtract residual environment offsets from z_c."""

    standardized_by_: dict[str, ReferenceKind]
    could_be_known_by_: dict[str, ReferenceKind]
    centered_by_: dict[str, ReferenceKind]
    label_shares_: np.ndarray
    in_common_: dict[str, float]
    leftover_: dict[str, np.ndarray]
    _standardize_by: StandardizeBy

    @property
    def _standardized_by(self) -> dict[str, ReferenceKind]:
        """Kind of reference cells, ``"controls"`` or ``"cells"``, by the name of the environment column.

        A column is absent if inputs are not standardised with its environments.
        """
        return getattr(self, "standardized_by_", {})

    def _make_preprocess(self, *, standardize_by: StandardizeBy = None, **settings: Any) -> Preprocess | FeatureScaling:
        """Create the module that scales inputs before the encoders, including standardisation per environment.

        Parameters
        ----------
        standardize_by
            Kind of reference cells, see :class:`scbd.SCBDModel`; `None` for no standardisation per environment.
        **settings
            Arguments of :class:`scbd.nn.Preprocess` for images, or of :class:`scbd.nn.FeatureScaling` for features.

        Raises
        ------
        ValueError
            If ``standardize_by`` is not a valid choice, or is ``"controls"`` although no controls were named in
            :meth:`setup_anndata`.
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
        """Names of the environment columns of ``obs``, as a list of tuples.

        Environments that are treated separately have a tuple with one name each. If environments are combinations of
        several columns, these columns form a single tuple.
        """
        columns = self._registered(E_REGISTRY)["columns"]
        return [(column,) for column in columns] if has_separate_environments(self.registry_) else [tuple(columns)]

    def _environment_codes(self, adata: AnnData) -> tuple[np.ndarray, list[list[Any]]]:
        """Return the integer codes of each cell's environments, and the names of the environments.

        Environments that were not registered in :meth:`setup_anndata` get codes above those of the registered
        environments. The code is -1 if the value of a cell is missing, or if the table lacks the column.

        Returns
        -------
        The codes, int64 ``(N, K)`` for N cells and K environment columns. A list with one list of names per column, in
        the order of the codes.
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
        """Draw the reference cells of each environment from the training cells.

        The first call also determines, for each environment column, whether the reference cells are controls or all
        cells. Later calls keep this choice.

        Parameters
        ----------
        adata
            Table of the cells.
        source
            Inputs of all cells of the table.
        rows
            Rows of the training cells.
        """
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
        """Return the integer code of each cell's perturbation, int64 ``(N,)``.

        Perturbations that were not registered in :meth:`setup_anndata` get codes above those of the registered
        perturbations. The code is -1 if the label of a cell is missing, or if the table lacks the column.
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
        """Draw, from given rows of a table, the reference cells of each environment.

        Parameters
        ----------
        by
            Kind of reference cells, ``"controls"`` or ``"cells"``, by the name of the environment column.
        adata
            Table of the cells.
        source
            Inputs of all cells of the table.
        codes
            Codes of each cell's environments in K columns, int64 ``(N, K)``.
        rows
            Rows from which reference cells may be drawn.
        of
            Mask, boolean ``(N, K)``, of the cells that may be reference cells of their environment in each column;
            `None` if all of ``rows`` may.
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
        """Return the environments of the cells of a table, and the effects of these environments on inputs and z_c.

        Effects of environments seen in training are those estimated in training. Effects of other environments are
        estimated from the cells of the table. The result is `None` if the model does not standardise inputs per
        environment.

        Parameters
        ----------
        adata
            Table of cells, with or without labels.
        leftover
            Whether to include the residual offset of each environment in z_c.
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
            # A minified table holds embeddings instead of inputs. These embeddings were computed from inputs that were
            # standardised per environment, so that only a table with inputs needs the following statistics.
            if module is self.module:
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
        """Log a warning with the names of the environment columns that a table lacks; a column may be misspelt."""
        columns = self._registered(E_REGISTRY)["columns"]
        absent = [column for column in columns if column not in adata.obs]
        if absent:
            names = " and no ".join(map(repr, absent))
            logger.warning("obs has no %s: inputs are standardised over all training cells alone.", names)

    def _estimate_residual_offsets(self) -> None:
        """Estimate the residual offset of each environment in z_c from training cells.

        This is the shift of z_c in an environment that remains although inputs are standardised per environment. If
        inputs are standardised with the controls, but all cells would be suitable reference cells as well, the offsets
        are estimated twice, from controls and from all cells. The estimate with the smaller standard error is kept.
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
    """Yield z_c of the reference cells, one batch of cells after the other, float32 ``(n, D)``.

    Parameters
    ----------
    module
        Module that computes z_c from inputs, or returns the z_c stored in a minified table.
    reference
        Reference cells, with their inputs.
    environments
        Mean and standard deviation of the inputs of each environment, with which inputs are standardised before z_c is
        computed.
    """
    module.eval()
    start, codes = 0, torch.from_numpy(reference.codes)
    with torch.inference_mode():
        for inputs in reference.batches():
            part = slice(start, start := start + len(inputs))
            yield module.embed(inputs.to(module.device), "c", "embedding", codes[part], environments).float()


def column_name(columns: str | Sequence[str]) -> str:
    """Return the name of an environment column; the names of several columns whose values are combined are joined."""
    return CROSS_SEPARATOR.join(map(str, as_columns(columns)))


def _restore_residual_offsets(saved: Mapping[str, np.ndarray]) -> EnvironmentScaling:
    """Create the module that subtracts residual environment offsets from z_c, with the offsets of a saved model."""
    outputs = EnvironmentScaling(saved["shift"].shape[1], len(saved["reference"]), scale=False)
    outputs.load_state_dict({name: torch.as_tensor(values) for name, values in saved.items()})
    return outputs


def _warn_of_unestimated(unknown: np.ndarray, codes: np.ndarray, names: Sequence[Sequence[Any]]) -> None:
    """Log a warning with the environments whose mean and standard deviation could not be estimated.

    Parameters
    ----------
    unknown
        Mask of the cells in such environments, for each of K environment columns, boolean ``(N, K)``.
    codes
        Codes of the environments of all cells, int64 ``(N, K)``.
    names
        Names of the environments in each column, in the order of their codes.
    """
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
