"""Serves scripted answers to other clients: prints its base address, ends when its stdin closes.

The last message selects the answer: `hi`, `tools`, `json`, `reason`, `dies`, `endless`, `long`,
`template`.
"""

import sys

from localchat.engine.events import Finished, Reasoning, Text, ToolCall
from localchat.errors import ContextExceeded, EngineDied, TemplateError
from tests.support.http_server import serving
from tests.support.scripted_engine import ScriptedAnswer


def main() -> None:
    with serving() as stage:
        stage.plays(
            "tools",
            Text(0, "Let me see."),
            ToolCall(0, 0, name="look", arguments='{"city":'),
            ToolCall(0, 0, arguments='"Rome"}'),
            ToolCall(0, 1, name="look", arguments='{"city":"Oslo"}'),
            Finished(0, "stop"),
        )
        stage.plays("json", Text(0, '{"name":'), Text(0, '"Ann"}'), Finished(0, "stop"))
        stage.plays("reason", Reasoning(0, "hm"), Text(0, "42"), Finished(0, "stop"))
        stage.scripts["dies"] = ScriptedAnswer(("a",), error=EngineDied("gone", signal="SIGKILL"))
        stage.scripts["endless"] = ScriptedAnswer(("word ",) * 100_000, gap_s=0.01)
        too_long = ContextExceeded("too long", prompt_tokens=9000, context_tokens=4096)
        stage.engine.refusals["long"] = [too_long] * 1000
        stage.engine.refusals["template"] = [TemplateError("roles must alternate")] * 1000
        print(f"{stage.base}/v1", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
