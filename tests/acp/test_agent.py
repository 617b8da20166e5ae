"""The agent, asked by the client of the protocol's own library."""

import asyncio
import base64
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from acp import (
    PROTOCOL_VERSION,
    RequestError,
    RequestPermissionResponse,
    connect_to_agent,
    image_block,
    resource_block,
    resource_link_block,
    spawn_agent_process,
    text_block,
)
from acp.agent.connection import AgentSideConnection
from acp.client.connection import ClientSideConnection
from acp.schema import (
    AgentMessageChunk,
    AgentThoughtChunk,
    AllowedOutcome,
    AvailableCommandsUpdate,
    DeniedOutcome,
    EnvVariable,
    FileEditToolCallContent,
    HttpHeader,
    HttpMcpServer,
    McpServerStdio,
    SseMcpServer,
    TextResourceContents,
    ToolCallProgress,
    ToolCallStart,
    UsageUpdate,
    UserMessageChunk,
)

from localchat.acp.agent import LocalchatAgent
from localchat.acp.content import passed_servers, question_of
from localchat.cli.main import run as run_command
from localchat.config.mcp_servers import McpServer
from localchat.engine.events import Event, Finished, Reasoning, Text, ToolCall
from localchat.engine.request import GenerateRequest, Messages
from localchat.errors import EngineDied, LocalchatError, UsageError
from localchat.history.store import History
from localchat.session.engine_holder import EngineHolder
from tests.support.media import png
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.tui_stage import DONE, INFO, Stage, told

UNDO: list[Any] = [text_block("/undo")]
HERE: list[Any] = [text_block("What is in a.txt?")]


class Editor:
    """A client that records what it gets, and answers questions about tool calls."""

    def __init__(self) -> None:
        self.updates: list[Any] = []
        self.asked: list[Any] = []
        self.options: list[list[str]] = []
        self.decision = "once"
        """Id of the option to choose. Empty: the user closed the question."""
        self.on_update: Callable[[], Awaitable[None]] | None = None

    async def session_update(self, session_id: str, update: Any, **_: Any) -> None:
        self.updates.append(update)
        if self.on_update is not None:
            await self.on_update()

    async def request_permission(
        self, session_id: str, tool_call: Any, options: Any, **_: Any
    ) -> RequestPermissionResponse:
        self.asked.append(tool_call)
        self.options.append([option.option_id for option in options])
        if self.decision == "never answers":
            await asyncio.Event().wait()
        if not self.decision:
            return RequestPermissionResponse(outcome=DeniedOutcome(outcome="cancelled"))
        outcome = AllowedOutcome(outcome="selected", option_id=self.decision)
        return RequestPermissionResponse(outcome=outcome)

    def of(self, kind: type) -> list[Any]:
        return [update for update in self.updates if isinstance(update, kind)]

    def text(self, kind: type = AgentMessageChunk) -> str:
        return "".join(update.content.text for update in self.of(kind))

    def states(self) -> list[tuple[str, str]]:
        """Status and title of each update of a call, in order."""
        calls = [*self.of(ToolCallStart), *self.of(ToolCallProgress)]
        return [(call.status, call.title) for call in calls]


class Desk:
    """A client and the agent, connected by a socket."""

    def __init__(self, editor: Editor, agent: ClientSideConnection, stage: Stage) -> None:
        self.editor = editor
        self.agent = agent
        self.stage = stage

    @property
    def folder(self) -> Path:
        return self.stage.tmp / "work"

    async def begin(self, **arguments: Any) -> str:
        await self.agent.initialize(protocol_version=PROTOCOL_VERSION)
        return (await self.agent.new_session(cwd=str(self.folder), **arguments)).session_id


