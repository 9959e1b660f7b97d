"""Methods of a trained model that embed cells, write embeddings to a Zarr store, and predict perturbations."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import deque
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from anndata import AnnData
from torch import nn

from scbd._shared.checks import check_choice, count_or_default, join_first
from scbd._shared.files import local_path, write_atomically
from scbd._shared.keys import E_REGISTRY, Y_REGISTRY
from scbd._shared.labels import get_obs_column
from scbd._shared.memory import keep_freed_memory
from scbd._shared.messages import warn_user
from scbd._shared.progress import progress_bar
from scbd.data._block_store import BlockStore
from scbd.data._loading import read_tensor
from scbd.data._prefetch import prefetch
from scbd.data._screens import open_embedding
from scbd.data._sources import digest_cells
from scbd.data._storable import as_storable
from scbd.model._arguments import explain_arguments
from scbd.model._minified import (
    StoredEmbeddings,
    block_names,
    is_minified,
    minified_copy,
    stored_embeddings,
    update_with_weights,
)
from scbd.model._setup import SetupMixin
from scbd.nn._distributed import rank_and_world_size, wait_for_all
from scbd.nn._groups import copy_to

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import pandas as pd

    from scbd.data._sources import ImageSource
    from scbd.model._environment_alignment import EnvironmentCorrections
    from scbd.model._interfaces import BlockName, EmbeddingModule, TrainingResults
    from scbd.nn._encoders import Representation

logger = logging.getLogger(__name__)

Center = Literal["auto", "controls"] | None

# BATCH_SIZE is the default number of cells per forward pass. BLOCK_SIZE is the default number of consecutive cells
# whose embeddings are written to a Zarr store at once.
BATCH_SIZE, BLOCK_SIZE = 512, 65_536
# maximum number of control cells from which the mean embedding of the controls is estimated
_MAX_CENTRE_CONTROLS = 16_384
# Before new cells are embedded, a random sample of them is used to check that their inputs have the units of the
# training cells. _UNIT_CHECK_CELLS is the size of the sample. With fewer cells than _MIN_UNIT_CHECK_CELLS, the check is
# skipped.
_UNIT_CHECK_CELLS, _MIN_UNIT_CHECK_CELLS = 256, 8
# The inputs of new cells count as being in other units than the inputs of the training cells if the two means differ by
# more than _MAX_UNIT_DEVIATION standard deviations, or if the two standard deviations differ by more than this factor.
# For inputs on an arcsinh (logarithmic) scale, the limit is _MAX_UNIT_DEVIATION_LOG.
_MAX_UNIT_DEVIATION, _MAX_UNIT_DEVIATION_LOG = 10.0, 3.0
_BLOCKS = {"c": "perturbation", "s": "environment"}
_REPRESENTATIONS = {"embedding": "z", "intermediate": "r"}
_DTYPES = ("float32", "float16")


class _StartedGroup(NamedTuple):
    """Group of cells whose embedding was started, and may not be finished on a GPU."""

    part: slice | np.ndarray
    """Rows of the cells in their table."""
    inputs: torch.Tensor
    """Inputs of the cells, on the device."""
    is_finite: torch.Tensor
    """Whether all inputs are finite, in CPU memory; valid after :attr:`copied`."""
    values: dict[BlockName, torch.Tensor]
    """Embeddings by block, ``(n, D)``, in CPU memory; valid after :attr:`copied`."""
    copied: torch.cuda.Event | None
    """Event that the GPU reaches when the embeddings are copied; `None` on other devices."""


def _n_groups_ahead(device: torch.device) -> int:
    """Return the number of further groups whose embedding is started before that of a group is finished."""
    return 1 if device.type == "cuda" else 0


class Embedder(NamedTuple):
    """Module, inputs, settings and corrections with which the cells of one table are embedded.

    A block is one of the two embeddings of a cell: ``"c"`` for z_c, and ``"s"`` for z_s.
    """

    module: EmbeddingModule | StoredEmbeddings
    source: ImageSource
    blocks: Sequence[BlockName]
    representation: Representation
    centers: Mapping[BlockName, np.ndarray]
    """Mean embedding of the controls, ``(D,)``, by block: ``"c"`` for z_c, ``"s"`` for z_s.

    The mean is subtracted from the embeddings of all cells. A block without an entry is not centred.
    """
    environments: EnvironmentCorrections | None
    """Environments of the cells, with the statistics for standardising inputs and centring z_c per environment.

    With `None`, neither inputs nor z_c are corrected for the environment.
    """

    def width(self, block: BlockName) -> int:
        """Return the number of dimensions of the embedding, or of the representation r, of a block (z_c or z_s)."""
        return self.module.width(block, self.representation)

    def embed(self, parts: Sequence[slice | np.ndarray]) -> Generator[dict[BlockName, np.ndarray]]:
        """Embed groups of cells one after the other, and yield the embeddings of each group.

        A background thread reads the inputs of the next groups in advance. The inputs of a group are read only once,
        even if both z_c and z_s are computed.

        Parameters
        ----------
        parts
            Groups of cells, each given as a slice of rows of the table or as an array of row numbers.

        Yields
        ------
        The embeddings of one group, float32 ``(n, D)``, by block (``"c"`` for z_c, ``"s"`` for z_s).

        Raises
        ------
        ValueError
            If inputs are not finite, or the embedding of finite inputs is not finite. The message names the rows.
        """
        self.module.eval()
        device, started = self.module.device, deque[_StartedGroup]()
        n_ahead = _n_groups_ahead(device)
        # one stream for all groups, since each stream of CUDA keeps freed memory for itself
        copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        reader = closing(prefetch(read_tensor(self.source, part) for part in parts))
        with keep_freed_memory(device), reader as batches:
            for part, read in zip(parts, batches, strict=True):
                # The inference mode of torch must not include the yield: if the caller abandons the generator,
                # inference mode would stay on.
                with torch.inference_mode():
                    started.append(self._start(part, read, device, copies))
                if len(started) > n_ahead:
                    yield self._finish(started.popleft())
            while started:
                yield self._finish(started.popleft())

    def _start(
        self, part: slice | np.ndarray, read: torch.Tensor, device: torch.device, copies: torch.cuda.Stream | None
    ) -> _StartedGroup:
        """Start to embed a group of cells. On a CUDA GPU, the CPU does not wait for the result.

        Parameters
        ----------
        part, read
            Rows of the cells in their table, and their inputs in CPU memory.
        device
            Device of the module.
        copies
            Stream of a CUDA GPU in which inputs are copied while the GPU still embeds the previous group; `None` on
            other devices, where all copies are complete when this method returns.
        """
        copied, is_cuda = None, copies is not None
        if copies is None:
            inputs = read.to(device)
        else:
            current = torch.cuda.current_stream(device)
            with torch.cuda.stream(copies):
                inputs = read.to(device, non_blocking=True)
            current.wait_stream(copies)
            inputs.record_stream(current)
        is_finite = torch.tensor(data=True)
        if inputs.is_floating_point():
            is_finite = inputs.isfinite().all().to("cpu", non_blocking=is_cuda)
        e = scaling = offsets = None
        if self.environments is not None:
            codes, scaling, offsets = self.environments
            e = copy_to(device, codes[part])
        values = {}
        for block in self.blocks:
            how = (e, scaling) if block == "c" else ()
            z = self.module.embed(inputs, block, self.representation, *how).float()
            z = offsets(z, e) if offsets is not None and block == "c" else z
            values[block] = z.to("cpu", non_blocking=is_cuda)
        if is_cuda:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(device))
        return _StartedGroup(part, inputs, is_finite, values, copied)

    def _finish(self, group: _StartedGroup) -> dict[BlockName, np.ndarray]:
        """Wait for the embeddings of a group of cells, check them, and centre them on the controls."""
        if group.copied is not None:
            group.copied.synchronize()
        if not group.is_finite:
            check_finite_inputs(group.inputs, group.part)
        values = {block: embedding.numpy() for block, embedding in group.values.items()}
        for block, embedding in values.items():
            _check_finite_embedding(self.module, embedding, group.part)
            if block in self.centers:
                embedding -= self.centers[block]
        return values

    def digest(self, obs: pd.DataFrame, settings: list[Any]) -> str:
        """Return the SHA-256 digest of the weights, inputs, cells and settings that determine the embeddings.

        Equal digests mean equal embeddings.

        Parameters
        ----------
        obs
            Annotation of the cells, ``obs`` of their table.
        settings
            Further settings to include in the digest.
        """
        how = [self.representation, *settings]
        how += [f"{block}: {hashlib.sha256(center.tobytes()).hexdigest()}" for block, center in self.centers.items()]
        digest = hashlib.sha256(repr([*how, digest_cells(self.source, obs)]).encode())
        parts: list[nn.Module] = [self.module]
        if self.environments is not None:
            digest.update(self.environments.codes.tobytes())
            parts += filter(None, (self.environments.inputs, self.environments.outputs))
        update_with_weights(digest, parts)
        return digest.hexdigest()


class EmbedMixin(SetupMixin):
    """Mixin that adds to a model the methods that compute, write and store embeddings of cells, and predict with them.

    The methods are :meth:`get_latent_representation`, :meth:`embed_to`, :meth:`minify_adata` and :meth:`predict`.
    """

    results_: TrainingResults
    online_head_: dict[str, np.ndarray]
    train_indices: np.ndarray

    @explain_arguments()
    def get_latent_representation(
        self,
        adata: AnnData | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        block: str = "c",
        representation: str = "embedding",
        center: Center = "auto",
        batch_size: int | None = None,
        out: np.ndarray | str | os.PathLike[str] | None = None,
        enable_progress_bar: bool | None = None,
    ) -> np.ndarray:
        """Return the embeddings of cells, with or without labels, from seen or unseen environments.

        Parameters
        ----------
        adata
            Table of the cells to embed, with inputs of the same kind, and under the same key, as in
            :meth:`setup_anndata`. By default, the table attached to the model. Another table need not be set up and
            needs no labels. If it has the columns of ``e_key``, inputs are standardised per environment as in training.
            The mean and the standard deviation of an environment that was not seen in training are estimated from cells
            of ``adata``: from the controls of the environment, or from all of its cells, as in training.
        indices
            Row numbers of the cells to embed, in this order, or a boolean mask. By default all rows.
        block
            ``"c"`` for z_c, which carries the perturbation and is invariant to the environment; ``"s"`` for z_s, which
            carries the environment.
        representation
            ``"embedding"`` returns the embedding z. ``"intermediate"`` returns r, the output of the encoder before the
            projection to z, which the paper uses for domain generalisation.
        center
            Vectors to subtract from the embedding z (the intermediate representation r is not changed):

            - ``"auto"``: subtract from z_c the residual offset of each cell's environment: the mean of z_c that remains
              in the environment although inputs are standardised per environment. It is estimated from the same kind
              of cells (controls or all cells) as the standardisation of inputs, see ``standardize_by`` of the model. If
              inputs are features and controls were named in :meth:`setup_anndata`, the mean of the controls is
              subtracted as well, as with ``"controls"``.
            - ``"controls"``: subtract the residual offset, and in addition the mean embedding of the controls among the
              training cells. The direction of an embedding then shows how a cell differs from controls, and the length
              of the embedding by how much.
            - `None`: subtract nothing. Embeddings have unit length, as in the losses.
        batch_size
            Number of cells per forward pass. Default: 512.
        out
            Array ``(len(indices), D)`` to write the embeddings to, or path of an ``.npy`` file. The file is written as
            a memory-map under a temporary name, and is renamed to its path when it is complete.
        enable_progress_bar
            Whether to show a progress bar. By default, it is shown for more than 20,000 cells.

        Returns
        -------
        Embeddings, float32 ``(len(indices), D)``: the array ``out`` if it was given, otherwise a new array.

        Raises
        ------
        KeyError, TypeError, ValueError
            If inputs are missing, not finite or of another kind than in :meth:`setup_anndata`, if an index is out of
            range, if the model has no z_s although ``block`` is ``"s"``, or if an embedding is NaN.

        Warns
        -----
        UserWarning
            If the names of the channels differ from those in :meth:`setup_anndata`, or if inputs are in other units
            than those of the training cells.
        """
        embedder = self._make_embedder(adata, [block], representation, center)
        (name,), rows = embedder.blocks, row_numbers(indices, embedder.source.shape[0])
        n, size = len(rows), count_or_default("batch_size", batch_size, BATCH_SIZE)
        parts = [slice(start, min(start + size, n)) for start in range(0, n, size)]
        bar = progress_bar(f"Embedding {_REPRESENTATIONS[representation]}_{name}", n, shown=enable_progress_bar)
        batches = embedder.embed(parts if indices is None else [rows[part] for part in parts])
        with _output_array(out, (n, embedder.width(name))) as target, bar, closing(batches):
            for part, values in zip(parts, batches, strict=True):
                target[part] = values[name]
                bar.update(len(values[name]))
        return target

    @explain_arguments()
    def embed_to(
        self,
        path: str | os.PathLike[str],
        adata: AnnData | None = None,
        *,
        blocks: Sequence[str] | None = None,
        representation: str = "embedding",
        center: Center = "auto",
        dtype: Literal["float32", "float16"] = "float32",
        batch_size: int | None = None,
        block_size: int | None = None,
        shard: tuple[int, int] | None = None,
        enable_progress_bar: bool | None = None,
    ) -> AnnData:
        """Embed cells and write the embeddings to a Zarr store, with a memory use that does not grow with the cells.

        If a call is killed, another call with the same model and cells continues where the first one stopped. The
        result is the same, byte for byte. The store is written under a temporary name, and is renamed to ``path`` when
        it is complete. :func:`scbd.data.verify_screen` compares the store with its checksums.

        Parameters
        ----------
        path
            Path of the new store, which ends in ``.zarr``.
        adata
            See :meth:`get_latent_representation`.
        blocks
            Embeddings to compute: ``["c"]`` for z_c, ``["s"]`` for z_s, or ``["c", "s"]`` for both. By default all
            embeddings that the model has. Each input is read only once, also for both embeddings.
        representation, center
            See :meth:`get_latent_representation`.
        dtype
            Type of the stored numbers, ``"float32"`` or ``"float16"``.
        batch_size
            Number of cells per forward pass. Default: 512.
        block_size
            Approximate number of cells whose embeddings are written at once. A call that is killed loses at most the
            embeddings of this number of cells. Default: 65,536.
        shard
            Pair ``(i, n)``, with i from 1 to n: embed only the i-th of n contiguous parts of the cells. Several
            processes or jobs, with the same model, cells and path, can then divide the work. The process that finishes
            last renames the store to ``path``. By default, the cells are divided among torch's distributed processes,
            if there are several, and each of these processes waits until the store is complete.
        enable_progress_bar
            Whether to show a progress bar. By default, it is shown for more than 20,000 cells.

        Returns
        -------
        The complete store, as :func:`scbd.data.open_embedding` opens it: a table with the ``obs`` of the cells and, in
        ``obsm``, the embeddings in memory under ``"X_scbd_c"`` and ``"X_scbd_s"`` (other models replace ``scbd`` by
        their own name). If other processes have not yet written their parts, the result is a table with ``obs`` only.

        Raises
        ------
        FileExistsError
            If ``path`` exists. Existing files are not overwritten.
        KeyError, TypeError, ValueError
            See :meth:`get_latent_representation`. Also if an unfinished store of other cells, another model or other
            settings exists for ``path``.
        """
        if blocks is None:
            blocks = block_names(self.module)
        embedder = self._make_embedder(adata, blocks, representation, center)
        rank, n_processes = rank_and_world_size()
        share = (rank + 1, n_processes) if shard is None else shard
        if not 1 <= share[0] <= share[1]:
            msg = f"shard={share[0]}/{share[1]}: give a first number from 1 to the second."
            raise ValueError(msg)
        path = _checked_store_path(path, blocks, dtype, shared=shard is not None)
        size = count_or_default("batch_size", batch_size, BATCH_SIZE)
        obs = as_storable(self._adata_or_attached(adata).obs)
        # The number of cells that are written at once is a multiple of the batch size. A call that continues a killed
        # call therefore computes the same batches.
        n, rows = len(obs), -(-count_or_default("block_size", block_size, BLOCK_SIZE) // size) * size
        system = type(self).__name__.removesuffix("Model").lower()
        names = {block: f"X_{system}_{block}" for block in embedder.blocks}
        arrays = {name: ((n, embedder.width(block)), np.dtype(dtype)) for block, name in names.items()}
        digest = embedder.digest(obs, [dtype, size, rows, *arrays])
        path.parent.mkdir(parents=True, exist_ok=True)
        store = BlockStore(path, {"obs": obs}, arrays, rows, digest)
        done = store.begin()
        todo = np.array_split(np.arange(len(done)), share[1])[share[0] - 1]
        todo = todo[~done[todo]]
        # In distributed computing, no process may complete and rename the store before all processes have opened it.
        if shard is None:
            wait_for_all()
        stops = np.minimum((todo + 1) * rows, n)
        bar = progress_bar(f"Embedding to {path.name}", int((stops - todo * rows).sum()), shown=enable_progress_bar)
        parts = [
            slice(start, min(start + size, stop))
            for number, stop in zip(todo, stops, strict=True)
            for start in range(number * rows, stop, size)
        ]
        with bar, closing(embedder.embed(parts)) as batches:
            for number, stop in zip(todo, stops, strict=True):
                values = {
                    name: np.empty((stop - number * rows, *shape[1:]), kind) for name, (shape, kind) in arrays.items()
                }
                for start in range(0, stop - number * rows, size):
                    for block, batch in next(batches).items():
                        values[names[block]][start : start + size] = batch
                    bar.update(len(batch))
                store.write(int(number), values)
        whole = store.finish()
        if shard is None:
            wait_for_all()
        return open_embedding(path) if whole or shard is None else AnnData(obs=obs)

    @explain_arguments()
    def minify_adata(self) -> None:
        """Replace the table attached to the model by a small table that holds embeddings instead of images or features.

        The new table, ``model.adata``, is small enough to be shared with ``save(save_anndata=True)``. It has ``obs``,
        ``var``, ``obsp`` and ``uns`` of the original table, and ``obsm`` without the inputs. The original table is not
        changed.

        Methods that need only embeddings work with the small table: :meth:`get_latent_representation`,
        :meth:`embed_to`, and methods that decode embeddings. All other methods raise a ``ValueError`` until the
        original table is attached again with ``model.adata = adata``.

        Raises
        ------
        ValueError
            If no table is attached, or if the attached table already holds embeddings instead of inputs.

        Examples
        --------
        >>> model.minify_adata()
        >>> model.minified_data_type
        'embeddings'
        >>> "single_cell_images" in model.adata.obsm
        False
        >>> model.get_latent_representation(block="s").shape
        (240, 64)
        """
        adata = self._adata_or_attached(None)
        self._source(adata)  # raises an error if the table holds no inputs
        embedder = self._make_embedder(adata, block_names(self.module), "embedding", None)
        n = adata.n_obs
        z = np.empty((n, sum(map(embedder.width, embedder.blocks))), np.float32)
        parts = [slice(start, min(start + BATCH_SIZE, n)) for start in range(0, n, BATCH_SIZE)]
        with progress_bar("Embedding all blocks", n, shown=None) as bar, closing(embedder.embed(parts)) as batches:
            for part, values in zip(parts, batches, strict=True):
                z[part] = np.concatenate(list(values.values()), axis=1)
                bar.update(len(z[part]))
        self.adata = minified_copy(adata, self._inputs, self.module, z)

    @property
    def can_predict(self) -> bool:
        """True if the model has a linear classifier that predicts perturbations.

        The classifier is part of the model's objective, or was trained by ``train(online_head=True)``.
        """
        return self._objective_head is not None or bool(getattr(self, "online_head_", {}))

    @explain_arguments()
    def predict(
        self,
        adata: AnnData | None = None,
        indices: Sequence[int] | np.ndarray | None = None,
        *,
        return_proba: bool = False,
        batch_size: int | None = None,
    ) -> np.ndarray:
        """Predict the perturbation of cells with a linear classifier on the intermediate representation r_c.

        r_c is the output of the encoder of z_c before its projection. In a classifier model, the linear classifier is
        part of the objective. Other models have a linear classifier if they were trained with ``online_head=True``; the
        paper's authors report scores of such a classifier.

        Parameters
        ----------
        adata
            Table of cells with images or features. Default: the training data.
        indices
            Row numbers in the order of the output, or a boolean mask. Default: all cells.
        return_proba
            Whether to return probabilities in place of labels.
        batch_size
            Number of cells per forward pass. Default: 512.

        Returns
        -------
        Predicted labels, ``(len(indices),)``. With ``return_proba=True``, probabilities, float32
        ``(len(indices), n_labels)``, with the labels in the order of the registered categories.

        Raises
        ------
        ValueError
            If the model has no linear classifier; see also :meth:`get_latent_representation`.
        """
        head = self._objective_head or self._load_online_head()
        how: dict[str, Any] = {"representation": "intermediate", "center": None, "batch_size": batch_size}
        r = torch.from_numpy(self.get_latent_representation(adata, indices, **how))
        with torch.inference_mode():
            logits = head(r.to(head.weight.device)).cpu()
        if return_proba:
            return logits.softmax(1).numpy()
        categories = self._registered(Y_REGISTRY)["categories"]
        # labels that mix numbers and text form an array of objects, since numpy would otherwise convert numbers to text
        alike = len({type(category) for category in categories}) == 1
        return np.array(categories, dtype=None if alike else object)[logits.argmax(1).numpy()]

    def _make_embedder(
        self,
        adata: AnnData | None,
        blocks: Sequence[Any],
        representation: Any,
        center: Center,
    ) -> Embedder:
        """Check the arguments of an embedding method, and create the :class:`Embedder` for the cells of a table.

        Parameters
        ----------
        adata
            Table of the cells; `None` for the table attached to the model.
        blocks
            Embeddings to compute: ``"c"`` for z_c, ``"s"`` for z_s.
        representation, center
            See :meth:`get_latent_representation`.
        """
        self._check_if_trained(warn=True)
        adata = self._adata_or_attached(adata)
        check_choice("representation", representation, _REPRESENTATIONS)
        is_embedding, of_images = representation == "embedding", self._inputs.image_key is not None
        module: EmbeddingModule | StoredEmbeddings = self.module
        # A minified table holds embeddings instead of inputs. The inputs are then the stored embeddings, and the module
        # returns them without computation.
        if is_minified(adata) and is_embedding:
            module, source = StoredEmbeddings(self.module), stored_embeddings(adata, self.module)
        else:
            source = self._source(adata)
        for block in blocks:
            check_choice("block", block, _BLOCKS)
            if block == "s" and self.module.style is None:
                msg = f"This {type(self).__name__} has a single block, which carries the perturbation: use block='c'."
                raise ValueError(msg)
        check_choice("center", center, {"auto": "of features", "controls": "by their mean", None: "not at all"})
        if center == "controls" and not self.results_.centers:
            msg = (
                "center='controls' needs controls among the training cells: name them with control=… in "
                "setup_anndata, and train."
            )
            raise ValueError(msg)
        is_centred = is_embedding and (center == "controls" or (center == "auto" and not of_images))
        environments = None
        if "c" in blocks:
            with_offsets = is_embedding and center is not None
            environments = self._environment_corrections(adata, module, source, with_offsets=with_offsets)
        if module is self.module and (adata is not self.adata or self._has_other_cells_attached()):
            names = self._registered_inputs["channels" if of_images else "features"]
            _warn_if_other_units(self.module, source, environments, names)
        centers = self.results_.centers if is_centred else {}
        return Embedder(module, source, blocks, representation, centers, environments)

    def _environment_corrections(
        self,
        adata: AnnData,
        module: EmbeddingModule | StoredEmbeddings,
        source: ImageSource,
        *,
        with_offsets: bool,
    ) -> EnvironmentCorrections | None:
        """Return the effects of the environments of the cells of a table on their inputs and, optionally, on z_c.

        The result is `None` if the model does not standardise inputs per environment. A warning names environment
        columns that are missing from the table (perhaps misspelt), or that have missing values.

        Parameters
        ----------
        adata
            Table of cells, with or without labels.
        module, source
            Module that embeds these cells, and their inputs.
        with_offsets
            Whether to include the residual offset of each environment in z_c.
        """
        if self.module.preprocess.environments is None or not self.alignment_.kinds:
            return None
        n, obs = adata.n_obs, adata.obs
        for column in self._registered(E_REGISTRY)["columns"]:
            n_missing = int(get_obs_column(obs, column).isna().sum()) if column in obs else n
            if n_missing:
                message = (
                    "%d of %d cells have no value in %r of obs: they are standardised with the mean of all training "
                    "cells. Add their values to obs."
                )
                logger.warning(message, n_missing, n, column)
        offsets = self.results_.offsets if with_offsets else None
        return self.alignment_.estimate_corrections(self.module, module, self._label_codes(adata), source, offsets)

    def _estimate_residual_offsets(self) -> None:
        """Estimate the residual offset of each environment in z_c from the training cells, and store the offsets."""
        source = self._source(self.adata)
        environments = self._environment_corrections(self.adata, self.module, source, with_offsets=False)
        if environments is not None:
            labels, rows = self._label_codes(self.adata), self.train_indices
            self.results_.offsets = self.alignment_.estimate_offsets(
                self.module, labels, source, rows, environments.inputs
            )

    def _estimate_centers(self) -> None:
        """Compute the means of z_c and of z_s over the controls among the training cells, and store them in the model.

        Without controls, no means are stored.
        """
        controls = self._control_mask(self.adata)
        if controls is None:
            return
        rows = self.train_indices[controls[self.train_indices]]
        if not len(rows):
            msg = "No training cell is a control: embeddings are not centred on controls."
            warn_user(msg)
            return
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:_MAX_CENTRE_CONTROLS])
        for block in block_names(self.module):
            z = self.get_latent_representation(indices=rows, block=block, enable_progress_bar=False)
            self.results_.centers[block] = z.mean(0)

    @property
    def _objective_head(self) -> nn.Linear | None:
        """Linear classifier of perturbations in the model's objective; `None` if the objective has no classifier."""
        return None

    def _load_online_head(self) -> nn.Linear:
        if not self.can_predict:
            msg = (
                f"This {type(self).__name__} has no head to predict with: train it with train(online_head=True), or "
                "take a classifier of scbd.baselines."
            )
            raise ValueError(msg)
        weights = {name: torch.from_numpy(values) for name, values in self.online_head_.items()}
        n_labels, n_features = weights["weight"].shape
        head = nn.Linear(n_features, n_labels)
        head.load_state_dict(weights)
        return head


