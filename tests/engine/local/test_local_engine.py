"""LocalEngine over real children that follow a script: answers, deaths, cancels, questions."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from localchat.engine.events import Accepted, Done, Event, Finished, Loading, Prefill, Text
from localchat.engine.local.engine import LocalEngine
from localchat.engine.local.process import child_environment
from localchat.engine.options import EngineOptions
from localchat.engine.request import GenerateRequest, Message, Messages, Sampling
from localchat.engine.request import TextPrompt as PlainText
from localchat.engine.stream import Stream
from localchat.errors import (
    ContextExceeded,
    EngineClosed,
    EngineDied,
    LocalchatError,
    ModelInvalid,
    ModelMissing,
    UsageError,
)
from tests.support.scripted_backend import FAULT

LIVELY_S = 90.0
Open = Callable[..., LocalEngine]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def engine_for(tmp_path: Path, said: list[str]) -> Iterator[Open]:
    """Opens an engine on a script given by keywords."""
    engines: list[LocalEngine] = []

    def open_engine(*, options: dict[str, Any] | None = None, **script: Any) -> LocalEngine:
        path = tmp_path / f"model{len(engines)}.script"
        path.write_text(json.dumps(script))
        load_options: dict[str, Any] = {
            "model": path,
            "backend": "tests.support.scripted_backend:ScriptedBackend",
        }
        engine = LocalEngine(
            EngineOptions(**{**load_options, **(options or {})}), notify=said.append
        )
        engines.append(engine)
        return engine

    yield open_engine
    for engine in engines:
        engine.close()


def plain(text: str = "hello", **more: Any) -> GenerateRequest:
    more.setdefault("sampling", Sampling(temperature=0.0))
    return GenerateRequest(prompt=PlainText(text), **more)


def text_of(events: list[Event]) -> str:
    return "".join(one.text for one in events if isinstance(one, Text))


def ended(pid: int) -> bool:
    """Whether the process is gone (or a zombie that nobody has waited for yet)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + LIVELY_S
    while not true():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


def test_an_answer_comes_with_its_events_in_order(engine_for: Open) -> None:
    engine = engine_for(reply="Grüße!", load_s=0.3)
    events = list(engine.generate(plain()))
    assert isinstance(events[0], Accepted)
    assert isinstance(events[-1], Done)
    assert any(isinstance(one, Loading) for one in events)
    assert text_of(events) == "Grüße!"
    kinds = [type(one) for one in events]
    assert kinds.index(Prefill) < kinds.index(Text) < kinds.index(Finished)


async def read_some(stream: Stream, pieces: int) -> str:
    """Read an answer until it has this many pieces of text."""
    text: list[Event] = []
    while len(text) < pieces:
        text += [event for event in await stream.batch() if isinstance(event, Text)]
    return text_of(text)


def test_a_query_that_blocks_the_reading_event_loop_is_answered(engine_for: Open) -> None:
    async def run() -> str:
        with engine.generate(plain()) as stream:
            text = await read_some(stream, 5)
            assert engine.info().loaded
            return text + text_of([event async for event in stream])

    engine = engine_for(reply="a long reply", step_s=0.005)
    assert asyncio.run(run()) == "a long reply"


def test_events_arrive_though_the_reading_event_loop_waits_for_a_thread(engine_for: Open) -> None:
    async def run() -> None:
        with engine.generate(plain()) as stream:
            await read_some(stream, 5)
            other = engine.generate(plain())
            thread = threading.Thread(target=lambda: texts.append(text_of(list(other))))
            thread.start()
            # This blocks the event loop, which no code should do.
            thread.join(LIVELY_S)

    texts: list[str] = []
    engine = engine_for(reply="a long reply", step_s=0.005)
    asyncio.run(run())
    assert texts == ["a long reply"]


def test_a_closed_event_loop_leaves_the_rest_to_a_thread(engine_for: Open) -> None:
    engine = engine_for(reply="a long reply", step_s=0.005)
    stream = engine.generate(plain())
    text = asyncio.run(read_some(stream, 5))
    assert text + text_of(list(stream)) == "a long reply"


