"""Search for a fast order for a placement, costs and a memory limit."""
