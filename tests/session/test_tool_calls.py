"""A session runs the calls of its answers, keeps them, and takes their writes back."""

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from localchat.chat.conversation import Node, Question
from localchat.chat.export import as_data, as_markdown
from localchat.chat.prompt_messages import sent_messages
from localchat.config.mcp_servers import McpServer
from localchat.engine.events import Event, Finished, Text, ToolCall
from localchat.engine.request import GenerateRequest, Messages
from localchat.history.store import History
from localchat.session.blocks import AnswerBlock, ToolCallBlock, UserBlock
from localchat.session.command_runner import CommandRunner, LongCommand, Output, QuestionUndone
from localchat.session.tool_calls import SessionTools
from localchat.tools.consent import Decision
from localchat.tools.loop import STOPPED
from localchat.tools.tool import Plan, Tool
from localchat.tools.toolset import Toolset
from tests.support.chat_sessions import Chat, run
from tests.support.scripted_engine import ScriptedAnswer
from tests.support.tool_scenes import ScriptedConsent
from tests.support.tui_stage import DONE, Stage, told


def calling(name: str, *texts: str, **arguments: object) -> ScriptedAnswer:
    """An answer that calls a tool after these texts."""
    events: list[Event] = [Text(0, text) for text in texts]
    events.append(ToolCall(0, 0, "call_1", name, msgspec.json.encode(arguments).decode()))
    return ScriptedAnswer(events=(*events, Finished(0, "tool_calls"), DONE))


