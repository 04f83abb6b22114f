"""What all ranks of a job settle among themselves before they train. Knows nothing of Megatron."""
