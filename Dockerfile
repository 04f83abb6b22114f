# Megatron-LM with the schedules of this package, for one GPU host or many: docker build -t megatron-zb .
# It has been checked by parsing alone (tests/docs/test_examples.py): no machine that builds images was there.
# The base is the image that Megatron-LM 0.16.1 is tested with (its docker/.ngc_version.dev): torch, Transformer-Engine
# and apex, built for each other: --no-deps leaves them as they are.
ARG BASE=nvcr.io/nvidia/pytorch:25.11-py3
FROM ${BASE}

ARG MEGATRON_LM=core_v0.16.1
RUN pip install --no-cache-dir einops pybind11 regex six tensorboard transformers \
    && git clone --depth 1 --branch ${MEGATRON_LM} https://github.com/NVIDIA/Megatron-LM.git /opt/Megatron-LM \
    && pip install --no-cache-dir --no-build-isolation --no-deps /opt/Megatron-LM

WORKDIR /opt/megatron-zb
COPY setup.py pyproject.toml README.md LICENSE ./
COPY megatron_zb megatron_zb
COPY configs configs
COPY scripts scripts
COPY patches patches
RUN pip install --no-cache-dir --no-build-isolation --no-deps . \
    && pip install --no-cache-dir jinja2 matplotlib numba numpy packaging psutil "pydantic >= 2.7, < 3" "pyyaml >= 6, < 7" rich

ENV MEGATRON_LM_PATH=/opt/Megatron-LM \
    PYTHONUNBUFFERED=1
CMD ["megatron-zb", "doctor", "/opt/Megatron-LM"]
