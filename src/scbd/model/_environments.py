"""What environments do to all of their cells alike: learned from cells that they are known by, taken out of inputs."""

from __future__ import annotations

import copy
import logging
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from scipy import stats

from scbd._anndata import CROSS, E_REGISTRY, Y_REGISTRY, as_columns, column_values, label_codes, label_values
from scbd._checks import check_choice, head, inflect
from scbd.model._contract import Reference
from scbd.model._design import is_side_by_side
from scbd.model._setup import SetupMixin
from scbd.nn._inputs import EnvironmentScaling, Moments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from anndata import AnnData

    from scbd.data._sources import ImageSource
    from scbd.model._contract import EmbeddingModule
    from scbd.model._minified import StoredBlocks
    from scbd.nn._inputs import FeatureScaling, Preprocess

KnownBy = Literal["controls", "cells"]
StandardizeBy = Literal["auto", KnownBy] | None

# an environment has controls if it has so many, and environments have, if those with so large a share of the cells do
_CONTROLS, _MOST_CELLS = 4, 0.9
# how much perturbations may differ: above, what they do would be taken for what an environment does
_UNLIKE = 0.05
# environments hold the same perturbations, if they have so much in common: some differ by chance
_SAME = 0.75
# what cells drawn at random have in common with all: if less, as of a plate that holds half of the perturbations once,
# there are too few of each to tell
_BY_CHANCE = 0.7
# cells that an environment is known by: these, or fewer where all would be more than so many, but not fewer than that
_EACH, _ALL, _LEAST = 256, 65_536, 32
_BLOCK = 512

logger = logging.getLogger(__name__)


class Environments(NamedTuple):
    """Of the cells of a table."""

    codes: np.ndarray
    """In each column, int64 ``(N, K)``; -1 where it is not known."""
    inputs: EnvironmentScaling
    """What they do to inputs."""
    outputs: EnvironmentScaling | None = None
    """What is left of it in z_c, if that is to be taken out."""


def known_by(
    asked: StandardizeBy, y: np.ndarray, e: np.ndarray, controls: np.ndarray | None
) -> tuple[KnownBy | None, KnownBy | None]:
    """Which cells the environments of a column are known by, and all that could be; `None` if they are not.

    Parameters
    ----------
    asked
        ``"auto"`` takes all cells, if most environments hold the same perturbations; else controls, if nine tenths of
        the cells lie in environments with four or more of them; else all cells, if most environments hold so many
        different perturbations that none makes a difference to their mean. There, z_c asks whichever know its mean
        better. An environment that differs from most is known by its controls, see :func:`telling_cells`.
    y, e
        Codes of perturbation and environment of the training cells, ``(N,)``.
    controls
        Which of them are controls, boolean ``(N,)``, where they are known.

    Warns
    -----
    UserWarning
        If what was asked for takes perturbations out with environments, or leaves environments as they are.
    """
    have = 0.0 if controls is None else float((np.bincount(e[controls], minlength=e.max() + 1)[e] >= _CONTROLS).mean())
    unlike = unlikeness(y, e, _shares(y))[e]
    if asked == "auto":
        all_cells: KnownBy | None = "cells" if np.median(unlike) < _UNLIKE else None
        same = all_cells is not None and all_in_common(y, e) >= _SAME
        by_controls = have >= _MOST_CELLS and not same
        return ("controls", all_cells or "controls") if by_controls else (all_cells, all_cells)
    if asked == "controls" and have < _MOST_CELLS:
        _warn(
            f"standardize_by='controls': {1 - have:.0%} of the training cells lie in environments with fewer than "
            f"{_CONTROLS} controls, which say little of them: name more controls, or use a coarser e_key."
        )
    if asked == "cells" and unlike.mean() >= _UNLIKE:
        _warn(
            "standardize_by='cells': environments hold different perturbations, and what these do is taken out of the "
            "inputs with what environments do. Use 'auto', which would not, or a coarser e_key."
        )
    return asked, asked


