"""Results of benchmarks on stdout: one, a list, or two side by side."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from localchat.cli.context import AppContext
from localchat.cli.output import print_json, print_report, report_width, table
from localchat.errors import LocalchatError, UsageError

if TYPE_CHECKING:
    from localchat.measure.bench_record import BenchRecord, BenchStore
    from localchat.measure.sweep import Point


def present(app: AppContext, record: "BenchRecord", svg: Path | None, *, as_json: bool) -> None:
    """Print a result, and draw its charts into `svg`."""
    if svg is not None:
        _draw(record, svg)
    if as_json:
        print_json(app.environ, record)
    else:
        print_report(app.environ, record_lines(record, report_width(app.environ)))


def _draw(record: "BenchRecord", path: Path) -> None:
    from localchat.atomic import write_text
    from localchat.errors import reason
    from localchat.measure.bench_chart import svg

    try:
        write_text(path, svg(record))
    except OSError as problem:
        raise LocalchatError(f"{path} cannot be written: {reason(problem)}") from problem


def record_lines(record: "BenchRecord", width: int | None) -> Iterator[str]:
    """The result in words. width: of the terminal, on which the throughput is drawn too."""
    from localchat.measure.bench_report import differences_table
    from localchat.measure.sweep import series

    for line in series(record.points):
        yield from _series_lines(record, line, width)
        yield ""
    if (found := differences_table(record)) is not None:
        yield from _aligned(*found, width)
        yield ""
    if record.disturbed:
        yield (
            f"Other programs used {record.others_share:.0%} of the CPU: expect better figures without "
            "them."
        )
    number = f"Kept as number {record.id}" if record.id else "Not kept"
    partial = "" if record.complete else ", interrupted"
    yield (
        f"{number}{partial}; times are p50/p90/p99, or median [minimum-maximum] of fewer than 20 requests."
    )


def _series_lines(record: "BenchRecord", line: "list[Point]", width: int | None) -> Iterator[str]:
    from localchat.measure import bench_report as report

    yield report.heading(record, line)
    yield from _aligned(*report.times_table(line), width)
    if (found := report.server_table(line)) is not None:
        yield from _aligned(*found, width)
    if width is not None and len(line) > 1:
        yield from report.bars(line, width)
    yield from report.sentences(record, line)


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> list[str]:
    left = sum(1 for name in head[:2] if name in ("", "SHAPE"))
    return table(head, rows, right=range(left, len(head)), width=width)


def list_records(app: AppContext, store: "BenchStore", *, as_json: bool) -> None:
    """Print every result that is kept, a line each."""
    from localchat.measure.sweep import saturation, series
    from localchat.units import rate

    records = list(store.records())
    if as_json:
        print_json(app.environ, records)
        return
    rows = []
    for record in records:
        lines = list(series(record.points))
        best = max((point.figures.tokens_per_s for line in lines for point in line), default=0.0)
        found = saturation(lines[0]) if lines else None
        rows.append(
            (
                str(record.id),
                record.at[:16].replace("T", " "),
                ", ".join(record.models),
                ", ".join(shape.name for shape in record.spec.shapes),
                str(len(record.spec.variants)),
                rate(best),
                str(found.clients) if found and found.reached else "-",
            )
        )
    head = ("N", "DATE", "MODEL", "SHAPE", "VARIANTS", "BEST", "SATURATED AT")
    lines_ = table(head, rows, right=(0, 4, 5, 6)) if rows else ["No benchmark is kept yet."]
    print_report(app.environ, lines_)


def compare_records(
    app: AppContext, store: "BenchStore", names: tuple[str, str], *, as_json: bool
) -> None:
    """Print two results side by side. Raises UsageError where they have nothing in common."""
    from localchat.measure.bench_report import comparison_sentences, comparison_table

    one, other = (store.find(name) for name in names)
    head, rows = comparison_table(one, other)
    if not rows:
        raise UsageError(
            f"{names[0]} and {names[1]} measured nothing at the same place",
            hint="shape, context and number of clients must be equal; of several variants the name too",
        )
    if as_json:
        print_json(app.environ, {"head": head, "rows": rows})
        return
    print_report(
        app.environ,
        (*_aligned(head, rows, report_width(app.environ)), *comparison_sentences(one, other)),
    )
