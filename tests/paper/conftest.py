"""The laboratory lies beside the package: where it does not, there is nothing to test."""

from pathlib import Path

collect_ignore_glob = [] if (Path(__file__).parents[2] / "benchmarks" / "paper").is_dir() else ["test_*.py"]
