"""Inputs of a table, images or features: where they lie, which channels are taken, and which a model knows."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from scbd._anndata import IMAGE_KEY, check_anndata, frame_numbers, is_sparse
from scbd._checks import head, missing_key
from scbd.data._sources import FEATURES, IMAGES, ArraySource, ImageSource, InputKind, ZarrSource, columns_of

if TYPE_CHECKING:
    from anndata import AnnData

logger = logging.getLogger(__name__)

# names or numbers of those that are taken, or new names for them
Channels: TypeAlias = Sequence[str | int] | Mapping[str, str | int]

# the layer that is no layer
X = "X"


class Inputs(NamedTuple):
    """Where in a table the inputs are: one of these is given."""

    image_key: str | None = None
    """Key of ``obsm`` with images."""
    layer: str | None = None
    """Layer with features, or ``"X"``."""
    obsm_key: str | None = None
    """Key of ``obsm`` with features."""
    channels: Channels | None = None
    """Of images those that are taken; `None` stands for all but masks."""

    @classmethod
    def found(
        cls,
        adata: AnnData,
        image_key: str | None = None,
        layer: str | None = None,
        obsm_key: str | None = None,
        channels: Channels | None = None,
    ) -> Inputs:
        """As it was said; by default images where ``obsm`` has them, else ``X``.

        Raises
        ------
        KeyError
            If nothing was said, and there is neither, or there are images under another key.
        ValueError
            If several were said, or channels of features.
        """
        check_anndata(adata)
        said = {"image_key": image_key, "layer": layer, "obsm_key": obsm_key}
        given = [name for name, key in said.items() if key is not None]
        if len(given) > 1:
            msg = f"Give one of {' and '.join(given)}: a model learns from images, or from one table of features."
            raise ValueError(msg)
        if not given and IMAGE_KEY in adata.obsm:
            image_key = IMAGE_KEY
        if channels is not None and image_key is None:
            msg = f"channels={channels!r} are those of images, and there are none: leave it out, or name image_key."
            raise ValueError(msg)
        if channels is not None:
            stored = cls(image_key=image_key).stored(adata)
            channels = _by_name(channel_names(adata.var, stored.shape[1], str(image_key)), channels)
        if given or image_key:
            return cls(image_key, layer, obsm_key, channels)
        if _keys_of_images(adata) or adata.X is None:
            raise KeyError(missing_key("obsm", IMAGE_KEY, adata.obsm.keys(), "image_key"))
        return cls(layer=X)

    @property
    def kind(self) -> InputKind:
        """Images or features."""
        return FEATURES if self.image_key is None else IMAGES

    @property
    def where(self) -> str:
        """As code."""
        if self.layer is None:
            return f"obsm[{self.image_key or self.obsm_key!r}]"
        return X if self.layer == X else f"layers[{self.layer!r}]"

    def array(self, adata: AnnData) -> Any:
        """What lies there.

        Raises
        ------
        KeyError
            If there is nothing.
        """
        if self.layer == X:
            if adata.X is None:
                msg = "adata has no X: name the features with layer=… or obsm_key=…, or the images with image_key=…."
                raise KeyError(msg)
            return adata.X
        slot, key = (adata.layers, self.layer) if self.layer else (adata.obsm, self.image_key or self.obsm_key)
        if key not in slot:
            argument = next(name for name, value in self._asdict().items() if value is not None)
            keys = [known for known in slot if known is not None]  # that is X since anndata 0.13
            raise KeyError(missing_key("layers" if self.layer else "obsm", str(key), keys, argument))
        return slot[key]

    def check_there(self, adata: AnnData) -> None:
        """Raise if cells lack what a model embeds, which cannot be told another key.

        Raises
        ------
        KeyError
            If they do.
        """
        try:
            self.array(adata)
        except KeyError as error:
            others = [] if self.image_key is None else _keys_of_images(adata)
            put = f": adata.{self.where} = adata.obsm[{others[0]!r}], if that is it" if others else ""
            msg = (
                f"The model embeds what lies at {self.where}, which these cells do not have (obsm has: "
                f"{', '.join(adata.obsm.keys()) or 'nothing'}). Give the cells with it{put}."
            )
            raise KeyError(msg) from error

    def source(self, adata: AnnData) -> ImageSource:
        """Ready to be read by row; of images the channels that are taken.

        Raises
        ------
        KeyError
            If there is nothing, or no such channel.
        TypeError, ValueError
            If what lies there is neither images nor features, see :class:`~scbd.data.ArraySource`.
        """
        stored = self.stored(adata)
        return stored if self.image_key is None else columns_of(stored, self.taken(adata, stored.shape[1])[0])

    def taken(self, adata: AnnData, n_channels: int) -> tuple[list[int], list[str]]:
        """Places and names of channels, see :func:`taken_channels`."""
        return taken_channels(adata.var, n_channels, self.image_key or "", self.channels)

    def stored(self, adata: AnnData) -> ImageSource:
        """All that lies there; errors are those of :meth:`source`."""
        check_anndata(adata)
        array = self.array(adata)
        if isinstance(array, pd.DataFrame):
            array = frame_numbers(array, self.where)
        if is_sparse(array):
            msg = f"{self.where} is sparse ({type(array).__name__}): make it dense, such as adata.X.toarray()."
            raise TypeError(msg)
        import zarr

        if isinstance(array, zarr.Array):
            return ZarrSource(array, self.where, self.kind)
        return ArraySource(array, self.where, self.kind)

    def names(self, adata: AnnData) -> list[str] | None:
        """Names of features; `None` where they have none."""
        if self.layer is not None:
            return adata.var_names.astype(str).tolist()
        array = self.array(adata)
        return [str(name) for name in array.columns] if isinstance(array, pd.DataFrame) else None


def _keys_of_images(adata: AnnData) -> list[str]:
    """Keys of ``obsm`` that images may be at."""
    return [key for key, values in adata.obsm.items() if len(getattr(values, "shape", ())) == 4]


def image_source(adata: AnnData, image_key: str) -> ImageSource:
    """Images of a table, ready to be read by row, without masks; see :meth:`Inputs.source`."""
    return Inputs(image_key=image_key).source(adata)


def channel_names(var: pd.DataFrame, n_channels: int, image_key: str) -> list[str]:
    """``var['channels']``, else the names of ``var`` if they are as many as channels, else numbers.

    Without that column, ``var`` need not be about images: X may hold genes or features.

    Raises
    ------
    ValueError
        If ``var['channels']`` names more or fewer channels than the images have.
    """
    named = "channels" in var
    if len(var) == n_channels:
        return [str(name) for name in (var["channels"] if named else var.index)]
    if named:
        raise ValueError(_cut(var, n_channels, image_key, "channels"))
    return numbered(n_channels)


def taken_channels(
    var: pd.DataFrame, n_channels: int, image_key: str, channels: Channels | None
) -> tuple[list[int], list[str]]:
    """Places and names of the channels that were asked for; by default of all but masks.

    Raises
    ------
    KeyError, ValueError
        If one is not there, ``var`` is not about the images, or none is asked for and ``var`` has fewer names than
        there are channels: which they are of, only a user can say.
    """
    names = channel_names(var, n_channels, image_key)
    if channels is not None:
        return chosen_channels(names, channels, f"obsm[{image_key!r}]")
    if 0 < len(var) < n_channels and not _unnamed(var.index.astype(str).tolist()):
        raise ValueError(_cut(var, n_channels, image_key, "names"))
    places = np.flatnonzero(~_masks(var, n_channels)).tolist()
    return places, [names[place] for place in places]


def _cut(var: pd.DataFrame, n_channels: int, image_key: str, what: str) -> str:
    """``adata[:, names]`` cuts ``var``, and no image."""
    names = var["channels"] if what == "channels" else var.index
    return (
        f"var has {len(var)} {what} ({head(names)}), obsm[{image_key!r}] has {n_channels}: adata[:, names] cuts var "
        "and no image. Begin with all of them and choose with channels=…, by number where var names something else."
    )


def chosen_channels(names: Sequence[str], channels: Channels, where: str) -> tuple[list[int], list[str]]:
    """Places and names of the channels that were asked for, in that order.

    Parameters
    ----------
    names
        Of all channels.
    channels
        Names or numbers; a mapping gives new names. Channels that have no names get those of a list that is as long.
    where
        What errors call the images.

    Raises
    ------
    KeyError
        If there is no such name.
    ValueError
        If none is asked for, one twice, there is no such number, or several have a name.
    """
    asked = [channels] if isinstance(channels, (str, int)) else list(channels)
    if not asked:
        msg = f"channels={channels!r}: name at least one of {', '.join(names)}."
        raise ValueError(msg)
    if isinstance(channels, Mapping):
        return _places(names, list(channels.values()), where), [str(name) for name in asked]
    if _unnamed(names) and len(asked) == len(names) and not any(_is_number(one) or one in names for one in asked):
        return list(range(len(names))), [str(name) for name in asked]
    places = _places(names, asked, where)
    return places, [names[place] for place in places]


def _by_name(names: Sequence[str], channels: Channels) -> Channels:
    """The same, by name where it is unique: other cells may have fewer channels, under other numbers."""

    def plain(one: str | int) -> str | int:
        if one in names or not _is_number(one) or not 0 <= int(one) < len(names):
            return one if isinstance(one, str) else int(one)
        return names[int(one)] if names.count(names[int(one)]) == 1 else int(one)

    if isinstance(channels, Mapping):
        return {str(name): plain(one) for name, one in channels.items()}
    return [plain(one) for one in ([channels] if isinstance(channels, (str, int)) else channels)]


def _places(names: Sequence[str], asked: Sequence[str | int], where: str) -> list[int]:
    places = []
    for one in asked:
        found = [place for place, name in enumerate(names) if name == one]
        if len(found) > 1:
            msg = f"{where} has {len(found)} channels of the name {one!r} (numbers {head(found)}): choose by number."
            raise ValueError(msg)
        if not found and not _is_number(one):
            if _unnamed(names):
                msg = (
                    f"{where} has {len(names)} channels without names: name all of them, or give numbers, not {one!r}."
                )
                raise KeyError(msg)
            raise KeyError(missing_key(f"{where} (channels)", str(one), names, "channels"))
        place = found[0] if found else int(one)
        if not 0 <= place < len(names):
            msg = f"{where} has {len(names)} channels, of the numbers 0 to {len(names) - 1}: there is no {place}."
            raise ValueError(msg)
        places.append(place)
    if len(set(places)) < len(places):
        msg = f"channels={list(asked)!r} names one channel twice."
        raise ValueError(msg)
    return places


def say_masks(var: pd.DataFrame, n_channels: int, image_key: str, channels: Channels | None) -> None:
    """Say which channels are left out, where none are asked for."""
    masks = _masks(var, n_channels)
    if masks.any() and channels is None:
        names = channel_names(var, n_channels, image_key)
        left = ", ".join(np.array(names)[masks])
        logger.warning("%s are masks (var['channel_mapping']), and are left out; channels=%s takes all.", left, names)


def _masks(var: pd.DataFrame, n_channels: int) -> np.ndarray:
    """Which channels are masks, as scPortrait says it; none where that leaves no image."""
    if "channel_mapping" not in var or len(var) != n_channels:
        return np.zeros(n_channels, dtype=bool)
    masks = (var["channel_mapping"].astype(str) == "mask").to_numpy()
    return masks & ~masks.all()


def numbered(n: int) -> list[str]:
    """How channels are called that have no names."""
    return [f"channel_{i}" for i in range(n)]


def _is_number(channel: str | int) -> bool:
    """Whether this is a number, which may be text where it comes from a command line."""
    return not isinstance(channel, str) or channel.isdecimal()


def _unnamed(names: Sequence[str]) -> bool:
    """Whether these are no names but numbers, ours or those of pandas."""
    return [name.removeprefix("channel_") for name in names] == [str(i) for i in range(len(names))]


def check_channel_names(var: pd.DataFrame, n_channels: int, registered: dict[str, Any], image_key: str) -> None:
    """Hold names of channels to those a model was set up with, where both have names.

    Raises
    ------
    ValueError
        If they are the same in another order. They are not put in order here: ``adata[:, names]`` moves names and
        leaves images where they are, so that names do not tell which of the two was moved.

    Warns
    -----
    UserWarning
        If there are other names.
    """
    stored = channel_names(var, n_channels, image_key)
    found = taken_channels(var, n_channels, image_key, registered.get("asked"))[1]
    known = registered["channels"]
    _check_order(stored, registered.get("stored", known), image_key)
    if not registered.get("asked"):
        _check_order(found, known, image_key)
    if found == known or _unnamed(found) or _unnamed(known):
        return
    msg = (
        f"obsm[{image_key!r}] has the channels {', '.join(found)}, the model was set up with {', '.join(known)}: other "
        "names. Channels are taken as they come; where only the names differ, rename them."
    )
    warnings.warn(msg, UserWarning, stacklevel=4)


def _check_order(found: list[str], known: list[str], image_key: str) -> None:
    if found == known or sorted(found) != sorted(known):
        return
    msg = (
        f"obsm[{image_key!r}] has the channels {', '.join(found)}, the model was set up with {', '.join(known)}: the "
        "same in another order. Put names (adata[:, order]) and images (adata.obsm[…][:, order]) in the model's order; "
        "only the names, if the images lie in it already."
    )
    raise ValueError(msg)


def check_like_registered(
    source: ImageSource, registered: dict[str, Any], image_key: str, resize: bool | None = None
) -> None:
    """Raise if images differ in kind from the registered ones.

    Parameters
    ----------
    source
        The images.
    registered
        What ``ImageField`` recorded.
    image_key
        Where they are.
    resize
        Whether the model resizes, and takes other sizes of the same proportions; `None` where that is not known yet,
        and size is not looked at.

    Raises
    ------
    ValueError
        If dtype, number of channels, size or proportions differ.
    """
    c, *size = registered["image_shape"]
    if source.shape[1] != c or source.dtype.name != registered["dtype"]:
        msg = (
            f"obsm[{image_key!r}] holds {source.shape[1]} channels of {source.dtype.name}, the model was set up with "
            f"{c} of {registered['dtype']} ({', '.join(registered['channels'])}): convert the images to match."
        )
        raise ValueError(msg)
    height, width = source.shape[2:]
    fact = (
        f"obsm[{image_key!r}] holds images of {height} × {width} pixels, the model was trained on {size[0]} × {size[1]}"
    )
    if resize is False and [height, width] != size:
        msg = f"{fact}: resize them, or train a model with image_size=… that resizes by itself."
        raise ValueError(msg)
    if resize and height * size[1] != width * size[0]:
        msg = f"{fact}, and resizing would stretch them: crop or pad them to the proportions of those."
        raise ValueError(msg)
