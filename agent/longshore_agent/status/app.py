"""The agent's HTTP pages: health, metrics, status, rooms, plans, registered instances, a web page. Created by `main`.

Every response but the web page uses one snapshot of a `StatusSource`. All pages are read-only, and no page shows a token or
a byte of the cache.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Protocol

import msgspec
from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.routing import Route

from longshore_agent.settings import Settings
from longshore_agent.status import rooms, web_page
from longshore_agent.status.findings import Check, Judge, Rules, Verdict, liveness
from longshore_agent.status.metrics import CONTENT_TYPE, MetricsSnapshot, judged, render
from longshore_agent.status.plans import PlanDefaults, PlanQuery, PlanView, answer
from longshore_agent.status.snapshot import AgentSnapshot
from longshore_agent.transports.own_network import host_identity
from longshore_spec.status import AgentStatus, InstanceStatus, Severity
from longshore_wire.errors import LongshoreError, Reason
from longshore_wire.names import ROOM_NAME, UNKNOWN_WIRE

# The label `worker` of the supervisor's own metrics.
SUPERVISOR = "supervisor"


class StatusSource(Protocol):
    """The source of the pages' snapshots: the supervisor."""

    def snapshot(self, room: str | None = None) -> AgentSnapshot:
        """Return the current state. Called from several HTTP threads concurrently.

        A worker that does not answer in time appears with its last known state and `silent_s`.

        Args:
            room: workers include this room and its spans.
        Raises:
            LongshoreError: SHUTTING_DOWN, or another reason if the supervisor does not answer.
        """


class ErrorBody(msgspec.Struct, frozen=True):
    """Why a request failed. `faults` has one line for each fault, which begins with the parameter's name."""

    reason: str
    text: str
    faults: tuple[str, ...] = ()


class InstanceList(msgspec.Struct, frozen=True):
    """The engine instances that are registered with this agent. The agent lists them and does not route requests."""

    deployment: str
    node: str
    instances: tuple[InstanceStatus, ...]


class _RefusalError(Exception):
    """Ends a request with one of our error bodies."""

    def __init__(self, status: int, body: ErrorBody) -> None:
        super().__init__(body.text)
        self.status = status
        self.body = body


_SCHEMA_REFERENCE = "#/components/schemas/{name}"
_BODIES = (AgentStatus, Verdict, rooms.RoomList, rooms.RoomDetail, PlanView, InstanceList, ErrorBody)
_JSON = "application/json"
# Characters of an unknown path in its 404 response.
_SHOWN_CHARACTERS_MAX = 100


def create_app(source: StatusSource, rules: Rules | None = None, plan_defaults: PlanDefaults | None = None) -> FastAPI:
    """Return the application.

    Args:
        rules: the requirements of readiness; None for those of the default settings.
        plan_defaults: values for fields that a query of a plan omits.
    """
    app = FastAPI(title="Longshore agent", docs_url=None, redoc_url=None, openapi_url=None)
    judge = Judge(rules or Rules.of(Settings()))
    _add_web_page(app)
    _add_health(app, source, judge)
    _add_status(app, source, judge)
    _add_rooms(app, source)
    _add_plans(app, source, plan_defaults or PlanDefaults())
    _add_openapi(app)
    _add_errors(app)
    return app


def _add_web_page(app: FastAPI) -> None:
    # By this the page's script knows the agent to which a reader gave the token. It says nothing about the agent.
    headers = web_page.HEADERS | {"longshore-agent": secrets.token_hex(16)}

    # A coroutine, since it takes none of the threads of the other pages.
    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def web() -> Response:
        return Response(web_page.BODY, headers=headers)


