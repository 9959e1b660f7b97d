"""Several columns as environment: each by itself, or their cross."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from scvi.data._constants import _FIELD_REGISTRIES_KEY, _SETUP_ARGS_KEY, _STATE_REGISTRY_KEY

from scbd._keys import E_REGISTRY
from scbd._labels import column_codes

if TYPE_CHECKING:
    import numpy as np

EColumns = Literal["side_by_side", "crossed"]


def known_e_columns(
    asked: EColumns | None, e_key: str | list[str], system: str, *, takes_several: bool
) -> EColumns | None:
    """What several columns are to be, by default what suits the system; of one column there is nothing to say.

    Raises
    ------
    ValueError
        If there is no such choice, or the system has no other.
    """
    if asked not in (None, *get_args(EColumns)):
        msg = f"e_columns={asked!r} is not known: use 'side_by_side', or 'crossed'."
        raise ValueError(msg)
    if asked == "side_by_side" and not takes_several:
        msg = f"{system} knows one environment a cell: use e_columns='crossed', or a single column as e_key."
        raise ValueError(msg)
    if isinstance(e_key, str):
        return None
    return asked or ("side_by_side" if takes_several else "crossed")


def is_side_by_side(registry: dict[str, Any]) -> bool:
    """Whether a model has several environments a cell; one that was saved before there was a choice crossed them."""
    return registry[_SETUP_ARGS_KEY].get("e_columns") == "side_by_side"


def covariates(registry: dict[str, Any]) -> np.ndarray | None:
    """Codes of the single columns of each registered environment, int64 ``(E, C)``, if they are side by side."""
    if not is_side_by_side(registry):
        return None
    return column_codes(registry[_FIELD_REGISTRIES_KEY][E_REGISTRY][_STATE_REGISTRY_KEY]["categories"])
