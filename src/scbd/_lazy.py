"""Names of a package that load on first use: what is light does not wait for what is heavy."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Parameters
    ----------
    package
        Its ``__name__``.
    homes
        Of each name that loads on first use, the module it is defined in; a module's own name stands for the module.
        The package also imports these names where ``TYPE_CHECKING``, for those who read types.
    """

    def get(name: str) -> Any:
        if name not in homes:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        module = importlib.import_module(homes[name])
        return module if module.__name__ == f"{package}.{name}" else getattr(module, name)

    def names() -> list[str]:
        module = vars(sys.modules[package])
        return sorted({*module["__all__"], *(name for name in module if name.startswith("__"))})

    return get, names
