"""Agreement among all ranks of a job before they train. Independent of Megatron."""
