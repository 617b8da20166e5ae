"""One answer: what goes to which stream, in which form, with which exit code."""

import errno
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from localchat.cli.chat import ask
from localchat.cli.chat.one_shot import OneShot
from localchat.config.paths import find_paths
from localchat.engine.events import Event, MetricsSnapshot
from localchat.errors import (
    DoesNotFit,
    EngineDied,
    LocalchatError,
    ModelInvalid,
    ModelMissing,
    NetworkError,
    TemplateError,
)
from tests.support.cli_program import (
    BEGIN,
    HOSTILE,
    INFO,
    SCENARIOS,
    ScenarioEngine,
    ScriptedApp,
    answer,
)
from tests.support.paths import ROOT
from tests.support.terminal_screen import Call


@pytest.mark.parametrize(
    ("scenario", "out"), [("hello", "Hello.\n"), ("empty", "\n"), ("hostile", HOSTILE + "\n")]
)
def test_stdout_is_the_answer_alone_with_one_newline_and_its_own_bytes(
    call: Call, scenario: str, out: str
) -> None:
    assert call(SCENARIOS[scenario], "hi")[:2] == (0, out)


def test_an_answer_without_text_is_reported_on_stderr(call: Call) -> None:
    for flags in ((), ("--json",)):
        err = call(SCENARIOS["empty"], *flags, "hi")[2]
        assert err == "localchat: The answer has no text. Ask in other words.\n"
    assert "no text" not in call(SCENARIOS["hello"], "hi")[2]


def test_a_pipe_hears_of_the_engine_only_with_stats_and_quiet_tells_nothing(
    call: Call,
) -> None:
    _, _, err = call(SCENARIOS["hello"], "--stats", "hi")
    assert "context 4,096 of 32,768" in err
    assert "the engine speaks" in err
    assert "\x1b" not in err
    assert "\r" not in err
    assert call(SCENARIOS["hello"], "-q", "hi") == (0, "Hello.\n", "")
    assert call(SCENARIOS["hello"], "hi") == (0, "Hello.\n", "")


def test_reasoning_goes_to_stderr_and_can_be_hidden(call: Call) -> None:
    code, out, err = call(SCENARIOS["thinks"], "hi")
    assert (code, out) == (0, "Yes\n")
    assert "hm so\n" in err
    assert "hm so" not in call(SCENARIOS["thinks"], "--hide-reasoning", "hi").err


def test_stats_is_figures_and_the_reason_on_stderr_even_when_quiet(call: Call) -> None:
    code, out, err = call(SCENARIOS["hello"], "-q", "--stats", "hi")
    assert (code, out) == (0, "Hello.\n")
    figures = "load 0.50 s · TTFT 0.41 s · 62.0 tok/s · KV 412/32,768 (1%) · drafts 34/51\n"
    assert err == f"{figures}GGUF runs on llama.cpp\n"


@pytest.mark.parametrize("flag", ["-v", "--verbose"])
def test_verbose_is_stats(call: Call, flag: str) -> None:
    assert call(SCENARIOS["hello"], flag, "hi") == call(SCENARIOS["hello"], "--stats", "hi")


def test_temp_is_temperature(call: Call) -> None:
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "--temp", "0.25", "hi").code == 0
    assert app.engines[0].requests[0].sampling.temperature == 0.25
    assert "--temperature must be" in call(app, "--temp", "hot", "hi").err


def test_json_is_one_object_with_exactly_the_promised_keys(call: Call) -> None:
    code, out, _ = call(SCENARIOS["thinks"], "--json", "hi")
    assert code == 0
    assert out.count("\n") == 1
    assert json.loads(out) == {
        "model": "tiny",
        "backend": "llamacpp",
        "lora": [],
        "text": "Yes",
        "reasoning": "hm so",
        "finish_reason": "stop",
        "limit": None,
        "repetition": None,
        "usage": {
            "prompt_tokens": 12,
            "cached_tokens": 4,
            "why_missed": "",
            "completion_tokens": 3,
        },
        "timings": {
            "load_s": 0.5,
            "ttft_s": 0.41,
            "prefill_tokens_per_s": 200.0,
            "decode_tokens_per_s": 62.04,
            "tpot_ms_p50": 16.0,
            "tpot_ms_p95": 20.0,
        },
        "kv": {"used_tokens": 412, "total_tokens": 32768},
        "speculation": {
            "drafted": 51,
            "accepted": 34,
            "speedup": None,
            "speculation_off": "",
        },
        "fingerprint": "f1",
    }


