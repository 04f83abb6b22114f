"""Check of the environment: installed packages, devices and Megatron, with advice."""
