"""The command `megatron-zb`, and the programs that it starts."""
