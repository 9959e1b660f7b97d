"""Frames or AnnData in, matplotlib Axes out; nothing is ever shown."""

from scbd.pl._history import history
from scbd.pl._images import cells
from scbd.pl._umap import umap, umap_blocks

__all__ = ["cells", "history", "umap", "umap_blocks"]
