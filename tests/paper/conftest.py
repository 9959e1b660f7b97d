"""Collect these tests only if the folder benchmarks/paper exists in the checkout."""

from pathlib import Path

collect_ignore_glob = [] if (Path(__file__).parents[2] / "benchmarks" / "paper").is_dir() else ["test_*.py"]
