# The trainer and vLLM for NVIDIA GPUs: docker build --tag eagle31 .
# The devel image has nvcc, with which DeepSpeed and vLLM compile operators.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
SHELL ["/bin/bash", "-e", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git libibverbs1 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
# The commands install packages for CUDA where nvidia-smi is, which a container has only when it runs.
RUN ln -s /bin/true /usr/local/bin/nvidia-smi
ENV EAGLE31_VLLM_ENV=/opt/vllm PIP_NO_CACHE_DIR=1 UV_NO_CACHE=1
WORKDIR /eagle31
COPY scripts/setup scripts/setup
RUN scripts/setup/vllm
COPY . .
RUN . scripts/setup/project_environment.sh; ensure_environment train; rm /usr/local/bin/nvidia-smi
ENV PATH=/eagle31/.venv/bin:$PATH
