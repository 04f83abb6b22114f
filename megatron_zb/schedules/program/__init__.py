"""Programs of a schedule: passes and messages of each rank, in one order."""
