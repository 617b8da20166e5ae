"""A hub on loopback: listings, redirects to a content store on a port of its own, ETags, ranges, and faults.

`FakeHub` holds repositories in memory. A `Fault` is used up by one request for content, in order. `sent`
counts bytes of content that left, `asked` every request.
"""

import hashlib
import json
import socket
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"
_CHUNK = 1 << 14


@dataclass
class Fault:
    """A fault of one request. `at`: which kind of request it waits for. `until`: the pauses end
    when it is set."""

    at: str = "store"  # api, resolve, header or store
    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    flip: int | None = None
    pause_s: float = 0.0
    pause_every: int = 1
    until: threading.Event = field(default_factory=threading.Event)
    no_range: bool = False
    body: bytes | None = None
    etag: str | None = None
    content_range: str | None = None
    location: str | None = None


class Asked(NamedTuple):
    """A request as it came. `at`: api, resolve, store, header (a bounded part of the store) or other."""

    at: str
    path: str
    headers: Mapping[str, str]


@dataclass
class Repository:
    """`files`: bytes by path; those in `large` are in the content store, the others in git."""

    files: dict[str, bytes]
    large: frozenset[str] = frozenset()
    gated: bool = False
    token: str = ""
    listing: Any = None


class FakeHub:
    """Runs until `close`. `url`: the endpoint; `store_url`: another origin."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.faults: deque[Fault] = deque()
        self.asked: list[Asked] = []
        self.sent = 0
        self.send_buffer = 0
        self.lock = threading.Lock()
        self._servers = [self._serve(_Hub), self._serve(_Store)]
        self.url, self.store_url = (
            f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers
        )

    def add(self, name: str, files: Mapping[str, bytes], **options: Any) -> Repository:
        """A repository; weights are large files unless `large` says which are."""
        large = frozenset(
            path for path in files if path.endswith((".gguf", ".safetensors", "tokenizer.json"))
        )
        self.repositories[name] = Repository(dict(files), **{"large": large, **options})
        return self.repositories[name]

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def requests(self, at: str) -> list[Asked]:
        return [one for one in self.asked if one.at == at]

    def next_fault(self, at: str) -> Fault:
        with self.lock:
            for fault in self.faults:
                if fault.at == at:
                    self.faults.remove(fault)
                    return fault
        return Fault()

    def _serve(self, kind: "type[_Handler]") -> ThreadingHTTPServer:
        server = _Server(("127.0.0.1", 0), type("Bound", (kind,), {"hub": self}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def listing_of(name: str, repository: Repository) -> dict[str, Any]:
    """The answer of the API, as the hub gives it with `blobs=true`."""
    siblings = []
    for path, data in repository.files.items():
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        one: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob}
        if path in repository.large:
            one["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 134}
        siblings.append(one)
    return {"id": name, "sha": REVISION, "private": False, "siblings": siblings}


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client that leaves is what is tested."""


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def setup(self) -> None:
        if self.hub.send_buffer:
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.hub.send_buffer)
        super().setup()

    def note(self, at: str) -> Fault:
        with self.hub.lock:
            self.hub.asked.append(
                Asked(at, self.path, {key.title(): value for key, value in self.headers.items()})
            )
        return self.hub.next_fault(at)

    def answer(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def content(self, data: bytes, etag: str, fault: Fault) -> None:
        """Bytes with range and If-Range, as the fault lets them."""
        data = fault.body if fault.body is not None else data
        etag = fault.etag if fault.etag is not None else etag
        if fault.status:
            self.answer(fault.status, fault.headers)
            return
        start, headers, status = 0, {"ETag": etag, **fault.headers}, 200
        wanted = self.headers.get("Range")
        if wanted and not fault.no_range and self.headers.get("If-Range", etag) == etag:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, end = int(first), min(int(last) + 1 if last else len(data), len(data))
            if start >= len(data):
                self.answer(416, {"Content-Range": f"bytes */{len(data)}"})
                return
            status = 206
            headers["Content-Range"] = fault.content_range or f"bytes {start}-{end - 1}/{len(data)}"
            data = data[:end]
        self._send(status, headers, data[start:], start, fault)

    def _send(
        self, status: int, headers: Mapping[str, str], body: bytes, start: int, fault: Fault
    ) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if fault.flip is not None and start <= fault.flip < start + len(body):
            place = fault.flip - start
            body = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
        if fault.cut_after is not None:
            body = body[: fault.cut_after]
            self.close_connection = True
        at = 0
        try:
            while at < len(body):
                slow = fault.pause_s and not fault.until.is_set()
                piece = body[at : at + (fault.pause_every if slow else _CHUNK)]
                self._write_counted(piece)
                at += len(piece)
                if slow:
                    fault.until.wait(fault.pause_s)
        except OSError:
            self.close_connection = True

    def _write_counted(self, piece: bytes) -> None:
        """Count a piece before the client can have it; a test reads the count right afterwards."""
        with self.hub.lock:
            self.hub.sent += len(piece)
        try:
            self.wfile.write(piece)
        except OSError:
            with self.hub.lock:
                self.hub.sent -= len(piece)
            raise

    def split_path(self) -> str:
        """Without the host that a request through a proxy carries."""
        return unquote(urlsplit(self.path).path)


class _Hub(_Handler):
    def do_GET(self) -> None:
        path = self.split_path()
        if path.startswith("/api/models/"):
            self._api(path.removeprefix("/api/models/"))
        elif "/resolve/" in path:
            name, _, rest = path.removeprefix("/").partition("/resolve/")
            self._resolve(name, rest.partition("/")[2])
        else:
            self.note("other")
            self.answer(404, {})

    def _api(self, name: str) -> None:
        fault = self.note("api")
        repository = self.hub.repositories.get(name)
        if fault.status:
            self.answer(fault.status, fault.headers)
        elif fault.body is not None:
            self.answer(200, {"Content-Type": "text/html"}, fault.body)
        elif repository is None:
            self.answer(404, {"X-Error-Code": "RepoNotFound"})
        else:
            listing = repository.listing or listing_of(name, repository)
            self.answer(200, {"Content-Type": "application/json"}, json.dumps(listing).encode())

    def _resolve(self, name: str, path: str) -> None:
        fault = self.note("resolve")
        repository = self.hub.repositories[name]
        if repository.gated and self.headers.get("Authorization") != f"Bearer {repository.token}":
            self.answer(401, {"X-Error-Code": "GatedRepo"})
        elif path not in repository.files:
            self.answer(404, {"X-Error-Code": "EntryNotFound"})
        elif path in repository.large and not fault.status:
            place = f"{self.hub.store_url}/{name}/{path}"
            linked = {"X-Linked-Etag": f'"{sha256(repository.files[path])}"'}
            self.answer(302, {"Location": fault.location or place, **linked})
        else:
            data = repository.files[path]
            self.content(data, f'"{sha256(data)[:40]}"', fault)


class _Store(_Handler):
    def do_GET(self) -> None:
        _, _, end = self.headers.get("Range", "").partition("-")
        fault = self.note("header" if end else "store")
        owner, name, path = self.split_path().removeprefix("/").split("/", 2)
        data = self.hub.repositories[f"{owner}/{name}"].files[path]
        self.content(data, f'"{sha256(data)}"', fault)
