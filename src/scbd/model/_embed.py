"""From images to an embedding: blocks of rows in order, one encoder, one array."""

from __future__ import annotations

import os
import warnings
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scbd._checks import count_or
from scbd._files import partial_path
from scbd._progress import progress_bar
from scbd.model._embed_to import embed_to
from scbd.model._forward import embedded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from anndata import AnnData

    from scbd.data import ImageSource
    from scbd.model._adapted import AdaptedCells
    from scbd.model._contract import BlockName, EmbeddingModule
    from scbd.nn import Representation

BATCH_SIZE, BLOCK_SIZE = 512, 65_536
# enough controls to know their mean
_CENTRE_CELLS = 16_384
Center = Literal["auto", "controls"] | None
_REPRESENTATIONS = {"embedding": "z", "intermediate": "r"}


class EmbedMixin:
    """Gives an image model :meth:`get_latent_representation`."""

    if TYPE_CHECKING:  # what the model brings
        module: EmbeddingModule
        _check_if_trained: Any
        adata: Any
        train_indices: np.ndarray
        _require: Any
        _source: Any
        _inputs: Any
        _controls: Any
        _adapted_cells: Any

    def get_latent_representation(
        self,
        adata: AnnData | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        block: str = "c",
        representation: str = "embedding",
        center: Center = "auto",
        adapt_key: str | Sequence[str] | None = None,
        batch_size: int | None = None,
        out: np.ndarray | str | os.PathLike[str] | None = None,
        enable_progress_bar: bool | None = None,
    ) -> np.ndarray:
        """Embed cells, with or without labels, from known or unseen environments.

        Parameters
        ----------
        adata
            Cells with inputs at the place, and of the kind, the model was set up with; the training data by default.
            It need not be set up, and no label is read.
        indices
            Rows to embed, in this order; all by default. A boolean mask is one of them.
        block
            ``"c"``: the perturbation, blind to the environment; ``"s"``: the environment.
        representation
            ``"embedding"``: z; ``"intermediate"``: r, before the projection, which the paper uses
            for domain generalisation.
        batch_size
            Cells in a forward pass; 512 by default.
        center
            ``"controls"``: subtract the mean z of the training cells that are controls, so that a cell's direction says
            in what it differs from them, and its length by how much; `None`: z as the losses see it, on the unit
            sphere. By default centred for features, where ``setup_anndata`` was told of controls. For ``"embedding"``
            only.
        adapt_key
            The ``key`` of :meth:`adapt`: each cell is embedded by what was learned of its own environment there. Cells
            of other environments are embedded like training cells; a log message names environments that the model does
            not know.
        out
            Where to write: an array of the right shape, or the path of an ``.npy`` file (memory-mapped, for what does
            not fit in memory; it appears under its name when complete).
        enable_progress_bar
            By default for more than 20,000 cells.

        Returns
        -------
        float32 ``(len(indices), D)``: ``out``, or a new array.

        Raises
        ------
        KeyError, TypeError, ValueError
            If the inputs are missing or not of the kind the model was trained on (other channels, or the same in
            another order), an index is out of range, the model has no such block, or an embedding would be NaN: the
            message tells whether pixels or weights are to blame.

        Warns
        -----
        UserWarning
            If the channels have other names than those the model was set up with.
        """
        self._check_if_trained(warn=True)
        block_name = self._block(block)
        kind: Representation = _one_of("representation", representation, _REPRESENTATIONS)
        adata = self._require(adata)
        source = self._source(adata)
        return embed(
            self.module,
            source,
            row_numbers(indices, source.shape[0]),
            block=block_name,
            representation=kind,
            centers=self._centers(center, kind),
            adapted=self._adapted_cells(adata, adapt_key),
            batch_size=count_or("batch_size", batch_size, BATCH_SIZE),
            out=out,
            enable_progress_bar=enable_progress_bar,
        )

    def embed_to(
        self,
        path: str | os.PathLike[str],
        adata: AnnData | None = None,
        *,
        blocks: Sequence[str] | None = None,
        representation: str = "embedding",
        center: Center = "auto",
        adapt_key: str | Sequence[str] | None = None,
        dtype: Literal["float32", "float16"] = "float32",
        batch_size: int | None = None,
        block_size: int | None = None,
        shard: tuple[int, int] | None = None,
        enable_progress_bar: bool | None = None,
    ) -> AnnData:
        """Embed any number of cells into a file, in constant memory.

        Killed at any moment and called again with the same model and cells, it goes on where it stopped, to the same
        bytes; other labels, or other pixels in a sample of the cells, are other cells. The file appears under its name
        when it is whole; :func:`scbd.data.verify_screen` compares it with its checksums.

        Parameters
        ----------
        path
            An ``.h5ad`` file to make.
        adata
            As for :meth:`get_latent_representation`.
        blocks
            ``["c", "s"]``: those that the model has by default. Each image is read once for all of them.
        representation, center, adapt_key
            As for :meth:`get_latent_representation`.
        dtype
            Of the file. Half precision halves it, and moves a component of a unit vector by less than 0.0005.
        batch_size
            Cells in a forward pass; 512 by default.
        block_size
            Cells that are written at once, about so many: a kill loses no more; 65,536 by default.
        shard
            ``(i, n)``: embed only the i-th of n contiguous shares, for n processes or jobs, a device each, with the
            same model, cells and path; whichever is the last gives the file its name. By default all cells, or where
            torch's processes know of each other (after training on several devices) one share each, and all of them
            wait for the file.
        enable_progress_bar
            By default for more than 20,000 cells.

        Returns
        -------
        The file, as :func:`scbd.data.open_embedding` opens it: the cells' ``obs``, and embeddings memory-mapped in
        ``obsm``, ``"X_scbd_c"`` and ``"X_scbd_s"`` (of other models their own name). Metrics read it as it is. The
        table alone while other shares are missing.

        Raises
        ------
        FileExistsError
            If there is something at ``path``; nothing is overwritten.
        OSError
            If the disk is too small.
        KeyError, TypeError, ValueError
            See :meth:`get_latent_representation`; or if the beginning of another file lies there.
        """
        self._check_if_trained(warn=True)
        adata = self._require(adata)
        has = [block for block, part in (("c", self.module.content), ("s", self.module.style)) if part is not None]
        named = [self._block(block) for block in (has if blocks is None else blocks)]
        kind: Representation = _one_of("representation", representation, _REPRESENTATIONS)
        name = type(self).__name__.removesuffix("Model").lower()
        return embed_to(
            self.module,
            self._source(adata),
            adata.obs,
            Path(path),
            {block: f"X_{name}_{block}" for block in named},
            representation=kind,
            centers=self._centers(center, kind),
            adapted=self._adapted_cells(adata, adapt_key),
            dtype=dtype,
            batch_size=count_or("batch_size", batch_size, BATCH_SIZE),
            block_size=count_or("block_size", block_size, BLOCK_SIZE),
            shard=shard,
            enable_progress_bar=enable_progress_bar,
        )

    def _centers(self, center: Center, representation: Representation) -> Mapping[BlockName, np.ndarray]:
        """What to subtract from each block, if anything."""
        known = getattr(self, "centers_", {})
        if center not in ("auto", "controls", None):
            msg = f"center={center!r} is not known: use 'controls', or None for z as it is."
            raise ValueError(msg)
        if center == "controls" and not known:
            msg = (
                "center='controls' needs controls among the training cells: name them with control=… in "
                "setup_anndata, and train."
            )
            raise ValueError(msg)
        of_features = self._inputs.image_key is None
        wanted = center == "controls" or (center == "auto" and of_features)
        return known if wanted and representation == "embedding" else {}

    def _find_centers(self) -> None:
        """Keep the mean of the controls among the training cells, for each block."""
        controls = self._controls(self.adata)
        self.centers_ = {}
        if controls is None:
            return
        rows = self.train_indices[controls[self.train_indices]]
        if not len(rows):
            msg = "No training cell is a control: embeddings are not centred on controls."
            warnings.warn(msg, UserWarning, stacklevel=3)
            return
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:_CENTRE_CELLS])
        blocks = ["c"] if self.module.style is None else ["c", "s"]
        for block in blocks:
            z = self.get_latent_representation(indices=rows, block=block, center=None, enable_progress_bar=False)
            self.centers_[block] = z.mean(0)

    def _block(self, block: str) -> BlockName:
        """One that the model has.

        Raises
        ------
        ValueError
            If it has no such block.
        """
        name: BlockName = _one_of("block", block, {"c": "perturbation", "s": "environment"})
        if name == "s" and self.module.style is None:
            msg = f"This {type(self).__name__} has a single block, which carries the perturbation: use block='c'."
            raise ValueError(msg)
        return name


