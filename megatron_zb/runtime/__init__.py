"""How a program is carried out on one rank. Imports torch, knows nothing of Megatron."""
