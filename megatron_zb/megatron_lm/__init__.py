"""Where the schedules meet Megatron-LM's own training loop: arguments, scripts, checkouts."""
