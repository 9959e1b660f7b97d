"""Features that others have measured, with what is known of each cell or well: CellProfiler, DeepProfiler, profiles."""

from scbd.data.profiles._cellprofiler import read_cellprofiler
from scbd.data.profiles._features import Missing, is_about, odd_names
from scbd.data.profiles._reading import read_features, read_profiles

__all__ = ["Missing", "is_about", "odd_names", "read_cellprofiler", "read_features", "read_profiles"]
