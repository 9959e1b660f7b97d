"""Experiments, a file a family: grids of trials, and what is made of their rows."""
