"""Import the public names of a package on first use, so that importing the package itself is fast.

Slow modules, such as torch, are then imported only if they are needed.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` for a package that imports its names on first use.

    Parameters
    ----------
    package
        Name of the package (its ``__name__``).
    homes
        Mapping from each name that is imported on first use to the full name of the module that defines it. A submodule
        is listed with its own full name. The package should also import these names under ``TYPE_CHECKING``, for type
        checkers.

    Returns
    -------
    Two functions, to be assigned to ``__getattr__`` and ``__dir__`` of the package.
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
