"""A small read-only HTTP server for one run: the page and its data, for this machine only and behind a random token."""

import hmac
import json
import logging
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from flatout.monitor.run_state import run_state

logger = logging.getLogger(__name__)

# Load of this machine


def machine_load() -> dict[str, Any]:
    """CPU and RAM use of the machine; per GPU use, memory and temperature, if NVIDIA's library is available."""
    memory = psutil.virtual_memory()
    return {
        "cpu_percent": psutil.cpu_percent(interval=None),
        "cores": psutil.cpu_count() or 1,
        "ram_used_gib": (memory.total - memory.available) / 2**30,
        "ram_total_gib": memory.total / 2**30,
        "gpus": _gpus(),
    }


def _gpus() -> list[dict[str, Any]]:
    import pynvml

    found: list[dict[str, Any]] = []
    # No driver, no permission, a GPU that has failed: the page shows the rest.
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(
                {
                    "name": str(pynvml.nvmlDeviceGetName(handle)),
                    "busy_percent": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                    "used_gib": memory.used / 2**30,
                    "total_gib": memory.total / 2**30,
                    "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                }
            )
    return found


# Server

PAGE = Path(__file__).with_name("page.html")
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def make_server(folder: Path, token: str, *, port: int = 0, price_per_hour: float | None = None) -> ThreadingHTTPServer:
    """A server bound to the loopback address, which answers only below /TOKEN/; a context manager."""

    class Handler(_Handler):
        run, secret, price = folder, token, price_per_hour

    return _Server(("127.0.0.1", port), Handler)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not printed: browsers close connections at any time."""
        logger.debug("No answer to %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    run: Path
    secret: str
    price: float | None
    timeout = 30.0
    """Seconds after which an idle connection is closed: browsers open them in advance, and each has a thread here."""

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].split("/")
        # Another site could reach 127.0.0.1 under a host name of its own (DNS rebinding), so the name is checked.
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        known = len(parts) == 3 and hmac.compare_digest(parts[1].encode(), self.secret.encode())
        if not known or host not in ("127.0.0.1", "localhost"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")
        elif parts[2] == "":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", PAGE.read_bytes())
        elif parts[2] == "state.json":
            state = run_state(self.run, price_per_hour=self.price) | {"machine": machine_load()}
            self._answer(HTTPStatus.OK, "application/json", json.dumps(state).encode())
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)