@asynccontextmanager
async def connected(stage: Stage) -> AsyncIterator[Desk]:
    ours, theirs = socket.socketpair()
    agent_reader, agent_writer = await asyncio.open_connection(sock=ours)
    reader, writer = await asyncio.open_connection(sock=theirs)
    engines = EngineHolder()
    setup = stage.resolve(None, {})
    engines.open(setup.open_engine)
    agent = LocalchatAgent(
        stage.app().session.context,
        setup,
        engines,
        lambda: History.open(stage.tmp / "history.sqlite3"),
    )
    connection = AgentSideConnection(agent, agent_writer, agent_reader)  # type: ignore[arg-type]
    editor = Editor()
    client = connect_to_agent(cast(Any, editor), writer, reader)
    try:
        yield Desk(editor, client, stage)
    finally:
        await agent.close()
        await client.close()
        await connection.close()
        for stream in (writer, agent_writer):
            stream.close()


def play(stage: Stage, scene: Callable[[Desk], Awaitable[None]]) -> None:
    async def run() -> None:
        async with connected(stage) as desk:
            await scene(desk)

    asyncio.run(run())


def stage_of(tmp_path: Path, *answers: ScriptedAnswer) -> Stage:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("alpha\n")
    remaining = list(answers)
    stage = Stage(tmp_path, script=lambda request: remaining.pop(0))
    stage.environ["LOCALCHAT_DATA_DIR"] = str(tmp_path / "data")
    return stage


def calling(name: str, **arguments: object) -> ScriptedAnswer:
    text = msgspec.json.encode(arguments).decode()
    events: list[Event] = [
        ToolCall(0, 0, "call_1", name, text[:5]),
        ToolCall(0, 0, "", "", text[5:]),
    ]
    return ScriptedAnswer(events=(*events, Finished(0, "tool_calls"), DONE))


def sent(request: GenerateRequest) -> Messages:
    assert isinstance(request.prompt, Messages)
    return request.prompt


def test_a_prompt_streams_text_and_thoughts_in_order(tmp_path: Path) -> None:
    pieces = (Reasoning(0, "Hm. "), Reasoning(0, "Yes."), Text(0, "Al"), Text(0, "pha."))
    stage = stage_of(tmp_path, ScriptedAnswer(events=(*pieces, Finished(0, "stop"), DONE)))

    async def scene(desk: Desk) -> None:
        session = await desk.begin()
        response = await desk.agent.prompt(session_id=session, prompt=HERE)
        assert response.stop_reason == "end_turn"
        editor = desk.editor
        assert editor.text(AgentThoughtChunk) == "Hm. Yes."
        assert editor.text() == "Alpha."
        assert editor.of(UserMessageChunk) == []
        (usage,) = editor.of(UsageUpdate)
        assert (usage.used, usage.size) == (6412, 32768)
        (commands,) = editor.of(AvailableCommandsUpdate)
        assert [command.name for command in commands.available_commands] == ["undo", "compact"]

    play(stage, scene)


def test_what_the_agent_can_do_depends_on_the_model(tmp_path: Path) -> None:
    stage = stage_of(tmp_path)
    stage.about = msgspec.structs.replace(INFO, media=("image",))

    async def scene(desk: Desk) -> None:
        response = await desk.agent.initialize(protocol_version=PROTOCOL_VERSION + 7)
        assert response.protocol_version == PROTOCOL_VERSION
        capabilities = response.agent_capabilities
        assert capabilities is not None
        assert capabilities.load_session
        prompt = capabilities.prompt_capabilities
        assert prompt is not None
        assert (prompt.image, prompt.audio, prompt.embedded_context) == (True, False, True)

    play(stage, scene)


def test_a_call_runs_after_consent_and_shows_its_states(tmp_path: Path) -> None:
    stage = stage_of(tmp_path, calling("read_file", path="a.txt"), told("It says alpha."))

    async def scene(desk: Desk) -> None:
        session = await desk.begin()
        await desk.agent.prompt(session_id=session, prompt=HERE)
        editor = desk.editor
        title = "read_file a.txt, from line 1"
        assert editor.states() == [
            ("pending", "read_file"),
            ("pending", title),
            ("in_progress", title),
            ("completed", title),
        ]
        last = editor.of(ToolCallProgress)[-1]
        assert last.content[0].content.text == "alpha"
        assert last.locations[0].path == str(desk.folder / "a.txt")
        assert last.raw_input == {"path": "a.txt"}
        (call,) = editor.asked
        assert (call.title, call.kind) == (title, "read")
        assert editor.options == [["once", "session", "no", "never"]]
        assert editor.text() == "It says alpha."
        names = [tool["function"]["name"] for tool in sent(desk.stage.engine.requests[0]).tools]
        assert "edit_file" in names
        assert "run_command" not in names

    play(stage, scene)


