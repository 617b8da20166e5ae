"""Command `localchat quality`: compares models, quantizations, KV types and backends by what they answer."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.measure.bench import counts, default_model
from localchat.cli.options import UserPath, complete_model, load_flags
from localchat.cli.output import print_json, print_report, report_width, table
from localchat.cli.streams import Terminal, tell
from localchat.errors import ExitCode, LocalchatError, UsageError

if TYPE_CHECKING:
    from localchat.measure.quality_record import QualityRecord, QualitySpec, QualityStore
    from localchat.measure.tasks import ExamQuestion

_HISTORY_CHARACTERS = 200_000
_NEEDLE_LENGTHS = (1024, 4096)


@click.command("quality")
@click.argument("words", metavar="[MODEL...]", nargs=-1, shell_complete=complete_model)
@click.option(
    "--vary",
    multiple=True,
    metavar="KEY=A,B",
    help="Compare values of a setting, for example kv-type=f16,q8_0. Repeatable.",
)
@click.option(
    "--text",
    "text_file",
    type=UserPath(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Text for perplexity and KL. Default: a small one that localchat brings.",
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
@click.option(
    "--only",
    metavar="LIST",
    help="Tests to run: text, greedy, json, tools, needles, questions. Default: all.",
)
@click.option(
    "--gate",
    "gates",
    multiple=True,
    metavar="NAME=LIMIT",
    help="Exit with 1 if a model misses this limit, as kl=0.02, top1=0.95 or grade=close; repeatable.",
)
@load_flags
@click.option(
    "--svg", type=UserPath(path_type=Path, dir_okay=False), metavar="FILE", help="Draw charts."
)
@click.option("--keep/--no-keep", default=True, help="Store the result. Default: on.")
@click.option("--list", "as_list", is_flag=True, help="List the stored results.")
@click.option("--show", metavar="N", help="Show a stored result: its number, last, or a file.")
@click.option("--compare", nargs=2, metavar="A B", help="Compare two results.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-q", "--quiet/--no-quiet", "quiet", default=None, help="Show no progress. Default: off."
)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    svg: Path | None,
    keep: bool,
    as_list: bool,
    show: str | None,
    compare: tuple[str, str] | None,
    as_json: bool,
    **_: object,
) -> int:
    """Compare the answers of models, quantizations and KV cache types.

    Is the smaller model still good? Which quantization should I take?
    Compares each MODEL with the first: perplexity and KL divergence over a text, where greedy texts part, JSON
    and tool calls, needles in long texts, and questions of your own; and says in words whether it is safe.
    MODEL is a model of this machine, the address of a running server, or remote:NAME of the settings.
    --vary kv-type=f16,q8_0 compares settings of one model in the same way.
    """
    from localchat.config.paths import find_paths
    from localchat.measure.quality_record import QualityStore

    app = ctx.find_object(AppContext)
    assert app is not None
    store = QualityStore(find_paths(app.environ).data_dir)
    if sum([as_list, show is not None, compare is not None, bool(words)]) > 1:
        raise UsageError("--list, --show, --compare and a model exclude each other")
    if as_list:
        _list(app, store, as_json=as_json)
    elif compare is not None:
        _compare(app, store, compare, as_json=as_json)
    elif show is not None:
        _present(app, store.find(show), svg, as_json=as_json)
    else:
        return _measure(ctx, app, store if keep else None, svg, as_json=as_json)
    return ExitCode.OK


# ---------------------------------------------------------------------------- measuring


def _measure(
    ctx: click.Context,
    app: AppContext,
    store: "QualityStore | None",
    svg: Path | None,
    *,
    as_json: bool,
) -> int:
    """Run the comparison; an interrupted one is kept and shown as far as it came."""
    from localchat.backend_api.registry import usable_machine
    from localchat.cli.measure.quality_progress import quality_progress_for
    from localchat.cli.measure.quality_targets import QualityTargets
    from localchat.cli.signals import terminate_gracefully
    from localchat.measure.bench_record import MachineRecord, now
    from localchat.measure.comparison import Comparison
    from localchat.measure.gate import failures, parse_gates
    from localchat.measure.quality_record import QualityRecord
    from localchat.measure.variants import is_running
    from localchat.measure.verdict import verdicts

    gates = parse_gates(ctx.params["gates"])
    spec, text, questions = _spec(ctx, app)
    if gates and len(spec.variants) < 2:
        raise UsageError("--gate compares models with the first: name two, or use --vary")
    if svg is not None and not svg.absolute().parent.is_dir():
        raise UsageError(f"--svg: there is no folder {svg.absolute().parent}")
    terminal = Terminal(app.environ, quiet=bool(ctx.params["quiet"]))
    targets = QualityTargets(ctx, terminal)
    targets.check(spec.variants)
    at = now()
    problem = None
    interrupted = False
    with quality_progress_for(terminal) as progress, terminate_gracefully():
        bos = not any(is_running(one.model) for one in spec.variants)
        comparison = Comparison(spec, text, questions, targets.open, progress.show, bos)
        try:
            comparison.run()
        except LocalchatError as trouble:
            problem = trouble
        except KeyboardInterrupt:
            interrupted = True
    if not comparison.measured:
        if problem is not None:
            raise problem
        return ExitCode.INTERRUPTED if interrupted else ExitCode.ERROR
    record = QualityRecord(
        at=at,
        machine=MachineRecord.of(usable_machine()),
        spec=spec,
        measured=tuple(comparison.measured),
        verdicts=tuple(verdicts(comparison.measured)),
        complete=problem is None and not interrupted,
    )
    try:
        record = store.keep(record) if store is not None else record
    except LocalchatError as trouble:  # what was measured is shown all the same
        problem = problem or trouble
    _present(app, record, svg, as_json=as_json)
    if problem is not None:
        raise problem
    if interrupted:
        return ExitCode.INTERRUPTED
    missed = list(failures(record.measured, gates))
    for sentence in missed:
        tell(f"gate missed: {sentence}")
    return ExitCode.ERROR if missed else ExitCode.OK


def _spec(
    ctx: click.Context, app: AppContext
) -> "tuple[QualitySpec, str, tuple[ExamQuestion, ...]]":
    """What is compared, on which text and with which questions. Raises UsageError."""
    import hashlib

    from localchat.measure.quality_record import QualitySpec
    from localchat.measure.variants import parse_vary, variants

    asked = ctx.params
    names = asked["words"] or (default_model(ctx),)
    found = variants(names, parse_vary(asked["vary"]), None)
    questions = _questions(asked["questions_file"])
    text_name, text = _text(app, asked["text_file"], history=asked["history"])
    spec = QualitySpec(
        variants=found,
        tests=_tests(asked["only"], questions),
        text=text_name,
        text_digest=hashlib.sha256(text.encode()).hexdigest()[:16],
        window_tokens=asked["window"],
        most_windows=asked["most_windows"],
        needle_lengths=counts(asked["needles"], "--needles", least=1) or _NEEDLE_LENGTHS,
        needle_depths=asked["depths"],
        tasks=asked["tasks"],
        questions=asked["questions_file"].name if questions else "",
    )
    return spec, text, questions


def _tests(only: str | None, questions: "tuple[ExamQuestion, ...]") -> tuple[str, ...]:
    """The tests that are asked for. Raises UsageError."""
    from localchat.measure.comparison import TESTS

    possible = [test for test in TESTS if test != "questions" or questions]
    if only is None:
        return tuple(possible)
    names = [name.strip() for name in only.split(",")]
    if wrong := next((name for name in names if name not in TESTS), None):
        raise UsageError(
            f"--only: there is no test {wrong!r}", hint=f"use one of {', '.join(TESTS)}"
        )
    if "questions" in names and not questions:
        raise UsageError("--only questions needs a file of questions", hint="as in --set FILE")
    return tuple(test for test in TESTS if test in names)


def _questions(path: Path | None) -> "tuple[ExamQuestion, ...]":
    from localchat.measure.tasks import read_questions

    return () if path is None else read_questions(path)


def _text(app: AppContext, path: Path | None, *, history: bool) -> tuple[str, str]:
    """Name and content of the text. Raises UsageError."""
    from localchat.errors import reason
    from localchat.measure.sample_text import NAME, sample_text

    if path is not None and history:
        raise UsageError("--text and --history exclude each other")
    if history:
        return "own conversations", _history_text(app)
    if path is None:
        return NAME, sample_text()
    try:
        return path.name, path.read_text("utf-8", "replace")
    except OSError as problem:
        raise UsageError(f"--text {path} cannot be read: {reason(problem)}") from problem


def _history_text(app: AppContext) -> str:
    """The newest conversations, as much as is needed. Raises UsageError where there are none."""
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


# ---------------------------------------------------------------------------- results


def _present(app: AppContext, record: "QualityRecord", svg: Path | None, *, as_json: bool) -> None:
    from localchat.atomic import write_text
    from localchat.errors import reason
    from localchat.measure import quality_chart as chart
    from localchat.measure import quality_report as report

    if svg is not None:
        try:
            write_text(svg, chart.svg(record))
        except OSError as problem:
            raise LocalchatError(f"{svg} cannot be written: {reason(problem)}") from problem
    if as_json:
        print_json(app.environ, record)
        return
    width = report_width(app.environ)
    lines = _table(report.HEAD, list(report.rows(record)), left=1, width=width)
    if width is not None:
        lines += report.needle_grid(record)
    number = f"Kept as number {record.id}" if record.id else "Not kept"
    partial = "" if record.complete else ", interrupted"
    lines += [*report.sentences(record), f"{number}{partial}; text: {record.spec.text}."]
    print_report(app.environ, lines)


def _table(
    head: tuple[str, ...], rows: list[tuple[str, ...]], left: int, width: int | None
) -> list[str]:
    """A table without the columns in which nothing was measured."""
    used = [at for at in range(len(head)) if any(row[at] != "-" for row in rows)]
    shown = [[row[at] for at in used] for row in rows]
    names = [head[at] for at in used]
    return table(names, shown, right=range(left, len(used)), width=width, keep=left)


def _list(app: AppContext, store: "QualityStore", *, as_json: bool) -> None:
    records = store.records()
    if as_json:
        print_json(app.environ, records)
        return
    if not records:
        print_report(app.environ, ["No result is kept yet."])
        return
    rows = [
        (
            str(record.id),
            record.at[:16].replace("T", " "),
            ", ".join(one.variant.name for one in record.measured),
        )
        for record in records
    ]
    head, *lines = table(("N", "DATE", "MODELS"), rows, right=(0,))
    shown = [head]
    for line, record in zip(lines, records, strict=True):
        shown += [line, *(f"   {verdict}" for verdict in record.verdicts)]
    print_report(app.environ, shown)


def _compare(
    app: AppContext, store: "QualityStore", names: tuple[str, str], *, as_json: bool
) -> None:
    from localchat.measure import quality_report as report

    one, other = (store.find(name) for name in names)
    rows = list(report.comparison_rows(one, other))
    if not rows:
        raise UsageError(f"{names[0]} and {names[1]} measured nothing of the same name")
    if as_json:
        print_json(app.environ, [one, other])
        return
    lines = _table(("N", *report.HEAD), rows, left=2, width=report_width(app.environ))
    print_report(app.environ, [*lines, *report.differing_conditions(one, other)])
