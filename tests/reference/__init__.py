"""Naive, obviously correct forms."""