def test_the_death_of_the_process_reaches_a_reading_event_loop(engine_for: Open) -> None:
    async def run() -> None:
        with engine.generate(plain()) as stream:
            await read_some(stream, 5)
            assert engine.child_pid
            os.kill(engine.child_pid, signal.SIGKILL)
            with pytest.raises(EngineDied):
                await read_some(stream, 1000)

    engine = engine_for(reply="a long reply" * 50, step_s=0.005)
    asyncio.run(run())


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        (signal.SIGBUS, "the model file changed or was truncated"),
        (signal.SIGILL, "uses instructions that this CPU does not have"),
        (signal.SIGSEGV, "`localchat doctor` checks the build"),
    ],
)
def test_death_names_the_likely_cause(engine_for: Open, cause: signal.Signals, words: str) -> None:
    engine = engine_for(step_s=0.01)
    stream = engine.generate(plain())
    assert any(isinstance(event, Text) for event in stream)
    assert engine.child_pid is not None
    os.kill(engine.child_pid, cause)
    with pytest.raises(EngineDied, match=cause.name) as caught:
        list(stream)
    assert words in caught.value.hint


def test_death_in_mid_answer_names_the_signal_and_the_next_request_works(engine_for: Open) -> None:
    engine = engine_for(step_s=0.01)
    stream = engine.generate(plain())
    for event in stream:
        if isinstance(event, Text):
            break
    assert engine.child_pid is not None
    os.kill(engine.child_pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="SIGKILL") as caught:
        list(stream)
    assert caught.value.details == {"signal": "SIGKILL", "status": -9, "phase": "serve"}
    assert "memory ran out" in caught.value.hint
    assert text_of(list(engine.generate(plain(max_tokens=5))))


