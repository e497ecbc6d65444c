# On the CPU:   docker build -t featcal . && docker run --rm -v "$PWD:/work" featcal
#               (on x86, PyPI's torch brings CUDA's libraries, gigabytes, which a CPU does not need)
# With CUDA:    docker build -t featcal --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 .
#               docker run --rm --gpus all -v "$PWD:/work" featcal calibrate user/merged
# Any Debian or Ubuntu with Python 3.10 or newer will do as base. Without a command, the image runs the demo.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

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
