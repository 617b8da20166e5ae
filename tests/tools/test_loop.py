"""The loop runs calls, and every fault of a model comes back to it as text."""

import asyncio
from pathlib import Path

import pytest

from localchat.engine.request import CalledTool, Message, Messages
from localchat.tools.consent import Approvals
from localchat.tools.loop import MAX_CALLS, STOPPED, ToolTurn, with_ids
from localchat.tools.tool import Plan, Tool, bounded
from tests.support.tool_scenes import ToolScene, done


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("read_fil", "{}", "read_file"),
        ("nothing_like_it", "{}", "valid names"),
        ("read_file", "{", "not valid JSON"),
        ("read_file", "[1]", "not a JSON object"),
        ("read_file", '{"path": 7}', "invalid"),
        ("read_file", "", "invalid"),
    ],
)
def test_an_invalid_call_is_returned_to_the_model(
    tmp_path: Path, name: str, arguments: str, message: str
) -> None:
    (result,) = ToolScene(tmp_path).calls((name, arguments))
    assert result.run.state == "failed"
    assert result.message.role == "tool"
    assert message in result.message.content


def test_parallel_calls_have_results_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A")
    results = ToolScene(tmp_path).calls(
        ("read_file", '{"path": "a"}'),
        ("edit_file", '{"path": "a", "old_text": "A", "new_text": "B"}'),
        ("read_file", '{"path": "a"}'),
        ("read_file", '{"path": "b"}'),
    )
    assert [result.message.tool_call_id for result in results] == ["id0", "id1", "id2", "id3"]
    assert [result.run.state for result in results] == ["done", "done", "done", "failed"]
    assert results[0].message.content == "A"
    assert results[2].message.content == "B"


def ended(scene: ToolScene) -> bool:
    """Whether no more calls run. A function, because a type checker believes a property to be constant."""
    return scene.turn.exhausted


def offered(scene: ToolScene) -> list[str]:
    """Names of the tools that the next answer may call."""
    tools = scene.turn.offer(Messages((Message("user", "hi"),))).tools
    return [tool["function"]["name"] for tool in tools]


def test_a_repeated_call_is_not_run_again_and_its_tool_is_left_out_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A")
    scene = ToolScene(tmp_path)
    everything = offered(scene)
    scene.call("read_file", path="a")
    asked = len(scene.consent.asked)
    assert scene.text("read_file", path="a").startswith("A\n\n[This is the same call")
    assert len(scene.consent.asked) == asked
    assert set(everything) - set(offered(scene)) == {"read_file"}
    scene.call("list_folder")
    assert offered(scene) == everything
    assert not ended(scene)