def test_a_request_that_comes_as_a_death_is_reported_is_one_of_the_next_child(
    engine_for: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(reply="still here")
    list(engine.generate(plain()))
    fail_all, events = engine._fail_all, list[Event]()
    asker = threading.Thread(target=lambda: events.extend(engine.generate(plain())))
    asked = threading.Event()

    def asked_meanwhile(error: EngineDied) -> None:
        asker.start()
        asker.join(0.1)
        asked.set()
        fail_all(error)

    with monkeypatch.context() as changed:
        changed.setattr(engine, "_fail_all", asked_meanwhile)
        assert engine.child_pid is not None
        os.kill(engine.child_pid, signal.SIGKILL)
        assert asked.wait(LIVELY_S)
        asker.join(LIVELY_S)
    assert text_of(events) == "still here"


@pytest.mark.parametrize("where", ["load", "warmup"])
def test_crash_before_the_first_answer_restarts_in_safe_mode_with_a_notice(
    engine_for: Open, said: list[str], tmp_path: Path, where: str
) -> None:
    options = {"state_dir": tmp_path / "state"}
    first = engine_for(options=options, reply="yes", crash=where)
    events = list(first.generate(plain(sampling=Sampling())))
    assert text_of(events) == "yes"
    assert [type(one) for one in events].count(Accepted) == 1
    assert first.info().safe_mode
    assert "SIGSEGV" in said[0] and "doctor" in said[0]
    said.clear()
    second = engine_for(options=options, reply="yes", crash=where)
    assert text_of(list(second.generate(plain()))) == "yes"
    assert second.info().safe_mode
    assert said == []


def test_error_of_the_gpu_before_the_first_answer_restarts_in_safe_mode(
    engine_for: Open, said: list[str], tmp_path: Path
) -> None:
    options = {"state_dir": tmp_path / "state"}
    first = engine_for(options=options, reply="yes", crash="fault")
    assert text_of(list(first.generate(plain()))) == "yes"
    assert first.info().safe_mode
    assert "error of the GPU" in said[0] and "safe mode" in said[0] and "llama.cpp" not in said[0]


def test_crash_that_safe_mode_does_not_mend_is_told_and_slows_no_other_model(
    engine_for: Open, said: list[str], tmp_path: Path
) -> None:
    options = {"state_dir": tmp_path / "state"}
    broken = engine_for(options=options, crash="always")
    with pytest.raises(EngineDied, match="SIGSEGV while warming up") as caught:
        list(broken.generate(plain()))
    assert "safe mode did not help" in caught.value.hint
    assert len([sentence for sentence in said if "safe mode" in sentence]) == 1
    other = engine_for(options=options, reply="yes")
    assert text_of(list(other.generate(plain()))) == "yes"
    assert not other.info().safe_mode


def test_crash_while_the_file_is_read_blames_the_file(engine_for: Open, said: list[str]) -> None:
    with pytest.raises(EngineDied, match="SIGSEGV while reading the model") as caught:
        list(engine_for(crash="open").generate(plain()))
    assert "file may be damaged" in caught.value.hint
    assert said == []


def test_seed_that_was_told_is_the_one_drawn_with_after_a_crash_in_warm_up(
    engine_for: Open,
) -> None:
    request = plain(sampling=Sampling(temperature=1.0), max_tokens=12)
    survivor = engine_for(crash="warmup")
    events = list(survivor.generate(request))
    accepted = events[0]
    assert isinstance(accepted, Accepted)
    sampling = Sampling(temperature=1.0, seed=accepted.seed)
    again = survivor.generate(plain(sampling=sampling, max_tokens=12, salt="other"))
    assert text_of(list(again)) == text_of(events)


def test_safe_mode_works_where_it_cannot_be_saved(
    engine_for: Open, said: list[str], tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    engine = engine_for(options={"state_dir": tmp_path / "state"}, reply="yes", crash="warmup")
    assert text_of(list(engine.generate(plain()))) == "yes"
    wait_until(lambda: any("could not be saved" in one for one in said))


def test_crash_in_a_step_is_an_error_that_says_so(engine_for: Open) -> None:
    engine = engine_for(crash="step")
    with pytest.raises(EngineDied, match="SIGSEGV while running"):
        list(engine.generate(plain()))


def test_a_fault_in_the_preparation_of_a_request_fails_that_request_alone(engine_for: Open) -> None:
    engine = engine_for(reply="yes")
    other = engine.generate(plain())
    with pytest.raises(LocalchatError, match="RuntimeError: a fault") as caught:
        list(engine.generate(plain(FAULT)))
    assert not isinstance(caught.value, EngineDied)
    assert text_of(list(other)) == "yes"


def test_missing_and_invalid_models_come_out_of_the_stream(
    engine_for: Open, tmp_path: Path
) -> None:
    engine = engine_for(options={"model": tmp_path / "none.script"})
    with pytest.raises(ModelMissing):
        list(engine.generate(plain()))
    with pytest.raises(ModelMissing):
        engine.tokenize("a")
    (tmp_path / "bad.script").write_text("{")
    with pytest.raises(ModelInvalid):
        list(engine_for(options={"model": tmp_path / "bad.script"}).generate(plain()))


def test_a_file_that_cannot_be_written_costs_the_log_probabilities_alone(
    engine_for: Open, tmp_path: Path
) -> None:
    engine = engine_for(reply="as ever")
    for name in (str(tmp_path), "a\0b"):
        asked = plain(prompt_logprobs=0, prompt_logprobs_file=name)
        assert text_of(list(engine.generate(asked))) == "as ever"


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (plain("x" * 5000), ContextExceeded),
        (plain(""), UsageError),
        (plain("half \udc80"), UsageError),
        (plain(sampling=Sampling(seed=1 << 70)), UsageError),
        (plain(sampling=Sampling(top_p=3.0)), UsageError),
    ],
)
def test_a_refused_request_leaves_the_engine_at_work(
    engine_for: Open, request_: GenerateRequest, error: type[Exception]
) -> None:
    engine = engine_for(reply="yes")
    with pytest.raises(error):
        list(engine.generate(request_))
    assert text_of(list(engine.generate(plain()))) == "yes"


