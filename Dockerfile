# vitrail for training and for serving, without root. The second stage has no compiler and no package cache.
#   docker build -t vitrail .                                           # CPU; --build-arg TORCH_INDEX=... for CUDA
#   docker run --rm -v $PWD/photos:/data:ro -v $PWD/runs:/work/runs vitrail train /data
#   docker run --rm -p 8000:8000 -v $PWD/runs/train-1:/model:ro vitrail serve /model --host 0.0.0.0 --allow-host localhost
FROM python:3.12-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/vitrail
ENV PATH=/opt/vitrail/bin:$PATH
RUN pip install --index-url "$TORCH_INDEX" "torch>=2.13"
WORKDIR /src
COPY pyproject.toml README.md LICENSE MANIFEST.in ./
COPY vitrail vitrail
ARG EXTRAS=serve
# hadolint ignore=DL3013
RUN pip install ".[$EXTRAS]"

FROM python:3.12-slim
RUN useradd --create-home --uid 1000 vitrail && mkdir /work && chown vitrail /work
COPY --from=build /opt/vitrail /opt/vitrail
ENV PATH=/opt/vitrail/bin:$PATH PYTHONUNBUFFERED=1 MPLBACKEND=Agg VITRAIL_CACHE=/work/cache
USER 1000
WORKDIR /work
EXPOSE 8000
# only a server answers; a training run has no port, so it counts as healthy
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "import pathlib, sys, urllib.request as u; b'serve' not in pathlib.Path('/proc/1/cmdline').read_bytes() or sys.exit(u.urlopen('http://127.0.0.1:8000/readyz', timeout=4).status != 200)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["vitrail"]
CMD ["--help"]
