"""A small read-only server for one run: the page, and what it asks for. This machine only, behind a random token."""

import hmac
import json
import logging
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from flatout.monitor.load import machine_load
from flatout.monitor.run_state import run_state

logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("page.html")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def make_server(folder: Path, token: str, *, port: int = 0, price_per_hour: float | None = None) -> ThreadingHTTPServer:
    """Bound to the loopback address; a context manager. Answers only below /TOKEN/."""

    class Handler(_Handler):
        run, secret, price = folder, token, price_per_hour

    return _Server(("127.0.0.1", port), Handler)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes its tab in mid-answer is nothing to show a person."""
        logger.debug("No answer to %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    run: Path
    secret: str
    price: float | None
    timeout = 30.0
    """Seconds that a client may be silent: browsers open connections ahead of time, and each has a thread here."""

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].split("/")
        # A page of another site could reach 127.0.0.1 under a name of its own; it does not know this name.
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        known = len(parts) == 3 and hmac.compare_digest(parts[1].encode(), self.secret.encode())
        if not known or host not in ("127.0.0.1", "localhost"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not here\n")
        elif parts[2] == "":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", PAGE.read_bytes())
        elif parts[2] == "state.json":
            state = run_state(self.run, price_per_hour=self.price) | {"machine": machine_load()}
            self._answer(HTTPStatus.OK, "application/json", json.dumps(state).encode())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not here\n")

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)
