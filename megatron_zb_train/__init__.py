"""Training a GPT model on megatron-core alone, as `megatron_zb.pretrain_gpt` does."""
