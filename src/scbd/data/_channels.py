"""Names of image channels: where they come from, and that cells have those that a model knows, in its order."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd


def channel_names(var: pd.DataFrame, n_channels: int, image_key: str) -> list[str]:
    """``var['channels']``, else the names of ``var`` if they are as many as channels, else numbers.

    Without a column that says so, ``var`` need not be about images: beside them, X may hold genes or features.

    Raises
    ------
    ValueError
        If ``var['channels']`` names more or fewer channels than the images have.
    """
    named = "channels" in var
    if named and len(var) != n_channels:
        msg = (
            f"var['channels'] names {len(var)} channels ({', '.join(map(str, var['channels']))}), "
            f"obsm[{image_key!r}] has {n_channels}: adata[:, names] cuts var, and no image. Begin with all channels, "
            f"and cut both: {how_to_keep([0, 1], image_key)} for the first two."
        )
        raise ValueError(msg)
    if len(var) != n_channels:
        return _numbered(n_channels)
    return [str(name) for name in (var["channels"] if named else var.index)]


def check_channel_names(var: pd.DataFrame, registered: dict[str, Any], image_key: str) -> None:
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
    known = registered["channels"]
    found = channel_names(var, len(known), image_key)
    if found == known:
        return
    fact = f"obsm[{image_key!r}] has the channels {', '.join(found)}, the model was set up with {', '.join(known)}: "
    if sorted(found) == sorted(known):
        order = np.argsort(found, kind="stable")[np.argsort(np.argsort(known, kind="stable"))].tolist()
        msg = (
            f"{fact}the same in another order. Put both in that order: {how_to_keep(order, image_key)}; or only the "
            "first, which moves names and no image, if the images lie in the model's order already."
        )
        raise ValueError(msg)
    if _unnamed(found) or _unnamed(known):
        return
    msg = f"{fact}other names. Channels are taken as they come; where only the names differ, rename them."
    warnings.warn(msg, UserWarning, stacklevel=4)


def warn_of_channels(var: pd.DataFrame, n_channels: int, image_key: str) -> None:
    """Say what ``var`` tells of channels that are probably not wanted as they are.

    Warns
    -----
    UserWarning
        If channels are masks, or ``var`` has fewer names than there are channels.
    """
    if "channel_mapping" in var and len(var) == n_channels:
        mask = (var["channel_mapping"].astype(str) == "mask").to_numpy()
        if mask.any() and not mask.all():
            names = np.array(channel_names(var, n_channels, image_key))[mask]
            msg = (
                f"{', '.join(names)} are masks (var['channel_mapping']), and are taken as channels of the images. To "
                f"leave them out: {how_to_keep(np.flatnonzero(~mask).tolist(), image_key)}."
            )
            warnings.warn(msg, UserWarning, stacklevel=2)
    names = [str(name) for name in var.index]
    if "channels" not in var and 0 < len(names) < n_channels and not _unnamed(names):
        msg = (
            f"var has {len(names)} names ({', '.join(names)}), obsm[{image_key!r}] has {n_channels} channels, which "
            f"are called by numbers. If adata[:, names] was to cut channels, it has cut var alone: begin with all, and "
            f"cut both, {how_to_keep([0, 1], image_key)} for the first two."
        )
        warnings.warn(msg, UserWarning, stacklevel=2)


def how_to_keep(channels: list[int], image_key: str) -> str:
    """Code that takes these channels, in this order, of names and images."""
    images = f"adata.obsm[{image_key!r}]"
    return f"adata = adata[:, {channels}].copy(), then {images} = {images}[:, {channels}]"


def _numbered(n: int) -> list[str]:
    return [f"channel_{i}" for i in range(n)]


def _unnamed(names: list[str]) -> bool:
    """Whether these are no names but numbers, ours or those of pandas."""
    return [name.removeprefix("channel_") for name in names] == [str(i) for i in range(len(names))]
