"""Measurements of a run, for training and for planning. Imports no torch."""
