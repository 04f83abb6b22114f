"""Pipelined blockwise distillation (Pipe-BD, Jang et al., arXiv 2301.12443) of Megatron models."""
