"""Sources and samplers become batches: rows as tensors, read ahead, and the Lightning data module."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import lightning as L
import numpy as np
import torch
from torch.nn import functional as F

from scbd._checks import check_choice, resized_to
from scbd.data._samplers import BatchSampler, PerturbationSampler, ShuffleSampler, mixed_neighbours, parts_of
from scbd.data._sources import ArraySource, count_rows, prefetch
from scbd.data._splits import matched_rows

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from scbd._checks import ImageSize
    from scbd.data._sources import ImageSource
    from scbd.data._splits import Split

Stage = Literal["train", "validation", "matched"]

# of a batch, by default
_CELLS = 2048
# below this many expected positives a cell learns little from a plainly shuffled batch
_POSITIVES_WANTED = 8
# training cells that validation cells are compared with: enough to say what they share, few enough to cost little
_MATCHED = 8192
# bytes that are on their way to a device
_COPIED_AT_ONCE = 64 * 2**20


def read_tensor(source: ImageSource | torch.Tensor, rows: np.ndarray | slice) -> torch.Tensor:
    """Inputs of these rows as a tensor: on the tensor's device, or pinned where there is a GPU to fetch them.

    Torch keeps pinned memory that is no longer used for the next batch.
    """
    if isinstance(source, torch.Tensor):
        if isinstance(rows, slice):
            return source[rows]
        # torch gathers int16 everywhere, uint16 only in places
        bits = source.view(torch.int16) if source.dtype == torch.uint16 else source
        return bits.index_select(0, torch.from_numpy(rows).to(bits.device)).view(source.dtype)
    if not torch.cuda.is_available():
        return torch.from_numpy(source.read(rows))
    n, *image_shape = source.shape
    pinned = torch.empty((count_rows(rows, n), *image_shape), dtype=_torch_dtype(source), pin_memory=True)
    source.read(rows, out=pinned.numpy())
    return pinned


def _torch_dtype(source: ImageSource) -> torch.dtype:
    return torch.from_numpy(np.empty(0, source.dtype)).dtype


def on_device(source: ImageSource, device: torch.device) -> torch.Tensor:
    """All inputs of a source, copied to a device in parts.

    Raises
    ------
    ValueError
        If they are larger than the free memory of a GPU.
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
    block = max(1, _COPIED_AT_ONCE * len(images) // size)
    for start in range(0, len(images), block):
        images[start : start + block] = read_tensor(source, slice(start, start + block))
    return images


class BatchLoader:
    """Batches of a sampler's rows, read ahead by a background thread: integers until the device.

    Its position is the trainer's step, since the sampler was built to start from it; the pair of state methods tells
    Lightning that it can resume. Arguments are those of :class:`ImageDataModule`, and ``batches`` the rows of each.
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
        self._of_cells = {"y": y, "e": e} | ({} if numbers is None else {"numbers": numbers})
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Generator[dict[str, torch.Tensor]]:
        return prefetch(map(self.batch, self.batches))

    def batch(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Images as stored, codes, and numbers where there are any, of these rows."""
        found = {"inputs": read_tensor(self._source, rows)}
        return found | {name: torch.from_numpy(values[rows]) for name, values in self._of_cells.items()}

    def state_dict(self) -> dict[str, Any]:
        """Nothing to keep."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to restore."""


class ImageDataModule(L.LightningDataModule):
    """Batches of images with their perturbation and environment codes.

    Training is one long pass of ``max_steps`` batches (times the batches that gradients are accumulated of); a resumed
    run goes on with the batch it would have seen next. Validation batches are the same each time: as many whole ones as
    the validation cells fill, or one of all of them if they are fewer than a batch.

    Parameters
    ----------
    source
        Images ``(N, C, H, W)``.
    y, e
        Codes, integer ``(N,)``.
    split
        Training and validation rows.
    numbers
        Places in the order of what changes slowly, such as the time, int64 ``(N, K)``; batches then have them, too.
    batch_size
        Cells a batch. `None` takes 2,048, or all training cells if they are fewer.
    perturbations_per_batch
        P of a P × K batch; `None` for plain shuffling; ``"auto"`` shuffles where that gives a cell about eight
        partners of its perturbation, and draws P × 8 batches otherwise.
    neighbours
        Draw cells of a perturbation in stretches that follow each other, see :class:`PerturbationSampler`; ``"auto"``:
        from images that are not in memory, where cells that lie together share labels no more often than by chance.
    mixed_by
        Codes of what should differ between partners beside the environment, such as guide and plate: non-negative
        int64 ``(N,)`` each. With ``neighbours="auto"``, each must be mixed; asked for one by one, and only then.
    max_steps
        Number of training steps: batches, where gradients are not accumulated.
    first_step
        Steps of runs before, which this one comes after.
    seed
        Seed of the batches.
    preload
        ``"device"`` puts all images on the device before training, where they fit; batches are then drawn there.

    Raises
    ------
    ValueError
        If a batch is larger than the data, see :class:`PerturbationSampler`.

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
        self._numbers = numbers
        self._y, self._e = (np.asarray(codes).astype(np.int64, copy=False) for codes in (y, e))
        self._at_rest = source
        self._preload = preload
        self.neighbours = neighbours
        if neighbours == "auto":
            read_in_stretches = not source.in_memory and preload is None
            self.neighbours = read_in_stretches and mixed_neighbours(y, chain([e], parts_of(numbers), mixed_by))
        self.split = split
        self.batch_size = min(_CELLS, len(self.split.train)) if batch_size is None else batch_size
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
        # built here, so that what cannot work is said before any work is done
        self.train_sampler = self._sampler("train", self.batch_size, self.max_steps)

    @property
    def steps_per_epoch(self) -> int:
        """Batches that make one pass over the training cells."""
        return self.train_sampler.steps_per_epoch

    @property
    def validates(self) -> bool:
        """Whether there are enough validation cells for a batch, at least two for each device."""
        return min(self.batch_size, len(self.split.validation)) >= 2 * self._world().get("world_size", 1)

    def setup(self, stage: str) -> None:
        """Move the images to the trainer's device, if so asked."""
        if self._preload == "device" and self.trainer is not None:
            self._source = on_device(self._at_rest, self.trainer.strategy.root_device)

    def teardown(self, stage: str) -> None:
        """Give the device's memory back."""
        self._source = self._at_rest

    def train_dataloader(self) -> BatchLoader:
        """Batches from the trainer's current step to ``max_steps``: as many each as it accumulates gradients of."""
        trainer = self.trainer
        step, of_step = (0, 1) if trainer is None else (trainer.global_step, trainer.accumulate_grad_batches)
        start, end = ((self.first_step + n) * of_step for n in (step, self.max_steps))
        return self._loader(self._sampler("train", self.batch_size, end, start=start, **self._world()))

    def val_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """As many whole batches as validation cells fill, the same each time; nothing if fewer than two a device.

        Where they are too few for P × K batches they are shuffled plainly, and some have no partner.
        """
        return self._one_pass("validation")

    def matched_dataloader(self) -> BatchLoader | list[BatchLoader]:
        """Training cells to compare validation cells with: as many of each perturbation, in batches drawn the same way.

        The same each time, and some thousand at most. What differs between the two is what was learned by heart.
        Nothing, if there are fewer than two a device.
        """
        return self._one_pass("matched", most=_MATCHED)

    def _one_pass(self, stage: Stage, most: int | None = None) -> BatchLoader | list[BatchLoader]:
        """Over the cells, or about as many of them."""
        world = self._world()
        n, n_devices = len(self._rows(stage)), world.get("world_size", 1)
        batch_size = min(self.batch_size, n // n_devices * n_devices)
        if batch_size < 2 * n_devices:
            return []
        n_steps = n // batch_size if most is None else min(n // batch_size, -(-most // batch_size))
        try:
            sampler = self._sampler(stage, batch_size, n_steps, **world)
        except ValueError:  # too few cells of a perturbation for P x K batches
            sampler = ShuffleSampler(self._rows(stage), batch_size, n_steps=n_steps, seed=self.seed, **world)
        return self._loader(sampler)

    def example_batch(self) -> dict[str, torch.Tensor]:
        """The first validation batch, or without validation cells the first training batch."""
        loader = self.val_dataloader()
        loader = loader if isinstance(loader, BatchLoader) else self._loader(self.train_sampler)
        return loader.batch(loader.batches.batch(0))

    def _choose_perturbations_per_batch(self) -> None:
        """Draw perturbations where plain shuffling would leave cells without partners, and the cells are enough."""
        n_perturbations = len(np.unique(self._y[self.split.train]))
        if self.batch_size / n_perturbations >= _POSITIVES_WANTED:
            return
        self.perturbations_per_batch = max(1, self.batch_size // _POSITIVES_WANTED)
        try:
            self._sampler("train", self.batch_size, self.max_steps)
        except ValueError:
            self.perturbations_per_batch = None

    def _sampler(self, stage: Stage, batch_size: int, n_steps: int, **world: int) -> BatchSampler:
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
        if stage == "matched":
            return self._matched
        return self.split.train if stage == "train" else self.split.validation

    @cached_property
    def _matched(self) -> np.ndarray:
        return matched_rows(self.split, self._y, self.seed)

    def _world(self) -> dict[str, int]:
        """Which share of every batch is this process's."""
        trainer = self.trainer
        return {} if trainer is None else {"rank": trainer.global_rank, "world_size": trainer.world_size}

    def _loader(self, sampler: BatchSampler) -> BatchLoader:
        return BatchLoader(self._source, self._y, self._e, sampler, self._numbers)


_BLOCK = 512


def resize_images(images: np.ndarray, image_size: ImageSize, *, out: np.ndarray | None = None) -> np.ndarray:
    """Resize images to so many pixels a side (bilinear, antialiased), in their own dtype.

    Models take ``image_size`` and resize as they go, which suits a GPU. On a processor, and for crops much larger than
    what is trained on, it pays to do it once: an epoch then reads and computes less. Integers are rounded.

    Parameters
    ----------
    images
        Shape ``(N, C, H, W)``, in memory or memory-mapped; uint8, uint16, float16 or float32.
    image_size
        Pixels a side; images that are not square want a pair ``(height, width)``, which may stretch them.
    out
        Array to write to, for example a memory-map; a new one by default.

    Returns
    -------
    Shape ``(N, C, image_size, image_size)``, or ``(N, C, height, width)``; dtype of ``images``.

    Raises
    ------
    TypeError, ValueError
        If ``images`` are not images, ``image_size`` is not positive or would squash images that are not square, or
        ``out`` is of another shape or dtype.

    Examples
    --------
    >>> scbd.data.resize_images(adata.obsm["single_cell_images"], 16).shape
    (240, 4, 16, 16)
    """
    source = ArraySource(images)
    n, channels, *stored = source.shape
    size = resized_to(image_size, *stored)
    shape = (n, channels, *size)
    if out is None:
        out = np.empty(shape, source.dtype)
    elif out.shape != shape or out.dtype != source.dtype:
        msg = f"out has shape {out.shape} and dtype {out.dtype}, the resized images {shape} and {source.dtype}."
        raise ValueError(msg)
    for start in range(0, n, _BLOCK):
        block = resized(source.read(slice(start, start + _BLOCK)), size)
        # a weighted mean never leaves the range of its dtype
        out[start : start + _BLOCK] = (block.round_() if source.dtype.kind == "u" else block).numpy()
    return out


def resized(images: np.ndarray, size: tuple[int, int]) -> torch.Tensor:
    """Bilinear and antialiased, float32."""
    return F.interpolate(torch.from_numpy(images).float(), size, mode="bilinear", antialias=True, align_corners=False)
