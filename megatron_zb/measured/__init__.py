"""What a run has measured of itself, for training and for planning. Imports no torch."""
