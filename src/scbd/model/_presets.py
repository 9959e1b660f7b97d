"""Presets of :class:`scbd.SCBDModel`: the settings of one use case under one name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from inspect import signature
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar

from scbd._shared.checks import check_choice

P = ParamSpec("P")
R = TypeVar("R")

PresetName = Literal["screen", "domain_generalization", "paper"]


class Preset(NamedTuple):
    """Settings that differ from the defaults of :class:`scbd.SCBDModel`."""

    model: Mapping[str, Any] = MappingProxyType({})
    """Arguments of the constructor."""
    training: Mapping[str, Any] = MappingProxyType({})
    """Arguments of :meth:`scbd.SCBDModel.train`."""
    plan: Mapping[str, Any] = MappingProxyType({})
    """Arguments of :class:`scbd.model.TrainingPlan`."""


PRESETS: Mapping[PresetName, Preset] = MappingProxyType(
    {
        "screen": Preset(),
        # Images of an unseen environment are to be classified, and may have another colour or shape of intensities.
        # Statistics of environments are therefore not used, and no image is turned, since digits and photographs have
        # an upper side. Without label smoothing, z_c would use a feature that misleads: 73 and 77 % of white digits are
        # predicted from z_c instead of 95 and 97 % (two seeds, 16,000 coloured digits, 300 steps of 512).
        "domain_generalization": Preset(
            {
                "standardize": False,
                "standardize_by": None,
                "augment": False,
                "n_latent": 128,
                "style_target": "ye",
                "smoothing": 2 / 3,
            },
            {"max_steps": 1_500, "batch_size": 1_024},
        ),
        # Makino et al. (2025), appendix, and the code that the authors published
        "paper": Preset(
            {
                "encoder": "resnet18",
                "alpha": 1.0,
                "invariance": "listing",
                "smoothing": 0.0,
                "set_size": 1,
                "include_self": True,
                "standardize_by": None,
                "augment": False,
            },
            {"max_steps": 25_000, "batch_size": 2_048, "lr": 1e-4},
            {"lr_decay": False},
        ),
    }
)


def with_preset(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given arguments of :class:`scbd.SCBDModel`, and those that their ``preset`` sets in addition.

    Raises
    ------
    ValueError
        If there is no such preset.
    """
    preset = arguments.get("preset", "screen")
    check_choice("preset", preset, PresetName)
    return {**PRESETS[preset].model, **arguments}


def fill_from_preset(constructor: Callable[P, R]) -> Callable[P, R]:
    """Decorate a constructor such that arguments that are not given have the values of its argument ``preset``.

    The signature of the constructor, which users see, has the defaults of the preset ``"screen"``.
    """
    names = list(signature(constructor).parameters)

    @wraps(constructor)
    def filled(*args: P.args, **arguments: P.kwargs) -> R:
        named: Any = with_preset(arguments)
        for name in names[: len(args)]:
            named.pop(name, None)
        return constructor(*args, **named)

    return filled
