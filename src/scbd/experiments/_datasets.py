"""The data sets of the experiments: how each is loaded, and what its columns are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from scbd import datasets

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from anndata import AnnData


@dataclass(frozen=True)
class Dataset:
    """A loader and its columns.

    Attributes
    ----------
    loader
        Makes the table; takes ``seed``, and ``path`` where there are files.
    y_key, e_key
        Columns of the label and of the environment.
    has_files
        Whether there are files to give a path to.
    needs_path
        Whether they cannot be downloaded.
    """

    loader: Callable[..., AnnData]
    y_key: str
    e_key: str
    has_files: bool = True
    needs_path: bool = True

    def load(self, path: str | os.PathLike[str] | None, seed: int, **kwargs: Any) -> AnnData:
        """Load the cells.

        Raises
        ------
        ValueError
            If the files are needed and no path was given.
        """
        if not self.has_files:
            return self.loader(seed=seed, **kwargs)
        if path is None and self.needs_path:
            name = self.loader.__name__
            msg = f"{name} cannot be downloaded by scbd: see scbd.datasets.{name} for its source, and give the path."
            raise ValueError(msg)
        return self.loader(path, seed=seed, **kwargs)


DATASETS = {
    "colored_digits": Dataset(datasets.colored_digits, "digit", "environment", has_files=False),
    "colored_mnist": Dataset(datasets.colored_mnist, "digit", "environment", needs_path=False),
    "simulated_screen": Dataset(datasets.simulated_screen, "gene", "well", has_files=False),
}
