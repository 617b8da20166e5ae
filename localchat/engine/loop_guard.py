"""Loop guard of an event stream, for engines that get their text from elsewhere."""

from localchat.engine.events import Event, Finished, Reasoning, Text, ToolCall
from localchat.engine.repetition import detector_for
from localchat.engine.request import GenerateRequest


class LoopGuard:
    """Watches the events of a request, each choice by itself."""

    def __init__(self, request: GenerateRequest) -> None:
        self._detectors = [detector_for(request) for _ in range(request.n)]
        self.ended: set[int] = set()
        """Choices that looped. Later events of them are to be dropped."""

    def end(self, event: Event) -> Finished | None:
        """Take the next event. Returns the end of its choice, if the choice loops."""
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