def test_an_edit_is_shown_as_a_difference_and_undo_takes_it_back(tmp_path: Path) -> None:
    edit = calling("edit_file", path="a.txt", old_text="alpha", new_text="beta")
    stage = stage_of(tmp_path, edit, told("Done."))

    async def scene(desk: Desk) -> None:
        session = await desk.begin()
        await desk.agent.prompt(session_id=session, prompt=HERE)
        (difference,) = desk.editor.asked[0].content
        assert isinstance(difference, FileEditToolCallContent)
        assert difference.path == str(desk.folder / "a.txt")
        assert (difference.old_text, difference.new_text) == ("alpha", "beta")
        assert (desk.folder / "a.txt").read_text() == "beta\n"
        await desk.agent.prompt(session_id=session, prompt=UNDO)
        assert (desk.folder / "a.txt").read_text() == "alpha\n"
        assert "restored: " in desk.editor.text()
        with pytest.raises(RequestError, match="nothing to undo"):
            await desk.agent.prompt(session_id=session, prompt=UNDO)

    play(stage, scene)


@pytest.mark.parametrize("decision", ["no", "", "nonsense"])
def test_a_refused_call_changes_nothing_and_the_model_is_told(
    tmp_path: Path, decision: str
) -> None:
    edit = calling("edit_file", path="a.txt", old_text="alpha", new_text="beta")
    stage = stage_of(tmp_path, edit, told("As you wish."))

    async def scene(desk: Desk) -> None:
        desk.editor.decision = decision
        session = await desk.begin()
        response = await desk.agent.prompt(session_id=session, prompt=HERE)
        assert response.stop_reason == "end_turn"
        assert (desk.folder / "a.txt").read_text() == "alpha\n"
        assert desk.editor.states()[-1][0] == "failed"
        assert "refused" in sent(desk.stage.engine.requests[1]).messages[-1].content

    play(stage, scene)


def test_text_that_is_not_valid_unicode_breaks_no_prompt(tmp_path: Path) -> None:
    call = ToolCall(0, 0, "call_1", "read\ud800", '{"path": "\\ud800"}')
    read = ToolCall(0, 1, "call_2", "read_file", '{"path": "\\ud800"}')
    broken = ScriptedAnswer(events=(call, read, Finished(0, "tool_calls"), DONE))
    stage = stage_of(tmp_path, broken, told("So \ud800."))

    async def scene(desk: Desk) -> None:
        session = await desk.begin()
        response = await desk.agent.prompt(session_id=session, prompt=HERE)
        assert response.stop_reason == "end_turn"
        assert desk.editor.text() == "So ?."
        assert {state for state, _ in desk.editor.states()} <= {"pending", "in_progress", "failed"}

    play(stage, scene)


def test_consent_for_the_session_asks_once(tmp_path: Path) -> None:
    answers = [calling("read_file", path="a.txt"), calling("list_folder"), told("ok")]
    stage = stage_of(tmp_path, *answers)

    async def scene(desk: Desk) -> None:
        desk.editor.decision = "session"
        session = await desk.begin()
        await desk.agent.prompt(session_id=session, prompt=HERE)
        assert len(desk.editor.asked) == 1
        assert desk.editor.states()[-1][0] == "completed"

    play(stage, scene)


