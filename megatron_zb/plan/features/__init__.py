"""What a schedule of a plan may have beside F, B and W: a file for each, with all that it does."""
