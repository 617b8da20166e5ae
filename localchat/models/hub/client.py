"""HubClient: lists repositories of the Hugging Face hub, and reads their files by range requests.

huggingface-hub provides listing, token, endpoint and the HTTP client. This client requests files itself,
because huggingface-hub 2.4.0 restarts downloads after a kill and checks no hash. It also follows redirects
itself, so that only the endpoint sees the token.
"""

import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import httpx2

from localchat.errors import (
    LocalchatError,
    ModelMissing,
    NetworkError,
    UsageError,
    connection_failure,
)
from localchat.http_transport import ProxyTransport, may_retry, retry_after_s
from localchat.models.hub.partial_file import RemoteFile
from localchat.proxies import proxy_for

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
MAX_FILE_BYTES: Final = 1 << 43
MAX_FILES: Final = 20_000
_MAX_REDIRECTS: Final = 10
_CONNECT_S: Final = 15.0
_LISTING_S: Final = 30.0
_FIRST_CONNECT_S: Final = 2.0
"""Timeout of the listing that starts every pull: without a network, a user should know soon."""
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_SHA1: Final = re.compile(r"[0-9a-f]{40}")
_DENIED: Final = frozenset({401, 403})


class Listing(NamedTuple):
    """A repository at one commit."""

    repository: str
    """`owner/name` as the hub spells it."""
    revision: str
    files: tuple[RemoteFile, ...]


class RetryableError(Exception):
    """A failure that may pass. asked_s: wait that the server requests. reached: whether a server answered."""

    def __init__(self, why: str, asked_s: float | None = None, *, reached: bool = True) -> None:
        super().__init__(why)
        self.asked_s = asked_s
        self.reached = reached