def test_cancelling_stops_the_answer_and_keeps_its_text(tmp_path: Path) -> None:
    long = ScriptedAnswer(pieces=tuple(f"{number} " for number in range(1000)), gap_s=0.005)
    stage = stage_of(tmp_path, long, told("again"))

    async def scene(desk: Desk) -> None:
        session = await desk.begin()

        async def cancel() -> None:
            if desk.editor.text():
                desk.editor.on_update = None
                await desk.agent.cancel(session_id=session)

        desk.editor.on_update = cancel
        response = await desk.agent.prompt(session_id=session, prompt=HERE)
        assert response.stop_reason == "cancelled"
        assert desk.stage.engine.cancelled == 1
        assert desk.editor.text().startswith("0 ")
        response = await desk.agent.prompt(session_id=session, prompt=HERE)
        assert response.stop_reason == "end_turn"

    play(stage, scene)


def test_cancelling_ends_a_question_about_a_call(tmp_path: Path) -> None:
    stage = stage_of(tmp_path, calling("read_file", path="a.txt"))

    async def scene(desk: Desk) -> None:
        session = await desk.begin()
        desk.editor.decision = "never answers"
        prompt = asyncio.create_task(desk.agent.prompt(session_id=session, prompt=HERE))
        while not desk.editor.asked:
            await asyncio.sleep(0)
        await desk.agent.cancel(session_id=session)
        assert (await prompt).stop_reason == "cancelled"

    play(stage, scene)


def test_failures_of_the_model_are_errors_of_the_request(tmp_path: Path) -> None:
    died = EngineDied("the engine ended", hint="send it again", signal="", phase="serve")
    stage = stage_of(tmp_path, ScriptedAnswer(pieces=("So",), error=died), told("Fine."))

    async def scene(desk: Desk) -> None:
        session = await desk.begin()
        with pytest.raises(RequestError, match="the engine ended\nsend it again") as caught:
            await desk.agent.prompt(session_id=session, prompt=HERE)
        assert caught.value.data == {"details": "the engine ended\nsend it again"}
        assert desk.editor.text() == "So"
        response = await desk.agent.prompt(session_id=session, prompt=HERE)
        assert response.stop_reason == "end_turn"

    play(stage, scene)


def test_a_model_that_cannot_be_loaded_fails_the_prompt_only(tmp_path: Path) -> None:
    stage = stage_of(tmp_path)
    stage.refuse = UsageError("this file is not a model")

    async def scene(desk: Desk) -> None:
        session = await desk.begin()
        with pytest.raises(RequestError, match="not a model"):
            await desk.agent.prompt(session_id=session, prompt=HERE)

    play(stage, scene)


def test_an_empty_prompt_is_refused(tmp_path: Path) -> None:
    stage = stage_of(tmp_path)

    async def scene(desk: Desk) -> None:
        session = await desk.begin()
        blank: list[Any] = [text_block(" ")]
        for prompt in ([], blank):
            with pytest.raises(RequestError, match="the prompt is empty") as caught:
                await desk.agent.prompt(session_id=session, prompt=prompt)
            assert caught.value.code == -32602
        assert not stage.engine.requests

    play(stage, scene)


def test_wrong_requests_are_named(tmp_path: Path) -> None:
    async def scene(desk: Desk) -> None:
        session = await desk.begin()
        for call in (
            desk.agent.prompt(session_id="nothere", prompt=HERE),
            desk.agent.set_session_mode(session_id=session, mode_id="nothere"),
            desk.agent.load_session(cwd=str(tmp_path), session_id="nothere"),
        ):
            with pytest.raises(RequestError, match="nothere") as caught:
                await call
            assert caught.value.code == -32602
        link: list[Any] = [resource_link_block("gone", f"file://{tmp_path}/gone")]
        with pytest.raises(RequestError, match="gone cannot be read"):
            await desk.agent.prompt(session_id=session, prompt=link)

    play(stage_of(tmp_path), scene)


def test_modes_choose_the_tools(tmp_path: Path) -> None:
    stage = stage_of(tmp_path, told("a"), told("b"))

    async def scene(desk: Desk) -> None:
        await desk.agent.initialize(protocol_version=PROTOCOL_VERSION)
        response = await desk.agent.new_session(cwd=str(desk.folder))
        assert response.modes is not None
        assert response.modes.current_mode_id == "edit"
        session = response.session_id
        tools = []
        for mode in ("chat", "run"):
            await desk.agent.set_session_mode(session_id=session, mode_id=mode)
            await desk.agent.prompt(session_id=session, prompt=HERE)
            tools.append([t["function"]["name"] for t in sent(stage.engine.requests[-1]).tools])
        assert tools[0] == []
        assert {"edit_file", "run_command", "fetch_page"} <= set(tools[1])

    play(stage, scene)


