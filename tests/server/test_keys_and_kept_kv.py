"""What one API key's prompts left in RAM and on the disk, and what another key's equal prompts get of it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import localchat
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.fit.load_options import LoadOptions
from localchat.measure.workload import prose
from tests.support.http_server import UNHURRIED, Wire, running

pytestmark = pytest.mark.usefixtures("one_thread")

GUIDE = Path(localchat.__file__).with_name("guide") / "guide.gguf"
KEYS = ("a-first-client", "another-client")
PATIENCE_S = 30.0


def cached(port: int, key: str, text: str) -> int:
    """Tokens of a prompt that its client did not have to wait for."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    with Wire(port) as wire:
        wire.ask("/v1/chat/completions", body, headers={"authorization": f"Bearer {key}"})
        usage = wire.reply().json["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@contextmanager
def server(folder: Path) -> Iterator[int]:
    """The port of a server over the built-in guide, whose engine keeps KV in a folder."""
    options = EngineOptions(
        GUIDE,
        load=LoadOptions(context_tokens=2048, threads=1),
        kv_folder=folder,
        kv_folder_bytes=1 << 30,
    )
    engine = LocalEngine(options, notify=lambda _: None)
    try:
        with running(engine, replace(UNHURRIED, api_keys=KEYS)) as (port, _):
            yield port
    finally:
        engine.close()


def test_nothing_is_reused_across_keys_in_ram_or_after_a_restart(tmp_path: Path) -> None:
    first, other = KEYS
    texts = [prose(360, number) for number in range(2)]
    with server(tmp_path) as port:
        assert [cached(port, first, text) > 100 for text in (*texts, *texts)] == [
            *(False, False),
            *(True, True),
        ]
        assert cached(port, other, texts[0]) == 0
        end_s = time.monotonic() + PATIENCE_S
        while len(list(tmp_path.rglob("*.kv"))) < 4 and time.monotonic() < end_s:
            time.sleep(0.01)
    with server(tmp_path) as port:
        assert cached(port, other, texts[1]) == 0
        assert cached(port, first, texts[1]) > 100
