"""The integration with Megatron: the only package that imports megatron."""
