"""Estimation of what each environment does to all of its cells, from reference cells, and removal from inputs and z_c.

Reference cells are the cells from which the mean and the standard deviation of an environment are estimated.
"""

from __future__ import annotations

import copy
import logging
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from scipy import stats

from scbd._anndata import (
    CROSS_SEPARATOR,
    E_REGISTRY,
    Y_REGISTRY,
    as_columns,
    encode_labels,
    label_values,
    split_crossed_label,
)
from scbd._checks import check_choice, inflect, join_first
from scbd.model._contract import ReferenceBatches
from scbd.model._design import has_separate_environments
from scbd.model._setup import SetupMixin
from scbd.nn._inputs import EnvironmentScaling, Moments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from anndata import AnnData

    from scbd.data._sources import ImageSource
    from scbd.model._contract import EmbeddingModule
    from scbd.model._minified import StoredEmbeddings
    from scbd.nn._inputs import FeatureScaling, Preprocess

ReferenceKind = Literal["controls", "cells"]
StandardizeBy = Literal["auto", ReferenceKind] | None

# minimum number of controls for an environment to be standardised by its controls; minimum fraction of the cells that
# lie in such environments for "auto" to choose controls
_MIN_CONTROLS_PER_ENVIRONMENT, _MIN_FRACTION_WITH_CONTROLS = 4, 0.9
# maximum of `unlikeness`: above it, effects of perturbations would be mistaken for the effect of an environment
_MAX_FREQUENCY_DISTANCE = 0.05
# minimum of `in_common` for environments to count as containing the same perturbations; some differ by chance
_MIN_OVERLAP = 0.75
# lower bound of the expected overlap in `in_common`: if randomly drawn cells overlap less with all cells, there are too
# few cells per perturbation (for example on a plate with half of the perturbations, one well each)
_MIN_EXPECTED_OVERLAP = 0.7
# number of reference cells: maximum per environment, maximum over all environments of a column, minimum per environment
# even if the second number is then exceeded (also the minimum of labelled cells to judge which perturbations there are)
_MAX_PER_ENVIRONMENT, _MAX_REFERENCE_CELLS, _MIN_PER_ENVIRONMENT = 256, 65_536, 32
# number of cells that are read at once
_BLOCK = 512

logger = logging.getLogger(__name__)


class EnvironmentCorrections(NamedTuple):
    """Environments of the cells of a table, with their estimated effects."""

    codes: np.ndarray
    """Codes of the environments in each of K columns, int64 ``(N, K)``; -1 if missing."""
    inputs: EnvironmentScaling
    """Standardisation of the inputs per environment."""
    outputs: EnvironmentScaling | None = None
    """Residual environment offsets of z_c; `None` if they are not subtracted."""


def choose_reference_kind(
    asked: StandardizeBy, y: np.ndarray, e: np.ndarray, controls: np.ndarray | None
) -> tuple[ReferenceKind | None, ReferenceKind | None]:
    """Choose the reference cells for the environments of a column: controls, all cells, or none.

    With ``"auto"``, the first choice that applies is taken:

    1. all cells, if most environments contain the same perturbations;
    2. controls, if at least 90 % of the cells lie in environments with four or more controls;
    3. all cells, if most environments contain enough perturbations that no single one affects their mean;
    4. none.

    If both controls and all cells are possible, inputs are standardised with the controls, and z_c is centred with
    whichever of the two has the smaller standard error of its mean. An environment that contains other perturbations
    than most is standardised with its controls, see :func:`select_reference_cells`.

    Parameters
    ----------
    asked
        Argument ``standardize_by`` of the model. Other values than ``"auto"`` are returned unchanged.
    y, e
        Codes of perturbation and environment of the training cells, ``(N,)``.
    controls
        Mask of the controls among the training cells, boolean ``(N,)``; `None` if controls were not named.

    Returns
    -------
    The choice for the inputs, and the alternative for z_c, which is usually the same. `None` stands for no reference
    cells: inputs are not standardised per environment.

    Warns
    -----
    UserWarning
        If the requested choice removes effects of perturbations along with those of environments, or if many
        environments have too few controls.
    """
    have = (
        0.0
        if controls is None
        else float((np.bincount(e[controls], minlength=e.max() + 1)[e] >= _MIN_CONTROLS_PER_ENVIRONMENT).mean())
    )
    unlike = frequency_distance(y, e, _frequencies(y))[e]
    if asked == "auto":
        all_cells: ReferenceKind | None = "cells" if np.median(unlike) < _MAX_FREQUENCY_DISTANCE else None
        same = all_cells is not None and median_overlap(y, e) >= _MIN_OVERLAP
        by_controls = have >= _MIN_FRACTION_WITH_CONTROLS and not same
        return ("controls", all_cells or "controls") if by_controls else (all_cells, all_cells)
    if asked == "controls" and have < _MIN_FRACTION_WITH_CONTROLS:
        _warn(
            f"standardize_by='controls': {1 - have:.0%} of the training cells lie in environments with fewer than "
            f"{_MIN_CONTROLS_PER_ENVIRONMENT} controls, which say little of them: name more controls, or use a coarser "
            "e_key."
        )
    if asked == "cells" and unlike.mean() >= _MAX_FREQUENCY_DISTANCE:
        _warn(
            "standardize_by='cells': environments hold different perturbations, and what these do is taken out of the "
            "inputs with what environments do. Use 'auto', which would not, or a coarser e_key."
        )
    return asked, asked