def test_a_second_round_of_repeated_calls_has_to_be_the_last(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("A")
    scene = ToolScene(tmp_path)
    assert scene.text("read_file", path="a") == "A"
    first, other = scene.calls(("read_file", '{"path":"a"}'), ("list_folder", "{}"))
    assert "same call" in first.message.content
    assert "same call" not in other.message.content
    assert not ended(scene)
    scene.call("edit_file", path="a", old_text="A", new_text="B")
    assert scene.text("read_file", path="a") == "B"
    assert "Now answer" not in scene.text("read_file", path="a")
    assert not ended(scene)
    last = scene.text("read_file", path="a")
    assert last.startswith("B\n\n[This is the same call")
    assert "Now answer" in last
    assert ended(scene)


def test_a_call_that_fails_again_and_again_ends_the_calls(tmp_path: Path) -> None:
    scene = ToolScene(tmp_path)
    for has_ended in (False, False, True):
        result = scene.call("edit_file", path="none", old_text="A", new_text="B")
        assert result.run.state == "failed"
        assert ended(scene) == has_ended
        assert "edit_file" in offered(scene)


def test_an_empty_answer_after_failed_calls_has_to_be_a_call(tmp_path: Path) -> None:
    scene = ToolScene(tmp_path)
    scene.turn = ToolTurn(
        scene.tools, Approvals(None), max_rounds=9, context_tokens=8192, forces_calls=True
    )
    scene.call("edit_file", path="none", old_text="A", new_text="B")
    assert scene.turn.must_answer(Message("assistant"))
    assert scene.turn.offer(Messages((Message("user", "hi"),))).tool_choice == "required"
    assert scene.turn.must_answer(Message("assistant"))
    assert ended(scene)


def test_an_empty_answer_after_results_is_asked_for_once_more_without_tools(tmp_path: Path) -> None:
    turn = ToolScene(tmp_path).turn
    assert not turn.must_answer(Message("assistant"))
    turn.rounds = 1
    assert not turn.must_answer(Message("assistant", "text"))
    assert turn.must_answer(Message("assistant"))
    assert turn.exhausted
    assert not turn.must_answer(Message("assistant"))


@pytest.mark.parametrize(
    ("answer", "choice"),
    [
        ("You can use read_file for this.", "read_file"),
        ("Use read_file, and then edit_file.", "required"),
        ('```json\n{\n  "name": "rename", "arguments": {"old": "a"}\n}\n```', "required"),
        ('{"name": "rename", "parameters": {}}', "required"),
        ('The file has the text {"name": "rename", "arguments": {}}.', ""),
        ("Hello!", ""),
    ],
)
def test_an_answer_that_describes_a_call_has_to_make_one(
    tmp_path: Path, answer: str, choice: str
) -> None:
    tools = ToolScene(tmp_path).tools
    turn = ToolTurn(tools, Approvals(None), max_rounds=9, context_tokens=8192, forces_calls=True)
    messages = Messages((Message("user", "Rename a."),))
    turn.offer(messages)
    assert turn.must_call(Message("assistant", answer)) == bool(choice)
    offer = turn.offer(messages)
    assert offer.tool_choice == (choice or "auto")
    assert offer.parallel_tool_calls == (not choice)


def test_after_the_last_round_no_tool_can_be_called(tmp_path: Path) -> None:
    scene = ToolScene(tmp_path, max_rounds=1)
    messages = Messages((Message("user", "hi"),))
    choices = [scene.turn.offer(messages).tool_choice]
    assert "Now answer" in scene.text("list_folder")
    choices.append(scene.turn.offer(messages).tool_choice)
    assert choices == ["auto", "none"]
    assert ended(scene)


def test_one_answer_runs_a_limited_number_of_calls(tmp_path: Path) -> None:
    results = ToolScene(tmp_path).calls(*[("list_folder", "{}")] * (MAX_CALLS + 1))
    assert "may have" in results[-1].message.content


def test_a_cancellation_ends_running_calls_and_says_so(tmp_path: Path) -> None:
    async def forever() -> str:
        await asyncio.sleep(3600)
        return "never"

    async def plan(_: object) -> Plan:
        return Plan(forever, "waits", "wait", "all waiting")

    async def play() -> None:
        tools = {
            "look": Tool("look", "", {"type": "object"}, "read", plan),
            "do": Tool("do", "", {"type": "object"}, "run", plan),
        }
        turn = ToolTurn(
            tools,
            Approvals(None, frozenset(("read", "run"))),
            max_rounds=3,
            context_tokens=100,
        )
        states: list[str] = []
        calls = [
            CalledTool("look", "{}", "1"),
            CalledTool("do", "{}", "2"),
            CalledTool("do", "{}", "3"),
        ]
        task = asyncio.create_task(
            turn.run(calls, lambda call, run, text: states.append(run.state))
        )
        while "running" not in states:
            await asyncio.sleep(0)
        task.cancel()
        results = await task
        assert [STOPPED in result.message.content for result in results] == [True] * 3

    done(play())


def test_a_fault_inside_a_tool_ends_neither_the_turn_nor_the_program() -> None:
    async def fail() -> str:
        raise ZeroDivisionError("oops")

    async def plan(_: object) -> Plan:
        return Plan(fail, "fails", "fail", "all failures")

    async def no_plan(_: object) -> Plan:
        raise ZeroDivisionError("oops")

    tools = {
        "bad": Tool("bad", "", {"type": "object"}, "read", plan),
        "worse": Tool("worse", "", {"type": "object"}, "read", no_plan),
    }
    turn = ToolTurn(tools, Approvals(None, frozenset({"read"})), max_rounds=3, context_tokens=1)
    calls = [CalledTool("bad", "{}", "1"), CalledTool("worse", "{}", "2")]
    for result in done(turn.run(calls, lambda *_: None)):
        assert result.run.state == "failed"
        assert "ZeroDivisionError" in result.message.content


def test_an_address_that_is_none_is_an_error_of_the_call(tmp_path: Path) -> None:
    result = ToolScene(tmp_path).call("fetch_page", url="http://[/")
    assert result.run.state == "failed"
    assert result.message.content == "Error: http://[/ is not an address: Invalid IPv6 URL"


def test_a_long_result_is_cut_in_the_middle_with_a_note() -> None:
    text = bounded("a" * 500 + "b" * 500, 90)
    assert text.startswith("a" * 60)
    assert text.endswith("b" * 30)
    assert "910 characters are left out" in text


def test_calls_without_an_id_of_their_own_get_one() -> None:
    calls = (
        CalledTool("x", "{}", ""),
        CalledTool("x", "{}", "same"),
        CalledTool("x", "{}", "same"),
    )
    ids = [call.id for call in with_ids(Message("assistant", tool_calls=calls)).tool_calls]
    assert len(set(ids)) == 3
    assert "" not in ids
    assert ids[1] == "same"
