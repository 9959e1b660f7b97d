"""What a model found of its weights, which says nothing of others."""

from __future__ import annotations

from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np


class OfWeightsMixin:
    """Forgets it when weights change, and keeps it out of what is saved while they do."""

    # attributes, and what they are where nothing was found
    _of_weights: ClassVar[Mapping[str, type]] = MappingProxyType(
        {"centers_": dict, "looks_": dict, "environments_": list, "values_": dict, "adaptations_": dict}
    )

    if TYPE_CHECKING:
        centers_: dict[str, np.ndarray]
        looks_: dict[str, Any]
        environments_: list[str]
        values_: dict[str, list[str]]
        adaptations_: dict[str, Any]

    def _forget(self) -> None:
        """Nothing was found of these weights yet."""
        for name, kind in self._of_weights.items():
            setattr(self, name, kind())

    @contextmanager
    def _forgotten(self) -> Iterator[None]:
        """While weights change, callbacks save a model of which nothing was found; then it is remembered again."""
        kept = {name: getattr(self, name) for name in self._of_weights if hasattr(self, name)}
        for name in kept:
            setattr(self, name, self._of_weights[name]())
        try:
            yield
        finally:
            for name, found in kept.items():
                setattr(self, name, found)