def frequency_distance(y: np.ndarray, e: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Compute how much the perturbation frequencies of each environment differ from those of all cells, ``(E,)``.

    The value is the squared Euclidean distance between both vectors of frequencies, minus its expectation due to
    sampling. It is about 0 if the environment contains the same perturbations as all cells, and close to 1 if it
    contains a single perturbation.

    Parameters
    ----------
    y, e
        Codes of perturbation and environment, ``(N,)``.
    shares
        Frequency of each perturbation among the training cells.
    """
    own, of_y, of_e, shares = _frequencies_within_environments(y, e, shares)
    n_cells = np.bincount(e)
    squares = np.bincount(of_e, np.square(own), minlength=len(n_cells))
    common = np.bincount(of_e, own * shares[of_y], minlength=len(n_cells))
    sampling = (1 - squares) / (n_cells - 1).clip(1)
    return np.where(n_cells > 0, squares - 2 * common + np.square(shares).sum() - sampling, 0)


def frequency_overlap(y: np.ndarray, e: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Compute the overlap of the perturbation frequencies of each environment with those of all cells, ``(E,)``.

    The overlap is the sum over perturbations of the smaller of the two frequencies. It is divided by its expectation
    if the cells of the environment were drawn at random from all cells. The result is at most 1.

    Parameters
    ----------
    y, e
        Codes of perturbation and environment, ``(N,)``.
    shares
        Frequency of each perturbation among the training cells.
    """
    own, of_y, of_e, shares = _frequencies_within_environments(y, e, shares)
    n_cells = np.bincount(e)
    found = np.bincount(of_e, np.minimum(own, shares[of_y]), minlength=len(n_cells))
    sizes, of_size = np.unique(n_cells, return_inverse=True)
    kinds, n_of_kind = np.unique(shares, return_counts=True)
    # The frequency f of a perturbation among n cells drawn at random falls short of its frequency p among all cells by
    # E[max(p - f, 0)] = p (1 - p) P(X = floor(n p)), with X binomial of n - 1 trials.
    others = (sizes - 1).clip(0)[:, None]
    below = kinds * (1 - kinds) * stats.binom.pmf(np.floor(sizes[:, None] * kinds), others, kinds)
    by_chance = ((kinds - below) @ n_of_kind)[of_size]
    return np.minimum(found / by_chance.clip(_MIN_EXPECTED_OVERLAP), 1)


def median_overlap(y: np.ndarray, e: np.ndarray) -> float:
    """Return the median over cells of the :func:`frequency_overlap` of their environment with all cells."""
    return float(np.median(frequency_overlap(y, e, _frequencies(y))[e]))


def _frequencies_within_environments(
    y: np.ndarray, e: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Compute the frequency of each perturbation within each environment, for the P pairs that occur.

    Returns
    -------
    The frequency of the perturbation in the environment, the code of the perturbation, and the code of the environment,
    each ``(P,)``; and ``shares``, extended by zeros for perturbations that are not in training.
    """
    n_y = max(len(shares), int(y.max(initial=-1)) + 1)
    pairs, counts = np.unique(e.astype(np.int64) * n_y + y, return_counts=True)
    of_e, of_y = np.divmod(pairs, n_y)
    return counts / np.bincount(e)[of_e], of_y, of_e, np.pad(shares, (0, n_y - len(shares)))


def _frequencies(codes: np.ndarray) -> np.ndarray:
    return np.bincount(codes) / max(1, len(codes))


def select_reference_cells(
    y: np.ndarray, e: np.ndarray, controls: np.ndarray, shares: np.ndarray, same: float
) -> tuple[np.ndarray, np.ndarray]:
    """Select the reference cells of each environment if the training environments are standardised with all cells.

    If the training environments contain the same perturbations (``same`` is at least 0.75), the reference cells of an
    environment are the first of these that applies:

    1. the cells of perturbations seen in training, if the environment contains these in similar proportions;
    2. its controls, if there are at least four;
    3. all of its cells, if no perturbation is frequent enough to affect their mean, or if few cells have labels.

    If the training environments contain different perturbations, the third rule comes before the second, and the
    first rule does not apply.

    Parameters
    ----------
    y, e, controls
        Code of the perturbation (-1 if missing), code of the environment, and whether a cell is a control, ``(N,)``.
    shares
        Frequency of each perturbation among the training cells.
    same
        Median overlap of the training environments, see :func:`median_overlap`.

    Returns
    -------
    Two masks, boolean ``(N,)``. The first marks the reference cells according to rules 1 and 3. The second marks all
    controls in environments with at least four controls. Rule 2 needs both masks: if an environment has no cells in the
    first mask, its controls are brought to the mean and deviation that the controls of other environments have after
    standardisation.
    """
    n_e = int(e.max(initial=-1)) + 1
    n_cells = np.bincount(e)
    labelled = y >= 0
    known = np.isin(y, np.flatnonzero(shares))

    def of_each(function: Callable[..., np.ndarray], chosen: np.ndarray) -> np.ndarray:
        values = function(y[chosen], e[chosen], shares)
        return np.pad(values, (0, n_e - len(values)))

    def few(chosen: np.ndarray) -> np.ndarray:
        n_chosen = np.bincount(e[chosen], minlength=n_e)
        return (n_chosen < _MIN_PER_ENVIRONMENT) & (2 * n_chosen < n_cells)

    alike = (
        (of_each(frequency_overlap, known) >= _MIN_OVERLAP * same)
        & (of_each(frequency_distance, known) < _MAX_FREQUENCY_DISTANCE)
        & ~few(known)
    )
    by_all = few(labelled) | (of_each(frequency_distance, labelled) < _MAX_FREQUENCY_DISTANCE)
    controls = controls & (np.bincount(e[controls], minlength=n_e) >= _MIN_CONTROLS_PER_ENVIRONMENT)[e]
    have = np.bincount(e[controls], minlength=n_e) > 0
    if same >= _MIN_OVERLAP:
        by_all &= ~have
    else:
        alike[:] = False
    return np.where(alike[e], known, by_all[e]), controls


def draw_reference_cells(
    source: ImageSource, rows: np.ndarray, codes: np.ndarray, used: np.ndarray, controls: np.ndarray | None = None
) -> ReferenceBatches:
    """Draw a sample of the reference cells, with at most the same number from each environment of a column.

    Parameters
    ----------
    source
        Inputs of all cells.
    rows
        Rows to draw from.
    codes, used, controls
        Codes of the environments and masks of the reference cells, for all cells, see :class:`Reference`.
    """
    rng, masks = np.random.default_rng(0), [used] if controls is None else [used, controls]
    drawn = [_draw_rows(rng, rows, codes, mask) for mask in masks]
    chosen = np.unique(np.concatenate(drawn))
    blocks = np.array_split(chosen, -(-len(chosen) // _BLOCK)) if len(chosen) else []
    kept = [mask[chosen] & np.isin(chosen, some)[:, None] for mask, some in zip(masks, drawn, strict=True)]
    return ReferenceBatches(lambda: (torch.from_numpy(source.read(block)) for block in blocks), codes[chosen], *kept)


def _draw_rows(rng: np.random.Generator, rows: np.ndarray, codes: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Draw rows from the reference cells of each column, at most the same number per environment."""
    drawn = [np.empty(0, dtype=np.int64)]
    for column, use in zip(codes.T, used.T, strict=True):
        usable = rng.permutation(rows[use[rows]])
        usable = usable[np.argsort(column[usable], kind="stable")]
        _, first, counts = np.unique(column[usable], return_index=True, return_counts=True)
        most = int(np.clip(_MAX_REFERENCE_CELLS // max(1, len(counts)), _MIN_PER_ENVIRONMENT, _MAX_PER_ENVIRONMENT))
        place = np.arange(len(usable)) - np.repeat(first, counts)
        drawn.append(usable[place < most])
    return np.concatenate(drawn)


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
            self.label_shares_ = _frequencies(y)
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


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=8)
