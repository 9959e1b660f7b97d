"""A new plate, from its controls alone: what training cells look like is kept, and new cells are brought there."""

from __future__ import annotations

import warnings
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from scbd._anndata import E_REGISTRY, label_text, label_values
from scbd._checks import check_count, head
from scbd._files import progress_bar
from scbd._linear_maps import between_normals, within_covariance
from scbd.data._loading import read_tensor
from scbd.model._cells import values_of_few
from scbd.model._embed import (
    Adaptation,
    AdaptedCells,
    Embedder,
    EmbedMixin,
    check_finite_inputs,
    column_name,
    put,
)
from scbd.nn._inputs import Alignment, ChannelSums, FeatureScaling, Moments, align

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from anndata import AnnData

    from scbd.data._sources import ImageSource
    from scbd.model._contract import BlockName, EmbeddingModule

Using = Literal["auto", "controls", "all"]
# cells of either kind whose statistics are kept
_REMEMBERED = 2_048
# fewer have no variance
_LEAST = 2
_COLUMNS = ["key", "environment", "using", "n_cells", "distance_before", "distance_after", "linear_map"]
_BATCH_SIZE = 256
_PREPROCESS = "preprocess"


class AdaptMixin(EmbedMixin):
    """Gives an image model :meth:`adapt`."""

    statistics_: dict[str, dict[str, Any]]

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
        perturbations in the same numbers as those of the training. It is saved with the model; a further :meth:`train`
        forgets it. Embed by it with ``get_latent_representation(adata, adapt_key=key)``.

        Parameters
        ----------
        adata
            Cells with inputs as the model was set up with. It needs the column ``key`` and, to find controls, the
            column of the perturbation.
        key
            Column of ``obs`` with what the cells differ by, such as the plate, or a list of columns, which are crossed.
            Each of its values is an environment to adapt to, but for those the model was trained on: it knows these
            of ``e_key``, and of any column that held a value for eight training cells or more on average. Variances are
            those within ``e_key`` of the training, such as wells, where new cells have it.
        using
            ``"controls"``: those named by ``control`` of :meth:`setup_anndata`; ``"all"``: all cells of an environment.
            By default controls where they were named, else all, with a warning.
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
        name = column_name(key)
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
        name, known = column_name(key), self._adaptations_of(key)
        names = list(known) if environments is None else [label_text(value) for value in environments]
        if unknown := [value for value in names if value not in known]:
            msg = f"The model was not adapted to {head(unknown)} of {name!r} (but to {head(known)})."
            raise KeyError(msg)
        left = {value: part for value, part in known.items() if value not in names}
        others = {other: part for other, part in self._adaptations.items() if other != name}
        self.adaptations_ = others | ({name: left} if left else {})

    def _using(self, using: str, adata: AnnData) -> str:
        """Which cells an environment is known by."""
        if using not in get_args(Using):
            msg = f"using={using!r} is not known: use one of {', '.join(get_args(Using))}."
            raise ValueError(msg)
        named = self._controls(adata) is not None
        unknown = "no controls are known (control=… of setup_anndata, and the column of the perturbation)"
        if using == "controls" and not named:
            msg = f"using='controls': {unknown}."
            raise ValueError(msg)
        if using == "auto" and not named:
            msg = (
                f"All cells of each environment are used, as {unknown}: effects of perturbations count as effects of "
                "the environment. If each holds those of the training in about the same numbers, give using='all'."
            )
            warnings.warn(msg, UserWarning, stacklevel=3)
        return ("controls" if named else "all") if using == "auto" else using

    def _chosen(self, labels: pd.Series, adata: AnnData, key: str | Sequence[str], kind: str) -> dict[str, np.ndarray]:
        """Rows of the cells to look at, of each environment that is new."""
        trained = self._trained_on(key)
        new = [name for name in dict.fromkeys(labels) if name not in trained]
        if not new:
            msg = f"The model was trained on all {labels.nunique()} environments of {column_name(key)!r}: none is new."
            raise ValueError(msg)
        usable = np.ones(len(labels), dtype=bool) if kind == "all" else self._controls(adata)
        values = labels.to_numpy()
        chosen = {name: np.flatnonzero((values == name) & usable) for name in new}
        if few := [f"{name} ({len(rows)})" for name, rows in chosen.items() if len(rows) < _LEAST]:
            what = "cells" if kind == "all" else "controls, named as in the training (or give using='all')"
            msg = f"There are fewer than two in {head(few)}: each environment needs at least two {what}."
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
        known = getattr(self, "statistics_", {})
        if kind not in known:
            msg = f"The model has seen no training cells for using={kind!r}: train it with such cells attached."
            raise ValueError(msg)
        if not known[kind]["moments"]:
            msg = (
                "This model normalises nothing by statistics (standardize=False, and no batch normalisation): there "
                "is nothing to adapt."
            )
            raise ValueError(msg)
        return known[kind]

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
        self.statistics_ = {
            kind: statistics_of(self.module, source, rows, e[rows])
            for kind, rows in drawn.items()
            if len(rows) >= _LEAST
        }


