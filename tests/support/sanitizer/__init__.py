"""Happens-before sanitizer for the GPU code paths, on CPU ranks.

The runtime, its channels and copy engines, and Megatron run as they do on a GPU. Every operation
takes effect at once on CPU memory, so that numbers stay right, and is noted as a kernel on the fake
stream that is current, with the bytes that it reads and writes. Events and waits build vector
clocks, as in ``torch.cuda._sanitizer``, which cannot be fed without a device.

- :mod:`sanitizer.order`: clocks, memory, and what is reported
- :mod:`sanitizer.device`: what takes the place of torch.cuda and of NCCL in a process
- :mod:`sanitizer.plants`: bugs that have to be found
- :mod:`sanitizer.trials`: the runs

NCCL is modelled strictly: the kernel of a message waits for the stream that is current at the call,
and no memory is kept alive by it.

Not seen: the streams of single autograd nodes (a backward runs inline on a CPU), which bytes a view
leaves out between its first and its last, how long kernels last, and Megatron's collectives apart
from each other, which are taken to run on one stream.
"""
