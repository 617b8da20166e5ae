"""MCP servers: good ones work, and bad ones fail alone."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from localchat.cli.main import run as run_command_line
from localchat.config.mcp_servers import McpServer, tool_name
from localchat.config.settings_file import read_settings
from localchat.documents.library import DocumentLibrary
from localchat.engine.request import CalledTool
from localchat.errors import LocalchatError, UsageError
from localchat.tools import mcp_client, mcp_servers
from localchat.tools.consent import Approvals
from localchat.tools.journal import Journal
from localchat.tools.loop import ToolTurn
from localchat.tools.mcp_client import McpConnection
from localchat.tools.mcp_servers import McpServers
from localchat.tools.tool import Tool
from localchat.tools.toolset import ToolServices, Toolset
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tool_scenes import ToolScene, done

SCRIPT = str(Path(__file__).parents[1] / "support" / "mcp_server.py")
ENVIRON = {"PATH": "/usr/bin:/bin", "SECRET_TOKEN": "s", "PASSED_ON": "p"}

pytestmark = pytest.mark.process


def server(kind: str, *, trusted: bool = False, timeout_s: int = 30) -> McpServer:
    return McpServer(
        "demo", sys.executable, (SCRIPT, kind), ("PASSED_ON",), trusted=trusted, timeout_s=timeout_s
    )


def with_server(
    spec: McpServer, play: Callable[[McpConnection], Awaitable[None]], tmp_path: Path
) -> None:
    async def whole() -> None:
        servers = McpServers([spec], ENVIRON, tmp_path)
        try:
            await play(await servers.connection(spec.name))
        finally:
            await servers.close()

    done(whole())


def failure_of(spec: McpServer, tmp_path: Path) -> str:
    async def whole() -> str:
        connections, (problem,) = await McpServers([spec], ENVIRON, tmp_path).start()
        assert connections == []
        return problem

    return done(whole())


def tool(connection: McpConnection, name: str) -> Tool:
    return next(tool for tool in connection.tools if tool.name == f"demo_{name}")


async def result(connection: McpConnection, name: str, **arguments: object) -> str:
    plan = await tool(connection, name).plan(arguments)
    return await plan.run()


def test_tools_resources_and_prompts_of_a_good_server(tmp_path: Path) -> None:
    async def play(connection: McpConnection) -> None:
        assert await result(connection, "add", a=2, b=3) == "5"
        assert await result(connection, "act", text="x") == "acted: x"
        assert await result(connection, "read_resource", uri="memo://today") == "water the plants"
        (prompt,) = connection.prompts.values()
        assert list(connection.prompts) == ["mcp__demo__greet_all"]
        assert (prompt.usage, prompt.about) == ("WHOM [HOW]", "Greet.")
        assert await prompt.render(prompt.bound("Ada Good  day")) == "Good  day, Ada"
        assert await prompt.render(prompt.bound("Ada")) == "Hello, Ada"
        with pytest.raises(UsageError, match=r"takes WHOM \[HOW\]"):
            prompt.bound("")
        with pytest.raises(LocalchatError, match="Error executing"):
            await result(connection, "fail")
        with pytest.raises(LocalchatError, match="needs a, b"):
            await result(connection, "add")
        names = (await result(connection, "environment")).split()
        assert "PASSED_ON" in names
        assert "SECRET_TOKEN" not in names

    with_server(server("full"), play, tmp_path)


def test_only_a_trusted_server_has_tools_that_read(tmp_path: Path) -> None:
    effects = []

    async def play(connection: McpConnection) -> None:
        effects.append((tool(connection, "add").effect, tool(connection, "act").effect))

    for trusted in (False, True):
        with_server(server("good", trusted=trusted), play, tmp_path)
    assert effects == [("run", "run"), ("read", "run")]


@pytest.mark.parametrize(
    ("kind", "message"),
    [("hang", "did not answer within"), ("die", "failed|ended")],
)
def test_a_server_that_hangs_or_dies_fails_its_call_only(
    kind: str, message: str, tmp_path: Path
) -> None:
    async def play(connection: McpConnection) -> None:
        with pytest.raises(LocalchatError, match=message):
            await result(connection, "trouble")
        if kind == "hang":
            return
        with pytest.raises(LocalchatError):
            await result(connection, "add", a=1, b=2)

    with_server(server(kind, timeout_s=1 if kind == "hang" else 30), play, tmp_path)


def test_a_server_that_has_ended_starts_again(tmp_path: Path) -> None:
    async def whole() -> None:
        services = ToolServices(
            tmp_path,
            (),
            Journal(None),
            cast(DocumentLibrary, None),
            ScriptedEngine(),
            ENVIRON,
            {"demo": server("die")},
        )
        toolset = Toolset(["demo"], services)
        await toolset.connect()
        assert toolset.problems == []
        with pytest.raises(LocalchatError):
            await (await toolset.tools["demo_trouble"].plan({})).run()
        await toolset.connect()
        assert toolset.problems == []
        assert await (await toolset.tools["demo_add"].plan({"a": 1, "b": 2})).run() == "3"
        await toolset.close()

    done(whole())


def test_an_answer_of_five_megabytes_is_bounded(tmp_path: Path) -> None:
    async def play(connection: McpConnection) -> None:
        text = await result(connection, "trouble")
        assert len(text) < 1_100_000
        assert "[… 3,951,424 characters are left out here …]" in text

    with_server(server("flood"), play, tmp_path)


def test_a_server_that_sends_notifications_without_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_client, "_MAX_UNASKED", 200)

    async def play(connection: McpConnection) -> None:
        with pytest.raises(LocalchatError, match=r"failed|ended"):
            await result(connection, "trouble_without_end")
        assert not connection.alive

    with_server(server("chatter"), play, tmp_path)


def test_what_a_server_tells_the_model_gives_it_no_rights(tmp_path: Path) -> None:
    """A server describes its tool as ours and claims consent. A model that obeys reaches nothing."""
    (tmp_path / "a.txt").write_text("alpha")

    async def play(connection: McpConnection) -> None:
        scene = ToolScene(tmp_path, allowed=frozenset({"read"}), nobody=True)
        tools = {**scene.tools, **{tool.name: tool for tool in connection.tools}}
        turn = ToolTurn(
            tools,
            Approvals(None, frozenset({"read"})),
            max_rounds=9,
            context_tokens=4096,
        )
        called = [
            CalledTool("demo_run_command", '{"command": "x"}', "1"),
            CalledTool(
                "edit_file", '{"path": "a.txt", "old_text": "alpha", "new_text": "owned"}', "2"
            ),
            CalledTool("run_command", '{"command": "echo owned > a.txt"}', "3"),
            CalledTool("demo_act", '{"text": "x"}', "4"),
        ]
        results = await turn.run(called, lambda *_: None)
        assert [result.run.state for result in results] == ["done", *["refused"] * 3]
        assert results[0].message.role == "tool"
        assert (tmp_path / "a.txt").read_text() == "alpha"

    with_server(server("hostile", trusted=True), play, tmp_path)


def test_a_message_above_the_limit_ends_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_client, "_MAX_MESSAGE", 1 << 20)

    async def play(connection: McpConnection) -> None:
        with pytest.raises(LocalchatError, match=r"failed|ended"):
            await result(connection, "trouble")

    with_server(server("flood"), play, tmp_path)


def plain_server(kind: str, log: Path) -> McpServer:
    script = str(Path(SCRIPT).with_name("plain_mcp_server.py"))
    return McpServer("demo", sys.executable, (script, kind, str(log)), timeout_s=30)


@pytest.mark.parametrize(
    ("kind", "methods"),
    [
        ("old", ["initialize", "tools/list"]),
        ("new", ["initialize", "server/discover", "tools/list"]),
    ],
)
def test_a_server_gets_no_request_that_it_would_ignore(
    kind: str, methods: list[str], tmp_path: Path
) -> None:
    """A server that does not know the newest protocol may leave its first request unanswered."""

    async def play(connection: McpConnection) -> None:
        assert [tool.name for tool in connection.tools] == ["demo_echo"]

    with_server(plain_server(kind, tmp_path / "log"), play, tmp_path)
    assert (tmp_path / "log").read_text().split() == methods


def test_an_answer_of_another_form_is_named_in_a_few_words(tmp_path: Path) -> None:
    problem = failure_of(plain_server("odd", tmp_path / "log"), tmp_path)
    assert problem.endswith("failed: it sent an invalid ListToolsResult")


@pytest.mark.parametrize(
    ("kind", "message", "start_s"),
    [("silent", "did not answer", 1.0), ("endless", "demo", 4.0), ("exit", "no license", 120.0)],
)
def test_a_server_that_does_not_start_is_said(
    kind: str, message: str, start_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_client, "_START_S", start_s)
    monkeypatch.setattr(mcp_client, "_MAX_MESSAGE", 1 << 20)
    assert message in failure_of(server(kind), tmp_path)


@pytest.mark.parametrize(("start_s", "pause_s"), [(0.5, 10.0), (60.0, 600.0)])
def test_a_failed_start_is_repeated_after_a_pause(
    start_s: float, pause_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    starts = []

    async def fail(self: McpConnection) -> None:
        starts.append(clock[0])
        clock[0] += start_s
        raise UsageError("demo has no license", hint="buy one")

    async def whole() -> None:
        servers = McpServers([server("good")], ENVIRON, tmp_path)
        for time_s in (0.0, start_s + pause_s - 1.0, start_s + pause_s):
            clock[0] = time_s
            assert (await servers.start())[1] == ["MCP server demo: has no license; buy one"]

    monkeypatch.setattr(McpConnection, "open", fail)
    monkeypatch.setattr(mcp_servers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    asyncio.run(whole())
    assert starts == [0.0, start_s + pause_s]


def test_a_server_whose_start_is_cancelled_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    opening = asyncio.Event()

    async def never_open(self: McpConnection) -> None:
        calls.append("open")
        opening.set()
        await asyncio.Event().wait()

    async def close(self: McpConnection) -> None:
        calls.append("close")

    async def whole() -> None:
        start = asyncio.create_task(McpServers([server("good")], ENVIRON, tmp_path).start())
        await opening.wait()
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    monkeypatch.setattr(McpConnection, "open", never_open)
    monkeypatch.setattr(McpConnection, "close", close)
    asyncio.run(whole())
    assert calls == ["open", "close"]


def test_servers_that_are_closed_by_another_task_end_a_start(tmp_path: Path) -> None:
    async def whole() -> None:
        servers = McpServers([server("silent")], ENVIRON, tmp_path)
        starts = [asyncio.create_task(servers.start()) for _ in range(2)]
        while not (connection := servers._connections.get("demo")) or connection._task is None:
            await asyncio.sleep(0.01)
        await servers.close()
        for start in starts:
            assert await start == ([], ["MCP server demo: was stopped"])
        assert connection._task.done()
        assert not servers._connections

    asyncio.run(whole())


def test_hostile_names_and_descriptions_are_cleaned(tmp_path: Path) -> None:
    async def play(connection: McpConnection) -> None:
        (nasty,) = (tool for tool in connection.tools if "nice" in tool.name)
        assert nasty.name == "demo_nice__2J_name"
        assert "\x1b" not in nasty.description
        assert nasty.effect == "run"

    with_server(server("hostile", trusted=True), play, tmp_path)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "object", "required": 5},
        {"type": "object", "required": [["a"]]},
        {"type": "object", "properties": ["a"]},
        {"type": "object", "properties": {"a": 5}},
        {"type": "object", "description": "x" * 20_000},
    ],
)
def test_a_schema_that_cannot_be_used_becomes_that_of_any_object(schema: dict[str, Any]) -> None:
    assert mcp_client._safe_schema(schema) == {"type": "object", "properties": {}}
    good = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    assert mcp_client._safe_schema(good) == good


def test_a_tool_that_is_named_after_its_server_keeps_its_name() -> None:
    assert tool_name("git", "git_status") == "git_status"
    assert tool_name("git", "status") == "git_status"
    assert tool_name("git", "gitlab") == "git_gitlab"
    assert tool_name("search", "search_files") == "search_search_files"


def test_a_missing_program_and_a_missing_variable_are_said(tmp_path: Path) -> None:
    missing = McpServer("demo", "no-such-program-here")
    assert "there is no program" in failure_of(missing, tmp_path)
    unset = McpServer("demo", "sh", env=("NOT_SET",))
    assert "NOT_SET is not set" in failure_of(unset, tmp_path)


def test_without_the_package_a_sentence_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    assert "pip install 'localchat-app[mcp]'" in failure_of(server("good"), tmp_path)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
def test_a_server_is_reached_by_http_and_its_long_answers_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Servers of the older protocol answer with server-sent events instead of JSON."""
    hold = McpConnection._hold

    async def hold_in_mode(self: McpConnection, transport: object, _: str) -> None:
        await hold(self, transport, mode)

    monkeypatch.setattr(McpConnection, "_hold", hold_in_mode)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "http", str(port)], stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)

        async def play(connection: McpConnection) -> None:
            assert await result(connection, "add", a=20, b=3) == "23"
            text = await result(connection, "trouble")
            assert "[… 3,951,424 characters are left out here …]" in text
            with pytest.raises(LocalchatError, match="failed"):
                await result(connection, "trouble", size=70 << 20)

        with_server(McpServer("demo", url=f"http://127.0.0.1:{port}/mcp"), play, tmp_path)
    finally:
        process.kill()
        process.wait()


