"""End a job that has stopped, and name the rank that holds it up."""