def _add_health(app: FastAPI, source: StatusSource, judge: Judge) -> None:
    @app.get("/healthz", **_answers(Verdict, {503: Verdict}))
    def healthz() -> Response:
        """Whether the supervisor works. If not, the agent must be restarted."""
        verdict = _judged(source, liveness)
        return _json(verdict, 200 if verdict.ok else 503)

    @app.get("/readyz", **_answers(Verdict, {503: Verdict}))
    def readyz() -> Response:
        """Whether engines may use this agent, with every check and its reason."""
        verdict = _judged(source, judge.readiness)
        return _json(verdict, 200 if verdict.ok else 503)

    @app.get(
        "/metrics",
        response_model=None,
        response_class=Response,
        responses={200: {"content": {"text/plain": {}}}, 503: _body(ErrorBody)},
    )
    def metrics() -> Response:
        """All metrics of the supervisor and of each worker, for Prometheus."""
        snapshot = _asked(source)
        findings = judge.findings(snapshot)
        ready = all(finding.severity is not Severity.CRITICAL for finding in findings)
        counts = {SUPERVISOR: (*judged(findings, "", ready=ready), *snapshot.metrics.series)}
        counts |= {
            worker.worker: (*judged(findings, worker.worker), *worker.metrics.series) for worker in snapshot.workers
        }
        assert len(counts) == len(snapshot.workers) + 1, [worker.worker for worker in snapshot.workers]
        text = render({name: MetricsSnapshot(series) for name, series in counts.items()})
        return Response(text, headers={"content-type": CONTENT_TYPE})


def _add_status(app: FastAPI, source: StatusSource, judge: Judge) -> None:
    @app.get("/v1/status", **_answers(AgentStatus))
    def status() -> Response:
        """The agent, what is wrong with it, its workers, engines, peers, rings and lanes. Rooms and metrics have their own pages."""
        snapshot = _asked(source)
        return _json(snapshot.status(judge.findings(snapshot)))

    @app.get("/v1/bootstrap", **_answers(InstanceList))
    def bootstrap() -> Response:
        """The engine instances that are registered here, with the address of each rank's worker."""
        snapshot = _asked(source)
        return _json(InstanceList(snapshot.deployment, snapshot.node, snapshot.instances))


def _add_rooms(app: FastAPI, source: StatusSource) -> None:
    @app.get("/v1/rooms", **_answers(rooms.RoomList, {422: ErrorBody}))
    def room_list(
        limit: Annotated[
            int, Query(ge=1, le=rooms.PAGE_MAX, description="Maximum number of rooms in the response.")
        ] = 100,
        after: Annotated[str, Query(description="`next` of the previous page.")] = "",
        half: Annotated[Literal["source", "target"] | None, Query(description="Show only this half.")] = None,
        ended: Annotated[bool | None, Query(description="Show only ended rooms, or only open ones.")] = None,
    ) -> Response:
        """The rooms of all workers by id: the oldest open ones and the newest ended ones."""
        try:
            return _json(rooms.page(_asked(source), limit=limit, after=after, half=half, ended=ended))
        except ValueError as error:
            raise _RefusalError(422, ErrorBody("BadRequest", f"after: {error}", (f"after: {error}",))) from error

    @app.get("/v1/rooms/{room}", **_answers(rooms.RoomDetail, {404: ErrorBody, 422: ErrorBody}))
    def room_detail(
        room: Annotated[
            str,
            Path(pattern=ROOM_NAME, description="The room's name: its number below 2**32, and else a digest of it."),
        ],
        instance: Annotated[str | None, Query(description="Show only rooms of this prefill instance.")] = None,
    ) -> Response:
        """One room: each of its halves at this agent, its pairs of ranks, and the spans of its slabs and messages."""
        received_ns = time.monotonic_ns()
        found = rooms.detail(_asked(source, room), room, instance)
        if found is None:
            raise _RefusalError(404, ErrorBody("UnknownRoom", f"no worker of this agent knows room {room}"))
        clock = rooms.Clock(host_identity(), received_ns, time.monotonic_ns())
        return _json(msgspec.structs.replace(found, clock=clock))