def statistics_of(module: EmbeddingModule, source: ImageSource, rows: np.ndarray, groups: np.ndarray) -> dict[str, Any]:
    """What cells look like, as plain arrays: moments within the network, mean and covariance of each z.

    Variances are those within ``groups (len(rows),)``.
    """
    moments = reference_moments(module, *_grouped(source, rows, groups))
    z = _embeddings(module, source, rows, Adaptation({}, {}))
    normal = {block: _normal(values, groups) for block, values in z.items()}
    return {
        "moments": {name: torch.stack(part).numpy() for name, part in moments.items()},
        "mean": {block: mean for block, (mean, _) in normal.items()},
        "covariance": {block: spread for block, (_, spread) in normal.items()},
    }


def adaptation_to(
    module: EmbeddingModule,
    source: ImageSource,
    rows: np.ndarray,
    groups: np.ndarray,
    reference: Mapping[str, Any],
    *,
    linear_map: bool,
) -> dict[str, Any]:
    """To the environment of some cells, as plain values, with what it did; see :func:`statistics_of`."""
    moments = {name: Moments(*torch.from_numpy(values)) for name, values in reference["moments"].items()}
    buffers = adapted_buffers(module, *_grouped(source, rows, groups), moments)
    adaptation = Adaptation(buffers, {})
    before, after = (_embeddings(module, source, rows, part) for part in (Adaptation({}, {}), adaptation))
    maps = {}
    if linear_map:
        for block, z in after.items():
            there = reference["mean"][block], reference["covariance"][block]
            width = len(there[0])
            maps[block] = between_normals(_normal(z, groups), there, width / (width + len(rows)))
        after = Adaptation(buffers, maps).mapped(module, after)
    scale = np.sqrt(np.trace(reference["covariance"]["c"])) or 1.0
    distances = [float(np.linalg.norm(z["c"].mean(0) - reference["mean"]["c"]) / scale) for z in (before, after)]
    return {
        "n_cells": len(rows),
        "distance_before": distances[0],
        "distance_after": distances[1],
        "linear_map": linear_map,
        "buffers": {name: values.cpu().numpy() for name, values in buffers.items()},
        "maps": {block: part._asdict() for block, part in maps.items()},
    }


def _embeddings(
    module: EmbeddingModule, source: ImageSource, rows: np.ndarray, adaptation: Adaptation
) -> dict[BlockName, np.ndarray]:
    """Embeddings of both blocks, ``(len(rows), D)`` each."""
    blocks: list[BlockName] = ["c"] if module.style is None else ["c", "s"]
    all_by_it = np.broadcast_to(np.int64(0), source.shape[:1])  # no memory, however many cells there are
    embedder = Embedder(module, source, blocks, "embedding", {}, AdaptedCells(all_by_it, [adaptation]))
    parts = [rows[start : start + _BATCH_SIZE] for start in range(0, len(rows), _BATCH_SIZE)]
    with closing(embedder.embed(parts)) as batches:
        found = list(batches)
    return {block: np.concatenate([batch[block] for batch in found]) for block in blocks}


def _grouped(
    source: ImageSource, rows: np.ndarray, groups: np.ndarray
) -> tuple[Generator[tuple[torch.Tensor, torch.Tensor]], int]:
    """Inputs as stored with the group of each cell, batch by batch, and the number of groups."""
    names, codes = np.unique(groups, return_inverse=True)

    def batches() -> Generator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, len(rows), _BATCH_SIZE):
            part = slice(start, start + _BATCH_SIZE)
            inputs = read_tensor(source, rows[part])
            check_finite_inputs(inputs, rows[part])
            yield inputs, torch.from_numpy(codes[part])

    return batches(), len(names)


