"""The tree of errors and the exit codes.

    LocalchatError                 exit 1   any other failure
    ├── UsageError                 exit 2   the request is invalid: unknown flag, bad value, bad template
    │   └── TemplateError          exit 2   the model's chat template rejects these messages or fails
    ├── ModelMissing               exit 3   the model does not exist
    ├── FileMissing                exit 3   a file of a prompt does not exist
    ├── ModelInvalid               exit 1   the file is not a usable model
    ├── DoesNotFit                 exit 4   not enough memory, before the load or while running
    ├── NetworkError               exit 5   the network failed, or a checksum
    ├── ContextExceeded            exit 6   the prompt is longer than the context
    ├── EngineDied                 exit 1   the child process ended: signal, last log lines
    ├── DeviceFault                exit 1   the GPU reported an error that ends its process
    ├── EngineClosed               exit 1   the model was unloaded while the request waited
    ├── HistoryUnusable            exit 1   the file of conversations is not readable or writable
    └── EngineBusy                 exit 1   the queue or the memory is full: try again later

`message` says what happened, and `hint` says what to do. Errors cross the pipe between processes as (code,
message, hint, details), and `from_wire` rebuilds them.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from typing import ClassVar, NamedTuple, TypeAlias

Detail: TypeAlias = int | float | str | bool | None


class ExitCode(IntEnum):
    """Exit codes of the command line."""

    OK = 0
    ERROR = 1
    USAGE = 2
    MODEL_MISSING = 3
    DOES_NOT_FIT = 4
    NETWORK = 5
    CONTEXT_EXCEEDED = 6
    ANSWER_CUT = 7
    INTERRUPTED = 130


class LocalchatError(Exception):
    """Base of all our errors. APIs and `--json` show the stable `code`."""

    code: ClassVar[str] = "error"
    exit_code: ClassVar[ExitCode] = ExitCode.ERROR

    def __init__(self, message: str, *, hint: str = "", **details: Detail) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = details
        self.steps: tuple[Mapping[str, object], ...] = ()
        """Options that would make room, as JSON, if a load or prompt does not fit.

        Not sent to other processes.
        """

    def __str__(self) -> str:
        if self.hint:
            return f"{self.message}\n{self.hint}"
        return self.message


class UsageError(LocalchatError):
    code = "usage"
    exit_code = ExitCode.USAGE


class TemplateError(UsageError):
    code = "template"


class ModelMissing(LocalchatError):
    """`details`: `pull`, the name for downloading it, if known."""

    code = "model_missing"
    exit_code = ExitCode.MODEL_MISSING


class FileMissing(LocalchatError):
    code = "file_missing"
    exit_code = ExitCode.MODEL_MISSING


class ModelInvalid(LocalchatError):
    """`details`: path, and reason if the file's content is invalid."""

    code = "model_invalid"

    @property
    def reason(self) -> str:
        """Problem of the file, as the end of a sentence that starts with its name.

        Empty if only `message` has it.
        """
        return str(self.details.get("reason", ""))


class DoesNotFit(LocalchatError):
    code = "does_not_fit"
    exit_code = ExitCode.DOES_NOT_FIT


class NetworkError(LocalchatError):
    """`details`: unreachable if no server answered, certain if a retry would fail in the same way."""

    code = "network"
    exit_code = ExitCode.NETWORK


class ContextExceeded(LocalchatError):
    """`details`: prompt_tokens, context_tokens."""

    code = "context_exceeded"
    exit_code = ExitCode.CONTEXT_EXCEEDED


class AnswerCut(LocalchatError):
    """Raised if an answer is incomplete, and the caller requires complete ones."""

    code = "answer_cut"
    exit_code = ExitCode.ANSWER_CUT


class EngineDied(LocalchatError):
    """`details`: signal (name or empty), status, phase (`load`, `warmup`, `serve`), attached if a server
    of this machine ran it."""

    code = "engine_died"


FAULT_STATUS = 70
"""Exit status of an engine process after a DeviceFault, which the last log line describes."""


class DeviceFault(LocalchatError):
    """Raised in the process of a model, which then ends. The parent process sees EngineDied."""

    code = "device_fault"


class EngineClosed(LocalchatError):
    code = "engine_closed"


class HistoryUnusable(LocalchatError):
    """`details`: version and known_version, if a newer localchat wrote the file."""

    code = "history_unusable"


