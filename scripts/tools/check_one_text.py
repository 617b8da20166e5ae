"""One request, one text: cold, warm, without drafts, after a restart from KV on the disk, and in a second turn.

    PYTHONPATH=.:backends python scripts/tools/check_one_text.py MODEL [--shard K/N]

Half of the requests are greedy, half have a seed. Second turns follow at once and after a pause, in which an
idle engine recomputes the answer, and are compared with those of a cold cache. `--backend reference` converts a
GGUF to a checkpoint and runs it on the CUDA backend's reference path, on the CPU. `--shard 3/20` takes every
20th prompt, so that several processes can share them. Every count must be 0 except for the one among neighbors,
which says what batching changes. The last line is JSON.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from localchat.engine.events import Done, Prefill
from localchat.engine.local.engine import LocalEngine
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.fit.load_options import LoadOptions
from tests.support.answers import ask
from tests.support.transformers_reference import TransformersReference

SUBJECTS = (Path(__file__).parent / "everyday.txt").read_text("utf-8").splitlines()
ENDINGS = ("", " Answer in one sentence.", " Give an example.", " Explain why.")
RULES = [f"Rule {number}: call item {number} by its name." for number in range(56)]
SHORT_RULES = 24
"""A system prompt of so many rules is long enough to be stored on the disk.

The CUDA backend reuses KV in chunks of 512 tokens, so it gets all rules.
"""
SYSTEM_PROMPTS = 20

REFERENCE = "localchat_cuda.backend:ReferenceBackend"


def requests(count: int, tokens: int, rules_count: int) -> list[GenerateRequest]:
    """Return requests, greedy and seeded in turn."""
    texts = [subject + ending for ending in ENDINGS for subject in SUBJECTS]
    made: list[GenerateRequest] = []
    for number in range(count):
        sampling = Sampling(temperature=0.0)
        if number % 2:
            sampling = Sampling(temperature=0.9, top_p=0.95, seed=number)
        person = f"Rules for person {number % SYSTEM_PROMPTS}."
        rules = " ".join((person, *RULES[:rules_count]))
        messages = (Message("system", rules), Message("user", texts[number % len(texts)]))
        made.append(
            GenerateRequest(
                Messages(messages), sampling=sampling, max_tokens=tokens, owner=f"chat{number}"
            )
        )
    return made


def without_drafts(request: GenerateRequest) -> GenerateRequest:
    return msgspec.structs.replace(request, speculation=False)


def second_turn(request: GenerateRequest, answer: str, salt: str = "") -> GenerateRequest:
    """Return the next request of a conversation. `salt`: names a cache of its own."""
    assert isinstance(request.prompt, Messages)
    following = (Message("assistant", answer), Message("user", "Say it again, but shorter."))
    return msgspec.structs.replace(
        request, prompt=Messages((*request.prompt.messages, *following)), salt=salt
    )


def cached_tokens(engine: LocalEngine, request: GenerateRequest) -> tuple[str, int]:
    """Return the text of a request, and the number of its prompt tokens that came from the disk."""
    events = list(engine.generate(request))
    assert isinstance(events[-1], Done)
    loaded = max((event.read_back for event in events if isinstance(event, Prefill)), default=0)
    return "".join(getattr(event, "text", "") for event in events), loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--shard", default="0/1", help="K/N: every Nth prompt from number K on")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--neighbors", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds before a second turn")
    parser.add_argument("--first-turns", action="store_true", help="leave out second turns")
    arguments = parser.parse_args()
    rules_count = len(RULES) if arguments.backend else SHORT_RULES
    first, step = map(int, arguments.shard.split("/"))
    asked = requests(arguments.prompts, arguments.tokens, rules_count)[first::step]
    with tempfile.TemporaryDirectory() as folder:
        model, backend = arguments.model, arguments.backend
        if backend == "reference":
            backend = REFERENCE
            if model.suffix == ".gguf":
                model = TransformersReference(model).save(Path(folder) / "checkpoint")
        kv_folder = Path(folder) / "kv"

        def start() -> LocalEngine:
            load = LoadOptions(
                context_tokens=1024,
                max_slots=arguments.neighbors,
                threads=arguments.threads,
                # Pages reach the disk by way of host memory.
                cache_ram_bytes=1 << 30,
            )
            options = EngineOptions(
                model,
                load,
                name="model",
                backend=backend,
                kv_folder=kv_folder,
                kv_folder_bytes=4 << 30,
            )
            return LocalEngine(options, notify=lambda text: None)

        engine = start()

        def texts(
            change: Callable[[GenerateRequest], GenerateRequest] = lambda same: same,
        ) -> list[str]:
            return [ask(engine, change(request)).text for request in asked]

        cold = texts()
        differ = {"warm": count_different(cold, texts())}
        differ["without drafts"] = count_different(cold, texts(without_drafts))
        with ThreadPoolExecutor(arguments.neighbors) as pool:
            beside = [
                answer.text for answer in pool.map(lambda request: ask(engine, request), asked)
            ]
        differ[f"among {arguments.neighbors}"] = count_different(cold, beside)
        turns: dict[str, list[str]] = {}
        pauses = {"at once": 0.0, "after a pause": arguments.pause}
        if arguments.first_turns:
            pauses = {}
        for name, pause_s in pauses.items():
            turns[name] = []
            for request, text in zip(asked, cold, strict=True):
                ask(engine, request)
                time.sleep(pause_s)
                turns[name].append(ask(engine, second_turn(request, text)).text)
        engine.close()
        engine = start()
        restarted = [cached_tokens(engine, request) for request in asked]
        differ["restarted"] = count_different(cold, [text for text, _ in restarted])
        if turns:
            cold_turns = [
                ask(engine, second_turn(request, text, salt=f"cold {number}")).text
                for number, (request, text) in enumerate(zip(asked, cold, strict=True))
            ]
            for name, warm in turns.items():
                differ[f"second turn {name}"] = count_different(cold_turns, warm)
        engine.close()
    loaded = sum(1 for _, tokens in restarted if tokens)
    print(f"{len(asked)} requests; {loaded} had tokens from the disk after the restart")
    for name, count in differ.items():
        print(f"{name:24} {count} differ")
    print(json.dumps({"requests": len(asked), "from_disk": loaded, "differ": differ}))


def count_different(first: list[str], second: list[str]) -> int:
    return sum(one != other for one, other in zip(first, second, strict=True))


if __name__ == "__main__":
    main()
