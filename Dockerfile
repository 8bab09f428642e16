# flatout in a container. Build it in a checkout, with BuildKit (the default of Docker 23 and newer):
#
#   docker build -t flatout .
#   docker build -t flatout:cpu --build-arg DEVICE=cpu --build-arg TORCH_INDEX=URL .
#   docker run --rm --init --gpus all --user "$(id -u):$(id -g)" -v "$PWD:/data" flatout doctor
#
# PYTHON       version of Python
# DEVICE       cuda: the torch of the package index, with CUDA; cpu: the smaller torch of TORCH_INDEX, without it
# TORCH_INDEX  index with torch for the CPU, needed by DEVICE=cpu; docs/install.md says where to find its address
# EXTRAS       extras of flatout, as pyproject.toml lists them
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS wheel
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY cfg cfg
COPY data data
COPY weights weights
COPY flatout flatout
# By variable, constraints reach the isolated build as well; pip 25.3 and newer read the second one for it.
RUN PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
    pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm
# For what is compiled at first use: the C painter (docs/augment.md), and Triton's kernels.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
# The home belongs to everybody, so that `docker run --user` may name any user; torch asks for the name of this user.
RUN useradd --uid 1000 --create-home flatout \
    && mkdir -p /home/flatout/.cache /data \
    && chmod 1777 /home/flatout /home/flatout/.cache /data
ENV HOME=/home/flatout USER=flatout TRITON_CACHE_DIR=/home/flatout/.cache/triton PYTHONUNBUFFERED=1 \
    PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY constraints.txt /opt/flatout/constraints.txt

# torch is most of the image, and has a layer of its own that a change of flatout does not touch.
# A build for the CPU is version X+cpu, which pip prefers to X wherever it sees both.
ARG DEVICE=cuda
ARG TORCH_INDEX=
RUN case "$DEVICE:$TORCH_INDEX" in \
        cuda:*|cpu:?*) ;; \
        cpu:) echo "DEVICE=cpu needs --build-arg TORCH_INDEX=URL, an index with torch for the CPU." >&2; exit 1 ;; \
        *) echo "DEVICE=$DEVICE: use cuda or cpu." >&2; exit 1 ;; \
    esac \
    && pip install --no-cache-dir --constraint /opt/flatout/constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch \
    && built=$(python -W ignore -c 'import torch; print("cuda" if torch.version.cuda else "cpu")') \
    && if [ "$built" != "$DEVICE" ]; then echo "DEVICE=$DEVICE, but pip installed torch for $built." >&2; exit 1; fi

ARG EXTRAS=eval,export,tb,cloud
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    for wheel in /wheels/flatout-*.whl; do \
        pip install --no-cache-dir --constraint /opt/flatout/constraints.txt "${wheel}${EXTRAS:+[$EXTRAS]}" || exit 1; \
    done \
    && flatout --version

USER 1000
WORKDIR /data
ENTRYPOINT ["flatout"]
CMD ["--help"]
