"""From a schedule to what each rank carries out: passes and messages in one order."""
