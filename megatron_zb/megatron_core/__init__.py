"""Where the schedules meet Megatron: the only package that imports megatron."""