def unlikeness(y: np.ndarray, e: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """How much the perturbations of an environment differ from those of all cells, ``(E,)``.

    The sum over perturbations of the squared difference of their share of its cells from their ``shares`` of all, less
    what is sampling: about 0 where it holds the same, close to 1 where it holds a single one.
    """
    own, of_y, of_e, shares = _own_shares(y, e, shares)
    n_cells = np.bincount(e)
    squares = np.bincount(of_e, np.square(own), minlength=len(n_cells))
    common = np.bincount(of_e, own * shares[of_y], minlength=len(n_cells))
    sampling = (1 - squares) / (n_cells - 1).clip(1)
    return np.where(n_cells > 0, squares - 2 * common + np.square(shares).sum() - sampling, 0)


def in_common(y: np.ndarray, e: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """How much of an environment holds the same perturbations as all cells do, by their ``shares``, ``(E,)``.

    The sum over perturbations of the smaller of both shares, as a part of what it is on average where the cells of the
    environment are drawn at random from all; 1 at most.
    """
    own, of_y, of_e, shares = _own_shares(y, e, shares)
    n_cells = np.bincount(e)
    found = np.bincount(of_e, np.minimum(own, shares[of_y]), minlength=len(n_cells))
    sizes, of_size = np.unique(n_cells, return_inverse=True)
    kinds, n_of_kind = np.unique(shares, return_counts=True)
    # a share of n cells is below the share p of all by p (1 - p) P(X = floor(n p)) on average, X of n - 1 cells
    others = (sizes - 1).clip(0)[:, None]
    below = kinds * (1 - kinds) * stats.binom.pmf(np.floor(sizes[:, None] * kinds), others, kinds)
    by_chance = ((kinds - below) @ n_of_kind)[of_size]
    return np.minimum(found / by_chance.clip(_BY_CHANCE), 1)


def all_in_common(y: np.ndarray, e: np.ndarray) -> float:
    """The same over all cells: what half of them have at least in common in their environments."""
    return float(np.median(in_common(y, e, _shares(y))[e]))


def _own_shares(
    y: np.ndarray, e: np.ndarray, shares: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Of the pairs of perturbation and environment that there are: its share of the environment, and both; all shares.

    The latter with zeros for perturbations of which they do not know.
    """
    n_y = max(len(shares), int(y.max(initial=-1)) + 1)
    pairs, counts = np.unique(e.astype(np.int64) * n_y + y, return_counts=True)
    of_e, of_y = np.divmod(pairs, n_y)
    return counts / np.bincount(e)[of_e], of_y, of_e, np.pad(shares, (0, n_y - len(shares)))


def _shares(codes: np.ndarray) -> np.ndarray:
    return np.bincount(codes) / max(1, len(codes))


def telling_cells(
    y: np.ndarray, e: np.ndarray, controls: np.ndarray, shares: np.ndarray, same: float
) -> tuple[np.ndarray, np.ndarray]:
    """Cells that tell of their environments where these are known by all cells, and controls that tell of others.

    Where environments of the training hold the same perturbations: of one that holds them, too, the cells of these; of
    another its controls; without controls all cells, if no perturbation makes a difference to their mean. Where those
    of the training do not, the last comes first. All cells of one in which few have labels.

    Parameters
    ----------
    y, e, controls
        Codes of perturbation (-1: not known) and environment, and which cells are controls, ``(N,)``.
    shares
        Of the perturbations in training.
    same
        How much environments of the training have in common.

    Returns
    -------
    Two masks of cells, boolean ``(N,)``.
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
        return (n_chosen < _LEAST) & (2 * n_chosen < n_cells)

    alike = (of_each(in_common, known) >= _SAME * same) & (of_each(unlikeness, known) < _UNLIKE) & ~few(known)
    by_all = few(labelled) | (of_each(unlikeness, labelled) < _UNLIKE)
    controls = controls & (np.bincount(e[controls], minlength=n_e) >= _CONTROLS)[e]
    have = np.bincount(e[controls], minlength=n_e) > 0
    if same >= _SAME:
        by_all &= ~have
    else:
        alike[:] = False
    return np.where(alike[e], known, by_all[e]), controls


def draw_reference(
    source: ImageSource, rows: np.ndarray, codes: np.ndarray, used: np.ndarray, controls: np.ndarray | None = None
) -> Reference:
    """Some of the cells that environments are known by, the same number of each environment of a column.

    Parameters
    ----------
    source
        Inputs of all cells.
    rows
        Those to choose from.
    codes, used, controls
        Of all cells, see :class:`Reference`.
    """
    rng, masks = np.random.default_rng(0), [used] if controls is None else [used, controls]
    drawn = [_drawn(rng, rows, codes, mask) for mask in masks]
    chosen = np.unique(np.concatenate(drawn))
    blocks = np.array_split(chosen, -(-len(chosen) // _BLOCK)) if len(chosen) else []
    kept = [mask[chosen] & np.isin(chosen, some)[:, None] for mask, some in zip(masks, drawn, strict=True)]
    return Reference(lambda: (torch.from_numpy(source.read(block)) for block in blocks), codes[chosen], *kept)


def _drawn(rng: np.random.Generator, rows: np.ndarray, codes: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Of the rows that are used in a column, the same number of each environment."""
    drawn = [np.empty(0, dtype=np.int64)]
    for column, use in zip(codes.T, used.T, strict=True):
        usable = rng.permutation(rows[use[rows]])
        usable = usable[np.argsort(column[usable], kind="stable")]
        _, first, counts = np.unique(column[usable], return_index=True, return_counts=True)
        most = int(np.clip(_ALL // max(1, len(counts)), _LEAST, _EACH))
        place = np.arange(len(usable)) - np.repeat(first, counts)
        drawn.append(usable[place < most])
    return np.concatenate(drawn)


class EnvironmentMixin(SetupMixin):
    """Gives an image model what it knows of environments."""

    standardized_by_: dict[str, KnownBy]
    could_be_known_by_: dict[str, KnownBy]
    centered_by_: dict[str, KnownBy]
    label_shares_: np.ndarray
    in_common_: dict[str, float]
    leftover_: dict[str, np.ndarray]
    _asked: StandardizeBy

    @property
    def _standardized_by(self) -> dict[str, KnownBy]:
        """Which cells the environments of a column are known by; without columns whose environments are not."""
        return getattr(self, "standardized_by_", {})

    def _preprocess(self, *, standardize_by: StandardizeBy = None, **settings: Any) -> Preprocess | FeatureScaling:
        """What prepares the inputs; with ``standardize_by`` within environments, too, see :class:`scbd.SCBDModel`.

        Raises
        ------
        ValueError
            If there is no such choice, or controls were not named.
        """
        preprocess, asked = super()._preprocess(**settings), standardize_by
        by = {"auto": "by what fits", "controls": "by these", "cells": "by all of them", None: "not at all"}
        check_choice("standardize_by", asked, by)
        if asked == "controls" and self._control_codes is None:
            msg = "standardize_by='controls': name controls with control=… in setup_anndata."
            raise ValueError(msg)
        if asked is not None and preprocess.standardize:
            columns = self._environment_columns
            preprocess.environments = EnvironmentScaling(preprocess.output_shape[0], len(columns))
        self._asked = asked
        return preprocess

    @property
    def _environment_columns(self) -> list[tuple[str, ...]]:
        """Columns of ``obs``, those together that were crossed."""
        columns = self._registered(E_REGISTRY)["columns"]
        return [(column,) for column in columns] if is_side_by_side(self.registry_) else [tuple(columns)]

    def _environment_codes(self, adata: AnnData) -> tuple[np.ndarray, list[list[Any]]]:
        """Codes of each cell's environments, int64 ``(N, K)``, and the names of each column's.

        New ones count on behind those that are registered; -1 where a table does not say.
        """
        categories = self._registered(E_REGISTRY)["categories"]
        known: Sequence[Sequence[Any]] = [categories]
        if is_side_by_side(self.registry_):
            known = [list(dict.fromkeys(values)) for values in zip(*map(column_values, categories), strict=True)]
        codes, names = [], []
        for columns, values in zip(self._environment_columns, known, strict=True):
            unknown: list[Any] = []
            of_cells = np.full(adata.n_obs, -1)
            if all(column in adata.obs for column in columns):
                of_cells, unknown = label_codes(label_values(adata.obs, columns, allow_missing=True), values)
            codes.append(of_cells)
            names.append([*values, *unknown])
        return np.stack(codes, 1), names

    def _reference(self, adata: AnnData, source: ImageSource, rows: np.ndarray) -> Reference:
        """Training cells that environments are known by; the first time, it is decided which cells these are."""
        codes, _ = self._environment_codes(adata)
        if not hasattr(self, "standardized_by_"):
            controls, y, of_rows = self._controls(adata), self._label_codes(adata)[rows], codes[rows]
            names = list(map(column_name, self._environment_columns))
            decide = partial(known_by, self._asked, y, controls=None if controls is None else controls[rows])
            found = {name: decide(of) for name, of in zip(names, of_rows.T, strict=True)}
            self.standardized_by_ = {name: by for name, (by, _) in found.items() if by is not None}
            self.could_be_known_by_ = {name: by for name, (_, by) in found.items() if by is not None}
            self.label_shares_ = _shares(y)
            self.in_common_ = {name: all_in_common(y, of) for name, of in zip(names, of_rows.T, strict=True)}
        return self._known_by(self.standardized_by_, adata, source, codes, rows)

    def _label_codes(self, adata: AnnData) -> np.ndarray:
        """Codes of the perturbations, int64 ``(N,)``; new ones count on behind those registered, -1: not known."""
        registered = self._registered(Y_REGISTRY)
        if not all(column in adata.obs for column in registered["columns"]):
            return np.full(adata.n_obs, -1)
        labels = label_values(adata.obs, registered["columns"], allow_missing=True)
        return label_codes(labels, registered["categories"])[0]

    def _known_by(
        self,
        by: Mapping[str, KnownBy],
        adata: AnnData,
        source: ImageSource,
        codes: np.ndarray,
        rows: np.ndarray,
        of: np.ndarray | None = None,
    ) -> Reference:
        """Those of the rows that a column's environments are known by; ``of`` some, boolean ``(N, K)``."""
        y, named = self._label_codes(adata), self._controls(adata)
        controls = np.zeros(len(codes), dtype=bool) if named is None else named
        used, beside = np.zeros(codes.shape, dtype=bool), np.zeros(codes.shape, dtype=bool)
        for column, name in enumerate(map(column_name, self._environment_columns)):
            known = rows[codes[rows, column] >= 0]
            if of is not None:
                known = known[of[known, column]]
            if by.get(name) == "controls":
                used[known, column] = controls[known]
            elif by.get(name) == "cells" and self._asked == "cells":
                used[known, column] = True
            elif by.get(name) == "cells":
                cells = y[known], codes[known, column], controls[known]
                used[known, column], beside[known, column] = telling_cells(
                    *cells, self.label_shares_, self.in_common_[name]
                )
        return draw_reference(source, rows, codes, used, beside if beside.any() else None)

    def _environments(self, adata: AnnData, *, leftover: bool) -> Environments | None:
        """What is known of the environments of a table, new ones among them; `None` where they play no part.

        Parameters
        ----------
        adata
            Cells, with labels or without.
        leftover
            Whether what is left in z_c is to be taken out, too.
        """
        inputs, device = self.module.preprocess.environments, self.module.device
        if inputs is None or not self._standardized_by:
            return None
        codes, names = self._environment_codes(adata)
        outputs = _restored(self.leftover_).to(device) if leftover and getattr(self, "leftover_", {}) else None
        asked = np.array([column_name(columns) in self._standardized_by for columns in self._environment_columns])
        of_cells = torch.from_numpy(codes).to(device)
        self._say_absent(adata)
        new = asked & (codes >= 0) & ~inputs.known(of_cells).cpu().numpy()
        if new.any():
            (module, source), rows = self._read_from(adata), np.flatnonzero(new.any(1))
            if module is self.module:  # what is stored was made of standardised inputs
                inputs = copy.deepcopy(inputs)
                known = self._known_by(self.standardized_by_, adata, source, codes, rows, new)
                scaled = self.module.preprocess.scaled_inputs
                _learn(inputs, lambda: (scaled(batch.to(device)) for batch in known.batches()), known)
                _say(new & ~inputs.known(of_cells).cpu().numpy(), codes, names)
            if outputs is not None:
                there = self._known_by(self.centered_by_, adata, source, codes, rows, new)
                _learn(outputs, partial(embeddings, module, there, inputs), there)
        return Environments(codes, inputs, outputs)

    def _say_absent(self, adata: AnnData) -> None:
        """Name environments that a table does not hold, by intent or by a misspelt name."""
        columns = self._registered(E_REGISTRY)["columns"]
        absent = [column for column in columns if column not in adata.obs]
        if absent:
            names = " and no ".join(map(repr, absent))
            logger.warning("obs has no %s: inputs are standardised over all training cells alone.", names)

    def _learn_leftover(self) -> None:
        """Learn from training cells what environments still do to all of z_c alike."""
        self.leftover_ = {}
        environments = self._environments(self.adata, leftover=False)
        if environments is None:
            return
        codes, inputs, _ = environments
        errors, source = [], self._source(self.adata)
        choices = [self.standardized_by_]
        if self.could_be_known_by_ != self.standardized_by_:
            choices.append(self.could_be_known_by_)
        for by in choices:
            outputs = EnvironmentScaling(self.module.width("c", "embedding"), codes.shape[1], scale=False)
            reference = self._known_by(by, self.adata, source, codes, self.train_indices)
            batches = partial(embeddings, self.module, reference, inputs)
            _learn(outputs.to(self.module.device), batches, reference)
            error = float(outputs.reference[:, Moments._fields.index("mean_error")].sum())
            errors.append(error if outputs.reference.any() else np.inf)
            if errors[-1] == min(errors):
                self.centered_by_ = by
                self.leftover_ = {name: values.cpu().numpy() for name, values in outputs.state_dict().items()}


def _learn(scaling: EnvironmentScaling, batches: Callable[[], Iterator[torch.Tensor]], of: Reference) -> None:
    scaling.learn(batches, *of.of_cells())


def embeddings(
    module: EmbeddingModule | StoredBlocks, reference: Reference, environments: EnvironmentScaling
) -> Iterator[torch.Tensor]:
    """z_c of the cells that environments are known by, block by block."""
    module.eval()
    start, codes = 0, torch.from_numpy(reference.codes)
    with torch.inference_mode():
        for inputs in reference.batches():
            part = slice(start, start := start + len(inputs))
            yield module.embed(inputs.to(module.device), "c", "embedding", codes[part], environments).float()


def column_name(columns: str | Sequence[str]) -> str:
    """One name for a column, or for several that are crossed."""
    return CROSS.join(map(str, as_columns(columns)))


def _restored(saved: Mapping[str, np.ndarray]) -> EnvironmentScaling:
    """Of what :meth:`EnvironmentMixin._learn_leftover` kept."""
    outputs = EnvironmentScaling(saved["shift"].shape[1], len(saved["reference"]), scale=False)
    outputs.load_state_dict({name: torch.as_tensor(values) for name, values in saved.items()})
    return outputs


def _say(unknown: np.ndarray, codes: np.ndarray, names: Sequence[Sequence[Any]]) -> None:
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
        logger.warning(message, len(left), noun, head(left), verb, reason)


def _warn(message: str) -> None:
    warnings.warn(message, UserWarning, stacklevel=8)
