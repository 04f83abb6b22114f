"""LoRA adapters on the linear layers of a frozen base model, several in one pipeline."""
