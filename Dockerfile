# vitrail for serving, without root, with all engines. The second stage has no compiler and no package cache.
#   docker build -t vitrail .                       # --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 for CUDA
#   docker run --rm -p 8000:8000 -v $PWD/runs/scratch-photos-1:/model:ro vitrail serve /model --host 0.0.0.0 --allow-host localhost
#   docker build -t vitrail-train --build-arg EXTRAS=train .                                                # for training
#   docker run --rm -v $PWD/photos:/data:ro -v $PWD/runs:/work/runs vitrail-train train /data
# Versions: constraints.txt (see CONTRIBUTING.md) and PYTHON, which also takes TAG@sha256:DIGEST.
ARG PYTHON=3.12.12-slim-bookworm
FROM python:$PYTHON AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=serve,engines
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/vitrail
ENV PATH=/opt/vitrail/bin:$PATH
WORKDIR /src
# first what vitrail needs, so that a change of its source does not install torch again
COPY pyproject.toml constraints.txt ./
RUN pip install --no-deps --index-url "$TORCH_INDEX" --constraint constraints.txt torch
RUN python -c "import sys, tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*project['dependencies'], *(one for extra in filter(None, sys.argv[1].split(',')) for one in project['optional-dependencies'][extra]), sep='\n')" \
    "$EXTRAS" > requirements.txt && pip install --constraint constraints.txt --requirement requirements.txt
COPY README.md LICENSE MANIFEST.in ./
COPY vitrail vitrail
RUN pip install --no-deps --no-build-isolation .

FROM python:$PYTHON
RUN useradd --create-home --uid 1000 vitrail && mkdir /work && chown vitrail /work
COPY --from=build /opt/vitrail /opt/vitrail
ENV PATH=/opt/vitrail/bin:$PATH PYTHONUNBUFFERED=1 MPLBACKEND=Agg VITRAIL_CACHE=/work/cache
USER 1000
WORKDIR /work
EXPOSE 8000
# it asks the server at the --port of the container's command; a container that does not serve is healthy
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s CMD ["python", "-m", "vitrail.server.health"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["vitrail"]
CMD ["--help"]
