"""Batches of tensors from sources and samplers, read in the background, and the Lightning data module."""

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
from scbd.data._samplers import BatchSampler, PerturbationSampler, ShuffleSampler, are_rows_mixed, bin_ranks
from scbd.data._sources import ArraySource, count_rows
from scbd.data._splits import draw_matched_training_rows

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from scbd._shared.checks import ImageSize
    from scbd.data._sources import ImageSource
    from scbd.data._splits import Split

Stage = Literal["train", "validation", "matched"]

# default number of cells per batch
_DEFAULT_BATCH_SIZE = 2048
# minimum mean number of cells per perturbation in a batch; with fewer, a cell has too few positives to learn from
_MIN_CELLS_PER_PERTURBATION = 8
# approximate maximum number of training cells with which validation cells are compared: enough for a precise
# comparison, few enough to be computed quickly
_MAX_MATCHED_CELLS = 8192
# number of bytes copied to a device at once
_COPY_BYTES = 64 * 2**20


def read_tensor(source: ImageSource | torch.Tensor, rows: np.ndarray | slice) -> torch.Tensor:
    """Read the inputs of the given rows as a tensor.

    If ``source`` is a tensor, the result is on its device. Otherwise the result is in main memory, pinned if there is a
    CUDA GPU to copy it to. Torch reuses pinned memory that is no longer in use for later batches.
    """
    if isinstance(source, torch.Tensor):
        if isinstance(rows, slice):
            return source[rows]
        # index_select supports int16 on every device, but uint16 only on some
        bits = source.view(torch.int16) if source.dtype == torch.uint16 else source
        return bits.index_select(0, torch.from_numpy(rows).to(bits.device)).view(source.dtype)
    if not torch.cuda.is_available():
        return torch.from_numpy(source.read(rows))
    n, *image_shape = source.shape
    pinned = torch.empty((count_rows(rows, n), *image_shape), dtype=_torch_dtype(source), pin_memory=True)
    source.read(rows, out=pinned.numpy())
    return pinned


def _torch_dtype(source: ImageSource) -> torch.dtype:
    """Return the torch dtype that corresponds to the dtype of a source."""
    return torch.from_numpy(np.empty(0, source.dtype)).dtype


