"""Serves the page: a thread that polls for each run, and werkzeug's server, which answers each request on a thread of its own.

What always holds: it answers GET and HEAD only; where a cluster has a secret, only those who have the key, which follows from it and
tells nothing of it.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

from werkzeug.exceptions import HTTPException, MethodNotAllowed, Unauthorized
from werkzeug.routing import Map, Rule
from werkzeug.serving import BaseWSGIServer, WSGIRequestHandler, make_server
from werkzeug.utils import redirect
from werkzeug.wrappers import Request, Response

from torchquorum.clock import SYSTEM, Clock
from torchquorum.cluster.secret import Secret
from torchquorum.dashboard import live_page, metrics
from torchquorum.dashboard.followed import Followed

POLL_S = 0.2
LAST_WORD_S = 10.0  # so long after the end of all runs, browsers are told of it
ASKED_S = 5.0  # a browser that has asked so recently is still there
TOLD_S = 3.5  # by then every browser has asked again
KEY = "torchquorum_key"
_GUARD = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_ROUTES = Map(
    [
        Rule("/", endpoint="first"),
        Rule("/metrics", endpoint="metrics"),
        Rule("/run/<int:number>/", endpoint="page"),
        Rule("/run/<int:number>/now", endpoint="now"),
        Rule("/run/<int:number>/charts", endpoint="charts"),
        Rule("/run/<int:number>/status.json", endpoint="status"),
    ]
)


def key_of(secret: Secret) -> str:
    """Returns the key that opens the page of a cluster with a secret."""
    return secret.derive("the page of a dashboard").hex()[:32]


class Dashboard:
    """The page of some runs.

    Args:
        runs: What is followed.
        host: The address to serve on.
        port: The port; 0 for a free one.
        key: Who wants to see the page needs it; empty if everybody who can reach the port may.
        clock: Tells the time.

    Raises:
        OSError: The address cannot be served on.
    """

    def __init__(self, runs: Sequence[Followed], host: str, port: int, key: str = "", clock: Clock = SYSTEM) -> None:
        self._runs, self._key, self._clock = list(runs), key, clock
        self._stop = threading.Event()
        self._asked_at = -ASKED_S
        self._server: BaseWSGIServer = make_server(host, port, self._answer, threaded=True, request_handler=_Quiet)
        self._threads = [
            threading.Thread(target=self._follow, args=(run,), name="torchquorum-dashboard", daemon=True)
            for run in self._runs
        ]
        self._threads.append(
            threading.Thread(target=self._server.serve_forever, name="torchquorum-dashboard-server", daemon=True)
        )
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self._server.server_port}/" + (f"?key={key}" if key else "")

    def start(self) -> None:
        """Begins to follow and to serve."""
        for thread in self._threads:
            thread.start()

    def wait(self, stop: threading.Event) -> bool:
        """Returns True once all runs were seen to run and are over, and browsers have been told; False if `stop` is set before."""
        over_at: float | None = None
        while not self._clock.wait(stop, POLL_S):
            now = self._clock.now()
            over_at = (now if over_at is None else over_at) if all(run.over for run in self._runs) else None
            if over_at is not None and now - over_at > LAST_WORD_S:
                return True
        return False

    def finish(self) -> None:
        """The runs are over, as their launcher knows: if a browser is there, it is told, which takes a moment."""
        self._stop.set()
        for run, thread in zip(self._runs, self._threads, strict=False):
            thread.join(timeout=5.0)
            run.finish()
        if self._clock.now() - self._asked_at < ASKED_S:
            self._clock.sleep(TOLD_S)

    def close(self) -> None:
        """Ends the threads and the connections."""
        self._stop.set()
        if self._threads[-1].is_alive():
            self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=5.0)
        for run in self._runs:
            run.close()

    def _follow(self, run: Followed) -> None:
        while not self._stop.is_set():
            run.poll(POLL_S)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        request = Request(environ)
        try:
            response = self._route(request)
        except HTTPException as error:
            response = Response(f"{error.code} {error.name}: {error.description}\n", error.code, mimetype="text/plain")
        response.headers.extend(_GUARD)
        return response(environ, start_response)

    def _route(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            raise MethodNotAllowed(["GET", "HEAD"], "this page is read only")
        if self._key:
            given = request.args.get("key", "")
            if hmac.compare_digest(given.encode(), self._key.encode()):
                answer = redirect(request.path)
                answer.set_cookie(KEY, self._key, httponly=True, samesite="Strict")
                if request.path != "/metrics":
                    return answer
            elif not hmac.compare_digest(request.cookies.get(KEY, "").encode(), self._key.encode()):
                raise Unauthorized("open the address that `torchquorum dashboard` printed, with its key")
        endpoint, values = _ROUTES.bind_to_environ(request.environ).match()
        return self._make(endpoint, values.get("number", 0))

    def _make(self, endpoint: str, number: int) -> Response:
        self._asked_at = self._clock.now()
        if endpoint == "first":
            return redirect("/run/0/")
        if endpoint == "metrics":
            return Response(metrics.exposition([run.shown for run in self._runs]), content_type=metrics.CONTENT_TYPE)
        if not 0 <= number < len(self._runs):
            return Response("404 Not Found: no such run\n", 404, mimetype="text/plain")
        shown = self._runs[number].shown
        if endpoint == "status":
            return Response(json.dumps(dict(shown.status), indent=2) + "\n", mimetype="application/json")
        others = [(f"/run/{i}/", run.shown.name) for i, run in enumerate(self._runs)]
        make = {"now": live_page.now, "charts": live_page.charts}.get(endpoint)
        body = make(shown) if make is not None else live_page.whole_page(shown, others)
        response = Response(body, mimetype="text/html")
        response.headers["X-Run"] = shown.state
        return response


class _Quiet(WSGIRequestHandler):
    """Prints no line for each request."""

    def log(self, type: str, message: str, *args: Any) -> None:
        """Prints nothing."""
