"""Estimation of the effect of each environment on its cells, and removal of this effect from inputs and z_c.

An environment (such as a plate) shifts and scales the inputs of all of its cells. The mean and the standard deviation
of each environment are estimated from its reference cells, which are its controls or all of its cells. Inputs are
standardised with them. A residual offset of each environment in z_c is then estimated in the same way and subtracted.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from scbd._shared.checks import inflect, join_first
from scbd.model._reference_cells import (
    MIN_CONTROLS_PER_ENVIRONMENT,
    ReferenceKind,
    StandardizeBy,
    choose_reference_kind,
    draw_reference_cells,
    frequencies,
    in_environments_with_controls,
    median_overlap,
    select_reference_cells,
)
from scbd.nn._environment_scaling import EnvironmentScaling, Moments

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from scbd.data._sources import ImageSource
    from scbd.model._interfaces import EmbeddingModule, ReferenceBatches
    from scbd.model._minified import StoredEmbeddings

logger = logging.getLogger(__name__)

# Maximum fraction of the training cells in one environment at which "auto" standardises images without named controls.
# With 65 to 93 % of the cells in one scanner or style, labels in a held-out scanner or style were predicted better from
# images that were not standardised per environment: balanced accuracy of r_c +0.032 ± 0.015 (mean and standard error
# over six runs with five choices of the large and the held-out environment; mitotic figures, and PACS).
_MAX_FRACTION_IN_ONE_ENVIRONMENT = 0.75


class LabelCodes(NamedTuple):
    """Integer codes of the labels of the N cells of a table, from which reference cells are selected.

    Labels that were not registered in ``setup_anndata`` have codes above those of the registered labels. The code is -1
    if the label of a cell is missing, or if the table lacks the column.
    """

    y: np.ndarray
    """Codes of the perturbations, int64 ``(N,)``."""
    e: np.ndarray
    """Codes of the environments in each of K environment columns, int64 ``(N, K)``."""
    environments: list[list[Any]]
    """Names of the environments in each column, in the order of their codes."""
    controls: np.ndarray | None
    """Mask of the controls, boolean ``(N,)``; `None` if no controls were named."""


class EnvironmentCorrections(NamedTuple):
    """Environments of all cells of a table, with the estimated effects of these environments on inputs and on z_c."""

    codes: np.ndarray
    """Integer codes of each cell's environment in each of K environment columns, int64 ``(N, K)``; -1 if missing."""
    inputs: EnvironmentScaling
    """Module that standardises inputs with the mean and standard deviation of each environment."""
    outputs: EnvironmentScaling | None = None
    """Module that subtracts from z_c the residual offset of each environment; `None` if z_c is not corrected."""


class ResidualOffsets(NamedTuple):
    """Residual offset of each training environment in z_c, which remains after inputs have been standardised."""

    kinds: dict[str, ReferenceKind]
    """Kind of reference cells from which the offsets were estimated, by the name of the environment column."""
    state: dict[str, np.ndarray]
    """Tensors of the :class:`scbd.nn.EnvironmentScaling` that subtracts the offsets, by name, as arrays."""


