"""Command `localchat config completion`: prints a script that completes verbs, flags, models, ids and files."""

import click

_SHELLS = ("bash", "zsh", "fish")
_WHERE = {
    "bash": 'eval "$(localchat config completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(localchat config completion zsh)" in ~/.zshrc',
    "fish": "localchat config completion fish > ~/.config/fish/completions/localchat.fish",
}


@click.command("completion", epilog="To have it always: " + "; ".join(_WHERE.values()) + ".")
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root().command
    click.echo(kind(root, {}, "localchat", "_LOCALCHAT_COMPLETE").source())
