"""From what was registered of inputs to the modules that prepare them, and the defaults that suit them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from scbd.nn import FeatureScaling, InputTransform, Preprocess

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from scbd.nn import Whitening

    WhiteningChoice = Whitening | Literal["auto"] | None

# rows of features from which a network with hidden layers has enough to learn from
_MANY_ROWS = 10_000
# dimensions of a linear embedding, which costs nothing, and of all others
_LINEAR_LATENT, _LATENT = 300, 64
# settings that have no meaning for features, with the values that ask for nothing
_OF_IMAGES: dict[str, Any] = {"image_size": None, "intensity": "auto", "augment": False}
_OF_FEATURES: dict[str, Any] = {"clip": 20.0}


def preparation(registered: Mapping[str, Any], settings: Mapping[str, Any]) -> Preprocess | FeatureScaling:
    """What prepares registered inputs.

    Parameters
    ----------
    registered
        What the field of images, or of features, recorded.
    settings
        Arguments of :class:`scbd.nn.Preprocess` or of :class:`scbd.nn.FeatureScaling`; those of the other are taken at
        their defaults.

    Raises
    ------
    ValueError
        If a setting is for inputs of the other kind.
    """
    of_images = "image_shape" in registered
    ours, theirs = ("images", "features") if of_images else ("features", "images")
    foreign = _OF_FEATURES if of_images else _OF_IMAGES
    for name, default in foreign.items():
        if settings.get(name, default) != default:
            msg = f"{name}={settings[name]!r} is for {theirs}, and the model was set up with {ours}: leave it out."
            raise ValueError(msg)
    own = {name: value for name, value in settings.items() if name not in foreign}
    if of_images:
        return Preprocess(tuple(registered["image_shape"]), registered["dtype"], **own)
    return FeatureScaling(len(registered["features"]), **own)


def encoder_for(registered: Mapping[str, Any], encoder: str | nn.Module) -> str | nn.Module:
    """What ``"auto"`` stands for: for images by the machine, for features by the number of rows."""
    if not isinstance(encoder, str) or encoder != "auto":
        return encoder
    if "image_shape" in registered:
        # models of before it was asked have a ResNet-18
        return "resnet18" if registered.get("accelerated", True) else "small"
    return "mlp" if registered["n_rows"] >= _MANY_ROWS else "linear"


def n_latent_for(
    encoder: str | nn.Module, n_latent: int | None, n_features: int, transform: InputTransform | None
) -> int:
    """Dimension of an embedding, where none was asked for: a linear encoder leaves that of its inputs."""
    if n_latent is not None:
        return n_latent
    if encoder != "linear":
        return _LATENT
    return n_features if transform is None else transform.output_shape[0]


def transform_for(
    registered: Mapping[str, Any], encoder: str | nn.Module, whitening: WhiteningChoice, settings: Mapping[str, Any]
) -> InputTransform | None:
    """What features pass before an encoder.

    Parameters
    ----------
    registered
        What the field of inputs recorded.
    encoder
        Not ``"auto"``.
    whitening
        A kind of :class:`scbd.nn.InputTransform`; `None`; or ``"auto"``: ``"plda"`` before ``"linear"``, else none.
    settings
        Arguments of :class:`scbd.nn.InputTransform`.

    Raises
    ------
    ValueError
        If a whitening is asked for of images.
    """
    if "image_shape" in registered:
        if whitening not in ("auto", None):
            msg = f"whitening={whitening!r} is for features, and the model was set up with images: leave it out."
            raise ValueError(msg)
        return None
    kind = ("plda" if encoder == "linear" else None) if whitening == "auto" else whitening
    if kind is None:
        return None
    # a linear encoder embeds in the dimensions that come in
    n_features = len(registered["features"])
    own = {"n_components": min(_LINEAR_LATENT, n_features)} if encoder == "linear" else {}
    return InputTransform(n_features, kind, **own | dict(settings))