@dataclass
class EnvironmentAlignment:
    """Rules by which a model selects the reference cells of each environment, and estimates effects of environments.

    The rules are fitted once, to the training cells of the first training run. They are applied to the environments of
    later runs and of new cells as well.
    """

    standardize_by: StandardizeBy
    """Argument ``standardize_by`` of the model."""
    columns: list[str]
    """Name of each of K environment columns. Columns that are combined to one have a joint name."""
    kinds: dict[str, ReferenceKind] = field(default_factory=dict)
    """Kind of reference cells by the name of the column; a column whose environments are not aligned is absent."""
    alternative_kinds: dict[str, ReferenceKind] = field(default_factory=dict)
    """Kind of reference cells that may replace ``kinds`` for z_c."""
    label_frequencies: np.ndarray = field(default_factory=lambda: np.empty(0))
    """Frequency of each perturbation among the training cells; empty before the rules are fitted."""
    overlaps: dict[str, float] = field(default_factory=dict)
    """Overlap of perturbations between training environments (``median_overlap``), by the name of the column."""

    def fit(self, labels: LabelCodes, rows: np.ndarray, *, has_images: bool) -> None:
        """Choose the kind of reference cells of each environment column. Later calls have no effect.

        Parameters
        ----------
        labels
            Labels of all cells of the training table.
        rows
            Rows of the training cells.
        has_images
            Whether the inputs are images. With ``"auto"``, images are not standardised by a column if no controls were
            named and one environment of the column holds more than three quarters of the training cells.
        """
        if len(self.label_frequencies):
            return
        y, controls = labels.y[rows], None if labels.controls is None else labels.controls[rows]
        self.label_frequencies = frequencies(y)
        for column, name in enumerate(self.columns):
            e, have = labels.e[rows, column], None
            if labels.controls is not None:
                have = in_environments_with_controls(labels.e[:, column], labels.controls, rows)[rows]
            kind, alternative = choose_reference_kind(self.standardize_by, y, e, controls, have)
            is_dominated = frequencies(e).max() > _MAX_FRACTION_IN_ONE_ENVIRONMENT
            if self.standardize_by == "auto" and has_images and controls is None and is_dominated:
                kind = alternative = None
            if self.standardize_by == "auto" and kind is None and have is not None:
                names = join_first(labels.environments[column][code] for code in np.unique(e[~have]))
                message = (
                    "Inputs are not standardised per %s, because these environments have fewer than %d controls, or "
                    "fewer than two in training: %s. Name more controls, or use a coarser e_key."
                )
                logger.warning(message, name, MIN_CONTROLS_PER_ENVIRONMENT, names)
            if kind is not None:
                self.kinds[name] = kind
            if alternative is not None:
                self.alternative_kinds[name] = alternative
            self.overlaps[name] = median_overlap(y, e)

    def draw_reference(
        self,
        labels: LabelCodes,
        source: ImageSource,
        rows: np.ndarray,
        kinds: Mapping[str, ReferenceKind] | None = None,
        allowed: np.ndarray | None = None,
    ) -> ReferenceBatches:
        """Draw, from given rows of a table, the reference cells of each environment.

        Parameters
        ----------
        labels, source
            Labels and inputs of all cells of the table.
        rows
            Rows from which reference cells may be drawn.
        kinds
            Kind of reference cells by the name of the environment column; by default those of the inputs.
        allowed
            Mask, boolean ``(N, K)``, of the cells that may be reference cells of their environment in each column;
            `None` if all of ``rows`` may.
        """
        kinds = self.kinds if kinds is None else kinds
        controls = np.zeros(len(labels.y), dtype=bool) if labels.controls is None else labels.controls
        used, replacing = np.zeros(labels.e.shape, dtype=bool), np.zeros(labels.e.shape, dtype=bool)
        for column, name in enumerate(self.columns):
            e = labels.e[:, column]
            usable = rows[(e[rows] >= 0) & (True if allowed is None else allowed[rows, column])]
            if kinds.get(name) == "controls":
                used[usable, column] = controls[usable]
            elif kinds.get(name) == "cells" and self.standardize_by == "cells":
                used[usable, column] = True
            elif kinds.get(name) == "cells":
                enough = controls & in_environments_with_controls(e, controls, usable)
                replacing[usable, column] = enough[usable]
                used[usable, column] = select_reference_cells(
                    labels.y[usable], e[usable], enough[usable], self.label_frequencies, self.overlaps[name]
                )
        return draw_reference_cells(source, rows, labels.e, used, replacing if replacing.any() else None)

    def estimate_corrections(
        self,
        module: EmbeddingModule,
        embedder: EmbeddingModule | StoredEmbeddings,
        labels: LabelCodes,
        source: ImageSource,
        offsets: ResidualOffsets | None = None,
    ) -> EnvironmentCorrections | None:
        """Return the environments of the cells of a table, and the effects of these environments on inputs and z_c.

        Effects of environments seen in training are those estimated in training. Effects of other environments are
        estimated from the cells of the table, and a warning is logged for environments without enough reference cells.
        The result is `None` if the model does not standardise inputs per environment.

        Parameters
        ----------
        module
            Module of the model, with the means and standard deviations of the training environments.
        embedder
            Module that computes z_c from inputs, or returns the z_c stored in a minified table.
        labels, source
            Labels of all cells of the table, and their inputs or stored embeddings.
        offsets
            Residual offsets of the training environments in z_c; `None` if z_c is not to be corrected.
        """
        inputs = module.preprocess.environments
        if inputs is None or not self.kinds:
            return None
        outputs = None if offsets is None else _restore_scaling(offsets).to(module.device)
        codes = torch.from_numpy(labels.e).to(module.device)
        aligned = np.array([name in self.kinds for name in self.columns])
        new = aligned & (labels.e >= 0) & ~inputs.known(codes).cpu().numpy()
        if new.any():
            rows = np.flatnonzero(new.any(1))
            # A minified table holds embeddings instead of inputs. These embeddings were computed from inputs that were
            # standardised per environment, so that only a table with inputs needs the following statistics.
            if embedder is module:
                inputs = copy.deepcopy(inputs)
                module.estimate_environment_statistics(self.draw_reference(labels, source, rows, allowed=new), inputs)
                _warn_of_unestimated(new & ~inputs.known(codes).cpu().numpy(), labels)
            if outputs is not None and offsets is not None:
                reference = self.draw_reference(labels, source, rows, offsets.kinds, new)
                outputs.learn(partial(reference_embeddings, embedder, reference, inputs), *reference.as_tensors())
        return EnvironmentCorrections(labels.e, inputs, outputs)

    def estimate_offsets(
        self,
        module: EmbeddingModule,
        labels: LabelCodes,
        source: ImageSource,
        rows: np.ndarray,
        inputs: EnvironmentScaling,
    ) -> ResidualOffsets | None:
        """Estimate the residual offset of each environment in z_c from training cells.

        If inputs are standardised with the controls, but all cells would be suitable reference cells as well, the
        offsets are estimated twice, from controls and from all cells. The estimate with the smaller standard error is
        returned.

        Parameters
        ----------
        module
            Module that computes z_c.
        labels, source
            Labels and inputs of all cells of the training table.
        rows
            Rows of the training cells.
        inputs
            Mean and standard deviation of the inputs in each environment.
        """
        best, smallest = None, np.inf
        for kinds in [self.kinds] if self.alternative_kinds == self.kinds else [self.kinds, self.alternative_kinds]:
            outputs = EnvironmentScaling(module.width("c", "embedding"), len(self.columns), scale=False)
            reference = self.draw_reference(labels, source, rows, kinds)
            z_c = partial(reference_embeddings, module, reference, inputs)
            outputs.to(module.device).learn(z_c, *reference.as_tensors())
            error = float(outputs.reference[:, Moments._fields.index("mean_error")].sum())
            error = error if outputs.reference.any() else np.inf
            if error <= smallest:
                state = {name: values.cpu().numpy() for name, values in outputs.state_dict().items()}
                best, smallest = ResidualOffsets(kinds, state), error
        return best


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