class EngineBusy(LocalchatError):
    """`details`: retry_after_s, and waiting and limit if a queue is full."""

    code = "engine_busy"


def reason(problem: Exception) -> str:
    """Return the text of an error without number and path. The sentence has the file name."""
    if isinstance(problem, OSError) and problem.strerror:
        return problem.strerror
    return str(problem)


def innermost(problem: BaseException) -> BaseException:
    """Return the first error in groups of errors, as task groups raise them."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return problem


@contextmanager
def os_errors_as(
    kind: type[LocalchatError], sentence: str, *, hint: str = "", **details: Detail
) -> Iterator[None]:
    """Raise an OSError as an error of this kind: the sentence, then the system's reason."""
    try:
        yield
    except OSError as problem:
        raise kind(f"{sentence}: {reason(problem)}", hint=hint, **details) from problem


_OFFLINE = re.compile(r"Network is unreachable|name resolution", re.IGNORECASE)
_NO_NAME = re.compile(
    r"Name or service not known|nodename nor servname|No address associated|getaddrinfo failed",
    re.IGNORECASE,
)
"""System messages about a missing route, and about a name that cannot be resolved."""
_TLS = re.compile(r"\bssl\b|\btls\b|certificate", re.IGNORECASE)


class ConnectionFailure(NamedTuple):
    """Description of a failed connection."""

    message: str
    hint: str
    certain: bool = False
    """Whether a retry would fail in the same way."""


def connection_failure(
    problem: Exception, where: str, *, known_host: bool = False, proxy: object = None
) -> ConnectionFailure:
    """Describe an error of an HTTP library.

    where: address of the server. known_host: its name is certainly valid. proxy: the proxy of the request, as
    messages show it.
    """
    if proxy is not None:
        # Only the proxy was contacted, so the error is nearly always the proxy's.
        return ConnectionFailure(
            f"cannot reach {where} through the proxy {proxy}: {_bare(str(problem)) or 'no answer'}",
            "is the proxy running? NO_PROXY lists hosts that need none",
        )
    words = str(problem)
    if "timeout" in type(problem).__name__.lower() or "timed out" in words:
        return ConnectionFailure(
            f"{where} does not answer in time", "is it busy, or behind a firewall?"
        )
    if _OFFLINE.search(words) or (known_host and _NO_NAME.search(words)):
        return ConnectionFailure(f"cannot reach {where}: this computer seems to be offline", "")
    if _NO_NAME.search(words):
        return ConnectionFailure(
            f"cannot reach {where}: no server of this name is known",
            "is the name right, and is this computer online?",
            certain=True,
        )
    if "refused" in words.lower():
        return ConnectionFailure(
            f"cannot reach {where}: nothing listens there", "is the server running, at this port?"
        )
    if "certificate" in words.lower():
        return ConnectionFailure(
            f"{where} is not trusted: {_bare(words)}",
            "a certificate of your own authority is trusted once SSL_CERT_FILE names it",
            certain=True,
        )
    if _TLS.search(words):
        return ConnectionFailure(
            f"{where} does not speak TLS: {_bare(words)}",
            "is its address http://, not https://?",
            certain=True,
        )
    if "disconnected" in words.lower() or "peer closed" in words.lower():
        return ConnectionFailure(
            f"{where} closed the connection", "has the server crashed? see its log"
        )
    return ConnectionFailure(
        f"the connection to {where} failed: {_bare(words) or type(problem).__name__}", ""
    )


def _bare(words: str) -> str:
    """Remove system numbers and lines of C code: `[SSL: NAME] text (_ssl.c:1000)`."""
    return re.sub(r"^(\[[^\]]*\] ?)+|\s*\(_ssl\.c:\d+\)$", "", words).strip()


def _tree(root: type[LocalchatError]) -> dict[str, type[LocalchatError]]:
    """Return the class that defines each code, not its subclasses."""
    classes = {root.code: root} if "code" in root.__dict__ else {}
    for kind in root.__subclasses__():
        classes |= _tree(kind)
    return classes


def from_wire(code: str, message: str, hint: str, details: dict[str, Detail]) -> LocalchatError:
    """Rebuild the error of another process. An unknown code becomes the base class."""
    return _tree(LocalchatError).get(code, LocalchatError)(message, hint=hint, **details)
