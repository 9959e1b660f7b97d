"""Write a screen: cells sorted by perturbation and shuffled inside, so that a batch is a few neighbours of each."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from anndata import AnnData

from scbd._files import check_distinct
from scbd._jobs import check_shard, check_space, share_of
from scbd._keys import IMAGE_KEY
from scbd._progress import progress_bar
from scbd.data._prefetch import worked_on, workers
from scbd.data.sources import Unreadable
from scbd.data.stores._block_file import exists
from scbd.data.stores._containers import Container, HDF5Container, ZarrContainer
from scbd.data.stores._conversion import conversion
from scbd.data.stores._crops import Crops, crops_of, some_channels
from scbd.data.stores._opening import open_screen
from scbd.data.stores._plan import screen_plan
from scbd.data.stores._readers import read_crops
from scbd.data.stores._shards import COMPRESSIONS
from scbd.data.stores._staging import missing_bytes, staged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zarr.abc.store import Store

    from scbd._sizes import ImageSize
    from scbd.data._channels import Channels
    from scbd.data.stores._plan import ScreenPlan

    Plate: TypeAlias = Crops | AnnData | str | os.PathLike[str]


def write_screen(
    path: str | os.PathLike[str] | Store,
    plates: Plate | Sequence[Plate],
    *,
    y_key: str | Sequence[str],
    image_key: str = IMAGE_KEY,
    channels: Channels | None = None,
    image_size: ImageSize | None = None,
    dtype: Literal["uint8", "uint16", "float16", "float32"] | None = None,
    intensity_range: Sequence[float] | Sequence[Sequence[float]] | None = None,
    compression: Literal["lz4", "zstd"] | None = None,
    block_size: int | None = None,
    seed: int = 0,
    shard: tuple[int, int] = (1, 1),
    n_workers: int | None = None,
    enable_progress_bar: bool | None = None,
) -> AnnData:
    """Write plates of crops into one screen, to be opened with :func:`open_screen`.

    Rows are sorted by perturbation and shuffled inside, across plates: of each perturbation of a batch, the cells are
    then a few stretches of neighbours, from different wells. Hence all plates are given at once; a plate that comes
    later is added by writing the old screen and the new plate to a new path.

    Killed at any moment and called again with the same cells, it goes on where it stopped, and the result is the same
    to the byte. The store appears under its name when it is whole. Memory holds the tables and, for each worker, a
    block and what is converted at once: about 170 MiB, whatever the size of crops. The sample for a range of
    intensities takes less, before workers begin.

    Plates whose chunks span many rows, such as an ``.h5ad`` that was written with ``compression="gzip"``, are slow to
    read by row. They are read once, from the first row to the last, and kept (converted, not compressed) in a folder
    beside ``path``, ``.name.staged``, until the screen is written; for a URL, in the system's folder for temporary
    files. A worker may hold 512 MiB then.

    Parameters
    ----------
    path
        ``.h5ad``: uncompressed, memory-mapped when read, for a disk of one machine. ``.zarr``: files of 64 MiB,
        compressed or not, with a checksum an image; also a URL (``s3://…``, with fsspec) or a store of Zarr's.
    plates
        AnnData with images in ``obsm``, :class:`Crops`, or paths for :func:`read_crops`; one or several. Of several,
        ``obs["source"]`` says which each cell is from, by the name of the file (a column of that name stays as it is).
        Columns of dates, intervals or mixed values, such as rows that are 1 on one plate and A on another, are written
        as text.
    y_key
        Column of the perturbation, or several.
    image_key
        Key of the images in ``obsm``, where plates have them and in the screen.
    channels
        Which are written, by name or number, in this order; a mapping gives them new names. By default all but masks.
    image_size
        Resize to so many pixels a side (bilinear, antialiased); crops that are not square want a pair
        ``(height, width)``, which may stretch them.
    dtype
        Of the stored images. From one integer dtype or float to another integer dtype, intensities are scaled.
    intensity_range
        What becomes the lowest and the highest value then: ``(low, high)``, or one such pair a channel; by default the
        0.1 and 99.9 % percentiles of each channel in 2,048 random crops (of floats, in 1,024 random pixels of each).
        Kept in ``uns["scbd_store"]``.
    compression
        Of a Zarr store: ``"lz4"`` reads fastest, ``"zstd"`` is smaller.
    block_size
        Rows that are written at once, those of a Zarr store's files; 64 MiB by default.
    seed
        Seed of the shuffling, and of the sample of intensities.
    shard
        ``(i, n)``: write only the i-th of n shares, for n processes or jobs with the same cells and path, at once or
        one after the other; whichever is the last gives the store its name.
    n_workers
        Threads that convert, compress and write, one core each; by default one a core, at least two and at most 16. Any
        number writes the same bytes.
    enable_progress_bar
        By default for more than 20,000 cells.

    Returns
    -------
    The screen, as :func:`open_screen` opens it; its table alone while other shares are missing.

    Raises
    ------
    FileExistsError
        If there is something at ``path``, other than the screen that shares of it have become; nothing is overwritten.
    OSError
        If the disk is too small: before any image is written, or where a size cannot be foreseen, as it becomes full.
    KeyError, TypeError, ValueError
        If plates do not fit together, are given twice or lack ``y_key``, a column cannot be stored, an argument is out
        of range, an image has NaN or infinite pixels (which), files cannot be read (all of the share, up to a hundred),
        or the beginning of another store lies there: of other cells, or of other images of them.

    Examples
    --------
    >>> plates = [adata[adata.obs["well"] == well].copy() for well in ("P1_W1", "P1_W2")]
    >>> screen = scbd.data.write_screen("screen.zarr", plates, y_key="gene", compression="lz4")
    >>> screen.obs["gene"].is_monotonic_increasing  # sorted by perturbation
    True
    """
    target: Any = path if not isinstance(path, (str, os.PathLike)) or "://" in str(path) else Path(path)
    check_shard(shard)
    workers(n_workers)
    _check_target(target, compression, shared=shard != (1, 1))
    given = [plates] if isinstance(plates, (Crops, AnnData, str, os.PathLike)) else list(plates)
    if not given:
        msg = "There is no plate to write: give at least one."
        raise ValueError(msg)
    check_distinct(given)
    crops = [_crops(plate, image_key, channels, f"plate {number}") for number, plate in enumerate(given)]
    convert = conversion(crops, image_size, dtype, intensity_range, seed)
    plan = screen_plan(crops, y_key, convert, block_size, seed)
    container: Container
    if isinstance(target, Path) and target.suffix == ".h5ad":
        container = HDF5Container(target, plan, image_key)
    else:
        container = ZarrContainer(target, plan, image_key, compression)
    if container.is_there():  # other jobs have left nothing for this one
        return open_screen(target, image_key=image_key)
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        missing = missing_bytes(plan, _staging(target))
        if compression is None:
            check_space(target, plan.shape[0] * plan.row_bytes + missing)
        else:  # its own size is not known
            check_space(_staging(target), missing)
    try:
        _write_blocks(target, plan, container, shard, n_workers, enable_progress_bar)
        whole = container.finish()
    except FileNotFoundError:
        whole = isinstance(target, Path) and target.exists()  # another process did the same, and was faster
        if not whole:
            raise
    if not whole:
        return AnnData(obs=plan.obs)
    if isinstance(target, Path):
        shutil.rmtree(_staging(target), ignore_errors=True)
    return open_screen(target, image_key=image_key)


def _write_blocks(
    target: Any,
    plan: ScreenPlan,
    container: Container,
    shard: tuple[int, int],
    n_workers: int | None,
    shown: bool | None,
) -> None:
    """Write the share of this process, as far as it is missing."""
    todo = share_of(container.begin(), shard).tolist()
    if not todo:
        return
    sizes = [len(range(*plan.rows(block).indices(plan.shape[0]))) for block in todo]
    name = target.name if isinstance(target, Path) else target
    with ExitStack() as stack:
        if isinstance(target, Path):
            folder = _staging(target)
        else:  # where nobody would find them again
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scbd-")))
        plan = staged(plan, folder, shard, n_workers, shown)
        bar = stack.enter_context(progress_bar(f"Writing {name}", sum(sizes), shown=shown))
        unreadable = Unreadable()

        def write(block: int) -> None:
            with unreadable.kept():
                container.write(block, plan.images(block))

        written = worked_on(write, todo, n_workers)
        for size, _ in zip(sizes, stack.enter_context(closing(written)), strict=True):
            bar.update(size)
        unreadable.tell()


def _staging(target: Path) -> Path:
    """Folder of plates on their way."""
    return target.with_name(f".{target.name}.staged")


def _check_target(target: Any, compression: str | None, *, shared: bool) -> None:
    if compression not in (None, *COMPRESSIONS):
        msg = f"compression={compression!r} is not known: use {', '.join(map(repr, COMPRESSIONS))} or None."
        raise ValueError(msg)
    if not isinstance(target, Path):
        return
    if target.suffix not in (".h5ad", ".zarr"):
        msg = f"{target}: give a path that ends in .h5ad or .zarr."
        raise ValueError(msg)
    if target.suffix == ".h5ad" and compression is not None:
        msg = f"compression={compression!r}: an .h5ad is memory-mapped, and so is not compressed; write a .zarr."
        raise ValueError(msg)
    if target.exists() and not shared:
        raise FileExistsError(exists(target))


def _crops(plate: Plate, image_key: str, channels: Channels | None, name: str) -> Crops:
    if isinstance(plate, Crops):
        return some_channels(plate, channels)
    if isinstance(plate, AnnData):
        return crops_of(plate, image_key, name, channels)
    return read_crops(plate, image_key=image_key, channels=channels)
