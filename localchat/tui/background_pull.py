"""Downloads a model on a thread while the chat goes on, one at a time."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from localchat.errors import LocalchatError, ModelInvalid, NetworkError, UsageError
from localchat.units import sizes

if TYPE_CHECKING:
    from localchat.models.hub.events import PullEvent
    from localchat.session.context import SessionContext


class BackgroundPull:
    """Runs one pull at a time. All callbacks but the first are called on its thread."""

    def __init__(
        self,
        context: "SessionContext",
        show: Callable[[str], None],
        done: Callable[[str], None],
        failed: Callable[[str, LocalchatError], None],
    ) -> None:
        """`show` gets a line of progress (empty at the end), `done` the model's name, `failed` name and
        error."""
        self._session_context = context
        self._show = show
        self._done = done
        self._failed = failed
        self._name = ""
        self._lock = threading.Lock()

    def begin(self, name: str, *, offline: bool) -> None:
        """Start to download a model. Raises UsageError while another pull runs, NetworkError offline."""
        if offline:
            raise NetworkError(
                f"{name} cannot be downloaded: the setting offline is on", hint="/set offline false"
            )
        with self._lock:
            if self._name:
                raise UsageError(f"{self._name} is still downloading", hint="one pull at a time")
            self._name = name
        self._show(f"pull {name}")
        threading.Thread(target=self._run, args=(name,), name="pull", daemon=True).start()

    def _run(self, name: str) -> None:
        from localchat.models.catalog import read_catalog
        from localchat.models.hub.client import hub_from_environment
        from localchat.models.hub.pull import fetch, select_files
        from localchat.models.hub.retry import RetryPolicy
        from localchat.models.names import parse

        paths = self._session_context.paths
        environ = self._session_context.environ
        retries = RetryPolicy()
        problem: LocalchatError | None = None
        found = name
        try:
            reference = parse(name, read_catalog(paths))
            hub = hub_from_environment(environ)
            choice = select_files(reference, hub, self._report, retries)
            found = fetch(choice, hub, paths.models_dir, self._report, retries).manifest.name
        except LocalchatError as error:
            problem = error
        finally:
            with self._lock:
                self._name = ""
        self._show("")
        if problem is None:
            self._done(found)
        else:
            self._failed(name, problem)

    def _report(self, event: "PullEvent") -> None:
        from localchat.models.hub.events import Checking, Note, Progress, PullFinished, PullStarted

        match event:
            case Progress(done_bytes=done, total_bytes=total, left_s=left):
                rest = f", {_time_left(left)}" if left is not None else ""
                self._show(f"pull {self._name} {sizes(done, total)}{rest}")
            case PullStarted(name=name, total_bytes=total, done_bytes=done):
                self._show(f"pull {name} {sizes(done, total)}")
            case Checking(file=file):
                self._show(f"checking {file}")
            case Note(text=text):
                self._show(text)
            case PullFinished(name=name, trouble=trouble) if trouble:
                raise ModelInvalid(
                    f"{name} cannot be run: {trouble}", hint=f"localchat rm {name} removes it"
                )
            case _:
                pass


def _time_left(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left"