def test_tools_of_the_settings_are_the_first_mode(tmp_path: Path) -> None:
    stage = stage_of(tmp_path)
    stage.changes = {"tools": "read,fetch"}

    async def scene(desk: Desk) -> None:
        response = await desk.agent.new_session(cwd=str(desk.folder))
        assert response.modes is not None
        assert response.modes.current_mode_id == "custom"
        assert response.modes.available_modes[0].description == "Tools: read,fetch"

    play(stage, scene)


def test_conversations_are_loaded_again(tmp_path: Path) -> None:
    answers = [calling("read_file", path="a.txt"), told("It says alpha."), told("Still alpha.")]
    stage = stage_of(tmp_path, *answers)

    async def scene(desk: Desk) -> None:
        session = await desk.begin()
        await desk.agent.prompt(session_id=session, prompt=HERE)
        # A second client process would load it, after this one has saved it.
        desk.editor.updates.clear()
        await desk.agent.load_session(cwd=str(desk.folder), session_id=session)
        editor = desk.editor
        assert editor.text(UserMessageChunk) == "What is in a.txt?"
        assert editor.text() == "It says alpha."
        assert editor.states()[-1] == ("completed", "read_file a.txt, from line 1")
        await desk.agent.prompt(session_id=session, prompt=HERE)
        roles = [message.role for message in sent(stage.engine.requests[-1]).messages]
        assert roles == ["system", "user", "assistant", "tool", "assistant", "user"]

    play(stage, scene)


def test_resources_and_pictures_become_parts_of_the_question(tmp_path: Path) -> None:
    notes = tmp_path / "my notes.txt"
    notes.write_text("linked text")
    picture = base64.b64encode(png(2, 2)).decode()
    embedded = TextResourceContents(uri="file:///project/b.py", text="embedded text")
    question = question_of(
        [
            text_block("Compare "),
            resource_link_block("notes", notes.as_uri()),
            resource_block(embedded),
            image_block(picture, "image/png"),
            text_block("please"),
        ]
    )
    assert question.text.startswith("Compare ")
    assert question.text.endswith("please")
    included = {item.label: question.text[item.start : item.end] for item in question.inclusions}
    assert included == {
        "my notes.txt": "my notes.txt:\n```\nlinked text\n```\n",
        "b.py": "b.py:\n```\nembedded text\n```\n",
    }
    (attachment,) = question.attachments
    assert attachment.kind == "image"
    assert question.text[attachment.position :] == "please"
    with pytest.raises(UsageError, match="only files"):
        question_of([resource_link_block("page", "https://example.org/")])
    with pytest.raises(UsageError, match="base64"):
        question_of([image_block("?", "image/png")])


def test_half_characters_are_replaced_in_all_parts_of_a_question() -> None:
    embedded = TextResourceContents(uri="file:///project/\ud800.py", text="text \udfff")
    question = question_of([text_block("a \ud800 b"), resource_block(embedded)])
    assert question.text.startswith("a ? b")
    assert [item.label for item in question.inclusions] == ["?.py"]
    question.text.encode()


def test_a_link_to_anything_but_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for link in (f"file://{tmp_path}/pipe", "file:///dev/zero", f"file://{tmp_path}"):
        with pytest.raises(UsageError, match="is not a file"):
            question_of([resource_link_block("link", link)])
    for link, message in (("file:///a%00b", "cannot be read"), ("file://[/a", "not an address")):
        with pytest.raises(LocalchatError, match=message):
            question_of([resource_link_block("link", link)])


