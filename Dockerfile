# On the CPU:   docker build -t featcal --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .
#               docker run --rm -v "$PWD:/work" featcal
# With CUDA:    docker build -t featcal --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 .
#               docker run --rm --gpus all -v "$PWD:/work" -v featcal:/root/.cache featcal calibrate user/merged
# The index has torch without CUDA's libraries, which are gigabytes; the volume keeps what was downloaded. Any Debian or
# Ubuntu with Python 3.10 or newer will do as base. Without a command, the image runs the demo.
ARG BASE=debian:bookworm-slim
FROM ${BASE}
ARG PIP_EXTRA_INDEX_URL

RUN apt-get update -q \
    && apt-get install -y -q --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN python3 -m venv /opt/featcal \
    && /opt/featcal/bin/pip install -q --no-cache-dir -c /src/constraints.txt /src \
    && rm -rf /src

ENV PATH=/opt/featcal/bin:$PATH
WORKDIR /work
ENTRYPOINT ["featcal"]
CMD ["demo"]
