"""Write a screen: cells sorted by perturbation and shuffled inside, so that a batch is a few neighbours of each."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from anndata import AnnData

from scbd._keys import IMAGE_KEY
from scbd.data.prefetch import prefetch
from scbd.data.progress import progress_bar
from scbd.data.stores.block_file import check_shard, check_space, share_of
from scbd.data.stores.containers import Container, HDF5Container, ZarrContainer
from scbd.data.stores.conversion import conversion
from scbd.data.stores.crops import Crops, crops_of
from scbd.data.stores.opening import open_screen
from scbd.data.stores.plan import screen_plan
from scbd.data.stores.readers import read_crops
from scbd.data.stores.shards import COMPRESSIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zarr.abc.store import Store

    Plate: TypeAlias = Crops | AnnData | str | os.PathLike[str]


def write_screen(
    path: str | os.PathLike[str] | Store,
    plates: Plate | Sequence[Plate],
    *,
    y_key: str,
    image_key: str = IMAGE_KEY,
    image_size: int | None = None,
    dtype: Literal["uint8", "uint16", "float16", "float32"] | None = None,
    intensity_range: Sequence[float] | Sequence[Sequence[float]] | None = None,
    compression: Literal["lz4", "zstd"] | None = None,
    block_size: int | None = None,
    seed: int = 0,
    shard: tuple[int, int] = (1, 1),
    enable_progress_bar: bool | None = None,
) -> AnnData:
    """Write plates of crops into one screen, to be opened with :func:`open_screen`.

    Rows are sorted by perturbation and shuffled inside, across plates: of each perturbation of a batch, the cells are
    then a few stretches of neighbours, from different wells. Hence all plates are given at once; a plate that comes
    later is added by writing the old screen and the new plate to a new path.

    Memory holds the tables and a few blocks. Killed at any moment and called again with the same cells, it goes on
    where it stopped, and the result is the same to the byte. The store appears under its name when it is whole.

    Parameters
    ----------
    path
        ``.h5ad``: uncompressed, memory-mapped when read, for a disk of one machine. ``.zarr``: files of 64 MiB,
        compressed or not, with a checksum an image; also a URL (``s3://…``, with fsspec) or a store of Zarr's.
    plates
        AnnData with images in ``obsm``, :class:`Crops`, or paths for :func:`read_crops`; one or several.
    y_key
        Column of the perturbation.
    image_key
        Key of the images in ``obsm``, where plates have them and in the screen.
    image_size
        Resize to so many pixels a side (bilinear, antialiased).
    dtype
        Of the stored images. From one integer dtype or float to another integer dtype, intensities are scaled.
    intensity_range
        What becomes the lowest and the highest value then: ``(low, high)``, or one such pair a channel; by default the
        0.1 and 99.9 % percentiles of each channel in 2,048 random crops. Kept in ``uns["scbd_store"]``.
    compression
        Of a Zarr store: ``"lz4"`` reads fastest, ``"zstd"`` is smaller.
    block_size
        Rows that are written at once, those of a Zarr store's files; 64 MiB by default.
    seed
        Seed of the shuffling, and of the sample of intensities.
    shard
        ``(i, n)``: write only the i-th of n shares, for n processes or jobs with the same cells and path, at once or
        one after the other; whichever is the last gives the store its name.
    enable_progress_bar
        By default for more than 20,000 cells.

    Returns
    -------
    The screen, as :func:`open_screen` opens it; its table alone while other shares are missing.

    Raises
    ------
    FileExistsError
        If there is something at ``path``; nothing is overwritten.
    OSError
        If the disk is too small, before any image is written.
    KeyError, TypeError, ValueError
        If plates do not fit together or lack ``y_key``, an argument is out of range, or the beginning of another store
        lies there.

    Examples
    --------
    >>> plates = [adata[adata.obs["well"] == well].copy() for well in ("P1_W1", "P1_W2")]
    >>> screen = scbd.data.write_screen("screen.zarr", plates, y_key="gene", compression="lz4")
    >>> screen.obs["gene"].is_monotonic_increasing  # sorted by perturbation
    True
    """
    target: Any = path if not isinstance(path, (str, os.PathLike)) or "://" in str(path) else Path(path)
    check_shard(shard)
    _check_target(target, compression)
    given = [plates] if isinstance(plates, (Crops, AnnData, str, os.PathLike)) else list(plates)
    if not given:
        msg = "There is no plate to write: give at least one."
        raise ValueError(msg)
    crops = [_crops(plate, image_key, f"plate {number}") for number, plate in enumerate(given)]
    convert = conversion(crops, image_size, dtype, intensity_range, seed)
    plan = screen_plan(crops, y_key, convert, block_size, seed)
    container: Container
    if isinstance(target, Path) and target.suffix == ".h5ad":
        container = HDF5Container(target, plan, image_key)
    else:
        container = ZarrContainer(target, plan, image_key, compression)
    if isinstance(target, Path):
        target.parent.mkdir(parents=True, exist_ok=True)
        if compression is None:
            check_space(target, plan.shape[0] * plan.row_bytes)
    done = container.begin()
    todo = share_of(done, shard)
    sizes = [len(range(*plan.rows(int(block)).indices(plan.shape[0]))) for block in todo]
    name = target.name if isinstance(target, Path) else target
    bar = progress_bar(f"Writing {name}", sum(sizes), shown=enable_progress_bar)
    with bar, closing(prefetch(map(plan.images, todo.tolist()))) as read:
        for block, size, images in zip(todo, sizes, read, strict=True):
            container.write(int(block), images)
            bar.update(size)
    return open_screen(target, image_key=image_key) if container.finish() else AnnData(obs=plan.obs)


def _check_target(target: Any, compression: str | None) -> None:
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
    if target.exists():
        msg = f"{target} exists: it is kept; move it away, or write to another path."
        raise FileExistsError(msg)


def _crops(plate: Plate, image_key: str, name: str) -> Crops:
    if isinstance(plate, Crops):
        return plate
    return crops_of(plate, image_key, name) if isinstance(plate, AnnData) else read_crops(plate, image_key=image_key)
