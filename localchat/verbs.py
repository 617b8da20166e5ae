"""Table of the verbs of the command line. Their modules are imported when they are used."""

from keyword import iskeyword
from typing import Final, NamedTuple

HEADINGS: Final = {
    "chat": "Chat",
    "models": "Models",
    "measure": "Measure",
    "serving": "Serve",
    "settings": "Settings",
}
"""Heading of each folder of verbs in `--help`, in order."""


class Verb(NamedTuple):
    """Verb of the command line, `localchat NAME`."""

    name: str
    folder: str
    """Folder of localchat/cli that contains the module of the verb."""
    about: str
    """Line in the overview, equal to the first line of the verb's own help."""

    @property
    def module(self) -> str:
        """Module whose `command` runs the verb."""
        name = f"{self.name}_" if iskeyword(self.name) else self.name
        return f"localchat.cli.{self.folder}.{name}"


VERBS: Final = {
    verb.name: verb
    for verb in (
        Verb("run", "chat", "Chat with a model, or ask it one question."),
        Verb("learn", "chat", "Index documents, then ask about them with @NAME."),
        Verb("history", "chat", "List, search, show and export conversations."),
        Verb("cache", "chat", "Show or clear the KV cache on disk."),
        Verb("pull", "models", "Download a model, or resume a download."),
        Verb("list", "models", "List the models on this machine."),
        Verb("show", "models", "Show a model's size, license and capabilities."),
        Verb("fit", "models", "Show which quantization of a model to take, and if it fits."),
        Verb("rm", "models", "Remove models, aliases and imported links."),
        Verb("quantize", "models", "Write a model as a GGUF file in another quantization."),
        Verb("import", "models", "Add a model file or a folder, or give a model another name."),
        Verb("bench", "measure", "Measure a model or a server under load."),
        Verb(
            "quality", "measure", "Compare the answers of models, quantizations and KV cache types."
        ),
        Verb("serve", "serving", "Serve models over the OpenAI, Anthropic and Ollama APIs."),
        Verb("launch", "serving", "Start a coding agent on a model of this machine."),
        Verb("acp", "serving", "Be the agent of an editor, over the Agent Client Protocol."),
        Verb("batch", "serving", "Answer a file of prompts."),
        Verb("ps", "serving", "List the models that the running server has loaded."),
        Verb("stop", "serving", "Stop the running server, or unload one of its models."),
        Verb("config", "settings", "Show and change settings."),
        Verb("doctor", "settings", "Show what this machine and this build can do."),
    )
}

ALIASES: Final = {
    "ls": ("list",),
    "cp": ("import",),
    "completion": ("config", "completion"),
}
"""Other words for a verb. Shell start-up files run `localchat completion`; `--help` lists none of them."""


class OtherWord(NamedTuple):
    """Advice for words of other programs."""

    words: tuple[str, ...]
    shell: str = ""
    """Advice for the word as a verb."""
    slash: str = ""
    """Advice for the word as a slash command."""


OTHER_WORDS: Final = (
    OtherWord(
        ("search",),
        "localchat list shows the models here, localchat pull NAME fetches one, "
        "and localchat history search TEXT searches conversations",
    ),
    OtherWord(("download", "get", "fetch", "install"), "localchat pull NAME", "/pull NAME"),
    OtherWord(("delete",), "localchat rm NAME", "/history"),
    OtherWord(("remove",), "localchat rm NAME"),
    OtherWord(("info",), "localchat show NAME"),
    OtherWord(("benchmark", "measure"), "localchat bench NAME"),
    OtherWord(
        ("perf", "tune", "optimize"), "localchat bench NAME --vary threads=4,8 compares settings"
    ),
    OtherWord(("convert", "compress"), "localchat quantize NAME --type Q4_K_M"),
    OtherWord(("capacity", "plan"), "localchat bench NAME"),
    OtherWord(("diagnose",), "localchat doctor"),
    OtherWord(("check",), "localchat doctor, or localchat fit NAME"),
    OtherWord(("status",), "localchat ps, or localchat doctor", "/stats"),
    OtherWord(("settings",), "localchat config", "/set"),
    OtherWord(("export",), "localchat history export ID; localchat history lists them"),
    OtherWord(("create", "alias", "aliases"), "localchat import MODEL NAME"),
    OtherWord(("chat",), "localchat run MODEL"),
    OtherWord(("ask",), 'localchat "PROMPT"'),
    OtherWord(("models",), "localchat list", "/model"),
    OtherWord(("list", "ls", "load", "run", "switch", "use"), slash="/model"),
    OtherWord(("reset", "restart"), slash="/new"),
    OtherWord(("prompt", "instructions"), slash="/system"),
    OtherWord(("config", "configure", "options", "parameters", "params"), slash="/set"),
    OtherWord(("retry", "redo", "again", "regenerate"), slash="/regen"),
    OtherWord(("save", "write"), slash="/export FILE"),
    OtherWord(("logs",), "localchat history", "/history"),
    OtherWord(("resume", "conversations", "sessions", "chats", "open"), slash="/history"),
    OtherWord(("rename", "title"), slash="/history"),
    OtherWord(("metrics", "usage", "tokens", "cost"), slash="/stats"),
    OtherWord(("reasoning", "effort"), slash="/think"),
    OtherWord(("commands", "keys", "shortcuts", "h"), slash="/help"),
    OtherWord(("file", "read", "attach", "add", "include"), slash="@FILE in a message"),
    OtherWord(("theme", "themes", "dark", "light", "colors"), slash="F2"),
)


OTHER_FLAGS: Final = {
    **dict.fromkeys(("-n", "--n-predict", "--num-predict", "--predict"), "--max-tokens"),
    **dict.fromkeys(
        ("--num-ctx", "--ctx-size", "--n-ctx", "--context", "--context-length", "--max-model-len"),
        "--ctx",
    ),
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--num-gpu"), "--gpu-layers"),
    **dict.fromkeys(("-ctk", "--cache-type-k", "--kv-cache-type"), "--kv-type"),
    **dict.fromkeys(("-sys", "--system-prompt"), "--system"),
    **dict.fromkeys(("-t", "--num-thread"), "--threads"),
    **dict.fromkeys(("--repeat-penalty", "--repetition-penalty"), "-o repetition_penalty"),
    "--format": "--schema",
    "--hidethinking": "--hide-reasoning",
    "--attachment": "--file",
    "--cid": "--conversation",
}
"""Flags of Ollama, llama.cpp, vLLM and llm, and ours for the same."""


def shell_advice(name: str) -> str:
    """Return what to run for a verb of another program, or an empty string."""
    return next((entry.shell for entry in OTHER_WORDS if name in entry.words), "")


def slash_advice(name: str) -> str:
    """Return what to type for a slash command of another program, or an empty string."""
    return next((entry.slash for entry in OTHER_WORDS if name in entry.words), "")
