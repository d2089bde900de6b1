"""Serves liveness, readiness and metrics over HTTP. Called by `main`."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from longshore_operator.settings import Settings
from longshore_operator.watches import WatchCheck

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def faults(lags_s: dict[str, float], ended: list[str], limit_s: float) -> list[str]:
    """Return a reason to restart the operator for each dead watch."""
    return [f"{name}: it has ended by itself" for name in ended] + [
        f"the watch of {kind} has missed something for {lag_s:.0f} s, the limit is {limit_s:g} s"
        for kind, lag_s in sorted(lags_s.items())
        if lag_s > limit_s
    ]


async def serve(settings: Settings, check: WatchCheck, show: Callable[[], bytes]) -> web.AppRunner:
    """Start the server and return it. It is ready once the watches have delivered the existing objects, also as standby.

    Args:
        show: returns all metrics.
    """

    async def healthz(_request: web.Request) -> web.Response:
        found = faults(check.lags_s(), check.ended(), settings.watch_lag_limit_s)
        return web.Response(text="\n".join(found) or "ok", status=503 if found else 200)

    async def readyz(_request: web.Request) -> web.Response:
        missing = check.missing()
        text = f"watches have not delivered all of: {', '.join(missing)}" if missing else "ok"
        return web.Response(text=text, status=503 if missing else 200)

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=show(), headers={"Content-Type": _METRICS_TYPE})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, settings.http_host, settings.http_port).start()
    return runner
