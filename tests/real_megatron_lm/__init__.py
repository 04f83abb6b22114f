"""Against a real Megatron-LM checkout."""