def _add_plans(app: FastAPI, source: StatusSource, defaults: PlanDefaults) -> None:
    @app.get("/v1/plan", **_answers(PlanView, {404: ErrorBody, 422: ErrorBody}))
    def plan(query: Annotated[PlanQuery, Query()]) -> Response:
        """The plan between two layouts, or between two instances that are registered here."""
        snapshot = _asked(source)
        wire = snapshot.self_test.wire if snapshot.self_test is not None else UNKNOWN_WIRE
        engines = tuple(engine for worker in snapshot.workers for engine in worker.engines)
        try:
            return _json(answer(query, snapshot.instances, defaults, wire, engines))
        except LongshoreError as error:
            unknown = error.reason is Reason.UNKNOWN_INSTANCE
            body = ErrorBody("UnknownInstance" if unknown else "LayoutMismatch", str(error), (str(error),))
            raise _RefusalError(404 if unknown else 422, body) from error


def _asked(source: StatusSource, room: str | None = None) -> AgentSnapshot:
    """Return a snapshot; end the request with 503 if there is none."""
    try:
        return source.snapshot(room)
    except LongshoreError as error:
        raise _RefusalError(503, ErrorBody(_absence(error), str(error))) from error


def _judged(source: StatusSource, judge: Callable[[AgentSnapshot], Verdict]) -> Verdict:
    """Return a verdict. A missing snapshot gives a failed one, since probes need yes or no with a reason."""
    try:
        return judge(source.snapshot())
    except LongshoreError as error:
        return Verdict.of([Check("Supervisor", ok=False, reason=_absence(error), message=str(error))])


def _absence(error: LongshoreError) -> str:
    return "ShuttingDown" if error.reason is Reason.SHUTTING_DOWN else "LoopHangs"


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=_JSON)


def _answers(body: type[msgspec.Struct], others: Mapping[int, type[msgspec.Struct]] | None = None) -> dict[str, Any]:
    """Return a route's arguments that document its bodies in place of FastAPI's own.

    Args:
        others: the bodies of other statuses than 200, in addition to the error that 503 has on each path.
    """
    found: dict[int, type[msgspec.Struct]] = {200: body, 503: ErrorBody, **(others or {})}
    responses = {code: _body(kind) for code, kind in sorted(found.items())}
    return {"response_model": None, "response_class": Response, "responses": responses}


def _body(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        "description": (kind.__doc__ or kind.__name__).partition("\n")[0],
        "content": {_JSON: {"schema": {"$ref": _SCHEMA_REFERENCE.format(name=kind.__name__)}}},
    }


def _add_openapi(app: FastAPI) -> None:
    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> dict[str, Any]:
        return app.openapi()

    def made() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version="v1", routes=app.routes)
            _, components = msgspec.json.schema_components(_BODIES, ref_template=_SCHEMA_REFERENCE)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = schema
        return app.openapi_schema

    replace: Callable[[], dict[str, Any]] = made
    app.openapi = replace  # type: ignore[method-assign]


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(_RefusalError)
    def refusal(_request: Request, error: _RefusalError) -> Response:
        return _json(error.body, error.status)

    @app.exception_handler(RequestValidationError)
    def invalid(_request: Request, error: RequestValidationError) -> Response:
        faults = tuple(f"{'.'.join(str(part) for part in e['loc'][1:])}: {e['msg']}" for e in error.errors())
        return _json(ErrorBody("BadRequest", "; ".join(faults), faults), 422)

    @app.exception_handler(HTTPException)
    def plain(request: Request, error: HTTPException) -> Response:
        path = request.url.path[:_SHOWN_CHARACTERS_MAX]
        if error.status_code == 404:  # noqa: PLR2004
            pages = ", ".join(route.path for route in app.routes if isinstance(route, Route))
            return _json(ErrorBody("UnknownPath", f"no page has the path {path}: there are {pages}"), 404)
        if error.status_code == 405:  # noqa: PLR2004
            text = f"{request.method} is not for {path}: pages are read by GET"
            return _json(ErrorBody("MethodNotAllowed", text), 405)
        return _json(ErrorBody("BadRequest", str(error.detail)), error.status_code)
