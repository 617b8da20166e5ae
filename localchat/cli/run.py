"""`localchat run MODEL ["prompt"]`: the same as a prompt, with the model named first."""

import click

from localchat.cli.ask import prompt_options
from localchat.cli.options import ThinkingCommand, engine_options


@click.command("run", cls=ThinkingCommand)
@click.argument("model_word", metavar="MODEL")
@click.argument("words", metavar="[PROMPT]", nargs=-1)
@prompt_options
@engine_options(with_model=False)
@click.pass_context
def command(ctx: click.Context, /, model_word: str, words: tuple[str, ...], **_: object) -> int:
    """Chat with a model, or ask it one thing.

    MODEL is the path of a GGUF file or a name. Without a prompt, on a terminal, a conversation begins.
    """
    from localchat.cli.converse import converse

    return converse(ctx, " ".join(words), model_word)