def test_the_readme_lists_the_keys_of_the_json_object(call: Call) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sentence = readme.partition("`--json` prints one object")[2].partition(";")[0]
    keys = json.loads(call(SCENARIOS["thinks"], "--json", "hi").out)
    assert re.findall(r"`(\w+)`", sentence) == list(keys)


def test_several_choices_are_parted_and_listed_in_json(call: Call) -> None:
    assert call(SCENARIOS["two"], "--n", "2", "hi").out == "one\n---\none\n"
    choices = json.loads(call(SCENARIOS["two"], "--n", "2", "--json", "hi").out)["choices"]
    assert [choice["text"] for choice in choices] == ["one\n", "one\n"]


def test_extract_prints_the_first_block_only_and_stops_the_rest(call: Call) -> None:
    app = ScriptedApp(SCENARIOS["code"])
    assert call(app, "-x", "hi")[:2] == (0, "print(1)\n")
    assert call(SCENARIOS["code"], "-x", "--json", "hi").out.count("Here") == 0


def test_extract_without_a_block_fails_and_shows_the_answer(call: Call) -> None:
    code, out, err = call(SCENARIOS["prose"], "-x", "hi")
    assert (code, out) == (1, "")
    assert "no code here" in err


def test_sampling_flags_reach_the_request(call: Call) -> None:
    app = ScriptedApp(SCENARIOS["hello"])
    args = (
        "--temperature",
        "0",
        "--top-p",
        "0.9",
        "--top-k",
        "40",
        "--min-p",
        "0.1",
        "--seed",
        "7",
    )
    more = ("--max-tokens", "5", "--stop", "END", "--stop", "]", "-o", "typical-p", "0.5")
    last = ("-o", "logit_bias", '{"3": -1}', "--no-speculation", "--think", "-s", "be brief")
    assert call(app, *args, *more, *last, "hi").code == 0
    request = app.engines[0].requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.9, 40)
    assert (sampling.min_p, sampling.seed, sampling.typical_p) == (0.1, 7, 0.5)
    assert sampling.logit_bias == {3: -1.0}
    assert (request.max_tokens, request.stop, request.speculation) == (5, ("END", "]"), False)
    assert [m.role for m in request.prompt.messages] == ["system", "user"]  # type: ignore[union-attr]
    assert request.prompt.thinking == "on"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("args", "thinking"),
    [
        (("--think=false", "hi"), "off"),
        (("--think=Off", "hi"), "off"),
        (("--think=true", "hi"), "on"),
        (("hi", "--think=low"), "on"),
        (("--no-think", "--think=auto", "hi"), "auto"),
        (("--think=auto", "--no-think", "hi"), "off"),
        (("-s", "", "--think=off", "hi"), "off"),
    ],
)
def test_think_takes_a_value_as_elsewhere(call: Call, args: tuple[str, ...], thinking: str) -> None:
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, *args).code == 0
    request = app.engines[0].requests[0]
    assert request.prompt.thinking == thinking  # type: ignore[union-attr]
    assert "hi" in str(request.prompt.messages[-1])  # type: ignore[union-attr]


def test_an_equals_sign_in_an_option_does_not_swallow_the_prompt(call: Call) -> None:
    result = call(SCENARIOS["hello"], "-o", "temperature=0.5", "hi")
    assert result.code == 2
    assert "write -o temperature 0.5" in result.err


def test_think_refuses_other_values_and_leaves_a_prompt_alone(call: Call) -> None:
    result = call(SCENARIOS["hello"], "--think=perhaps", "hi")
    assert result.code == 2
    assert "--think is 'perhaps'; expected true, false or auto" in result.err
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "--", "--think=false").code == 0
    messages = app.engines[0].requests[0].prompt.messages  # type: ignore[union-attr]
    assert "--think=false" in str(messages[-1])


@pytest.mark.parametrize(
    ("switch", "forms"),
    [
        ("--think", "--think or --no-think"),
        ("--no-think", "--think or --no-think"),
        ("--stats", "--stats or --no-stats"),
    ],
)
def test_a_value_after_a_switch_is_refused_and_no_prompt(
    call: Call, switch: str, forms: str
) -> None:
    result = call(SCENARIOS["hello"], switch, "off", "hi")
    assert (result.code, result.out) == (2, "")
    assert f"{switch} is a switch" in result.err
    assert f"write {forms}" in result.err
    for args in (("--think", "officers"), ("--think", "--", "off", "hi"), ("-c", "on", "what?")):
        assert call(SCENARIOS["hello"], *args).code == 0


