"""The HTTP interface: POST /v1/predict, /v1/embed, /v1/attention, GET /v1/models, /livez, /readyz, /metrics; the page.

No request can name a file or an address: only uploaded bytes are read. FastAPI's documentation pages are switched off
because they load scripts from other servers; /openapi.json describes the interface.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route

from vitrail.errors import UsageError
from vitrail.server.clients import Clients
from vitrail.server.guard import Guard, as_response, problem_response
from vitrail.server.limits import Refused
from vitrail.server.metrics import MEDIA_TYPE
from vitrail.server.responses import (
    IMAGE_BODY,
    REFUSALS,
    Attention,
    Embedding,
    ImageFeatures,
    ImagePrediction,
    Models,
    Prediction,
    Problem,
    RequestLimits,
)
from vitrail.server.served_model import TOP, AttentionQuery, ServedModel
from vitrail.server.service import FileResult, Service, seconds_since
from vitrail.server.upload import FORM
from vitrail.version import __version__

SCRIPTS = ("page.js", "column.js", "draw.js", "ask.js")
PAGE = {"/": "index.html"} | {f"/{name}": name for name in ("page.css", "mark.svg", *SCRIPTS)}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POSTS = ("/v1/predict", "/v1/embed", "/v1/attention")
GETS = ("/v1/models", "/openapi.json", "/livez", "/readyz", "/metrics")
PATHS = (*POSTS, *GETS, *PAGE)
POST: dict[str, Any] = {"openapi_extra": {"requestBody": IMAGE_BODY}, "responses": REFUSALS}

ModelName = Annotated[str | None, Query(description="Name of a model, as in /v1/models (default: the first)")]
Top = Annotated[int, Query(ge=1, le=TOP, description="Number of classes to return per image")]
Crop = Annotated[bool, Query(description="Whether to return the part of each image that the network saw")]


def create_app(service: Service, clients: Clients | None = None) -> Guard:
    """Return the ASGI application that passes requests to `service`; it starts and stops the service.

    `clients` are those that may use it; by default only those of this machine.
    """
    clients = clients or Clients()
    if any(path.startswith(f"{clients.root_path}/") for path in PATHS if clients.root_path):
        raise UsageError(f"--root-path is {clients.root_path}, where the server's own addresses begin. Choose another")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.stop()

    about = "Classes of images, their features, and where a Vision Transformer looks."
    app = FastAPI(
        title="vitrail", version=__version__, description=about, lifespan=lifespan, docs_url=None, redoc_url=None
    )
    _add_posts(app, service)
    _add_gets(app, service)
    _add_page(app)
    _add_problems(app, service, clients)
    return Guard(app, service.limits, clients, service.metrics, service.bodies, PATHS)


def _add_posts(app: FastAPI, service: Service) -> None:
    @app.post("/v1/predict", response_model=Prediction, **POST)
    async def predict(request: Request, model: ModelName = None, top: Top = 5, crop: Crop = False) -> Any:
        """Predict the classes of one or more images."""
        began, served = time.perf_counter(), service.model(model)
        outcomes = await service.process(request, served, served.rank)
        crops = await asyncio.to_thread(_crops, outcomes) if crop else [None] * len(outcomes)
        images = []
        for one, image in zip(outcomes, crops, strict=True):
            found = {"top": []} if one.refused else served.values(one.value, top)
            images.append(ImagePrediction(one.name, problem=_problem(one), crop=image, **found))
            for counted in () if one.refused else served.counted(one.value):
                service.metrics.predicted(served.name, *counted)
        return _if_all_refused(outcomes) or Prediction(*_who(served), images, seconds_since(began))

    @app.post("/v1/embed", response_model=Embedding, **POST)
    async def embed(request: Request, model: ModelName = None) -> Any:
        """Return the features of one or more images: the input of the classifier."""
        began, served = time.perf_counter(), service.model(model)
        outcomes = await service.process(request, served, served.features)
        images = [ImageFeatures(one.name, [] if one.refused else one.value.tolist(), _problem(one)) for one in outcomes]
        width = max(len(one.features) for one in images)
        return _if_all_refused(outcomes) or Embedding(*_who(served), width, images, seconds_since(began))

    @app.post("/v1/attention", response_model=Attention, **POST)
    async def attention(
        request: Request,
        model: ModelName = None,
        layer: Annotated[
            int, Query(description="Number of the layer, from 0; negative numbers count from the last")
        ] = -1,
        head: Annotated[
            int | None, Query(ge=0, description="Number of the head, from 0 (default: the mean of all heads)")
        ] = None,
        row: Annotated[int | None, Query(ge=0, description="Row of a patch, from 0; needs column")] = None,
        column: Annotated[int | None, Query(ge=0, description="Column of a patch, from 0; needs row")] = None,
    ) -> Any:
        """Return where the network looks in one image."""
        began, served = time.perf_counter(), service.model(model)
        if (row is None) != (column is None):
            raise Refused(422, "query", "a patch needs a row and a column: give both or neither")
        what = AttentionQuery(layer, head, None if row is None or column is None else (row, column))
        outcomes = await service.process(request, served, served.look, what)
        return _if_all_refused(outcomes) or Attention(*_who(served), seconds=seconds_since(began), **outcomes[0].value)


def _who(served: ServedModel) -> tuple[str, str, str]:
    """Return who answered: the first three fields of every response."""
    return served.name, served.weights_sha256, __version__


def _crops(outcomes: list[FileResult]) -> list[str | None]:
    return [None if one.prepared is None else one.prepared.crop() for one in outcomes]


def _problem(outcome: FileResult) -> Problem | None:
    return Problem(**outcome.refused.as_json()) if outcome.refused else None


def _if_all_refused(outcomes: list[FileResult]) -> JSONResponse | None:
    """Return the refusal of the first image if all were refused, else None."""
    refusals = [one.refused for one in outcomes if one.refused is not None]
    return as_response(refusals[0]) if len(refusals) == len(outcomes) else None


def _add_gets(app: FastAPI, service: Service) -> None:
    limits = RequestLimits(service.limits.body, service.limits.pixels, service.limits.images)

    @app.get("/v1/models")
    def models() -> Models:  # in a thread: before the server is ready, it waits for the checksums
        """List the models with their cards, and the limits of requests."""
        return Models([served.description for served in service.models.values()], limits, __version__)

    @app.get("/livez", response_class=PlainTextResponse)
    async def livez() -> str:
        """Respond with 200 while the process runs."""
        return "alive\n"

    @app.get("/readyz", response_class=PlainTextResponse)
    async def readyz(response: Response) -> str:
        """Respond with 200 while the server accepts images, else with 503."""
        if service.ready:
            return "ready\n"
        refused = service.not_ready()
        response.status_code, response.headers["Retry-After"] = refused.status, str(refused.retry_after)
        return f"{refused}\n"

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return counts and times in the text format of Prometheus."""
        return Response(service.metrics.text(), media_type=MEDIA_TYPE)


