"""Command `localchat doctor`: reports hardware and backends, and rebuilds llama.cpp for them."""

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.output import print_json, print_lines
from localchat.config.paths import find_paths
from localchat.errors import LocalchatError, UsageError

if TYPE_CHECKING:
    from localchat.backend_api.interface import Remedy


@click.command("doctor")
@click.option(
    "--rebuild", is_flag=True, help="Build llama.cpp again for this machine, after asking."
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_obj
def command(app: AppContext, rebuild: bool, yes: bool, as_json: bool) -> int:
    """Say what this machine and this build can do."""
    from localchat.cli.doctor_report import diagnose, sentences

    diagnosis = diagnose(app)
    if rebuild:
        return _rebuild(app, diagnosis.remedies, yes=yes)
    if as_json:
        print_json(app.environ, diagnosis)
    else:
        print_lines(app.environ, sentences(diagnosis))
    return 0


def _rebuild(app: AppContext, remedies: "tuple[Remedy, ...]", *, yes: bool) -> int:
    """Offer each command in turn and run the first that the user accepts."""
    from localchat.cli.doctor_report import shell_line
    from localchat.config.settings import from_environment, resolve
    from localchat.config.settings_file import read_settings

    offered = [remedy for remedy in remedies if remedy.command]
    if not offered:
        click.echo("localchat: there is nothing to rebuild: this build fits this machine", err=True)
        return 0
    file = read_settings(find_paths(app.environ).settings_file)
    if resolve(file.layer(), from_environment(app.environ)).settings.offline:
        raise UsageError("a rebuild downloads the source, and offline is set")
    if not yes and not sys.stdin.isatty():
        raise UsageError(
            "doctor --rebuild asks first, and there is no terminal", hint="--yes agrees"
        )
    for remedy in offered:
        click.echo(f"{remedy.sentence}\n  {shell_line(remedy)}", err=True)
        if yes or click.confirm("Run it?", err=True):
            done = subprocess.run(
                remedy.command,
                env={**os.environ, **dict(remedy.environment)},
                stdout=sys.stderr,
                check=False,
            )
            if done.returncode:
                raise LocalchatError(
                    f"the rebuild ended with status {done.returncode}",
                    hint="see its output above",
                )
            return 0
    return 0
