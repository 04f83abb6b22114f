"""What copying activations to the host takes beside computing them, before anybody measures it."""

from __future__ import annotations

# FLOPs that a device does while its link carries one byte. A GPU: 400 TFLOP/s and 55 GB/s each way
# (PCIe 5); a CPU, which copies within its own memory: 50 GFLOP/s and 5 GB/s.
FLOPS_PER_BYTE = {"cuda": 400e12 / 55e9, "cpu": 50e9 / 5e9}


def copy_share(hidden_size: int, device_type: str) -> float:
    """Return what copying a layer's activations one way takes, as a share of its F, B and W.

    A layer of ``hidden_size`` h holds about 34 h bytes of each token in 16 bits, for 72 h^2 FLOPs.
    Where ranks share a layer, both are divided alike.
    """
    return 34 / (72 * hidden_size) * FLOPS_PER_BYTE[device_type]
