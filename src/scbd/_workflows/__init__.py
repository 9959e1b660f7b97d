"""Whole analyses in one call each, such as ``scbd.run`` and ``scbd.compare``; most are commands of the command line."""