def test_servers_are_added_listed_tried_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    monkeypatch.setenv("LOCALCHAT_CONFIG", str(file))
    monkeypatch.setenv("PASSED_ON", "p")
    mcp = ["config", "mcp"]
    add = [*mcp, "add", "--env", "PASSED_ON", "demo", sys.executable, SCRIPT, "full"]
    assert run_command_line(add) == 0
    assert read_settings(file).mcp_servers["demo"].args == (SCRIPT, "full")
    assert run_command_line([*mcp, "list"]) == 0
    assert run_command_line([*mcp, "test", "demo"]) == 0
    shown = capfd.readouterr().out
    assert "demo_add  Add two numbers." in shown
    assert "/mcp__demo__greet_all WHOM [HOW]  Greet." in shown
    assert run_command_line([*mcp, "remove", "demo"]) == 0
    assert not read_settings(file).mcp_servers
    assert run_command_line([*mcp, "test", "demo"]) == 2
    assert run_command_line([*mcp, "add", "read", "x"]) == 2
    assert "--tools read already has a meaning" in capfd.readouterr().err


def test_adding_says_what_is_replaced_and_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.toml"
    monkeypatch.setenv("LOCALCHAT_CONFIG", str(file))
    assert run_command_line(["config", "mcp"]) == 0
    assert "there are no MCP servers yet" in capfd.readouterr().err
    assert run_command_line(["config", "mcp", "add", "demo", "no-such-program-here"]) == 0
    shown = capfd.readouterr().err
    assert "there is no program no-such-program-here" in shown
    assert "added demo" in shown
    assert run_command_line(["config", "mcp", "add", "demo", "--", sys.executable, "--flag"]) == 0
    assert "replaced demo" in capfd.readouterr().err
    assert read_settings(file).mcp_servers["demo"].args == ("--flag",)
    assert run_command_line(["config", "mcp", "add", "demo", "--"]) == 2
    assert run_command_line(["config", "mcp"]) == 0
    assert f"demo  {sys.executable} --flag" in capfd.readouterr().out


@pytest.mark.parametrize(
    "section",
    [
        "[mcp.demo]",
        '[mcp.demo]\ncommand = "x"\nurl = "http://x"',
        '[mcp.demo]\nurl = "x"',
        '[mcp.demo]\ncommand = "x"\nother = 1',
        '[mcp.demo]\ncommand = "x"\nvalues = { TOKEN = "secret" }',
        '[mcp.demo]\nurl = "http://x"\nheaders = { Key = "secret" }',
        '[mcp.run]\ncommand = "x"',
        "mcp = 3",
    ],
)
def test_a_wrong_section_is_an_error_with_its_place(section: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(section)
    with pytest.raises(UsageError):
        read_settings(file)
