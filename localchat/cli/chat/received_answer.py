"""Answer to a one-shot prompt while it arrives."""

from dataclasses import dataclass, field

from localchat.engine.events import Accepted
from localchat.session.answer_builder import AnswerBuilder
from localchat.session.engine_status import EngineStatus


@dataclass(slots=True)
class ReceivedAnswer:
    """Answer to a request so far."""

    choices: tuple[AnswerBuilder, ...] = ()
    accepted: Accepted | None = None
    status: EngineStatus = field(default_factory=EngineStatus)
    """Progress and metrics of the request."""
    interrupted: bool = False
