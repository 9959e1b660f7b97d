"""Batches of cells for training with PyTorch Lightning.

The file holds the data module, the loader that reads batches in a background thread, and functions that resize images
and copy them to a GPU.
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import numpy as np
import torch
from torch.nn import functional as F

from scbd._shared.checks import check_choice, size_after_resizing
from scbd.data._prefetch import prefetch
from scbd.data._samplers import BatchSampler, PerturbationSampler, ShuffleSampler, are_rows_mixed
from scbd.data._sources import ArraySource, count_rows, iterate_blocks, rows_per_block
from scbd.data._splits import draw_matched_training_rows
from scbd.nn._groups import Groups

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from scbd._shared.checks import ImageSize
    from scbd.data._sources import ImageSource
    from scbd.data._splits import Split

Stage = Literal["train", "validation", "matched"]

# default number of cells per batch, if there are at least that many training cells
_DEFAULT_BATCH_SIZE = 2048
# Minimum mean number of cells per perturbation in a batch. With fewer cells per perturbation, the contrastive loss has
# too few positive pairs (two cells of one perturbation) to learn from.
_MIN_CELLS_PER_PERTURBATION = 8
# Approximate maximum number of training cells on which losses are computed, in order to compare them with the losses of
# validation cells. The number is large enough for a precise comparison, and small enough to be computed quickly.
_MAX_MATCHED_CELLS = 8192
# number of bytes of images that are copied to the GPU at once
_COPY_BYTES = 64 * 2**20


def read_tensor(source: ImageSource | torch.Tensor, rows: np.ndarray | slice) -> torch.Tensor:
    """Read the images or features of the given rows (one row per cell) as a tensor.

    If ``source`` is a tensor, the result is on the device of this tensor. Otherwise the result is in main memory. If
    there is a CUDA GPU, this memory is pinned (page-locked), which makes copies to the GPU faster. Torch reuses the
    pinned memory of finished batches.
    """
    if isinstance(source, torch.Tensor):
        if isinstance(rows, slice):
            return source[rows]
        # view uint16 pixels as int16, since torch's index_select does not support uint16 on every device
        bits = source.view(torch.int16) if source.dtype == torch.uint16 else source
        return bits.index_select(0, torch.from_numpy(rows).to(bits.device)).view(source.dtype)
    if not torch.cuda.is_available():
        return torch.from_numpy(source.read(rows))
    n, *image_shape = source.shape
    pinned = torch.empty((count_rows(rows, n), *image_shape), dtype=_torch_dtype(source), pin_memory=True)
    source.read(rows, out=pinned.numpy())
    return pinned


def _torch_dtype(source: ImageSource) -> torch.dtype:
    """Return the torch dtype that corresponds to the numpy dtype of a source of images or features."""
    return torch.from_numpy(np.empty(0, source.dtype)).dtype


def copy_to_device(source: ImageSource, device: torch.device) -> torch.Tensor:
    """Copy all images or features of a source to a device such as a GPU, in parts of about 64 MiB.

    Raises
    ------
    ValueError
        If the images or features take more than the free memory of the GPU.
    """
    size = int(np.prod(source.shape)) * source.dtype.itemsize
    if device.type == "cuda" and size > torch.cuda.mem_get_info(device)[0]:
        free = torch.cuda.mem_get_info(device)[0]
        msg = (
            f"preload='device': all inputs take {size / 2**30:.1f} GiB, {device} has {free / 2**30:.1f} GiB free: "
            "leave preload out, batches are read ahead anyway."
        )
        raise ValueError(msg)
    images = torch.empty(source.shape, dtype=_torch_dtype(source), device=device)
    for rows in iterate_blocks(len(images), rows_per_block(source.shape, source.dtype, _COPY_BYTES)):
        images[rows] = read_tensor(source, rows)
    return images


class BatchLoader:
    """Data loader that reads the cells of each batch, in a background thread ahead of training.

    A sampler draws the row numbers of each batch. Images are read in their stored (often integer) dtype, and are
    converted to floats only on the GPU.

    A resumed run creates a new loader whose sampler starts at the step that training has reached. The loader therefore
    has no state to save. The methods ``state_dict`` and ``load_state_dict`` exist only because Lightning requires them
    of a loader that can be resumed.

    Parameters
    ----------
    source
        Source of the images or features of all cells, or a tensor that holds them.
    y, e
        Perturbation code and environment code of all cells, see :class:`ImageDataModule`.
    batches
        Sampler that yields the row numbers of each batch.
    """

    def __init__(self, source: ImageSource | torch.Tensor, y: np.ndarray, e: np.ndarray, batches: BatchSampler) -> None:
        self._source = source
        self._y, self._e = y, e
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Generator[dict[str, torch.Tensor]]:
        return prefetch(map(self.batch, self.batches))

    def batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the batch of the cells with the given row numbers, as a dictionary of tensors.

        The keys are ``"inputs"`` (images or features in their stored dtype), ``"y"`` (perturbation codes) and ``"e"``
        (environment codes). The codes bring along the groups of cells that have the same code
        (:meth:`scbd.nn.Groups.of`). In training, these are computed here, in the background.
        """
        y, e = (torch.from_numpy(values[rows]) for values in (self._y, self._e))
        if torch.cuda.is_available():  # a copy from memory that is not pinned may wait for the GPU
            y, e = y.pin_memory(), e.pin_memory()
        by_y, by_e = Groups(y), Groups(e)
        by_y.cross(by_e)
        return {"inputs": read_tensor(self._source, rows), "y": by_y.attach(y), "e": by_e.attach(e)}

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dictionary, since a loader has no state to save; Lightning requires this method."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the saved state, since a loader has no state to restore; Lightning requires this method."""


