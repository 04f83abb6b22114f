"""Watchdog that ends a job that has stopped, and names the rank that holds it up."""
