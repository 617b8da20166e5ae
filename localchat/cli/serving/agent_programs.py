"""Coding agents that `localchat launch` starts: one row each, with its variables, flags and files.

A program gets its settings by environment variables and flags, so that its own files stay as they are. A
program that reads them only from a file gets a temporary folder.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

KEY_VARIABLE: Final = "LOCALCHAT_LAUNCH_KEY"
"""Variable with the API key of the server, for programs whose settings name a variable."""
_PROVIDER: Final = "localchat"
_CLAUDE_ALL_TOOLS: Final = 65_536
"""Context from which Claude Code gets all its tools. They and their instructions have 19,000 tokens; those for
files and commands have 3,000."""


class ServedModel(NamedTuple):
    """The server and its model, as a program sees them."""

    url: str
    """Address of the server, without a path."""
    key: str
    model: str
    context_tokens: int

    @property
    def answer_tokens(self) -> int:
        """Longest answer that a program should request. Most of the context is for its prompt."""
        return min(8192, self.context_tokens // 4)


class Start(NamedTuple):
    """How a program is started."""

    arguments: tuple[str, ...] = ()
    """Arguments before those of the user."""
    environment: Mapping[str, str] = {}
    files: Mapping[str, str] = {}
    """Texts of files in the temporary folder, by name."""


class Program(NamedTuple):
    """A coding agent."""

    name: str
    """Command that starts it."""
    title: str
    install: str
    """Command that installs it."""
    start: Callable[[ServedModel, Path], Start]
    """Returns how to start it. The path is that of its temporary folder."""
    min_context: int = 16_384
    """Context in tokens below which it cannot work: its instructions and tools, and room for a task."""
    good_context: int = 32_768
    """Context that it gets where memory and model allow it."""
    removed: tuple[str, ...] = ()
    """Variables of the user that would lead it to another server."""


def _claude(served: ServedModel, folder: Path) -> Start:
    arguments: tuple[str, ...] = ()
    if served.context_tokens < _CLAUDE_ALL_TOOLS:
        arguments = ("--tools", "Bash,Edit,Read,Write")
    roles = ("DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL", "MODEL")
    models = {f"ANTHROPIC_{role}": served.model for role in roles}
    return Start(
        arguments,
        environment={
            **models,
            "ANTHROPIC_BASE_URL": served.url,
            "ANTHROPIC_AUTH_TOKEN": served.key,
            "API_TIMEOUT_MS": "3600000",  # reading a long prompt on a CPU takes minutes
            "CLAUDE_CODE_SUBAGENT_MODEL": served.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # Without them, it assumes 200,000 tokens and answers of 32,000. It summarizes the conversation when
            # the tokens of an answer and 13,000 more are left.
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(served.answer_tokens // 2),
        },
    )


def _codex(served: ServedModel, folder: Path) -> Start:
    provider = {
        "name": _PROVIDER,
        "base_url": f"{served.url}/v1",
        "env_key": KEY_VARIABLE,
        "wire_api": "responses",
    }
    settings: dict[str, Any] = {
        f"model_providers.{_PROVIDER}.{key}": value for key, value in provider.items()
    }
    settings |= {
        "model_provider": _PROVIDER,
        "model": served.model,
        "model_context_window": served.context_tokens,
        "check_for_update_on_startup": False,
        "web_search": "disabled",  # a tool of OpenAI's servers
    }
    flags: list[str] = []
    for key, value in settings.items():
        flags += ["-c", f"{key}={json.dumps(value)}"]
    return Start(arguments=tuple(flags))


def _opencode(served: ServedModel, folder: Path) -> Start:
    name = f"{_PROVIDER}/{served.model}"
    model = {
        "name": served.model,
        "limit": {"context": served.context_tokens, "output": served.answer_tokens},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": _PROVIDER,
        "options": {"baseURL": f"{served.url}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {served.model: model},
    }
    config = {
        "provider": {_PROVIDER: provider},
        "enabled_providers": [_PROVIDER],
        "model": name,
        "small_model": name,
        "autoupdate": False,
        "share": "disabled",
    }
    return Start(
        environment={
            "OPENCODE_CONFIG_CONTENT": json.dumps(config),
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
        }
    )


def _crush(served: ServedModel, folder: Path) -> Start:
    model = {
        "id": served.model,
        "name": served.model,
        "context_window": served.context_tokens,
        "default_max_tokens": served.answer_tokens,
    }
    provider = {
        "type": "openai-compat",
        "base_url": f"{served.url}/v1",
        "api_key": f"${KEY_VARIABLE}",
        "models": [model],
    }
    chosen = {"provider": _PROVIDER, "model": served.model}
    config = {
        "providers": {_PROVIDER: provider},
        "models": {"large": chosen, "small": chosen},
    }
    return Start(
        environment={
            "CRUSH_GLOBAL_CONFIG": str(folder),
            # It stores the chosen model here, which would override ours the next time.
            "CRUSH_GLOBAL_DATA": str(folder / "data"),
            # Variables count more than files of the project. Keys of other providers in the environment, and
            # the model that the project used last, must not lead to another server.
            "CRUSH_DISABLE_DEFAULT_PROVIDERS": "1",
            "CRUSH_DISABLE_PROVIDER_AUTO_UPDATE": "1",
            "CRUSH_DISABLE_METRICS": "1",
        },
        files={"crush.json": json.dumps(config)},
    )


def _gptme(served: ServedModel, folder: Path) -> Start:
    return Start(
        arguments=("--model", f"local/{served.model}"),
        environment={
            "OPENAI_BASE_URL": f"{served.url}/v1",
            "OPENAI_API_KEY": served.key,
            "GPTME_CONTEXT_LENGTH": str(served.context_tokens),
            "GPTME_MAX_TOKENS": str(served.answer_tokens),
            "GPTME_TIKTOKEN_TIMEOUT": "0",  # downloads a tokenizer of other models only to count
        },
    )


def _aider(served: ServedModel, folder: Path) -> Start:
    metadata: dict[str, Any] = {
        "litellm_provider": "openai",
        "mode": "chat",
        "max_input_tokens": served.context_tokens,
        "max_output_tokens": served.answer_tokens,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
    }
    name = f"openai/{served.model}"
    return Start(
        arguments=(
            *("--model", name, "--weak-model", name),
            *("--model-metadata-file", str(folder / "models.json")),
            *("--no-show-model-warnings", "--no-check-update"),
            *("--no-show-release-notes", "--no-analytics"),
            *("--no-auto-commits", "--no-dirty-commits", "--no-gitignore"),
        ),
        environment={
            "OPENAI_API_BASE": f"{served.url}/v1",
            "OPENAI_API_KEY": served.key,
        },
        files={"models.json": json.dumps({name: metadata})},
    )


PROGRAMS: Final[Mapping[str, Program]] = {
    program.name: program
    for program in (
        Program(
            "claude",
            "Claude Code",
            "npm install -g @anthropic-ai/claude-code",
            _claude,
            min_context=32_768,
            good_context=65_536,
            removed=(
                "ANTHROPIC_API_KEY",
                "CLAUDE_CODE_USE_BEDROCK",
                "CLAUDE_CODE_USE_VERTEX",
                "CLAUDE_CODE_USE_FOUNDRY",
            ),
        ),
        Program("codex", "Codex CLI", "npm install -g @openai/codex", _codex),
        Program("opencode", "opencode", "npm install -g opencode-ai", _opencode),
        Program("crush", "Crush", "npm install -g @charmland/crush", _crush),
        Program("gptme", "gptme", "pipx install gptme", _gptme, removed=("OPENAI_API_BASE",)),
        Program(
            "aider",
            "aider",
            "pipx install --python python3.12 aider-chat",
            _aider,
            min_context=8_192,
        ),
    )
}
