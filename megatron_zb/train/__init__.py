"""Training a GPT model only on megatron-core, as `megatron_zb.train` does."""
