"""Downloads a model in a thread while the chat goes on, one at a time."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from localchat.errors import (
    LocalchatError,
    ModelInvalid,
    ModelMissing,
    NetworkError,
    UsageError,
)
from localchat.session.blocks import Offer
from localchat.units import duration, sizes

if TYPE_CHECKING:
    from localchat.models.hub.events import PullEvent
    from localchat.session.session import ChatSession


class BackgroundPull:
    """Runs one pull at a time, and shows its progress and result in the session."""

    def __init__(self, session: "ChatSession", call_from_any_thread: Callable[..., object]) -> None:
        """`call_from_any_thread` calls a function on the event loop of the session."""
        self._session = session
        self._call = call_from_any_thread
        self._name = ""
        self._lock = threading.Lock()

    def begin(self, name: str, *, offline: bool) -> None:
        """Start to download a model. Raises UsageError during another pull, NetworkError if offline."""
        if offline:
            raise NetworkError(
                f"{name} cannot be downloaded: the setting offline is on", hint="/set offline false"
            )
        with self._lock:
            if self._name:
                raise UsageError(f"{self._name} is still downloading", hint="one pull at a time")
            self._name = name
        self._call(self._show_progress, f"pull {name}")
        threading.Thread(target=self._run, args=(name,), name="pull", daemon=True).start()

    def _show_progress(self, line: str) -> None:
        self._session.status.pulling = line
        self._session.view.status_changed()

    def finished(self, name: str) -> None:
        """Report a downloaded model, and offer it."""
        offers = (Offer(f"chat with {name}", f"model {name}"),)
        self._session.notice(f"{name} is here.", "info", offers)

    def failed(self, name: str, problem: LocalchatError) -> None:
        """Report a failed pull. It can be resumed unless the name itself is wrong."""
        offers: tuple[Offer, ...] = ()
        if not isinstance(problem, ModelMissing | UsageError):
            offers = (Offer("resume download", f"pull {name}"),)
        self._session.show_error(problem, offers)

    def _run(self, name: str) -> None:
        from localchat.models.catalog import read_catalog
        from localchat.models.hub.client import hub_from_environment
        from localchat.models.hub.pull import fetch, select_files
        from localchat.models.names import parse

        paths = self._session.context.paths
        environ = self._session.context.environ
        try:
            reference = parse(name, read_catalog(paths))
            hub = hub_from_environment(environ)
            choice = select_files(reference, hub, self._report)
            pulled = fetch(choice, hub, paths.models_dir, self._report)
        except LocalchatError as problem:
            self._release()
            self._call(self.failed, name, problem)
        except BaseException:
            self._release()
            raise
        else:
            self._release()
            self._call(self.finished, pulled.manifest.name)

    def _release(self) -> None:
        """Allow the next pull, and clear the progress."""
        with self._lock:
            self._name = ""
        self._call(self._show_progress, "")

    def _report(self, event: "PullEvent") -> None:
        from localchat.models.hub.events import Checking, Note, Progress, PullFinished, PullStarted

        match event:
            case Progress(done_bytes=done, total_bytes=total, left_s=left_s):
                line = f"pull {self._name} {sizes(done, total)}"
                if left_s is not None:
                    line += f", {duration(left_s)} left"
            case PullStarted(name=name, total_bytes=total, done_bytes=done):
                line = f"pull {name} {sizes(done, total)}"
            case Checking(file=file):
                line = f"checking {file}"
            case Note(text=text):
                line = text
            case PullFinished(name=name, trouble=trouble) if trouble:
                raise ModelInvalid(
                    f"{name} cannot be run: {trouble}", hint=f"localchat rm {name} removes it"
                )
            case _:
                return
        self._call(self._show_progress, line)