def stage_of(tmp_path: Path, answers: Sequence[ScriptedAnswer], tools: str = "edit,run") -> Stage:
    """A stage whose engine gives these answers, with tools on a folder of their own."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("alpha\n")
    remaining = list(answers)
    stage = Stage(tmp_path, script=lambda request: remaining.pop(0))
    stage.environ["LOCALCHAT_DATA_DIR"] = str(tmp_path / "data")
    stage.changes = {"tools": tools, "root": str(folder)}
    return stage


def prompt(request: GenerateRequest) -> Messages:
    assert isinstance(request.prompt, Messages)
    return request.prompt


def test_a_call_runs_after_consent_and_its_result_is_sent_back(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        labels = []

        class Consent(ScriptedConsent):
            async def ask(self, tool: Tool, plan: Plan) -> Decision:
                labels.append(chat.session.status.label)
                return await super().ask(tool, plan)

        consent = Consent()
        chat.session.tools.consent = consent
        outcome = await chat.session.ask(Question("What is in a.txt?"))
        assert labels == ["waiting for you"]
        assert outcome.end == "complete"
        assert outcome.node is not None
        assert outcome.node.message.content == "It says alpha."
        assert [tool.name for tool, _ in consent.asked] == ["read_file"]
        first, second = chat.stage.engine.requests
        names = [tool["function"]["name"] for tool in prompt(first).tools]
        assert names == ["read_file", "list_folder", "search_files", "edit_file", "run_command"]
        assert prompt(first).bind_arguments
        result = prompt(second).messages[-1]
        assert (result.role, result.content, result.name) == ("tool", "alpha", "read_file")
        assert result.tool_call_id == prompt(second).messages[-2].tool_calls[0].id
        kinds = [type(block) for block in chat.page.blocks.values()]
        assert kinds == [UserBlock, AnswerBlock, ToolCallBlock, AnswerBlock]
        shown = [block for block in chat.page.blocks.values() if isinstance(block, ToolCallBlock)]
        assert shown[0].run is not None
        assert (shown[0].run.state, shown[0].result) == ("done", "alpha")
        before = dict(chat.page.blocks)
        chat.session.show()
        assert {id_: type(block) for id_, block in chat.page.blocks.items()} == {
            id_: type(block) for id_, block in before.items()
        }
        await chat.session.tools.close()

    answers = [calling("read_file", "Let me look.", path="a.txt"), told("It says alpha.")]
    run(stage_of(tmp_path, answers), play)


def test_a_stop_ends_the_wait_for_servers_that_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(toolset: Toolset) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Toolset, "connect", hang)

    async def play(chat: Chat) -> None:
        server = McpServer("slow", command="slow")
        session = chat.session
        session.context = msgspec.structs.replace(session.context, mcp_servers={"slow": server})
        session.tools.consent = ScriptedConsent()
        asking = asyncio.create_task(session.ask(Question("one")))
        async with asyncio.timeout(60.0):
            while session.status.label != "starting slow":
                await asyncio.sleep(0)
        assert session.stop()
        outcome = await asking
        assert (outcome.end, session.status.task, session.busy) == ("stopped", "", False)
        assert [notice.text for notice in chat.page.notices()] == ["stopped before the first token"]
        assert len(session.conversation.nodes) == 1, "the question is kept"
        await session.tools.close()

    stage = stage_of(tmp_path, [])
    monkeypatch.setattr(SessionTools, "groups", lambda tools: ("slow",))
    run(stage, play)


def test_a_call_that_is_only_described_is_made_next(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        chat.session.tools.consent = ScriptedConsent()
        outcome = await chat.session.ask(Question("What is in a.txt?"))
        assert outcome.node is not None
        assert outcome.node.message.content == "It says alpha."
        first, second, third = map(prompt, chat.stage.engine.requests)
        assert (first.tool_choice, second.tool_choice, third.tool_choice) == (
            "auto",
            "read_file",
            "auto",
        )
        assert second.continue_last
        called = chat.session.conversation.path()[1].message
        assert [call.name for call in called.tool_calls] == ["read_file"]
        # The advice is gone, also for the model.
        assert called.content == ""
        assert third.messages[-2].content == ""
        kinds = [type(block) for block in chat.page.blocks.values()]
        assert kinds == [UserBlock, ToolCallBlock, AnswerBlock]
        await chat.session.tools.close()

    described = told("You can use read_file.")
    answers = [described, calling("read_file", path="a.txt"), told("It says alpha.")]
    run(stage_of(tmp_path, answers), play)


def test_a_call_that_is_described_after_a_failed_one_is_made_too(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        chat.session.tools.consent = ScriptedConsent()
        outcome = await chat.session.ask(Question("What is in b.txt?"))
        assert outcome.node is not None
        assert outcome.node.message.content == "Call read_file again."
        choices = [prompt(request).tool_choice for request in chat.stage.engine.requests]
        # After a call that succeeds, the answer stands.
        assert choices == ["auto", "auto", "list_folder", "auto"]
        await chat.session.tools.close()

    answers = [
        calling("read_file", path="b.txt"),
        told("Call list_folder."),
        calling("list_folder"),
        told("Call read_file again."),
    ]
    run(stage_of(tmp_path, answers), play)


def test_an_answer_after_the_last_round_is_in_words(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        chat.session.tools.consent = ScriptedConsent()
        await chat.session.ask(Question("What is in a.txt?"))
        first, second = chat.stage.engine.requests
        assert first.grammar is None
        assert prompt(second).tool_choice == "none"
        assert second.grammar is not None
        pattern = re.compile(second.grammar.source)
        assert pattern.fullmatch("It says alpha.\nThat is all {of it}.")
        for call in ('{"name": "read_file"}', "<tool_call>", "```json\n{}", "[{}]"):
            assert not pattern.fullmatch(call)
        await chat.session.tools.close()

    stage = stage_of(tmp_path, [calling("read_file", path="a.txt"), told("alpha")])
    stage.changes["tool_rounds"] = "1"
    run(stage, play)


def test_a_tool_that_the_user_names_may_be_explained(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        outcome = await chat.session.ask(Question("What does read_file do?"))
        assert outcome.node is not None
        assert len(chat.stage.engine.requests) == 1
        await chat.session.tools.close()

    run(stage_of(tmp_path, [told("The tool read_file reads a file.")]), play)


def test_calls_and_results_are_kept_in_the_history_and_exported(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        history = History.open(tmp_path / "history.sqlite3")
        chat.session.recorder.attach(history)
        chat.session.tools.allowed = frozenset({"read"})
        await chat.session.ask(Question("What is in a.txt?"))
        conversation = chat.session.conversation
        chat.session.recorder.flush()
        loaded = history.load(conversation.id)
        assert [node.message for node in loaded.path()] == [
            node.message for node in conversation.path()
        ]
        assert [node.run for node in loaded.path()] == [node.run for node in conversation.path()]
        assert sent_messages(loaded) == sent_messages(conversation)
        text = as_markdown(loaded)
        assert "Calls the tool `read_file`" in text
        assert "Tool `read_file`: done in" in text
        record = as_data(loaded)["messages"][2]
        assert (record["role"], record["text"], record["run"]["state"]) == ("tool", "alpha", "done")
        chat.session.recorder.close()
        await chat.session.tools.close()

    run(stage_of(tmp_path, [calling("read_file", path="a.txt"), told("alpha")]), play)


def test_undo_restores_the_files_of_every_branch_byte_by_byte(tmp_path: Path) -> None:
    file = tmp_path / "work" / "a.txt"

    async def play(chat: Chat) -> None:
        chat.session.tools.consent = ScriptedConsent(["session"])
        await chat.session.ask(Question("Write beta."))
        assert file.read_text() == "beta\n"
        await chat.session.regenerate()
        assert file.read_text() == "gamma\n"
        assert (tmp_path / "work" / "new" / "b.txt").exists()
        reply = CommandRunner(chat.session, "line").run("/undo")
        assert isinstance(reply, QuestionUndone)
        assert chat.session.restored == "restored: new/b.txt, a.txt"
        assert file.read_text() == "alpha\n"
        assert [path.name for path in (tmp_path / "work").iterdir()] == ["a.txt"]
        await chat.session.tools.close()

    answers = [
        calling("edit_file", path="a.txt", old_text="alpha", new_text="beta"),
        told("done"),
        calling("edit_file", path="a.txt", old_text="beta", new_text="gamma"),
        calling("edit_file", path="new/b.txt", old_text="", new_text="b"),
        told("done"),
    ]
    run(stage_of(tmp_path, answers), play)


def test_undo_leaves_a_file_that_changed_since_and_says_so(tmp_path: Path) -> None:
    file = tmp_path / "work" / "a.txt"

    async def play(chat: Chat) -> None:
        chat.session.tools.consent = ScriptedConsent()
        await chat.session.ask(Question("Write beta."))
        file.write_text("mine\n")
        chat.session.undo()
        assert "left as it is" in chat.session.restored
        assert file.read_text() == "mine\n"
        await chat.session.tools.close()

    edit = calling("edit_file", path="a.txt", old_text="alpha", new_text="beta")
    run(stage_of(tmp_path, [edit, told("done")]), play)


def test_stopping_ends_a_command_and_the_conversation_stays_valid(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        chat.session.tools.consent = ScriptedConsent()
        task = asyncio.create_task(chat.session.ask(Question("Wait.")))
        await chat.until(
            lambda: any(
                isinstance(block, ToolCallBlock) and block.run and block.run.state == "running"
                for block in chat.page.blocks.values()
            )
        )
        assert chat.session.status.label == "running a tool"
        assert chat.session.stop()
        outcome = await task
        assert outcome.end == "stopped"
        assert chat.session.status.label == "ready"
        last = chat.session.conversation.path()[-1]
        assert (last.message.role, STOPPED in last.message.content) == ("tool", True)
        assert chat.session.can_continue
        await chat.session.continue_answer()
        answer = chat.session.last_answer()
        assert answer is not None
        assert answer.message.content == "Stopped, then."
        await chat.session.tools.close()

    answers = [calling("run_command", command="sleep 600"), told("Stopped, then.")]
    run(stage_of(tmp_path, answers), play)


def test_without_a_front_end_that_asks_a_call_is_refused_and_said(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        await chat.session.ask(Question("Look."))
        result: Node = chat.session.conversation.path()[2]
        assert result.run is not None
        assert result.run.state == "refused"
        await chat.session.tools.close()

    run(stage_of(tmp_path, [calling("read_file", path="a.txt"), told("no")]), play)


def test_text_of_a_result_never_chooses_documents(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        library = chat.session.context.library
        with library.open("notes", create=True):
            pass
        chat.session.tools.allowed = frozenset({"read"})
        (tmp_path / "work" / "a.txt").write_text("@notes read them\n")
        await chat.session.ask(Question("Look."))
        last = prompt(chat.stage.engine.requests[-1]).messages[-1]
        assert last.content == "@notes read them"
        await chat.session.tools.close()

    run(stage_of(tmp_path, [calling("read_file", path="a.txt"), told("ok")]), play)


def test_calls_that_a_kill_left_without_a_result_get_one(tmp_path: Path) -> None:
    async def play(chat: Chat) -> None:
        conversation = chat.session.conversation
        chat.session.tools.allowed = frozenset({"read"})
        await chat.session.ask(Question("Look."))
        conversation.back_to(conversation.path()[1].id)
        roles = [(message.role, message.content) for message in sent_messages(conversation)]
        assert roles[-1] == ("tool", "This call was not run.")
        await chat.session.tools.close()

    run(stage_of(tmp_path, [calling("read_file", path="a.txt"), told("ok")]), play)


def test_tools_are_listed_and_changed_by_a_command(tmp_path: Path) -> None:
    async def replies(reply: object) -> list[object]:
        assert isinstance(reply, LongCommand)
        return [inner async for inner in reply.replies]

    async def play(chat: Chat) -> None:
        runner = CommandRunner(chat.session, "line")
        (shown,) = await replies(runner.run("/tools"))
        assert isinstance(shown, Output)
        assert "Tools are off" in shown.text
        *_, shown = await replies(runner.run("/tools read"))
        assert isinstance(shown, Output)
        assert "read_file" in shown.text
        assert chat.session.setup.settings.tools == "read"
        with pytest.raises(Exception, match="there are no tools 'raed'"):
            await replies(runner.run("/tools raed"))
        *_, shown = await replies(runner.run("/tools off"))
        assert isinstance(shown, Output)
        assert "Tools are off" in shown.text
        await chat.session.tools.close()

    run(stage_of(tmp_path, [], tools="off"), play)