def test_what_nobody_says_is_left_to_the_model(call: Call) -> None:
    app = ScriptedApp(SCENARIOS["hello"])
    call(app, "hi")
    sampling = app.engines[0].requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (None, None, None)


def test_engine_flags_reach_the_engine(call: Call, model: Path) -> None:
    app = ScriptedApp(SCENARIOS["hello"])
    flags = ("--ctx", "2048", "--kv-type", "q8_0", "--threads", "2", "--gpu-layers", "all")
    assert call(app, "run", model, *flags, "--cache-ram", "64", "hi").code == 0
    options = app.options[0]
    assert (options.model, options.name) == (model, "tiny")
    load = options.load
    assert (load.context_tokens, load.kv_type, load.threads) == (2048, "q8_0", 2)
    assert (load.gpu_layers, load.cache_ram_bytes) == ("all", 64 * 2**20)
    assert load.single_request_tokens > 0


def test_the_load_for_a_question_knows_its_length(call: Call) -> None:
    app = ScriptedApp(SCENARIOS["hello"])
    call(app, "explain", stdin=b"word " * 20_000)
    assert app.options[0].load.single_request_tokens > 50_000


def test_raw_prompt_goes_without_messages(call: Call) -> None:
    app = ScriptedApp(SCENARIOS["hello"])
    call(app, "--raw-prompt", "<s>hi")
    assert app.engines[0].requests[0].prompt.text == "<s>hi"  # type: ignore[union-attr]
    for unused in (("-s", "x"), ("-c",), ("--conversation", "1234")):
        code, _, err = call(SCENARIOS["hello"], "--raw-prompt", *unused, "hi")
        assert (code, f"so {unused[0]} would have no effect" in err) == (2, True)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LocalchatError("odd"), 1),
        (ModelInvalid("no GGUF"), 1),
        (EngineDied("died"), 1),
        (TemplateError("refused"), 2),
        (ModelMissing("gone"), 3),
        (DoesNotFit("too big", hint="smaller"), 4),
        (NetworkError("cut"), 5),
    ],
)
def test_every_failure_has_its_exit_code_and_no_traceback(
    call: Call, error: LocalchatError, code: int
) -> None:
    got, out, err = call((error,), "hi")
    assert (got, out) == (code, "")
    assert f"localchat: {error.message}\n" in err
    assert error.hint in err
    assert "Traceback" not in err


def test_too_long_a_prompt_ends_with_6_both_numbers_and_help_in_order(call: Call) -> None:
    code, out, err = call(SCENARIOS["long"], "hi")
    assert (code, out) == (6, "")
    assert "9,000" in err
    assert "4,096" in err
    places = [err.index(word) for word in ("shorten", "--ctx 10240", "another model")]
    assert places == sorted(places)


def test_failure_in_mid_answer_keeps_the_text_and_closes_the_engine(call: Call) -> None:
    app = ScriptedApp(SCENARIOS["dies"])
    code, out, err = call(app, "hi")
    assert (code, out) == (1, "half an ans\n")
    assert "SIGKILL" in err
    assert app.engines[0].closed


