"""Features that others have measured, with what is known of each cell or well: CellProfiler, DeepProfiler, profiles."""

from scbd.data.profiles._cellprofiler import read_cellprofiler
from scbd.data.profiles._reading import read_profiles

__all__ = ["read_cellprofiler", "read_profiles"]
