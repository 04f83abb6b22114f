"""Drawings of a schedule: as text, as a picture, and as a page."""