def copy_to_device(source: ImageSource, device: torch.device) -> torch.Tensor:
    """Copy all inputs of a source to a device, in parts of about 64 MiB.

    Raises
    ------
    ValueError
        If the inputs are larger than the free memory of the GPU.
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
    block = max(1, _COPY_BYTES * len(images) // size)
    for start in range(0, len(images), block):
        images[start : start + block] = read_tensor(source, slice(start, start + block))
    return images


class BatchLoader:
    """Batches of the rows that a sampler draws, read ahead by a background thread.

    Images stay in their stored (often integer) dtype until they are on the device. The sampler is built to start from
    the trainer's step, so that the loader has no state of its own. ``state_dict`` and ``load_state_dict`` exist only to
    let Lightning recognise that the loader can be resumed.

    Parameters
    ----------
    source
        Source of the inputs, or a tensor with all of them.
    y, e, numbers
        Values of all cells, see :class:`ImageDataModule`.
    batches
        Sampler of the row numbers of each batch.
    """

    def __init__(
        self,
        source: ImageSource | torch.Tensor,
        y: np.ndarray,
        e: np.ndarray,
        batches: BatchSampler,
        numbers: np.ndarray | None = None,
    ) -> None:
        self._source = source
        self._cell_values = {"y": y, "e": e} | ({} if numbers is None else {"numbers": numbers})
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Generator[dict[str, torch.Tensor]]:
        return prefetch(map(self.batch, self.batches))

    def batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the batch of the given rows.

        The dictionary holds ``"inputs"`` in their stored dtype, the codes ``"y"`` and ``"e"``, and ``"numbers"`` if the
        loader has numbers.
        """
        found = {"inputs": read_tensor(self._source, rows)}
        return found | {name: torch.from_numpy(values[rows]) for name, values in self._cell_values.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Ignore the state, since the loader has none."""


class ImageDataModule(L.LightningDataModule):
    """Batches of images with their perturbation and environment codes.

    Training is a single pass over ``max_steps`` batches (times the number of batches over which gradients are
    accumulated). A resumed run continues with the batch that would have come next. Validation batches are the same in
    each validation: as many complete batches as the validation cells fill. If there are fewer validation cells than a
    batch has, they form one smaller batch.

    Parameters
    ----------
    source
        Source of images ``(N, C, H, W)``.
    y, e
        Codes of perturbation and environment, integers ``(N,)``.
    split
        Training and validation rows.
    numbers
        Rank of each cell in K ordered variables, such as time, int64 ``(N, K)``. If given, batches include these ranks.
    batch_size
        Number of cells per batch. Default: 2,048, or all training cells if there are fewer.
    perturbations_per_batch
        Number of perturbations P of a P × K batch (:class:`PerturbationSampler`). `None` shuffles plainly. ``"auto"``
        shuffles plainly if a batch then has on average at least eight cells per perturbation. Otherwise, ``"auto"``
        draws P × 8 batches, or shuffles plainly if the perturbations have too few cells for these.
    neighbours
        Whether to draw the cells of a perturbation as stretches of consecutive rows, see :class:`PerturbationSampler`.
        ``"auto"`` does so if the images are not in memory, ``preload`` is `None`, the rows are grouped by perturbation,
        and consecutive rows of a perturbation share environment, ranks of ``numbers`` and labels of ``mixed_by`` no
        more often than by chance.
    mixed_by
        Codes of further labels that should differ between partners in a batch, in addition to the environment, such as
        guide and plate; non-negative int64 ``(N,)`` each. Used only with ``neighbours="auto"``. The iterable is
        consumed only as far as the test needs it.
    max_steps
        Number of training steps. A step is one batch, unless gradients are accumulated over several batches.
    first_step
        Number of steps of earlier training runs that this run continues.
    seed
        Seed of the batches.
    preload
        ``"device"`` copies all images to the device before training, and draws the batches there; the images must fit
        into its memory. Default: read each batch when it is needed.

    Raises
    ------
    ValueError
        If a batch is larger than the number of training cells, the perturbations cannot fill a batch
        (:class:`PerturbationSampler`), or an argument is not one of its allowed values.

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
        numbers: np.ndarray | None = None,
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
        self._covariate_ranks = numbers
        self._y, self._e = (np.asarray(codes).astype(np.int64, copy=False) for codes in (y, e))
        self._stored_source = source
        self._preload = preload
        self.neighbours = neighbours
        if neighbours == "auto":
            read_in_stretches = not source.in_memory and preload is None
            self.neighbours = read_in_stretches and are_rows_mixed(y, chain([e], bin_ranks(numbers), mixed_by))
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
        # built here, so that impossible settings raise an error before any work is done
        self.train_sampler = self._sampler("train", self.batch_size, self.max_steps)

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches in one pass over the training cells."""
        return self.train_sampler.steps_per_epoch

    @property
    def validates(self) -> bool:
        """True if there are enough validation cells for a batch: at least two per device."""
        return min(self.batch_size, len(self.split.validation)) >= 2 * self._process_arguments().get("world_size", 1)

    def setup(self, stage: str) -> None:
        """Copy the images to the trainer's device if ``preload="device"``."""
        if self._preload == "device" and self.trainer is not None:
            self._source = copy_to_device(self._stored_source, self.trainer.strategy.root_device)

    def teardown(self, stage: str) -> None:
        """Release the copy of the images on the device."""
        self._source = self._stored_source

    def train_dataloader(self) -> BatchLoader:
        """Return the training batches from the trainer's current step to step ``max_steps``.

        If the trainer accumulates gradients over several batches, each step has that number of batches.
        """
        trainer = self.trainer
        step, of_step = (0, 1) if trainer is None else (trainer.global_step, trainer.accumulate_grad_batches)
        start, end = ((self.first_step + n) * of_step for n in (step, self.max_steps))
        return self._loader(self._sampler("train", self.batch_size, end, start=start, **self._process_arguments()))

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Return the validation batches, which are the same in each call.

        There are as many complete batches as the validation cells fill. If there are fewer than two validation cells
        per device, the result is an empty list. If the validation cells are too few for P × K batches, they are
        shuffled plainly, and some of them have no partner in their batch.
        """
        return self._one_pass("validation")

    def matched_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Return batches of training cells with which to compare the validation batches, the same in each call.

        For each validation cell, there is one training cell of the same perturbation, as far as the training cells
        suffice. At most about 8,192 cells are used. Batches are drawn in the same way as validation batches. A
        difference in the losses between these batches and the validation batches measures overfitting. If there are
        fewer than two such training cells per device, the result is an empty list.
        """
        return self._one_pass("matched", most=_MAX_MATCHED_CELLS)

    def _one_pass(self, stage: Stage, most: int | None = None) -> BatchLoader | list[BatchLoader]:
        """Return batches for one pass over the cells of a stage, or over about ``most`` of these cells.

        The result is an empty list if there are fewer than two cells per device.
        """
        world = self._process_arguments()
        n, n_devices = len(self._rows(stage)), world.get("world_size", 1)
        batch_size = min(self.batch_size, n // n_devices * n_devices)
        if batch_size < 2 * n_devices:
            return []
        n_steps = n // batch_size if most is None else min(n // batch_size, -(-most // batch_size))
        try:
            sampler = self._sampler(stage, batch_size, n_steps, **world)
        except ValueError:  # the perturbations have too few cells for P x K batches
            sampler = ShuffleSampler(self._rows(stage), batch_size, n_steps=n_steps, seed=self.seed, **world)
        return self._loader(sampler)

    def example_batch(self) -> dict[str, torch.Tensor]:
        """Return the first validation batch, or the first training batch if there are no validation batches."""
        loader = self.val_dataloader()
        loader = loader if isinstance(loader, BatchLoader) else self._loader(self.train_sampler)
        return loader.batch(loader.batches.batch(0))

    def _choose_perturbations_per_batch(self) -> None:
        """Choose P × 8 batches if plain shuffling gives cells too few partners.

        Plain shuffling is kept if the perturbations have too few cells for P × 8 batches.
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
        """Return the sampler of a stage; ``world`` holds ``rank`` and ``world_size`` of :class:`BatchSampler`."""
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
        """Return the row numbers of the cells of a stage."""
        if stage == "matched":
            return self._matched
        return self.split.train if stage == "train" else self.split.validation

    @cached_property
    def _matched(self) -> np.ndarray:
        return draw_matched_training_rows(self.split, self._y, self.seed)

    def _process_arguments(self) -> dict[str, int]:
        """Return the rank of this process and the number of processes, or an empty dictionary without a trainer."""
        trainer = self.trainer
        return {} if trainer is None else {"rank": trainer.global_rank, "world_size": trainer.world_size}

    def _loader(self, sampler: BatchSampler) -> BatchLoader:
        return BatchLoader(self._source, self._y, self._e, sampler, self._covariate_ranks)


# number of images resized at once
_RESIZE_BLOCK_IMAGES = 512


def resize_images(images: np.ndarray, image_size: ImageSize, *, out: np.ndarray | None = None) -> np.ndarray:
    """Resize images to a given number of pixels per side (bilinear, antialiased), in their own dtype.

    Models with an ``image_size`` resize each batch after reading it, which suits a GPU. On a CPU, and for crops much
    larger than the size for training, resizing once is faster, because each epoch then reads and computes less. Values
    of integer images are rounded.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``, in memory or memory-mapped; uint8, uint16, float16 or float32.
    image_size
        Number of pixels per side. Images that are not square require a pair ``(height, width)``, which may change their
        aspect ratio.
    out
        Array to write to, for example a memory map. Default: a new array.

    Returns
    -------
    Array of shape ``(N, C, image_size, image_size)`` or ``(N, C, height, width)``, with the dtype of ``images``.

    Raises
    ------
    TypeError
        If ``images`` is not a numpy array, is a masked array, or has an unsupported dtype.
    ValueError
        If ``images`` has another shape than images, ``image_size`` is not positive, ``image_size`` is a single number
        for images that are not square, or ``out`` has another shape or dtype than the result.

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
    for start in range(0, n, _RESIZE_BLOCK_IMAGES):
        block = resize_to(source.read(slice(start, start + _RESIZE_BLOCK_IMAGES)), size)
        # bilinear interpolation is a weighted mean, so that values stay within the range of the dtype
        out[start : start + _RESIZE_BLOCK_IMAGES] = (block.round_() if source.dtype.kind == "u" else block).numpy()
    return out


def resize_to(images: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
    """Resize images to ``(height, width)`` pixels with bilinear, antialiased interpolation, and return float32."""
    return F.interpolate(torch.from_numpy(images).float(), size, mode="bilinear", antialias=True, align_corners=False)