def _normal(z: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean, and covariance within groups; where these hold fewer than two cells on average, all are one."""
    if 2 * len(np.unique(groups)) > len(groups):
        groups = np.zeros(len(groups))
    return z.mean(0, dtype=np.float64), within_covariance(z, groups)


class _Normaliser(NamedTuple):
    """``(x - mean) / sd``, as it was when the module was trained."""

    name: str
    mean: Tensor
    sd: Tensor
    added: float
    """To the variance, where it is that which is kept; 0 where it is the standard deviation."""

    @classmethod
    def of(cls, name: str, module: nn.Module) -> _Normaliser:
        if isinstance(module, _BatchNorm):
            mean, variance = module.running_mean, module.running_var
            assert mean is not None
            assert variance is not None
            return cls(name, mean.clone(), (variance + module.eps).sqrt(), module.eps)
        return cls(name, module.mean.clone(), module.sd.clone(), 0.0)  # type: ignore[operator]

    def of_inputs(self, inputs: Tensor) -> Tensor:
        """What it makes of inputs ``(B, C, ...)``."""
        shape = (1, -1, *(1,) * (inputs.ndim - 2))
        return (inputs.float() - self.mean.view(shape)) / self.sd.view(shape)

    def buffers(self, alignment: Alignment) -> dict[str, Tensor]:
        """Its buffers once aligned, by their names in the module."""
        shift, ratio = (part.to(self.mean).view(self.mean.shape) for part in alignment)
        mean, sd = self.mean + self.sd * shift, self.sd * ratio
        if self.added:
            variance = (sd.square() - self.added).clamp(min=0)
            return {f"{self.name}.running_mean": mean, f"{self.name}.running_var": variance}
        return {f"{self.name}.mean": mean, f"{self.name}.sd": sd}


def reference_moments(
    module: EmbeddingModule, batches: Iterable[tuple[Tensor, Tensor]], n_groups: int
) -> dict[str, Moments]:
    """What some cells that were trained on look like to each normalisation that they pass.

    ``batches`` are inputs as stored, and the group of each cell; variances are those within.
    """
    sums: dict[str, ChannelSums] = {}
    groups = torch.empty(0)

    def count(normaliser: _Normaliser, normalised: Tensor) -> None:
        sums.setdefault(normaliser.name, ChannelSums(n_groups)).add(normalised, groups)

    with _watched(module, lambda normaliser, _, inputs: count(normaliser, normaliser.of_inputs(inputs))):
        for inputs, groups in batches:  # noqa: B007 - groups are read by the hook
            prepared = module.preprocess(inputs.to(module.device))
            if module.preprocess.standardize:
                count(_Normaliser.of(_PREPROCESS, module.preprocess), prepared)
            _through_networks(module, prepared)
    return {name: part.moments() for name, part in sums.items()}


def adapted_buffers(
    module: EmbeddingModule, batches: Iterable[tuple[Tensor, Tensor]], n_groups: int, reference: Mapping[str, Moments]
) -> dict[str, Tensor]:
    """Statistics with which cells leave each normalisation as those of a reference do, by the names of buffers.

    Cells are read once: at each batch, a layer is aligned by all cells so far, and the layers behind it see what it
    makes of the batch then. Batches, as for :func:`reference_moments`, are best drawn at random. The module is left as
    it was but for evaluation mode.
    """
    sums = {name: ChannelSums(n_groups) for name in reference}
    found: dict[str, Tensor] = {}
    groups = torch.empty(0)

    # convolutions pad inputs with their mean, which must be right; their scale does not pass a BatchNorm, and that of
    # pixels has in it how large cells are
    centred_only = {_PREPROCESS} if len(reference) > 1 else set()

    def aligned(normaliser: _Normaliser, normalised: Tensor) -> dict[str, Tensor]:
        name = normaliser.name
        sums[name].add(normalised, groups)
        return normaliser.buffers(align(reference[name], sums[name].moments(), scale=name not in centred_only))

    def renew(normaliser: _Normaliser, layer: nn.Module, inputs: Tensor) -> None:
        if normaliser.name not in reference:
            return
        buffers = aligned(normaliser, normaliser.of_inputs(inputs))
        for name, values in buffers.items():
            layer.get_buffer(name.rpartition(".")[2]).copy_(values)
        found.update(buffers)

    own, prepared = _Normaliser.of(_PREPROCESS, module.preprocess), _PreparedNew(module.preprocess)
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    try:
        with _watched(module, renew):
            for stored, groups in batches:  # noqa: B007 - groups are read by the hook
                inputs = stored.to(module.device)
                if _PREPROCESS in reference:
                    put(module, {name: kept[name] for name in (f"{_PREPROCESS}.mean", f"{_PREPROCESS}.sd")})
                    buffers = aligned(own, prepared(inputs))
                    put(module, buffers)
                    found.update(buffers)
                _through_networks(module, module.preprocess(inputs))
    finally:
        put(module, kept)
    return found


class _PreparedNew:
    """Inputs of new cells behind a preprocess that is not theirs yet.

    Features are cut off about where new cells are, as they will be once it is aligned: cut off about where training
    cells are, all of a plate that is far away would be the same.
    """

    def __init__(self, preprocess: nn.Module) -> None:
        self._preprocess = preprocess
        self._window: tuple[Tensor, Tensor] | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if not isinstance(self._preprocess, FeatureScaling) or self._preprocess.clip is None:
            prepared: Tensor = self._preprocess(inputs)
            return prepared
        scaled = self._preprocess.scaled(inputs)
        if self._window is None:  # of the first batch
            self._window = self._preprocess.limits(scaled)
        return scaled.clamp(*self._window)


@contextmanager
def _watched(module: EmbeddingModule, look: Callable[[_Normaliser, nn.Module, Tensor], None]) -> Generator[None]:
    """Have what comes to each BatchNorm looked at; without gradient, and uncompiled, where hooks are not called."""
    module.eval()
    handles = []
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            normaliser = _Normaliser.of(name, layer)
            handles.append(
                layer.register_forward_pre_hook(
                    lambda layer, inputs, normaliser=normaliser: look(normaliser, layer, inputs[0])
                )
            )
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _through_networks(module: EmbeddingModule, prepared: Tensor) -> None:
    for network in (module.content, module.style):
        if network is not None:
            network.represent(prepared, "embedding")