def test_ctrl_c_keeps_what_was_said_cancels_and_ends_with_130(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = ScriptedApp((*BEGIN, *answer("kept", "lost")[3:]))
    pieces: list[str] = []

    def interrupted(self: object, text: str) -> None:
        pieces.append(text)
        if len(pieces) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("localchat.cli.streams.Terminal.answer", interrupted)
    assert call(app, "hi").code == 130
    assert pieces[0] == "kept"
    assert app.engines[0].closed


def test_ctrl_c_before_the_engine_accepts_asks_it_nothing(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupting(*_: object) -> None:
        raise KeyboardInterrupt

    asked: list[object] = []
    monkeypatch.setattr(OneShot, "_take", interrupting)
    monkeypatch.setattr(ScenarioEngine, "info", lambda engine: asked.append(engine))
    assert call(SCENARIOS["hello"], "hi").code == 130
    assert not asked


def test_json_of_an_interrupted_answer_says_cancelled_and_what_is_known(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = OneShot._take

    def interrupting(one_shot: OneShot, event: Event) -> None:
        if isinstance(event, MetricsSnapshot):
            raise KeyboardInterrupt
        take(one_shot, event)

    monkeypatch.setattr(OneShot, "_take", interrupting)
    code, out, _ = call(SCENARIOS["slow"], "--json", "hi")
    told = json.loads(out)
    assert code == 130
    assert (told["text"], told["finish_reason"]) == ("first ", "cancelled")
    usage = {"prompt_tokens": 12, "cached_tokens": 4, "completion_tokens": 1, "why_missed": ""}
    assert told["usage"] == usage
    assert set(told["timings"].values()) == {None}


def test_an_unexpected_fault_is_one_line_unless_debugging(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("deep inside")

    monkeypatch.setattr("localchat.cli.chat.one_shot.request_for", broken)
    code, _, err = call(SCENARIOS["hello"], "hi")
    assert code == 1
    assert "ZeroDivisionError: deep inside" in err
    assert "Traceback" not in err
    monkeypatch.setenv("LOCALCHAT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        call(SCENARIOS["hello"], "hi")


def test_a_limit_of_the_system_behind_an_error_is_named(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise LocalchatError("the connection was lost") from OSError(errno.EMFILE, "Too many")

    monkeypatch.setattr("localchat.cli.chat.one_shot.request_for", refused)
    code, _, err = call(SCENARIOS["hello"], "hi")
    assert code == 1
    assert "too many open files" in err
    assert "lost" not in err


def test_a_history_that_no_file_can_be_opened_for_stops_no_answer(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("localchat.cli.chat.answer_record.open_to_record", refused)
    code, out, err = call(SCENARIOS["hello"], "hi")
    assert (code, out) == (0, call(SCENARIOS["hello"], "--no-history", "hi").out)
    assert "this conversation is not saved: Too many open files" in err


def test_the_model_that_answered_is_the_next_default(
    call: Call, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(SCENARIOS["hello"], "-m", model, "hi", named=False).code == 0
    app = ScriptedApp(SCENARIOS["hello"])
    assert call(app, "hi", named=False).code == 0
    assert app.options[0].model == model
    model.unlink()
    assert call(SCENARIOS["hello"], "hi", named=False).code in (0, 3)


def test_a_model_that_failed_is_not_remembered(call: Call, model: Path) -> None:
    import os

    assert call((ModelInvalid("no"),), "-m", model, "hi", named=False).code == 1
    assert not (find_paths(os.environ).state_dir / "last-model").exists()


@pytest.mark.parametrize(
    "problem", [ModelInvalid("no"), EngineDied("it died", phase="load"), DoesNotFit("too big")]
)
def test_a_model_that_nobody_named_and_that_fails_tells_the_way_out(
    call: Call, model: Path, problem: LocalchatError
) -> None:
    assert call(SCENARIOS["hello"], "-m", model, "hi", named=False).code == 0
    assert "because it answered last" not in call((problem,), "-m", model, "hi", named=False).err
    failed = call((problem,), "hi", named=False)
    assert failed.code == problem.exit_code
    assert "tiny is the default because it answered last" in failed.err
    assert "localchat -m guide" in failed.err


def test_an_engine_that_dies_in_an_answer_is_no_reason_for_another_model(
    call: Call, model: Path
) -> None:
    assert call(SCENARIOS["hello"], "-m", model, "hi", named=False).code == 0
    assert "because it answered last" not in call(SCENARIOS["dies"], "hi", named=False).err


def test_a_terminal_is_not_called_an_empty_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert ask._nothing_to_ask().message == "there is nothing to ask: no prompt"


@pytest.mark.parametrize("flags", [(), ("--stats",), ("--raw-prompt",), ("--n", "2")])
def test_quality_that_an_option_costs_is_said_once_in_a_pipe(
    call: Call, flags: tuple[str, ...]
) -> None:
    loss = "A q4_0 KV cache damages this model. Use q8_0."
    info = msgspec.structs.replace(INFO, loss=loss, notes=(loss, *INFO.notes))
    app = ScriptedApp(SCENARIOS["hello"], info)
    outcome = call(app, "hi", *flags)
    assert outcome.code == 0
    assert outcome.err.count(loss) == 1
    assert loss not in call(app, "hi", "-q", *flags).err
