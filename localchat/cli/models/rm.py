"""Command `localchat rm`: remove models, after showing their files and the space they free."""

from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.options import complete_model
from localchat.cli.output import confirm
from localchat.cli.streams import tell
from localchat.config.paths import find_paths
from localchat.sanitize import sanitize
from localchat.units import size

if TYPE_CHECKING:
    from localchat.models.remove import Removal


@click.command("rm")
@click.argument("words", metavar="MODEL", nargs=-1, required=True, shell_complete=complete_model)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.pass_obj
def command(app: AppContext, words: tuple[str, ...], yes: bool) -> int:
    """Remove models, aliases and imported links.

    Files of other programs are never removed. Removing an alias or a link keeps the model that it names.
    """
    from localchat.models.index import find_model, read_index
    from localchat.models.remove import carry_out, plan_removal

    paths = find_paths(app.environ)
    index = read_index(paths, app.environ)
    # By name, so that a model that is named twice is removed once.
    models = {
        model.name: model
        for model in (find_model(name, index, paths, app.environ) for name in words)
    }
    removals = [plan_removal(model, index, paths) for model in models.values()]
    total = sum(removal.freed_bytes for removal in removals)
    for removal in removals:
        tell(sanitize(_description(removal)))
    if not confirm(f"Remove? It frees {size(total)}.", yes=yes, verb="rm"):
        return 1
    for removal in removals:
        carry_out(removal, paths)
    tell(f"localchat: removed; {size(total)} freed")
    return 0


def _description(removal: "Removal") -> str:
    lines = [f"{removal.model.name}: frees {size(removal.freed_bytes)}"]
    if removal.kept:
        lines[0] += f" ({removal.kept})"
    lines += [f"  {file}" for file in removal.files]
    lines += [f"  the alias {name} will name no model" for name in removal.orphans]
    return "\n".join(lines)
