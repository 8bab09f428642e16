"""A small read-only HTTP server: the page, its data and the images of runs, for this machine only, behind a token."""

import hmac
import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil

from flatout.monitor.charts import charts_of
from flatout.monitor.run_state import PROFILE, find_runs, images_of, run_state, without_run

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


# What the page shows


def page_data(paths: Sequence[Path], shown: Sequence[str], *, price_per_hour: float | None = None) -> dict[str, Any]:
    """The runs at or below the paths, the state of those that are shown, and their charts.

    `shown` holds names of runs, the first of which is looked at and the others compared with it; empty: the newest
    run, or the runs that were named one by one.
    """
    runs = names_of(find_runs(paths))
    if not set(shown) & set(runs):
        shown = [name for path in paths for name, folder in runs.items() if folder == path] or list(runs)[:1]
    states = {name: run_state(runs[name], price_per_hour=price_per_hour) for name in shown if name in runs}
    charts = charts_of({name: state.pop("rows") for name, state in states.items()})
    missing = without_run(paths, list(runs.values()))
    return {
        "waiting_for": " or ".join(map(str, missing)),
        "runs": list(runs),
        "shown": list(states),
        "states": list(states.values()),
        "charts": charts,
        "machine": machine_load(),
    }


def names_of(folders: Sequence[Path]) -> dict[str, Path]:
    """Run folders by as many of their last parts as tell them apart: exp and exp2, or train/exp and defect/exp."""
    for length in range(1, max((len(folder.parts) for folder in folders), default=0) + 1):
        named = {"/".join(folder.parts[-length:]): folder for folder in folders}
        if len(named) == len(folders):
            return named
    return {str(folder): folder for folder in folders}


# Server

PAGE = Path(__file__).with_name("page.html")
IMAGE_TYPES = {".jpg": "image/jpeg", ".png": "image/png"}
POLICY = "Content-Security-Policy"
HEADERS = {
    "Cache-Control": "no-store",
    POLICY: "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
FILE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"
"""Content security policy of files that lie in a run folder: whoever wrote them, nothing in them is executed."""


def make_server(
    paths: Sequence[Path], token: str, *, port: int = 0, price_per_hour: float | None = None
) -> ThreadingHTTPServer:
    """A server bound to the loopback address, which answers only below /TOKEN/; a context manager."""

    class Handler(_Handler):
        roots, secret, price = paths, token, price_per_hour

    psutil.cpu_percent(interval=None)  # the first call only starts the measurement
    return _Server(("127.0.0.1", port), Handler)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Not printed: browsers close connections at any time."""
        logger.debug("No answer to %s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    roots: Sequence[Path]
    secret: str
    price: float | None
    timeout = 30.0
    """Seconds after which an idle connection is closed: browsers open them in advance, and each has a thread here."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        _, token, name = [*url.path.split("/"), "", ""][:3] if url.path.count("/") == 2 else ("", "", "")
        # Another site could reach 127.0.0.1 under a host name of its own (DNS rebinding), so the name is checked.
        host = (self.headers.get("Host") or "").rpartition(":")[0]
        known = hmac.compare_digest(token.encode(), self.secret.encode()) and host in ("127.0.0.1", "localhost")
        answer = self._content(name, parse_qs(url.query)) if known else None
        if answer is None:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")
        else:
            own = name in ("", "state.json")
            self._answer(HTTPStatus.OK, *answer, headers=HEADERS if own else HEADERS | {POLICY: FILE_POLICY})

    def _content(self, name: str, query: Mapping[str, list[str]]) -> tuple[str, bytes] | None:
        """Type and bytes of what is served under this name; None if nothing is."""
        if name == "":
            return "text/html; charset=utf-8", PAGE.read_bytes()
        if name == "state.json":
            data = page_data(self.roots, query.get("run", []), price_per_hour=self.price)
            return "application/json", json.dumps(data).encode()
        folder = names_of(find_runs(self.roots)).get(query.get("run", [""])[0])
        with suppress(OSError):
            if folder and name == PROFILE:
                return "text/html; charset=utf-8", (folder / PROFILE).read_bytes()
            file = query.get("file", [""])[0]
            # Only what the page lists: nothing else in the folder can be asked for.
            if folder and name == "image" and file in {each for found in images_of(folder).values() for each in found}:
                return IMAGE_TYPES[Path(file).suffix], (folder / file).read_bytes()
        return None

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, headers: Mapping[str, str] = HEADERS) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)
