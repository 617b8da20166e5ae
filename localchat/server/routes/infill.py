"""POST /infill and /completion: llama.cpp's own routes, for the editors that know no others."""

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp

from localchat.engine.request import GenerateRequest
from localchat.server.answering import Wish
from localchat.server.body import decoded, read_body
from localchat.server.engines import Lease
from localchat.server.exchange import Exchange
from localchat.server.llamacpp.asking import completion_request, infill_requests
from localchat.server.llamacpp.brake import LineBrake
from localchat.server.llamacpp.reply import NativeFrame, NativeStream, NativeWhole
from localchat.server.llamacpp.wire import NativeBody
from localchat.server.service import asker, service_of


async def infill(request: Request) -> ASGIApp:
    """A gap to fill. What does not fit into the context is left out from afar, and the answer says so
    (`truncated`): a suggestion from half of the file is worth more than none."""
    config = service_of(request).config
    body = decoded(await read_body(request, config.limits), NativeBody, config.limits)
    asked = infill_requests(body, config.limits, asker(request))
    return Exchange(request, NativePlan(body, asked, config.loop_guard))


async def completion(request: Request) -> ASGIApp:
    """A text to go on from."""
    config = service_of(request).config
    body = decoded(await read_body(request, config.limits), NativeBody, config.limits)
    asked = completion_request(body, config.limits, asker(request))
    return Exchange(request, NativePlan(body, [asked], config.loop_guard))


@dataclass(frozen=True, slots=True)
class NativePlan:
    """See Plan. asked: the ways to ask, the whole request first."""

    body: NativeBody
    asked: Sequence[GenerateRequest]
    loop_guard: bool

    @property
    def model(self) -> str | None:
        return self.body.model

    @property
    def streams(self) -> bool:
        return bool(self.body.stream)

    @property
    def wanted_tokens(self) -> int | None:
        return self.asked[0].max_tokens

    async def wish(self, lease: Lease) -> Wish:
        return Wish([self.asked], loop_guard=self.loop_guard, ever_shorter=True, brake=self._brake)

    def _brake(self) -> LineBrake:
        limit_ms = self.body.t_max_predict_ms or 0
        return LineBrake(self.body.n_indent or 0, limit_ms / 1e3 if limit_ms > 0 else None)

    def stream(self, lease: Lease, wish: Wish) -> NativeStream:
        return NativeStream(self._frame(lease, wish))

    def whole(self, lease: Lease, wish: Wish) -> NativeWhole:
        return NativeWhole(self._frame(lease, wish))

    def _frame(self, lease: Lease, wish: Wish) -> NativeFrame:
        body = self.body
        return NativeFrame(
            body.model or lease.name,
            self.asked[0],
            wish,
            body.response_fields or (),
            ids=bool(body.return_tokens),
            candidates=bool(body.n_probs),
        )