def test_questions_are_answered_while_the_model_loads_and_while_a_step_runs(
    engine_for: Open,
) -> None:
    loading = engine_for(load_s=90.0)
    loading.generate(plain(max_tokens=8))
    assert loading.tokenize("ab") == [97, 98]
    assert loading.stats().now.phase == "loading"
    assert not loading.info().loaded
    messages = Messages((Message("user", "hi"),))
    assert loading.render(messages) == "[user]hi\n[assistant]"
    engine = engine_for(step_s=0.3)
    stream = engine.generate(plain(max_tokens=300))
    for event in stream:
        if isinstance(event, Text):
            assert engine.detokenize([97, 98]) == "ab"
            assert engine.stats().now.running == 1
            assert engine.info().loaded
            break
    stream.close()


def test_a_cancelled_request_makes_room_wherever_it_was(engine_for: Open) -> None:
    engine = engine_for(load_s=0.4, step_s=0.02, reply="x" * 60)
    engine.generate(plain()).close()
    in_load = engine.generate(plain())
    next(iter(in_load))
    in_load.close()
    running, queued = engine.generate(plain("a" * 2000)), engine.generate(plain())
    for event in running:
        if isinstance(event, Prefill):
            break
    running.close()
    queued.close()
    decoding = engine.generate(plain())
    for event in decoding:
        if isinstance(event, Text):
            break
    decoding.close()
    wait_until(lambda: engine.stats().now.running == engine.stats().now.waiting == 0)
    assert engine.stats().now.kv_used_tokens == 0
    assert text_of(list(engine.generate(plain()))) == "x" * 60


def test_nobody_waits_to_send_or_cancel_while_the_child_reads_nothing(engine_for: Open) -> None:
    engine = engine_for(reply="yes", context_tokens=1 << 20)
    assert text_of(list(engine.generate(plain()))) == "yes"
    pid = engine.child_pid
    assert pid is not None
    goes_on = threading.Timer(LIVELY_S / 3, os.kill, (pid, signal.SIGCONT))
    os.kill(pid, signal.SIGSTOP)
    goes_on.start()
    long, behind = engine.generate(plain("a" * 500_000)), engine.generate(plain())
    long.close()
    assert goes_on.is_alive(), "they waited until the child read again"
    goes_on.cancel()
    os.kill(pid, signal.SIGCONT)
    assert text_of(list(behind)) == "yes"
    wait_until(lambda: engine.stats().cancelled == 1)


def test_close_ends_a_child_in_a_long_step_by_its_deadline(engine_for: Open) -> None:
    engine = engine_for(step_s=60.0)
    stream = engine.generate(plain())
    next(iter(stream))
    pid = engine.child_pid
    assert pid is not None
    engine.close(deadline_s=0.2)
    assert ended(pid)
    with pytest.raises(EngineClosed):
        list(stream)
    with pytest.raises(EngineClosed):
        list(engine.generate(plain()))
    with pytest.raises(EngineClosed):
        engine.tokenize("a")
    engine.close()


def test_close_waits_for_a_loaded_model_but_hardly_for_a_load(engine_for: Open) -> None:
    def longest_wait_s(engine: LocalEngine) -> float:
        """Close an engine, and return how long it would wait for its process."""
        child = engine._child
        assert child is not None
        process = child._process
        wait = process.wait
        limits_s: list[float] = []

        def recorded(timeout: float | None = None) -> int:
            limits_s.append(timeout or 0.0)
            return wait(timeout)

        process.wait = recorded  # type: ignore[method-assign]
        engine.close(deadline_s=LIVELY_S)
        assert ended(child.pid)
        return max(limits_s)

    engine = engine_for(load_s=60.0)
    next(iter(engine.generate(plain())))
    assert longest_wait_s(engine) < 1
    engine = engine_for()
    list(engine.generate(plain(max_tokens=1)))
    assert longest_wait_s(engine) == LIVELY_S


def test_an_engine_has_one_render_process_and_takes_it_along(engine_for: Open) -> None:
    engine = engine_for(template="{{ messages[0].content }}")
    talk = Messages((Message("user", "hi"),))
    assert [engine.render(talk) for _ in range(3)] == ["hi"] * 3
    assert engine.child_pid is not None
    (helper,) = psutil.Process(engine.child_pid).children()
    assert "render_worker" in " ".join(helper.cmdline())
    helper.kill()
    wait_until(lambda: ended(helper.pid))
    assert engine.render(talk) == "hi"
    (helper,) = psutil.Process(engine.child_pid).children()
    engine.close()
    assert ended(helper.pid)