class HubClient:
    """A hub at an endpoint, as one user."""

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        token: str | None = None,
        silence_s: float = 30.0,
    ) -> None:
        """silence_s: seconds without data after which the request is repeated."""
        self.endpoint = endpoint.rstrip("/")
        self._token = token
        self._timeout = httpx2.Timeout(silence_s, connect=_CONNECT_S)
        self._origin = _origin(httpx2.URL(self.endpoint))

    def list(self, repository: str) -> Listing:
        """List a repository. Raises RetryableError, ModelMissing, NetworkError."""
        _disable_telemetry()
        _use_our_transport()
        from huggingface_hub import HfApi
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
        )

        api = HfApi(endpoint=self.endpoint, token=self._token or False)
        timeout: Any = httpx2.Timeout(_LISTING_S, connect=_FIRST_CONNECT_S)
        try:
            self._find_host()
            info = api.model_info(repository, files_metadata=True, timeout=timeout)
            return _listing(repository, info.id, info.sha, info.siblings)
        except GatedRepoError as problem:
            raise self._gated(repository) from problem
        except RepositoryNotFoundError as problem:
            raise self._missing(repository) from problem
        except OfflineModeIsEnabled as problem:
            raise offline_error(repository, "HF_HUB_OFFLINE") from problem
        except HfHubHTTPError as problem:
            raise self._refused(repository, problem.response) from problem
        except httpx2.HTTPError as problem:
            raise self._failed(problem) from problem
        except (ValueError, TypeError, KeyError, AttributeError) as problem:
            raise NetworkError(
                f"{self.endpoint} answers for {repository}, but not with a listing: {problem}",
                hint="HF_ENDPOINT names the hub; a proxy or a login page may have answered instead",
            ) from problem

    @contextmanager
    def open(
        self, listing: Listing, path: str, start: int = 0, etag: str = "", end: int | None = None
    ) -> Iterator[httpx2.Response]:
        """Request bytes of a file from `start` up to `end` (exclusive).

        Yields a raw response of status 200, 206 or 416. etag: that of the bytes before `start`. If it
        changed, the server sends the whole file (RFC 9110, If-Range). Raises RetryableError, LocalchatError.
        """
        headers = {"Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        if start and etag:
            headers["If-Range"] = etag
        url = httpx2.URL(
            f"{self.endpoint}/{listing.repository}/resolve/{listing.revision}/{quote(path)}"
        )
        try:
            response = self._follow(url, headers)
        except httpx2.HTTPError as problem:
            raise self._failed(problem) from problem
        try:
            if response.status_code not in (200, 206, 416):
                raise self._refused(listing.repository, response)
            yield response
        except httpx2.HTTPError as problem:
            failure = connection_failure(
                problem, response.url.host, known_host=True, proxy=proxy_for(str(response.url))
            )
            raise RetryableError(failure.message) from problem
        finally:
            response.close()

    def _follow(self, url: httpx2.URL, headers: Mapping[str, str]) -> httpx2.Response:
        _use_our_transport()
        from huggingface_hub import get_session

        client = get_session()
        for _ in range(_MAX_REDIRECTS):
            request_headers = dict(headers)
            if self._token and _origin(url) == self._origin:
                request_headers["Authorization"] = f"Bearer {self._token}"
            request = client.build_request(
                "GET", url, headers=request_headers, timeout=self._timeout
            )
            response = client.send(request, stream=True, follow_redirects=False)
            location = response.headers.get("location")
            if not 300 <= response.status_code < 400 or not location:
                return response
            response.close()
            try:
                following = url.join(location)
            except httpx2.InvalidURL as problem:
                raise NetworkError(f"{url.host} redirects to no address: {problem}") from problem
            if following.scheme not in ("http", "https") or (
                url.scheme == "https" and following.scheme == "http"
            ):
                raise NetworkError(f"{url.host} redirects to {following.scheme}://{following.host}")
            url = following
        raise NetworkError(f"{self.endpoint} redirects more than {_MAX_REDIRECTS} times")

    def _find_host(self) -> None:
        """Look up the address of the hub. Raises RetryableError.

        Runs in a thread, because a request would wait for the look-up without a limit.
        """
        # A proxy looks up the address itself.
        if proxy_for(self.endpoint) is not None:
            return
        host = httpx2.URL(self.endpoint).host
        failed: list[OSError] = []

        def look_up() -> None:
            try:
                socket.getaddrinfo(host, None)
            except OSError as problem:
                failed.append(problem)

        thread = threading.Thread(target=look_up, daemon=True)
        thread.start()
        thread.join(_FIRST_CONNECT_S)
        if failed:
            raise self._failed(httpx2.ConnectError(str(failed[0]))) from failed[0]
        if thread.is_alive():
            raise self._failed(httpx2.ConnectTimeout(""))

    def _failed(self, problem: httpx2.HTTPError) -> RetryableError:
        """Return the error for a request without an answer."""
        reached = not isinstance(problem, httpx2.ConnectError | httpx2.ConnectTimeout)
        failure = connection_failure(
            problem, self.endpoint, known_host=True, proxy=proxy_for(self.endpoint)
        )
        return RetryableError(failure.message, reached=reached)

    def _refused(self, repository: str, response: httpx2.Response) -> Exception:
        """Return the error for an unexpected status."""
        status = response.status_code
        if response.headers.get("x-error-code") == "GatedRepo":
            return self._gated(repository)
        if status in _DENIED:
            return self._denied(repository, response)
        if may_retry(response):
            requested_s = retry_after_s(response.headers.get("retry-after"))
            return RetryableError(
                f"{response.url.host} answers {status} {response.reason_phrase}", requested_s
            )
        return NetworkError(
            f"{response.url.host} answers {status} {response.reason_phrase} for {repository}",
            hint="run the same command again later; it resumes where it stopped",
        )

    def _gated(self, repository: str) -> LocalchatError:
        page = f"{self.endpoint}/{repository}"
        if self._token is None:
            return NetworkError(
                f"{repository} is gated: accept its license at {page}",
                hint=f"then make a token that reads: {self.endpoint}/settings/tokens\n"
                "export HF_TOKEN=… and run the same command again",
            )
        return NetworkError(
            f"{repository} refuses this token",
            hint=f"accept the license at {page} with the account of the token, which needs read access",
        )

    def _denied(self, repository: str, response: httpx2.Response) -> NetworkError:
        """Return the error for a user whom the server refuses without naming a license."""
        host = response.url.host
        status = f"{response.status_code} {response.reason_phrase}"
        message = " ".join(response.headers.get("x-error-message", "").split())[:200]
        advice = "set HF_TOKEN to a token that has"
        if self._token:
            advice = "give the token"
        return NetworkError(
            f"{host} answers {status} for {repository}{f': {message}' if message else ''}",
            hint=f"{advice} read access to the repository; a proxy or a mirror may also refuse it",
        )

    def _missing(self, repository: str) -> ModelMissing:
        advice = "check its spelling"
        if self._token is None:
            advice += "; a private one needs a token in HF_TOKEN"
        return ModelMissing(
            f"there is no repository {repository} on {self.endpoint}",
            hint=advice,
        )


def hub_from_environment(environ: Mapping[str, str]) -> HubClient:
    """Create a client for HF_ENDPOINT, with HF_TOKEN or the token of `hf auth login`.

    Raises UsageError for an HF_ENDPOINT that is not a web address.
    """
    from huggingface_hub import get_token

    endpoint = environ.get("HF_ENDPOINT", "").strip() or DEFAULT_ENDPOINT
    _check_endpoint(endpoint)
    token = environ.get("HF_TOKEN", "").strip() or get_token()
    return HubClient(endpoint, token)


def _check_endpoint(endpoint: str) -> None:
    try:
        url = httpx2.URL(endpoint)
    except httpx2.InvalidURL:
        url = httpx2.URL("")
    if url.scheme not in ("http", "https") or not url.host:
        raise UsageError(
            f"HF_ENDPOINT must be a web address such as {DEFAULT_ENDPOINT}, not {endpoint!r:.80}",
            hint="correct it, or unset it to use the Hugging Face hub",
        )


def _disable_telemetry() -> None:
    """Keep huggingface-hub from reporting the installed programs to the hub (2.4.0).

    Its environment variable only works before its import.
    """
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True


@cache
def _use_our_transport() -> None:
    """Let huggingface-hub choose the proxy of each request as our other clients do.

    Cached, because every call closes the connections that are in use.
    """
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.errors import OfflineModeIsEnabled

    def refuse_offline(request: httpx2.Request) -> None:
        if constants.is_offline_mode():
            raise OfflineModeIsEnabled(f"HF_HUB_OFFLINE is set; {request.url} was not requested")

    def client() -> httpx2.Client:
        return httpx2.Client(
            transport=ProxyTransport(),
            event_hooks={"request": [refuse_offline]},
            follow_redirects=True,
            timeout=None,
        )

    set_client_factory(client)


def offline_error(what: str, by: str) -> NetworkError:
    """Return the error for a download while offline is set. by: the setting or flag that set it."""
    return NetworkError(
        f"{what} is not here, and it cannot be fetched: offline is set ({by})",
        hint="with a network, unset it and run the same command again",
    )


def _listing(repository: str, name: object, revision: object, siblings: object) -> Listing:
    """Check the hub's answer, which decides which files are written. Raises ValueError."""
    if not isinstance(revision, str) or not _SHA1.fullmatch(revision):
        raise ValueError("it names no commit")
    if not isinstance(siblings, list) or len(siblings) > MAX_FILES:
        raise ValueError(f"it lists no files, or over {MAX_FILES:,}")
    files = tuple(_file(sibling) for sibling in siblings)
    if len({file.path for file in files}) != len(files):
        raise ValueError("it lists a file twice")
    # Accept the hub's own spelling of the name. Another name means that the repository moved.
    same = isinstance(name, str) and name.lower() == repository.lower()
    return Listing(str(name) if same else repository, revision, files)


def _file(listed: object) -> RemoteFile:
    path, size, lfs = (getattr(listed, key, None) for key in ("rfilename", "size", "lfs"))
    sha256 = getattr(lfs, "sha256", None)
    sha1 = getattr(listed, "blob_id", None)
    if not isinstance(path, str) or not path:
        raise ValueError("a file has no name")
    if not isinstance(size, int) or not 0 <= size <= MAX_FILE_BYTES:
        raise ValueError(f"{path[:200]!r} has the size {size!r}")
    return RemoteFile(
        path,
        size,
        sha256 if isinstance(sha256, str) and _SHA256.fullmatch(sha256) else None,
        sha1 if isinstance(sha1, str) and _SHA1.fullmatch(sha1) else None,
    )


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port