def _warn_if_other_units(
    module: EmbeddingModule, source: ImageSource, environments: EnvironmentCorrections | None, names: Sequence[str]
) -> None:
    """Warn if the inputs of new cells are in other units than those of the training cells (raw instead of scaled).

    The mean and the standard deviation of each channel or feature in a sample of the new cells are compared with those
    of the training cells.

    Parameters
    ----------
    module
        Module whose preprocessing has stored the means and standard deviations of the training cells.
    source
        Inputs of all new cells.
    environments
        Environments of the new cells; `None` if inputs are not standardised per environment.
    names
        Names of the channels or features, for the warning.
    """
    n, preprocess = source.shape[0], module.preprocess
    rows = np.sort(np.random.default_rng(0).permutation(n)[:_UNIT_CHECK_CELLS])
    if len(rows) < _MIN_UNIT_CHECK_CELLS or not (preprocess.standardize and bool(preprocess.fitted)):
        return
    with torch.no_grad():
        values = preprocess.scaled_inputs(read_tensor(source, rows).to(module.device))
        # In an environment that was not seen in training, inputs may differ from those of the training cells because of
        # the environment. The inputs are then standardised per environment before their units are compared.
        if environments is not None and environments.inputs is not preprocess.environments:
            values = environments.inputs(values, torch.from_numpy(environments.codes[rows]).to(module.device))
    # For images, mean and standard deviation are computed over the pixels of each cell. Cells with NaN or infinity are
    # excluded from the comparison of units, because they raise an error when they are embedded.
    of_images = values.ndim == 4
    pixels = values.double().cpu().numpy().reshape(*values.shape[:2], -1)
    pixels = pixels[np.isfinite(pixels).all((1, 2))]
    if not len(pixels):
        return
    middles = np.median(pixels.mean(-1), axis=0)
    spread = np.median(pixels.std(-1) if of_images else np.abs(pixels[..., 0] - middles), axis=0)
    off, ratio = float(np.median(np.abs(middles))), float(np.median(spread[spread > 0])) if spread.any() else 1.0
    bound = _MAX_UNIT_DEVIATION_LOG if preprocess.intensity == "arcsinh" else _MAX_UNIT_DEVIATION
    # For images, the ratio of the standard deviations of new and training cells may be ten times smaller than for
    # features before a warning is raised, because smooth or resized images vary less than noisy images.
    if off > bound or not (0.1 if of_images else 1) / bound < ratio < bound:
        what = "Channels" if of_images else "Features"
        msg = (
            f"{what} of these cells have other units than the training cells: their median differs by {off:.2g} "
            f"standard deviations, and they vary {ratio:.2g} times as much (largest difference: "
            f"{names[int(np.argmax(np.abs(middles)))]}). Their embedding is unreliable: scale them like the training "
            "cells."
        )
        warn_user(msg)


