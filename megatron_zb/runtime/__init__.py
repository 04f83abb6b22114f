"""Execution of a program on one rank. Imports torch; independent of Megatron."""
