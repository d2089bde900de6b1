"""One HTTP server that plays the status page of every agent: KWOK's pods have addresses of loopback, and no process."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


class AgentResponder:
    """Answers on every address of loopback. `answers` are by address; `silent` addresses get no answer."""

    def __init__(self, port: int) -> None:
        self.answers: dict[str, Body] = {}
        self.silent: set[str] = set()
        self.asked: set[str] = set()
        self.port = port
        responder = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                address = self.connection.getsockname()[0]
                responder.asked.add(address)
                if address in responder.silent:
                    return
                data = json.dumps(responder.answers.get(address, report())).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

        self._server = Server(("0.0.0.0", port), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def report(*instances: Body, peers: tuple[Body, ...] = (), roles: tuple[str, ...] = ()) -> Body:
    """What an agent says: these instances, and one worker with these peers if there are any."""
    engines = [{"instance": entry["instance"], "rank": 0, "roles": entry["roles"]} for entry in instances]
    worker = {"worker": "w/0/0", "engines": engines, "peers": list(peers)}
    return {
        "deployment": "x/y",
        "node": "n",
        "instances": list(instances),
        "workers": [worker] if instances or peers else [],
    }


def instance(name: str, role: str, *, complete: bool = True) -> Body:
    """One instance as an agent lists it; `role` is source or target."""
    return {"instance": name, "roles": [role], "complete": complete}


def peer(name: str, wire: str, state: str = "attached") -> Body:
    """One peer as a worker lists it."""
    return {"instance": name, "dp_rank": 0, "rank": 0, "state": state, "wire": wire}