def _restore_scaling(offsets: ResidualOffsets) -> EnvironmentScaling:
    """Create the module that subtracts residual environment offsets from z_c."""
    n_columns, n_dimensions = len(offsets.state["reference"]), offsets.state["shift"].shape[1]
    scaling = EnvironmentScaling(n_dimensions, n_columns, scale=False)
    scaling.load_state_dict({name: torch.as_tensor(values) for name, values in offsets.state.items()})
    return scaling


def _warn_of_unestimated(unknown: np.ndarray, labels: LabelCodes) -> None:
    """Log a warning with the environments whose mean and standard deviation could not be estimated.

    Parameters
    ----------
    unknown
        Mask of the cells in such environments, for each of K environment columns, boolean ``(N, K)``.
    labels
        Labels of all cells.
    """
    left: list[str] = []
    for column, names in enumerate(labels.environments):
        left += [str(names[code]) for code in np.unique(labels.e[unknown[:, column], column])]
    if left:
        message = (
            "%d %s (%s) %s standardised with the mean and deviation of all training cells, since %s too few controls "
            "and not the same perturbations as the training cells."
        )
        pairs = ("environment", "environments"), ("is", "are"), ("it holds", "they hold")
        noun, verb, reason = (inflect(len(left), *pair) for pair in pairs)
        logger.warning(message, len(left), noun, join_first(left), verb, reason)
