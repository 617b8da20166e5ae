"""Loop guard for the event streams of engines whose text comes from another server."""

from localchat.engine.events import Event, Finished, Reasoning, Text, ToolCall
from localchat.engine.repetition import detector_for
from localchat.engine.request import GenerateRequest


class LoopGuard:
    """Looks for loops in the events of a request, separately for each choice."""

    def __init__(self, request: GenerateRequest) -> None:
        self._detectors = [detector_for(request) for _ in range(request.n)]
        self.ended: set[int] = set()
        """Choices that looped. The caller drops their later events."""

    def end(self, event: Event) -> Finished | None:
        """Check the next event, and return the end of its choice if the choice loops."""
        match event:
            case Text(choice=choice, text=text) | Reasoning(choice=choice, text=text):
                detector = self._detectors[choice]
            case ToolCall(choice=choice, arguments=text):
                detector = self._detectors[choice]
            case _:
                return None
        if detector is None or not text or choice in self.ended:
            return None
        repetition = detector.push(text)
        if repetition is None:
            return None
        self.ended.add(choice)
        return Finished(choice, "repetition", repetition=repetition)
