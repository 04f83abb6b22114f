"""The integration with Megatron-LM's own training loop: arguments, scripts, checkouts."""
