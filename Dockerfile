# fsdp_qlora on NVIDIA GPUs. Not built yet as an image: its pip commands were run on a plain machine.
# Needs Docker with the NVIDIA container toolkit, and a driver for this CUDA.
#
#   docker build -t fsdp_qlora .
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD":/work fsdp_qlora doctor
#   docker run --rm --gpus all --ipc=host --ulimit memlock=-1 -v "$PWD":/work -v ~/.cache:/home/user/.cache \
#       fsdp_qlora train --model_name ./my-model --dataset rows.jsonl
#
# --ipc=host: ranks of a machine meet in shared memory. memlock: offload locks host memory.
# The user in it has id 1000; for another, add --user "$(id -u):$(id -g)".
ARG CUDA=13.0.1
FROM nvidia/cuda:${CUDA}-runtime-ubuntu24.04

# Triton compiles its launchers when it first runs: a C compiler and Python's headers.
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# Where torch comes from; for an older driver, such as https://download.pytorch.org/whl/cu128
ARG TORCH_INDEX=https://pypi.org/simple
COPY constraints.txt /src/
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir --index-url "${TORCH_INDEX}" \
        "$(grep '^torch==' /src/constraints.txt)"

COPY LICENSE README.md setup.cfg pyproject.toml /src/
COPY fsdp_qlora /src/fsdp_qlora
# torch is not in these constraints: what was installed above stays.
RUN grep -v '^torch==' /src/constraints.txt > /tmp/constraints.txt \
    && /opt/venv/bin/pip install --no-cache-dir -c /tmp/constraints.txt "/src[data,plot]" \
    && rm /tmp/constraints.txt

# A user without rights; the image's own `ubuntu` has the id that it takes.
RUN userdel --remove ubuntu && useradd --create-home --uid 1000 user \
    && mkdir /work && chown user /work
USER user
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR=/home/user/.cache/torchinductor
WORKDIR /work
ENTRYPOINT ["fsdp-qlora"]
CMD ["--help"]
