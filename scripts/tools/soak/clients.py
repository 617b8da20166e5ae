"""Clients of the soak, in a separate process: `python -m scripts.tools.soak.clients PLAN`.

Raw sockets, so that no client library distorts the timing. Each client asks for one streamed answer
after the other until its time is over. Some vanish in the middle of an answer: their connection is cut.
"""

import asyncio
import random
import sys
import time
from dataclasses import dataclass

import msgspec

QUESTIONS = (
    "What is a KV cache?",
    "How do I pull a model?",
    "Why is the first token slow?",
    "What does --ctx do?",
    "How do I run a model on the CPU?",
    "What is a quantization?",
    "Explain continuous batching.",
    "What is speculation?",
)


_LEAVE_WITHIN = 8
"""Pieces of an answer: who reads more may find that the engine has ended it already."""


class Plan(msgspec.Struct, frozen=True):
    """How long, how many clients, and how many of them vanish. `tokens`: of each answer. `answers`,
    `errors`: the least that each client must see, however long that takes.
    """

    port: int
    clients: int
    seconds: float
    vanishing: int = 0
    tokens: int = 64
    seed: int = 1
    answers: int = 0
    errors: int = 0


class Client(msgspec.Struct):
    """Results of one client. `gap_s`: its longest silence. `vanished`: answers it left in the middle."""

    tokens: int = 0
    answers: int = 0
    vanished: int = 0
    gap_s: float = 0.0
    errors: list[str] = []


class Report(msgspec.Struct):
    """`seconds`: the real duration."""

    seconds: float
    clients: list[Client]


@dataclass(slots=True)
class Talk:
    """One client's connection during the soak."""

    number: int
    plan: Plan
    seen: Client
    luck: random.Random
    until_s: float

    async def run(self) -> None:
        vanishes = self.number < self.plan.vanishing
        while time.monotonic() < self.until_s or self._wants_more():
            leave_after = self.luck.randint(1, _LEAVE_WITHIN) if vanishes else 0
            try:
                await self._ask(leave_after)
            except (OSError, ValueError, asyncio.IncompleteReadError) as problem:
                self.seen.errors.append(f"{type(problem).__name__}: {problem}")
                await asyncio.sleep(0.1)

    def _wants_more(self) -> bool:
        seen, plan = self.seen, self.plan
        return seen.answers < plan.answers or len(seen.errors) < plan.errors

    async def _ask(self, leave_after: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.plan.port)
        try:
            writer.write(self._request())
            await writer.drain()
            head = await self._timed(reader.readuntil(b"\r\n\r\n"))
            if not head.startswith(b"HTTP/1.1 200"):
                self.seen.errors.append(head.split(b"\r\n", 1)[0].decode("latin-1"))
                return
            await self._follow(reader, leave_after)
        finally:
            writer.transport.abort() if leave_after else writer.close()

    async def _follow(self, reader: asyncio.StreamReader, leave_after: int) -> None:
        received = 0
        while True:
            line = await self._timed(reader.readline())
            if not line.startswith(b"data: "):
                if not line:
                    raise ValueError("the stream ended without its end")
                continue
            if line.startswith(b"data: [DONE]"):
                self.seen.answers += 1
                return
            chunk = msgspec.json.decode(line[6:])
            if "error" in chunk:
                self.seen.errors.append(chunk["error"]["message"])
                return
            if usage := chunk.get("usage"):
                self.seen.tokens += usage["completion_tokens"]
            received += any(choice["delta"].get("content") for choice in chunk["choices"])
            if leave_after and received >= leave_after:
                self.seen.vanished += 1
                self.seen.tokens += received
                return

    async def _timed(self, waiting: "asyncio.Future[bytes] | object") -> bytes:
        begun_s = time.monotonic()
        got: bytes = await waiting  # type: ignore[misc]
        self.seen.gap_s = max(self.seen.gap_s, time.monotonic() - begun_s)
        return got

    def _request(self) -> bytes:
        question = self.luck.choice(QUESTIONS)
        body = msgspec.json.encode(
            {
                "messages": [{"role": "user", "content": f"{question} ({self.number})"}],
                "stream": True,
                "stream_options": {"include_usage": True},
                "max_tokens": self.plan.tokens,
                "temperature": 1.0,
            }
        )
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"user-agent: soak-{self.number}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + body


async def soak(plan: Plan) -> Report:
    """All clients at once."""
    seen = [Client() for _ in range(plan.clients)]
    begun_s = time.monotonic()
    talks = [
        Talk(number, plan, one, random.Random(plan.seed + number), begun_s + plan.seconds)
        for number, one in enumerate(seen)
    ]
    await asyncio.gather(*(talk.run() for talk in talks))
    return Report(time.monotonic() - begun_s, seen)


if __name__ == "__main__":
    reports = asyncio.run(soak(msgspec.json.decode(sys.argv[1], type=Plan)))
    sys.stdout.buffer.write(msgspec.json.encode(reports))
