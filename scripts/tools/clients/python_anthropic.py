"""Checks the anthropic library for Python: message, stream, tools, thinking, structure, errors, cancel."""

import importlib
import sys
import time
import urllib.request
from collections.abc import Callable
from typing import Any

# By name, because the checks of types run where this library is not.
anthropic: Any = importlib.import_module("anthropic")

BASE = sys.argv[1].removesuffix("/v1")
TOOL: Any = {
    "name": "look",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
client: Any = anthropic.Anthropic(base_url=BASE, api_key="none", max_retries=0)


def said(word: str, **fields: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": word}]
    return {"model": "m", "max_tokens": 100, "messages": messages, **fields}


def message() -> None:
    answer = client.messages.create(**said("hi", system="Be brief."))
    assert answer.content[0].text == "Hello." and answer.stop_reason == "end_turn"
    assert answer.usage.input_tokens > 3 and answer.usage.output_tokens == 3
    assert answer._request_id.startswith("req_")


def stream() -> None:
    with client.messages.stream(**said("hi")) as events:
        assert "".join(events.text_stream) == "Hello."
        final = events.get_final_message()
    assert final.usage.input_tokens > 3 and final.usage.output_tokens == 3
    raw = list(client.beta.messages.create(**said("hi"), stream=True, betas=["x-2099-01-01"]))
    assert (raw[0].type, raw[-1].type) == ("message_start", "message_stop")


def tools() -> None:
    with client.messages.stream(**said("tools", tools=[TOOL])) as events:
        final = events.get_final_message()
    text, *calls = final.content
    assert text.text == "Let me see." and final.stop_reason == "tool_use"
    assert [call.input for call in calls] == [{"city": "Rome"}, {"city": "Oslo"}]
    assert client.messages.create(**said("tools", tools=[TOOL])).content[1].input["city"] == "Rome"
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls
    ]
    asked = said("tools", tools=[TOOL])
    asked["messages"] += [
        {"role": "assistant", "content": final.content},
        {"role": "user", "content": results},
    ]
    assert client.messages.create(**asked).content[0].text == "Hello."


def thinking() -> None:
    asked = said("reason", thinking={"type": "enabled", "budget_tokens": 1024})
    with client.messages.stream(**asked) as events:
        thought, text = events.get_final_message().content
    assert (thought.thinking, text.text) == ("hm", "42") and thought.signature


def structured() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    answer = client.messages.create(**said("json", output_config={"format": form}))
    assert answer.content[0].text == '{"name":"Ann"}'


def count() -> None:
    asked = said("hi")
    del asked["max_tokens"]
    assert client.messages.count_tokens(**asked).input_tokens > 3


def errors() -> None:
    refused = failure(lambda: client.messages.create(**said("long")), anthropic.BadRequestError)
    assert refused["message"] == "prompt is too long: 9000 tokens > 4096 maximum"
    broken = client.messages.create(**said("dies"), stream=True)
    assert failure(lambda: list(broken), anthropic.APIStatusError)["type"] == "overloaded_error"


def failure(ask: Callable[[], Any], kind: type[Exception]) -> dict[str, str]:
    """The error that this raises, as it was sent."""
    try:
        ask()
    except kind as error:
        detail: dict[str, str] = vars(error)["body"]["error"]
        return detail
    raise AssertionError("it did not fail")


def cancel() -> None:
    before = gone()
    events = client.messages.create(**said("endless"), stream=True)
    next(iter(events))
    events.close()
    for _ in range(100):
        if gone() == before + 1:
            return
        time.sleep(0.05)
    raise AssertionError("the server did not notice")


def gone() -> float:
    """How many clients left, as the server counted."""
    with urllib.request.urlopen(f"{BASE}/metrics") as page:
        for line in page.read().decode().splitlines():
            if line.startswith("localchat_client_gone_total"):
                return float(line.split()[1])
    raise AssertionError("no such figure")


def main() -> None:
    for check in (message, stream, tools, thinking, structured, count, errors, cancel):
        check()
        print(f"anthropic {anthropic.__version__} for Python: {check.__name__} ok")


main()
