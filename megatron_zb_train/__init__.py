"""Training a GPT model only on megatron-core, as `megatron_zb.pretrain_gpt` does."""
