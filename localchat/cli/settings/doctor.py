"""Command `localchat doctor`: report hardware and backends, or rebuild llama.cpp."""

import click

from localchat.cli.context import AppContext
from localchat.cli.output import print_json, print_lines
from localchat.cli.settings.rebuild import BEST, rebuild


@click.command("doctor")
@click.option(
    "--rebuild",
    "build",
    is_flag=False,
    flag_value=BEST,
    metavar="[KIND]",
    help=(
        "Build llama.cpp for this machine, and use it if it is correct. KIND: cpu, cuda, "
        "vulkan, metal or undo."
    ),
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(app: AppContext, build: str | None, yes: bool, as_json: bool) -> int:
    """Show what this machine and this build can do."""
    from localchat.cli.resolve import follow_library_setting
    from localchat.cli.settings.doctor_report import diagnose, sentences

    follow_library_setting(app)
    if build is not None:
        rebuild(app, build, yes=yes)
        return 0
    diagnosis = diagnose(app)
    if as_json:
        print_json(app.environ, diagnosis)
    else:
        print_lines(app.environ, sentences(diagnosis))
    return 0