def embed(
    module: EmbeddingModule,
    source: ImageSource,
    rows: np.ndarray | None,
    *,
    block: BlockName,
    representation: Representation,
    centers: Mapping[BlockName, np.ndarray],
    adapted: AdaptedCells | None,
    batch_size: int,
    out: np.ndarray | str | os.PathLike[str] | None,
    enable_progress_bar: bool | None,
) -> np.ndarray:
    """Embed rows of a source (all if `None`), in order; see ``get_latent_representation``."""
    n = source.shape[0] if rows is None else len(rows)
    target, partial = _target(out, (n, module.width(block, representation)))
    name = f"{'z' if representation == 'embedding' else 'r'}_{block}"
    bar = progress_bar(f"Embedding {name}", n, shown=enable_progress_bar)
    try:
        parts = [slice(start, min(start + batch_size, n)) for start in range(0, n, batch_size)]
        wanted = [part if rows is None else rows[part] for part in parts]
        with bar, closing(embedded(module, source, wanted, [block], representation, centers, adapted)) as batches:
            for part, values in zip(parts, batches, strict=True):
                target[part] = values[block]
                bar.update(len(values[block]))
    except BaseException:
        if partial is not None:
            partial.unlink()
        raise
    if partial is not None:
        target.flush()  # type: ignore[attr-defined]
        os.replace(partial, Path(out))  # type: ignore[arg-type]
    return target