class ImageDataModule(L.LightningDataModule):
    """Lightning data module that yields batches of images with their perturbation and environment codes.

    Training consists of ``max_steps`` steps. A step takes one batch, or several if the trainer accumulates gradients
    over several batches. A resumed run continues with the batch that would have come next.

    The validation batches are the same in every validation. They are complete batches, in a number that the validation
    cells suffice for. If there are fewer validation cells than ``batch_size``, all of them form one smaller batch.

    Parameters
    ----------
    source
        Source of the images of all cells, ``(N, C, H, W)``.
    y, e
        Perturbation code and environment code of each cell, integers ``(N,)``.
    split
        Row numbers of the training and the validation cells.
    batch_size
        Number of cells per batch. Default: 2,048, or the number of training cells if that is smaller.
    perturbations_per_batch
        Number of perturbations P in a batch of P perturbations with K cells each (:class:`PerturbationSampler`). `None`
        draws each batch from all cells at random, without regard to the perturbation (:class:`ShuffleSampler`).
        ``"auto"`` does the same as `None` if a random batch has on average at least eight cells per perturbation.
        Otherwise, ``"auto"`` draws batches with K = 8, unless the perturbations have too few cells for such batches.
    neighbours
        If true, draw the cells of a perturbation as a few stretches of consecutive rows, which are read faster from
        disk than scattered rows, see :class:`PerturbationSampler`. ``"auto"`` does so if all of these conditions hold:
        the images are not in memory, ``preload`` is `None`, and the rows are sorted such that the cells of a
        perturbation are adjacent, but are otherwise in random order. The order is random if adjacent cells of a
        perturbation have the same environment and the same label in ``mixed_by`` no more often than by chance.
    mixed_by
        Further labels in which the cells of a perturbation in a batch should differ, such as guide and plate. Each
        label is an array of non-negative codes, int64 ``(N,)``. Used only with ``neighbours="auto"``, to test whether
        the rows are in random order. The iterable is consumed only up to the first label that fails the test.
    max_steps
        Number of training steps of this run.
    first_step
        Number of training steps of earlier runs, if this run continues them.
    seed
        Seed of the random choice of cells for the batches.
    preload
        ``"device"`` copies all images to the device (the GPU) before training, and draws the batches there. The images
        must fit into the memory of the device. Default: read the images of each batch when it is needed.

    Raises
    ------
    ValueError
        If ``batch_size`` is larger than the number of training cells, the perturbations have too few cells to fill a
        batch (:class:`PerturbationSampler`), or an argument is not one of its allowed values.

    Examples
    --------
    >>> source = scbd.data.ArraySource(adata.obsm["single_cell_images"])
    >>> gene, well = (adata.obs[key].cat.codes.to_numpy() for key in ("gene", "well"))
    >>> split = scbd.data.Split(train=np.arange(200), validation=np.arange(200, 240))
    >>> data = scbd.data.ImageDataModule(source, gene, well, split, batch_size=50, max_steps=10)
    >>> batch = next(iter(data.train_dataloader()))
    >>> batch["inputs"].shape, batch["y"].shape
    (torch.Size([50, 4, 32, 32]), torch.Size([50]))
    """

    def __init__(
        self,
        source: ImageSource,
        y: np.ndarray,
        e: np.ndarray,
        split: Split,
        *,
        batch_size: int | None = None,
        perturbations_per_batch: int | str | None = "auto",
        neighbours: bool | Literal["auto"] = "auto",
        mixed_by: Iterable[np.ndarray] = (),
        max_steps: int = 1,
        first_step: int = 0,
        seed: int = 0,
        preload: Literal["device"] | None = None,
    ) -> None:
        super().__init__()
        check_choice("neighbours", neighbours, (True, False, "auto"))
        check_choice("preload", preload, ("device", None))
        self._source: ImageSource | torch.Tensor = source
        self._y, self._e = (np.asarray(codes).astype(np.int64, copy=False) for codes in (y, e))
        self._stored_source = source
        self._preload = preload
        self.neighbours = neighbours
        if neighbours == "auto":
            read_in_stretches = not source.in_memory and preload is None
            self.neighbours = read_in_stretches and are_rows_mixed(y, chain([e], mixed_by))
        self.split = split
        self.batch_size = min(_DEFAULT_BATCH_SIZE, len(self.split.train)) if batch_size is None else batch_size
        self.max_steps = max_steps
        self.first_step = first_step
        self.seed = seed
        self.perturbations_per_batch: int | None = None
        if perturbations_per_batch == "auto":
            self._choose_perturbations_per_batch()
        elif perturbations_per_batch is None or isinstance(perturbations_per_batch, int):
            self.perturbations_per_batch = perturbations_per_batch
        else:
            msg = f"perturbations_per_batch must be a number, None or 'auto', got {perturbations_per_batch!r}."
            raise ValueError(msg)
        # create the sampler of training batches here, so that impossible settings raise an error before any work is
        # done
        self.train_sampler = self._sampler("train", self.batch_size, self.max_steps)

    @property
    def steps_per_epoch(self) -> int:
        """Number of complete batches in one pass over the training cells."""
        return self.train_sampler.steps_per_epoch

    @property
    def validates(self) -> bool:
        """True if there are enough validation cells for a batch, that is, at least two cells per device."""
        return min(self.batch_size, len(self.split.validation)) >= 2 * self._process_arguments().get("world_size", 1)

    def setup(self, stage: str) -> None:
        """Copy all images to the trainer's device (the GPU) if ``preload="device"`` was given."""
        if self._preload == "device" and self.trainer is not None:
            self._source = copy_to_device(self._stored_source, self.trainer.strategy.root_device)

    def transfer_batch_to_device(
        self, batch: dict[str, torch.Tensor], device: torch.device, dataloader_idx: int
    ) -> dict[str, torch.Tensor]:
        """Move a batch to the device, together with the groups of cells that its codes bring along.

        The losses therefore do not wait for the GPU to group the cells.
        """
        moved: dict[str, torch.Tensor] = super().transfer_batch_to_device(batch, device, dataloader_idx)
        for name in ("y", "e"):
            Groups.of(batch[name]).to(device).attach(moved[name])
        return moved

    def teardown(self, stage: str) -> None:
        """Release the copy of the images on the device (the GPU), if there is one."""
        self._source = self._stored_source

    def train_dataloader(self) -> BatchLoader:
        """Return the loader of the training batches, from the trainer's current step to step ``max_steps``.

        If the trainer accumulates gradients over several batches, each step takes that number of batches.
        """
        trainer = self.trainer
        step, of_step = (0, 1) if trainer is None else (trainer.global_step, trainer.accumulate_grad_batches)
        start, end = ((self.first_step + n) * of_step for n in (step, self.max_steps))
        return self._loader(self._sampler("train", self.batch_size, end, start=start, **self._process_arguments()))

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Return the loader of the validation batches, which are the same in each call.

        Incomplete batches are dropped, unless all validation cells together are fewer than ``batch_size``. In this
        case, they form one smaller batch. If there are fewer than two validation cells per device, the result is an
        empty list.

        The batches are drawn in the same way as training batches. If the perturbations have too few validation cells
        for batches of P perturbations with K cells each, batches are drawn from all validation cells at random. A cell
        may then be the only one of its perturbation in a batch.
        """
        return self._one_pass("validation")

    def matched_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Return a loader of training cells that are matched to the validation cells by perturbation.

        The difference between the loss on these batches and the loss on the validation batches measures overfitting.
        Each validation cell is matched with one training cell of the same perturbation, as long as the perturbation has
        training cells that are not matched yet. At most about 8,192 training cells are used. The batches are drawn in
        the same way as validation batches, and are the same in each call. If there are fewer than two matched training
        cells per device, the result is an empty list.
        """
        return self._one_pass("matched", most=_MAX_MATCHED_CELLS)

    def _one_pass(self, stage: Stage, most: int | None = None) -> BatchLoader | list[BatchLoader]:
        """Return the loader of the batches of a single pass over cells, without training on them.

        Parameters
        ----------
        stage
            Cells to use: ``"validation"`` for the validation cells, ``"matched"`` for the training cells that are
            matched to them.
        most
            Approximate maximum number of cells to use. Default: all cells.

        Returns
        -------
        Loader of complete batches, or an empty list if there are fewer than two cells per device.
        """
        world = self._process_arguments()
        n, n_devices = len(self._rows(stage)), world.get("world_size", 1)
        batch_size = min(self.batch_size, n // n_devices * n_devices)
        if batch_size < 2 * n_devices:
            return []
        n_steps = n // batch_size if most is None else min(n // batch_size, -(-most // batch_size))
        try:
            sampler = self._sampler(stage, batch_size, n_steps, **world)
        except ValueError:  # the perturbations have too few cells for batches of P perturbations with K cells each
            sampler = ShuffleSampler(self._rows(stage), batch_size, n_steps=n_steps, seed=self.seed, **world)
        return self._loader(sampler)

    def example_batch(self) -> dict[str, torch.Tensor]:
        """Return the first validation batch, or the first training batch if there are no validation batches."""
        loader = self.val_dataloader()
        loader = loader if isinstance(loader, BatchLoader) else self._loader(self.train_sampler)
        return loader.batch(loader.batches.batch(0))

    def _choose_perturbations_per_batch(self) -> None:
        """Choose the number of perturbations per batch for ``perturbations_per_batch="auto"``.

        If batches of randomly shuffled cells have on average at least eight cells per perturbation, shuffling is used.
        Otherwise, the number is chosen such that a batch has eight cells of each of its perturbations. If the
        perturbations have too few cells for such batches, shuffling is used nevertheless.
        """
        n_perturbations = len(np.unique(self._y[self.split.train]))
        if self.batch_size / n_perturbations >= _MIN_CELLS_PER_PERTURBATION:
            return
        self.perturbations_per_batch = max(1, self.batch_size // _MIN_CELLS_PER_PERTURBATION)
        try:
            self._sampler("train", self.batch_size, self.max_steps)
        except ValueError:
            self.perturbations_per_batch = None

    def _sampler(self, stage: Stage, batch_size: int, n_steps: int, **world: int) -> BatchSampler:
        """Return the sampler that draws the batches of a stage.

        Parameters
        ----------
        stage
            Cells to draw from: ``"train"``, ``"validation"``, or ``"matched"`` for the training cells that are matched
            to the validation cells.
        batch_size
            Number of cells per batch.
        n_steps
            Number of batches.
        **world
            Further arguments of :class:`BatchSampler`: ``rank``, ``world_size`` and ``start``.
        """
        rows = self._rows(stage)
        if self.perturbations_per_batch is None:
            return ShuffleSampler(rows, batch_size, n_steps=n_steps, seed=self.seed, **world)
        return PerturbationSampler(
            rows,
            batch_size,
            labels=self._y[rows],
            perturbations_per_batch=self.perturbations_per_batch,
            neighbours=bool(self.neighbours),
            n_steps=n_steps,
            seed=self.seed,
            **world,
        )

    def _rows(self, stage: Stage) -> np.ndarray:
        """Return the row numbers of the cells of a stage.

        The stages are ``"train"``, ``"validation"``, and ``"matched"`` for the training cells that are matched to the
        validation cells.
        """
        if stage == "matched":
            return self._matched
        return self.split.train if stage == "train" else self.split.validation

    @cached_property
    def _matched(self) -> np.ndarray:
        return draw_matched_training_rows(self.split, self._y, self.seed)

    def _process_arguments(self) -> dict[str, int]:
        """Return the arguments ``rank`` and ``world_size`` of a sampler for distributed training.

        They are the number of this process and the total number of processes. Without a trainer, the dictionary is
        empty.
        """
        trainer = self.trainer
        return {} if trainer is None else {"rank": trainer.global_rank, "world_size": trainer.world_size}

    def _loader(self, sampler: BatchSampler) -> BatchLoader:
        return BatchLoader(self._source, self._y, self._e, sampler)


# number of images that are resized at once
_RESIZE_BLOCK_IMAGES = 512


def resize_images(images: np.ndarray, image_size: ImageSize, *, out: np.ndarray | None = None) -> np.ndarray:
    """Resize images with bilinear, antialiased interpolation, and return them in their own dtype.

    A model with an ``image_size`` resizes the images of each batch by itself, which is fast on a GPU. If a model is
    trained on a CPU, or if the stored crops are much larger than the ``image_size`` of the model, it is faster to
    resize all images once before training. Each epoch then reads less data and computes less. Values of integer images
    are rounded.

    Parameters
    ----------
    images
        Images ``(N, C, H, W)`` of dtype uint8, uint16, float16 or float32, in memory or memory-mapped.
    image_size
        Number of pixels per side of the resized images. Images that are not square require a pair ``(height, width)``,
        which may change their aspect ratio.
    out
        Array to write the resized images to, for example a memory map. Default: a new array.

    Returns
    -------
    Array of shape ``(N, C, image_size, image_size)`` or ``(N, C, height, width)``, with the dtype of ``images``.

    Raises
    ------
    TypeError
        If ``images`` is not a numpy array, is a masked array, or has an unsupported dtype.
    ValueError
        If the shape of ``images`` is not ``(N, C, H, W)``, ``image_size`` is not positive, ``image_size`` is a single
        number for images that are not square, or ``out`` does not have the shape and dtype of the resized images.

    Examples
    --------
    >>> scbd.data.resize_images(adata.obsm["single_cell_images"], 16).shape
    (240, 4, 16, 16)
    """
    source = ArraySource(images)
    n, channels, *stored = source.shape
    size = size_after_resizing(image_size, *stored)
    shape = (n, channels, *size)
    if out is None:
        out = np.empty(shape, source.dtype)
    elif out.shape != shape or out.dtype != source.dtype:
        msg = f"out has shape {out.shape} and dtype {out.dtype}, the resized images {shape} and {source.dtype}."
        raise ValueError(msg)
    for rows in iterate_blocks(n, _RESIZE_BLOCK_IMAGES):
        block = resize_to(source.read(rows), size)
        # no clipping is needed: bilinear interpolation is a weighted mean of pixels, which stays within the range of
        # the dtype
        out[rows] = (block.round_() if source.dtype.kind == "u" else block).numpy()
    return out


def resize_to(images: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
    """Resize images to ``(height, width)`` pixels with bilinear, antialiased interpolation, and return float32."""
    return F.interpolate(torch.from_numpy(images).float(), size, mode="bilinear", antialias=True, align_corners=False)
