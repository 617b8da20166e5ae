"""POST /v1/responses."""

from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.server.answering import Wish
from localchat.server.asking import chat_request
from localchat.server.body import decoded, read_body
from localchat.server.engines import Lease
from localchat.server.exchange import Exchange
from localchat.server.failures import ApiError
from localchat.server.responses.asking import Asked, as_chat, in_own_words
from localchat.server.responses.record import Record
from localchat.server.responses.reply import ResponseStream, ResponseWhole
from localchat.server.responses.wire import ResponsesBody
from localchat.server.service import asker, service_of
from localchat.server.talk import Talk


async def responses(request: Request) -> ASGIApp:
    """Validated here; answered by the Exchange."""
    config = service_of(request).config
    sent = decoded(await read_body(request, config.limits), ResponsesBody, config.limits)
    understood = as_chat(sent)
    try:
        asked = chat_request(understood.chat, config.limits, asker(request))
    except ApiError as error:
        raise in_own_words(error) from error
    plan = ResponsesPlan(understood.chat, asked, config.loop_guard, sent, understood)
    return Exchange(request, plan)


@dataclass(frozen=True, slots=True)
class ResponsesPlan(Talk):
    """See Plan."""

    sent: ResponsesBody
    understood: Asked

    def stream(self, lease: Lease, wish: Wish) -> ResponseStream:
        return ResponseStream(self._record(lease))

    def whole(self, lease: Lease, wish: Wish) -> ResponseWhole:
        return ResponseWhole(self._record(lease))

    def _record(self, lease: Lease) -> Record:
        return Record(self.sent.model or lease.name, self.sent, self.understood.places)