def _target(out: Any, shape: tuple[int, int]) -> tuple[np.ndarray, Path | None]:
    """The array to fill, and the file it lies in until it is complete."""
    if out is None:
        return np.empty(shape, dtype=np.float32), None
    if isinstance(out, np.ndarray):
        if out.shape != shape:
            msg = f"out has shape {out.shape}, the embedding has shape {shape}."
            raise ValueError(msg)
        if out.dtype.kind != "f":
            msg = f"out has dtype {out.dtype.name}, which holds no fractions: give an array of float32."
            raise ValueError(msg)
        return out, None
    path = Path(out)
    if path.suffix != ".npy":
        msg = f"out={str(path)!r}: give the path of an .npy file, or an array."
        raise ValueError(msg)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_path(path)
    return np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape), partial


def row_numbers(indices: Any, n: int) -> np.ndarray | None:
    """Row numbers from a list of them, negative ones among them, or from a boolean mask; `None` stays `None`."""
    if indices is None:
        return None
    rows = np.asarray(indices)
    if rows.dtype == bool:
        if len(rows) != n:
            msg = f"The boolean indices have length {len(rows)}, there are {n} cells."
            raise ValueError(msg)
        return np.flatnonzero(rows)
    if rows.ndim != 1 or rows.dtype.kind not in "iu" and rows.size:
        msg = f"indices must be a list of row numbers or a boolean mask, got dtype {rows.dtype} of shape {rows.shape}."
        raise ValueError(msg)
    rows = rows.astype(np.int64)
    if rows.size and (rows.min() < -n or rows.max() >= n):
        msg = f"indices reach from {rows.min()} to {rows.max()}, there are {n} cells."
        raise ValueError(msg)
    return rows % n


def _one_of(name: str, value: str, choices: dict[str, str]) -> Any:
    """The value, if it is one of these."""
    if value not in choices:
        known = " or ".join(f"{choice!r} ({meaning})" for choice, meaning in choices.items())
        msg = f"{name}={value!r} is not known: use {known}."
        raise ValueError(msg)
    return value
