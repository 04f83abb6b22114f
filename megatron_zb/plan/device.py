"""Description of a GPU and its links for the planner: ``configs/devices/*.yaml``."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from megatron_zb.measured import config
from megatron_zb.measured.config import Section
from megatron_zb.parsing import GIB

_SOURCE = Field(
    min_length=1, max_length=500, description="where it comes from", examples=["data sheet"]
)


class Rate(Section):
    """A speed as the data sheet has it, and the share of it that real kernels reach."""

    peak: float = Field(
        gt=0, lt=1e24, description="FLOP/s or bytes/s of the data sheet", examples=["3.12e+14"]
    )
    efficiency: float = Field(
        gt=0, le=1, description="share of the peak that is reached", examples=[0.75]
    )
    source: str = _SOURCE

    @property
    def reached(self) -> float:
        return self.peak * self.efficiency


class DeviceMemory(Section):
    """Memory of a GPU in GiB."""

    size_gib: float = Field(
        gt=0, lt=1e6, description="all of it, as the driver gives it", examples=[79.1]
    )
    reserved_gib: float = Field(
        ge=0, lt=1e6, description="CUDA context and communicators", examples=[2.0]
    )
    fragmentation: float = Field(
        0.03, ge=0, lt=0.5, description="share that the allocator cannot use", examples=[0.03]
    )
    source: str = _SOURCE


class Kernels(Section):
    """Overhead of a kernel besides its work: its start, its first and last tiles, the gap after it.

    It makes a small microbatch less efficient than a large one.
    """

    seconds: float = Field(
        ge=0, lt=1, description="seconds lost at every kernel", examples=["8.0e-06"]
    )
    source: str = _SOURCE


class Link(Section):
    """Bandwidth and latency of a link, for one GPU."""

    bandwidth: float = Field(
        gt=0, lt=1e18, description="bytes/s in one direction, as reached", examples=["2.0e+11"]
    )
    latency: float = Field(ge=0, lt=10, description="seconds of a message", examples=["2.0e-05"])
    source: str = _SOURCE

    def seconds(self, size: float) -> float:
        """Return the seconds of one message of ``size`` bytes."""
        return self.latency + size / self.bandwidth


class Places(Section):
    """Links inside a node and between nodes."""

    in_node: Link = Field(description="between GPUs of one node")
    between_nodes: Link = Field(description="between nodes, for each GPU")


class HostLink(Section):
    """Link to the host's memory, for offload."""

    bandwidth: float = Field(
        gt=0, lt=1e18, description="bytes/s in one direction, as reached", examples=["2.5e+10"]
    )
    gpus: int = Field(
        1, gt=0, le=100_000, description="GPUs that share it, all at once", examples=[2]
    )
    full_duplex: bool = Field(True, description="whether both directions run at once")
    memory_gib: float = Field(
        gt=0, lt=1e6, description="memory of the host for each GPU", examples=[200]
    )
    source: str = _SOURCE

    def seconds(self, size: float) -> float:
        """Return the seconds in which ``size`` bytes are copied one way."""
        return size * self.gpus / self.bandwidth

    @property
    def memory_bytes(self) -> float:
        """Bytes of the host for each GPU."""
        return self.memory_gib * GIB


class Node(Section):
    """Number of GPUs that share the fast link."""

    gpus: int = Field(gt=0, le=100_000, description="GPUs of a node", examples=[8])
    source: str = _SOURCE


class DeviceConfig(Section):
    """One GPU of a cluster, for training in bf16 or fp16, or with fp8 in the layers."""

    name: str = Field(min_length=1, max_length=80, description="as shown", examples=["H100 SXM"])
    memory: DeviceMemory = Field(description="memory of a GPU")
    node: Node = Field(description="a node")
    matrix_products: Rate = Field(description="FLOP/s of dense 16-bit matrix products")
    fp8_products: Rate | None = Field(None, description="the same in fp8, if the GPU has it")
    attention: Rate = Field(description="FLOP/s of the products with attention scores")
    memory_bandwidth: Rate = Field(description="bytes/s of kernels that compute little")
    kernels: Kernels = Field(description="what is lost at every kernel")
    collectives: Places = Field(description="links under all-reduce, all-gather and all-to-all")
    messages: Places = Field(description="links under the messages between pipeline ranks")
    host: HostLink | None = Field(None, description="link to the memory of the host")

    @property
    def memory_bytes(self) -> float:
        return self.memory.size_gib * GIB

    @property
    def reserved_bytes(self) -> float:
        """Bytes that a model cannot use: CUDA context, communicators and fragmentation."""
        return self.memory.reserved_gib * GIB + self.fragmentation_bytes

    @property
    def fragmentation_bytes(self) -> float:
        return self.memory.fragmentation * self.memory_bytes

    def with_memory(self, size: float) -> DeviceConfig:
        """Return the same GPU with another size of memory, in bytes."""
        memory = self.memory.model_copy(update={"size_gib": size / GIB})
        return self.model_copy(update={"memory": memory})


def read_device(path: Path) -> DeviceConfig:
    """Read a file of ``configs/devices``.

    Raises:
        UsageError: the file or a field of it is wrong.
    """
    return config.read(path, DeviceConfig)