def check_finite_inputs(inputs: torch.Tensor, part: slice | np.ndarray) -> None:
    """Raise ``ValueError`` if the inputs of some cells contain NaN or infinity.

    Parameters
    ----------
    inputs
        Images ``(n, C, H, W)`` or features ``(n, F)`` of n cells.
    part
        Rows of these cells in their table, for the message.
    """
    if not inputs.is_floating_point() or bool(inputs.isfinite().all()):
        return
    rows = np.r_[part][~inputs.isfinite().flatten(1).all(1).cpu().numpy()]
    whole, values = ("Images", "pixels") if inputs.ndim == 4 else ("Features", "values")
    msg = (
        f"{whole} of {len(rows)} of {len(inputs)} cells that were read together have NaN or infinite {values} (rows "
        f"{join_first(rows)}): drop these cells or repair them."
    )
    raise ValueError(msg)


def row_numbers(indices: Any, n: int) -> np.ndarray:
    """Convert row numbers or a boolean mask to non-negative row numbers; `None` stands for all rows.

    Negative row numbers count from the end of the table.

    Parameters
    ----------
    indices
        Row numbers, a boolean mask of length ``n``, or `None`.
    n
        Number of rows of the table.
    """
    if indices is None:
        return np.arange(n)
    rows = np.asarray(indices)
    if rows.dtype == bool:
        if len(rows) != n:
            msg = f"The boolean indices have length {len(rows)}, there are {n} cells."
            raise ValueError(msg)
        return np.flatnonzero(rows)
    if rows.ndim != 1 or (rows.dtype.kind not in "iu" and rows.size):
        msg = f"indices must be a list of row numbers or a boolean mask, got dtype {rows.dtype} of shape {rows.shape}."
        raise ValueError(msg)
    rows = rows.astype(np.int64)
    if rows.size and (rows.min() < -n or rows.max() >= n):
        msg = f"indices reach from {rows.min()} to {rows.max()}, there are {n} cells."
        raise ValueError(msg)
    return rows % n