def test_an_engine_without_a_chat_template_keeps_no_render_process(engine_for: Open) -> None:
    engine = engine_for(template="")
    engine.tokenize("a")
    assert psutil.Process(engine.child_pid or 0).children() == []


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "m.script").write_text('{"step_s": 0.05}')
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from localchat.engine.local.engine import EngineOptions, LocalEngine\n"
        "engine = LocalEngine(EngineOptions(Path(sys.argv[1]),"
        " backend='tests.support.scripted_backend:ScriptedBackend'), notify=print)\n"
        "engine.tokenize('a')\n"
        "print(engine.child_pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "m.script")], stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert not ended(child)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: ended(child))


def test_ctrl_c_while_the_child_starts_does_not_end_it(engine_for: Open) -> None:
    """It reaches the whole group, long before Python is up in the child."""
    engine = engine_for(reply="yes")
    pid = engine.child_pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    assert text_of(list(engine.generate(plain()))) == "yes"
    assert engine.child_pid == pid
    os.kill(pid, signal.SIGINT)
    assert text_of(list(engine.generate(plain()))) == "yes"
    assert engine.child_pid == pid


def test_two_threads_are_answered_at_once(engine_for: Open) -> None:
    engine = engine_for(step_s=0.005)
    alone = text_of(list(engine.generate(plain("one", max_tokens=30, salt="first"))))
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        texts[number] = text_of(list(engine.generate(plain("one", max_tokens=30))))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIVELY_S)
    assert list(texts.values()) == [alone] * 4


def test_an_event_loop_can_consume_a_stream(engine_for: Open) -> None:
    engine = engine_for(reply="yes", step_s=0.01)

    async def consume() -> list[Event]:
        return [event async for event in engine.generate(plain())]

    events = asyncio.run(consume())
    assert text_of(events) == "yes"
    assert isinstance(events[-1], Done)


def test_closing_from_another_thread_ends_a_consumer(engine_for: Open) -> None:
    engine = engine_for(step_s=1.0)
    stream = engine.generate(plain())
    timer = threading.Timer(0.3, stream.close)
    timer.start()
    with pytest.raises(EngineClosed):
        list(stream)
    timer.join()


def test_environment_of_the_child_holds_no_secrets() -> None:
    outside = {"PATH": "/bin", "HF_TOKEN": "a", "OPENAI_API_KEY": "b", "X_PASSWORD": "c"}
    inside = child_environment({**outside, "AWS_SECRET_ACCESS_KEY": "d", "OPENAI_KEY": "e"})
    assert inside == {
        "PATH": "/bin",
        "GOMP_SPINCOUNT": "2000",
        "TOKENIZERS_PARALLELISM": "false",
        "GGML_NO_BACKTRACE": "1",
    }


def test_noise_on_the_childs_output_disturbs_no_frame(engine_for: Open, tmp_path: Path) -> None:
    module = "import os\nos.system('echo noise; echo more >&2')\nprint('and python')\n"
    module += "from tests.support.scripted_backend import ScriptedBackend as Noisy\n"
    (tmp_path / "noisy_backend.py").write_text(module)
    sys.path.append(str(tmp_path))
    try:
        engine = engine_for(options={"backend": "noisy_backend:Noisy"}, reply="yes")
    finally:
        sys.path.remove(str(tmp_path))
    assert text_of(list(engine.generate(plain()))) == "yes"


def test_what_lies_in_the_current_folder_is_not_run_by_the_child(
    engine_for: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('a stranger was imported')")
    monkeypatch.chdir(tmp_path)
    assert text_of(list(engine_for(reply="yes").generate(plain()))) == "yes"


def test_a_malformed_frame_ends_the_child_with_a_trace_in_its_log(engine_for: Open) -> None:
    engine = engine_for(step_s=0.05)
    stream = engine.generate(plain())
    next(iter(stream))
    child = engine._child
    assert child is not None
    child._writer.send(b"\xc1 no frame")
    with pytest.raises(EngineDied, match=r"status 3.*FrameError"):
        list(stream)