def _add_page(app: FastAPI) -> None:
    folder = files("vitrail.server") / "page"
    for path, name in PAGE.items():
        content, kind = (folder / name).read_bytes(), TYPES[name.rpartition(".")[2]]
        app.router.routes.append(Route(path, Response(content, media_type=kind), methods=["GET"]))


def _add_problems(app: FastAPI, service: Service, clients: Clients) -> None:
    below = [[clients.root_path + path for path in paths] for paths in (POSTS, GETS)]
    nothing = (
        f"there is nothing at this address. Valid are POST {', '.join(below[0])}; GET {', '.join(below[1])}, and the "
        f"page {clients.root_path}/"
    )

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        service.metrics.refused.labels(error.reason).inc()
        return as_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # says what is wrong with query values, without repeating the values
        problems = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()]
        return await refused(request, Refused(422, "query", "; ".join(problems)))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        reason, message = "http", str(error.detail)
        if error.status_code == 405:
            reason, message = "method", _valid_request(request.url.path, (error.headers or {}).get("Allow", "GET"))
        if error.status_code == 404:
            reason, message = "no-such-path", nothing
        return problem_response(error.status_code, {"reason": reason, "message": message}, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> JSONResponse:
        # the error is raised again afterwards, and logged with its traceback
        return problem_response(500, {"reason": "failed", "message": "the server failed on this request"})


def _valid_request(path: str, methods: str) -> str:
    """Return what a request to `path`, one of the application's, must be: it allows these `methods` only."""
    if methods != "POST":
        return f"{path} is valid with {methods} only"
    return f"{path} is valid with POST only: send an image as the body, or a form ({FORM}) with files named image"