@contextmanager
def _output_array(out: Any, shape: tuple[int, int]) -> Generator[np.ndarray]:
    """Yield the array that embeddings are written to: a new array, the array ``out``, or a memory-map of a file.

    A file is written under a temporary name. It is renamed to the path ``out`` if the ``with`` statement ends without
    an error.
    """
    if out is None:
        yield np.empty(shape, dtype=np.float32)
    elif isinstance(out, np.ndarray):
        if out.shape != shape or out.dtype.kind != "f":
            msg = f"out is {out.dtype.name} of shape {out.shape}, the embedding is float32 of shape {shape}."
            raise ValueError(msg)
        yield out
    else:
        path = local_path(out)
        if path.suffix != ".npy":
            msg = f"out={str(path)!r}: give the path of an .npy file, or an array."
            raise ValueError(msg)
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as partial:
            mapped = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
            yield mapped
            mapped.flush()


def _checked_store_path(path: str | os.PathLike[str], blocks: Sequence[str], dtype: str, *, shared: bool) -> Path:
    """Return the path of a new Zarr store of embeddings, after checking the arguments of :meth:`EmbedMixin.embed_to`.

    Parameters
    ----------
    path, blocks, dtype
        See :meth:`EmbedMixin.embed_to`.
    shared
        Whether ``shard`` was given. The store may then exist already, because other jobs have completed it.
    """
    path = local_path(path)
    if not blocks:
        msg = "blocks names no embedding to write: give 'c', 's' or both."
        raise ValueError(msg)
    if path.suffix != ".zarr":
        msg = f"{path}: give a path that ends in .zarr."
        raise ValueError(msg)
    if path.exists() and not shared:
        msg = f"{path} is there: give another path, or remove it."
        raise FileExistsError(msg)
    check_choice("dtype", dtype, _DTYPES)
    return path


def _check_finite_embedding(module: nn.Module, embedding: np.ndarray, part: slice | np.ndarray) -> None:
    """Raise ``ValueError`` if embeddings contain NaN or infinity although the inputs are finite.

    The message names the likely cause: weights that are not finite, or else inputs far outside the range of the
    training cells.
    """
    finite = np.isfinite(embedding).all(axis=1)
    if finite.all():
        return
    values = module.state_dict().items()
    broken = [name for name, value in values if value.is_floating_point() and not value.isfinite().all()]
    why = "they are far outside of the training cells"
    if broken:
        why = f"its weights are not finite ({join_first(broken)})"
    msg = (
        f"The model returns NaN for {(~finite).sum()} of {len(finite)} cells (rows "
        f"{join_first(np.r_[part][~finite])}) whose inputs are finite: {why}."
    )
    raise ValueError(msg)
