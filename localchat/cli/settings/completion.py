"""Command `localchat config completion`: print a script that completes the command line of a shell."""

import click

_SHELLS = ("bash", "zsh", "fish")
_WHERE = {
    "bash": 'eval "$(localchat config completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(localchat config completion zsh)" in ~/.zshrc',
    "fish": "localchat config completion fish > ~/.config/fish/completions/localchat.fish",
}


@click.command(
    "completion", epilog="To enable it in every shell: " + "; ".join(_WHERE.values()) + "."
)
@click.argument("shell", type=click.Choice(_SHELLS))
@click.pass_context
def command(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    It completes verbs, flags, models, ids of conversations, and files.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = ctx.find_root().command
    click.echo(kind(root, {}, "localchat", "_LOCALCHAT_COMPLETE").source())
