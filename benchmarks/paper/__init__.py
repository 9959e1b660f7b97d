"""The experiments of the paper and ours: grids of runs, their rows at rest, and the tables and figures made of them."""
