"""Command `localchat quality`: compares models, quantizations, KV types and backends by what they answer."""

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from localchat.cli.context import AppContext, app_context
from localchat.cli.measure.options import (
    default_model,
    json_option,
    models_argument,
    parse_counts,
    quiet_option,
    vary_option,
)
from localchat.cli.measure.records import MeasuredResult, measure_command, run_to_end
from localchat.cli.options import UserPath, load_flags
from localchat.cli.output import table
from localchat.config.paths import read_input
from localchat.errors import LocalchatError, UsageError, os_errors_as

if TYPE_CHECKING:
    from localchat.measure.records import QualityRecord, QualitySpec
    from localchat.measure.tasks import ExamQuestion

_HISTORY_CHARACTERS: Final = 200_000
_NEEDLE_LENGTHS: Final = (1024, 4096)


@click.command("quality")
@models_argument
@vary_option
@click.option(
    "--text",
    "text_file",
    type=UserPath(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Text for perplexity and KL. Default: a small one that comes with localchat.",
)
@click.option("--history", is_flag=True, help="Use the text of your own conversations.")
@click.option(
    "--window",
    type=click.IntRange(8, 1 << 20),
    default=512,
    metavar="N",
    help="Tokens in each window of the text. Default: 512.",
)
@click.option(
    "--windows",
    "most_windows",
    type=click.IntRange(0),
    default=16,
    metavar="N",
    help="Number of windows of the text; 0 uses all. Default: 16.",
)
@click.option(
    "--needles",
    metavar="LIST",
    help="Lengths of the needle texts, for example 1k,16k. Default: 1k,4k.",
)
@click.option(
    "--depths",
    type=click.IntRange(1, 50),
    default=5,
    metavar="N",
    help="Needles in each text. Default: 5.",
)
@click.option(
    "--tasks",
    type=click.IntRange(1, 1000),
    default=8,
    metavar="N",
    help="JSON schemas and tools to try. Default: 8.",
)
@click.option(
    "--set",
    "questions_file",
    type=UserPath(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Questions with their exact answers, as JSONL. Default: none.",
)
@click.option("--speed", is_flag=True, help="Measure the speed of an answer too.")
@click.option(
    "--only",
    metavar="LIST",
    help="Tests to run: text, json, tools, needles, questions, speed. Default: all but speed.",
)
@click.option(
    "--gate",
    "gates",
    multiple=True,
    is_flag=False,
    flag_value="grade=close",
    metavar="NAME=LIMIT",
    help="Exit with 1 if a model misses this limit, as kl=0.02 or top1=0.95; repeatable. Alone: grade=close.",
)
@load_flags
@click.option(
    "--svg", type=UserPath(path_type=Path, dir_okay=False), metavar="FILE", help="Draw charts."
)
@json_option
@quiet_option
@click.pass_context
def command(ctx: click.Context, /, **_: object) -> int:
    """Compare the answers of models, quantizations and KV cache types.

    Is the smaller model still good? Which quantization should I take?
    Compares each MODEL with the first one: perplexity and KL divergence over a text, JSON and tool calls,
    needles in long texts, and questions of your own. A verdict says whether the model is safe.
    MODEL is a model of this machine. --vary kv-type=f16,q8_0 compares settings of one model in the same way.
    """
    svg: Path | None = ctx.params["svg"]
    draw = None
    if svg is not None:
        if not svg.absolute().parent.is_dir():
            raise UsageError(f"--svg: there is no folder {svg.absolute().parent}")
        draw = partial(_draw, svg)
    return measure_command(ctx, lambda: _measure(ctx), _record_lines, draw)


def _draw(path: Path, record: "QualityRecord") -> None:
    """Draw a result into a file. Raises LocalchatError."""
    from localchat.atomic import write_text
    from localchat.measure.plot import quality_svg

    with os_errors_as(LocalchatError, f"{path} cannot be written"):
        write_text(path, quality_svg(record))


def _measure(ctx: click.Context) -> "MeasuredResult[QualityRecord]":
    from localchat.backend_api.registry import usable_machine
    from localchat.cli.measure.progress import MeasureProgress
    from localchat.cli.measure.targets import QualityTargets
    from localchat.cli.streams import Terminal
    from localchat.fit.contention import CpuWatch
    from localchat.measure.comparison import Comparison
    from localchat.measure.records import MachineRecord, QualityRecord, now
    from localchat.measure.verdict import failures, parse_gates, verdicts

    app = app_context(ctx)
    gates = parse_gates(ctx.params["gates"])
    plan = _comparison_plan(ctx, app)
    variants = plan.spec.variants
    if gates and len(variants) < 2:
        raise UsageError("--gate compares models with the first: name two, or use --vary")
    terminal = Terminal(app.environ, quiet=bool(ctx.params["quiet"]))
    targets = QualityTargets(ctx, terminal)
    targets.check(variants)
    began_at = now()
    watch = CpuWatch()
    with MeasureProgress(terminal) as progress:
        comparison = Comparison(
            plan.spec, plan.text, plan.questions, targets.open, progress.show_quality
        )
        end = run_to_end(comparison.run)
    measured = tuple(comparison.measured)
    if not measured:
        return MeasuredResult(None, end)
    record = QualityRecord(
        at=began_at,
        machine=MachineRecord.of(usable_machine()),
        spec=plan.spec,
        measured=measured,
        verdicts=tuple(verdicts(measured)),
        complete=end.complete,
        others_share=watch.others_share(),
    )
    missed = [f"gate missed: {failure}" for failure in failures(measured, gates)]
    return MeasuredResult(record, end, missed)


class _ComparisonPlan(NamedTuple):
    """Variants and tests, with the text and the questions."""

    spec: "QualitySpec"
    text: str
    questions: "tuple[ExamQuestion, ...]"


def _comparison_plan(ctx: click.Context, app: AppContext) -> _ComparisonPlan:
    """Build the comparison of the command line. Raises UsageError."""
    import hashlib

    from localchat.measure.records import QualitySpec
    from localchat.measure.tasks import read_questions
    from localchat.measure.variants import is_running, parse_vary, variants

    options = ctx.params
    models = options["words"] or (default_model(ctx),)
    if not options["words"] and not options["vary"]:
        raise UsageError(
            "quality needs a model, because it measures each one for minutes",
            hint=f"the last one used: localchat quality {shlex.quote(models[0])}",
        )
    if running := next(filter(is_running, models), None):
        raise UsageError(
            f"{running} is a running server, and quality loads its models itself",
            hint="name a model of this machine",
        )
    combinations = variants(models, parse_vary(options["vary"]), None)
    questions_file: Path | None = options["questions_file"]
    questions = read_questions(questions_file) if questions_file is not None else ()
    text_name, text = _read_text(app, options["text_file"], history=options["history"])
    spec = QualitySpec(
        variants=combinations,
        tests=_parse_tests(options["only"], questions, speed=options["speed"]),
        text=text_name,
        text_digest=hashlib.sha256(text.encode()).hexdigest()[:16],
        window_tokens=options["window"],
        most_windows=options["most_windows"],
        needle_lengths=parse_counts(options["needles"], "--needles") or _NEEDLE_LENGTHS,
        needle_depths=options["depths"],
        tasks=options["tasks"],
        questions=questions_file.name if questions_file is not None and questions else "",
    )
    return _ComparisonPlan(spec, text, questions)


def _parse_tests(
    only: str | None, questions: "Sequence[ExamQuestion]", *, speed: bool
) -> tuple[str, ...]:
    """Return the tests to run. Raises UsageError."""
    from localchat.measure.comparison import TESTS

    if only is None:
        optional = {"questions": bool(questions), "speed": speed}
        return tuple(test for test in TESTS if optional.get(test, True))
    names = [name.strip() for name in only.split(",")]
    if speed:
        names.append("speed")
    if unknown := next((name for name in names if name not in TESTS), None):
        raise UsageError(f"--only: unknown test {unknown!r}", hint=f"use one of {', '.join(TESTS)}")
    if "questions" in names and not questions:
        raise UsageError("--only questions needs a file of questions", hint="as in --set FILE")
    return tuple(test for test in TESTS if test in names)


def _read_text(app: AppContext, path: Path | None, *, history: bool) -> tuple[str, str]:
    """Return name and content of the text to score. Raises UsageError."""
    from localchat.measure.workload import SAMPLE_TEXT, sample_text

    if path is not None and history:
        raise UsageError("--text and --history exclude each other")
    if history:
        return "own conversations", _history_text(app)
    if path is None:
        return SAMPLE_TEXT, sample_text()
    with os_errors_as(UsageError, f"--text {path} cannot be read"):
        return path.name, read_input(path).decode("utf-8", "replace").replace("\r\n", "\n")


def _history_text(app: AppContext) -> str:
    """Return the text of the newest conversations, up to a limit. Raises UsageError without any."""
    from localchat.cli.chat.conversation_options import open_history
    from localchat.config.paths import find_paths

    texts: list[str] = []
    with open_history(find_paths(app.environ), to_read=True) as history:
        for summary in history.list():
            texts += [node.message.content for node in history.load(summary.id).path()]
            if sum(map(len, texts)) > _HISTORY_CHARACTERS:
                break
    if not texts:
        raise UsageError("--history: there are no conversations yet", hint="or give --text FILE")
    return "\n\n".join(texts)[:_HISTORY_CHARACTERS]


def _record_lines(record: "QualityRecord", width: int | None) -> list[str]:
    """Format a result."""
    from localchat.measure import quality_report

    rows = [quality_report.row(measured) for measured in record.measured]
    lines = _table_lines(quality_report.HEAD, rows, width)
    lines += quality_report.sentences(record)
    if not record.complete:
        lines.append("The comparison was interrupted.")
    return [*lines, f"Text: {record.spec.text}."]


def _table_lines(
    head: tuple[str, ...], rows: list[tuple[str, ...]], width: int | None
) -> list[str]:
    """Format a table, and leave out the columns without a figure."""
    used = [column for column in range(len(head)) if any(row[column] != "-" for row in rows)]
    shown = [[row[column] for column in used] for row in rows]
    names = [head[column] for column in used]
    return table(names, shown, right=range(1, len(used)), width=width, keep=1)