@pytest.mark.parametrize("cwd", ["", "relative", "/nowhere", "/dev/null", "/tmp\0"])
def test_a_session_needs_a_folder(cwd: str, tmp_path: Path) -> None:
    async def scene(desk: Desk) -> None:
        with pytest.raises(RequestError, match="absolute path of a folder") as caught:
            await desk.agent.new_session(cwd=cwd)
        assert caught.value.code == -32602

    play(stage_of(tmp_path), scene)


def test_servers_of_the_client_get_names_of_ours(tmp_path: Path) -> None:
    own = {"files": McpServer("files", "mine")}
    variable = EnvVariable(name="TOKEN", value="secret")
    header = HttpHeader(name="X-Key", value="k")
    servers = passed_servers(
        [
            McpServerStdio(name="Files", command="theirs", args=["-x"], env=[variable]),
            HttpMcpServer(type="http", name="My Wiki!", url="http://w/mcp", headers=[header]),
            McpServerStdio(name="7", command="c", args=[], env=[]),
        ],
        own,
    )
    assert servers == {
        **own,
        "files-2": McpServer("files-2", "theirs", ("-x",), values={"TOKEN": "secret"}),
        "my-wiki": McpServer("my-wiki", url="http://w/mcp", headers={"X-Key": "k"}),
        "server-7": McpServer("server-7", "c"),
    }
    with pytest.raises(UsageError, match="uses sse"):
        passed_servers([SseMcpServer(type="sse", name="s", url="http://w", headers=[])], {})


@pytest.mark.process
def test_a_server_of_the_client_is_used_with_its_variables(tmp_path: Path) -> None:
    answers = [calling("passed_environment"), told("ok")]
    stage = stage_of(tmp_path, *answers)

    async def scene(desk: Desk) -> None:
        variable = EnvVariable(name="SECRET_OF_CLIENT", value="mellon")
        program = str(Path(__file__).parents[1] / "support" / "mcp_server.py")
        server = McpServerStdio(
            name="passed", command=sys.executable, args=[program, "good"], env=[variable]
        )
        session = await desk.begin(mcp_servers=[server])
        await desk.agent.prompt(session_id=session, prompt=HERE)
        names = [tool["function"]["name"] for tool in sent(stage.engine.requests[0]).tools]
        assert "passed_environment" in names
        result = sent(stage.engine.requests[1]).messages[-1].content
        assert "SECRET_OF_CLIENT" in result

    play(stage, scene)


@pytest.mark.process
def test_the_command_speaks_the_protocol_and_saves_at_the_end(tmp_path: Path) -> None:
    async def run() -> None:
        editor = Editor()
        environment = {**os.environ, "LOCALCHAT_DATA_DIR": str(tmp_path)}
        arguments = ("-m", "tests.support.server_program", "acp", "-m", "guide")
        async with spawn_agent_process(
            cast(Any, editor), sys.executable, *arguments, env=environment, cwd=Path.cwd()
        ) as (agent, process):
            await agent.initialize(protocol_version=PROTOCOL_VERSION)
            response = await agent.new_session(cwd=str(tmp_path))
            assert response.modes is not None
            assert [mode.id for mode in response.modes.available_modes] == ["chat"]
            await agent.prompt(session_id=response.session_id, prompt=HERE)
            assert editor.text() == "Hello."
            assert process.stdin is not None
            process.stdin.close()
            assert await process.wait() == 0
        with History.open(tmp_path / "history.sqlite3") as history:
            assert [node.message.content for node in history.load(response.session_id).path()] == [
                "What is in a.txt?",
                "Hello.",
            ]

    asyncio.run(run())


@pytest.mark.process
def test_a_file_as_output_is_wrong_usage_and_no_traceback(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        result = subprocess.run(
            [sys.executable, "-m", "localchat", "acp"],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.PIPE,
            env={**os.environ, "HOME": str(tmp_path)},
        )
    assert result.returncode == 2
    assert b"stdin or stdout is a file" in result.stderr
    assert b"unexpected" not in result.stderr


def test_without_the_library_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "acp", None)
    assert run_command(["acp"]) == 2
    assert "pip install 'localchat-app[acp]'" in capsys.readouterr().err
