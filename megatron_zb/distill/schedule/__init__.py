"""Pipe-BD as a schedule: blocks on ranks, and the order of their passes. Imports no torch."""
