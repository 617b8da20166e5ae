"""Table of all settings: help, flags, valid values, default, and label.

The command line, `config`, the settings screen and error messages read it. Types and defaults are the fields of
`Settings`. This module imports nothing heavy, because `--help` needs the table.
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple


class Label(NamedTuple):
    """Row of the settings screen."""

    group: str
    text: str
    unit: str = ""
    unset: str = ""
    """Short form of the default; empty for `Parameter.default`."""


class SamplingNumber(NamedTuple):
    """Number of a request that shapes the sampling."""

    engine_range: tuple[float, float]
    """Lowest and highest value that the engine accepts."""
    off: float
    """Value without effect."""
    client_range: tuple[float, float] | None = None
    """Values that a client of the server can mean; None for `engine_range`."""
    alias: str = ""
    """Second name of the field in requests."""
    llamacpp_stage: str = ""
    """Name in llama.cpp's list of samplers; empty for one that the list cannot turn off."""
    reads_text: bool = False
    """Whether it turns on a penalty that depends on the tokens before the drawn one."""
    rare: bool = False
    """Whether it turns on a sampler whose CUDA code is compiled only on use."""

    @property
    def setting_range(self) -> tuple[float, float]:
        """Lowest and highest value of the setting: what a client can mean and the engine accepts."""
        low, high = self.engine_range
        client_low, client_high = self.client_range or self.engine_range
        return max(low, client_low), min(high, client_high)


class Parameter(NamedTuple):
    """Description of a setting."""

    help: str
    """Meaning, without a final dot."""
    names: str
    """Spellings of the flag, separated by spaces. A switch has the form `--on/--off`."""
    label: Label | None = None
    """Row of the settings screen; None for a setting that only tests need."""
    metavar: str = ""
    """Placeholder for the value of a flag."""
    valid: str = "true or false"
    """Valid values, which complete "it takes"."""
    default: str = "off"
    """Default, or what happens without a value."""
    loads: bool = False
    """True if every command that loads a model has the flag."""
    applies: Literal["", "reload", "now"] = ""
    """Effect of a change in a conversation; empty if a conversation cannot change it."""
    sampler: SamplingNumber | None = None
    """Meaning in requests, for a number of the sampling."""

    @property
    def is_switch(self) -> bool:
        """True for a flag without a value."""
        return "/" in self.names

    @property
    def is_list(self) -> bool:
        """True for a flag that may be repeated."""
        return self.metavar.startswith("PATH[")

    @property
    def has_option(self) -> bool:
        """False if a command defines the flag itself, or `-o` sets the value."""
        return self.is_switch or bool(self.metavar)

    @property
    def flag(self) -> str:
        """Flag as messages name it: the one that changes the default."""
        if not self.has_option:
            return self.names
        on, _, off = self.names.split()[-1].partition("/")
        return off if self.default == "on" else on

    @property
    def meaning(self) -> str:
        """Help with the valid values, in a sentence each."""
        return f"{self.help}. It takes {self.valid}."

    @property
    def flag_help(self) -> str:
        """Help of the flag, with its default."""
        if self.is_switch:
            return f"{self.help}. Default: {self.default}."
        return f"{self.help}: {self.valid}. Default: {self.default}."


_SHARE: Final = "a number from 0 to 1"
_GIGABYTES: Final = "a number of gigabytes above 0, up to a million"
_PENALTY: Final = "a number from -2 to 2"
MODEL_DEFAULT: Final = "model default"
"""Shown for a number that the model chooses."""

PARAMETERS: Final[Mapping[str, Parameter]] = {
    "model": Parameter(
        "Model that answers",
        "-m --model",
        Label("Model", "Model"),
        metavar="MODEL",
        valid="a name of localchat list, or the path of a GGUF file",
        default="the last one used",
    ),
    "system": Parameter(
        "Instructions that come before the conversation",
        "-s --system",
        Label("Model", "Instructions"),
        metavar="TEXT",
        valid="text",
        default="none",
    ),
    "remote": Parameter(
        "OpenAI-compatible server that answers",
        "--remote",
        Label("Model", "Server that answers"),
        metavar="URL",
        valid="a name under [remotes] of the settings file, or the address of a server",
        default="this computer",
    ),
    "backend": Parameter(
        "Backend that runs the model",
        "--backend",
        Label("Model", "Backend"),
        metavar="NAME",
        valid="the name of a backend that doctor lists",
        default="chosen for each model",
        loads=True,
    ),
    "llamacpp_library": Parameter(
        "Library of llama.cpp",
        "--llamacpp-library",
        Label("Model", "llama.cpp library", unset="found automatically"),
        metavar="PATH",
        valid="the path of a libllama, native, llama-cpp-python or xllamacpp",
        default="the first that doctor lists",
        loads=True,
    ),
    "speculation": Parameter(
        "Speculative decoding: draft tokens and verify them together",
        "--speculation/--no-speculation",
        Label("Model", "Guess ahead"),
        default="on",
        loads=True,
        applies="now",
    ),
    "draft": Parameter(
        "Draft model for speculative decoding, of the same family",
        "--draft",
        Label("Model", "Draft model"),
        metavar="MODEL",
        valid="a name or a path",
        default="none",
        loads=True,
        applies="reload",
    ),
    "mmproj": Parameter(
        "GGUF that lets the model see pictures or hear sound",
        "--mmproj",
        Label("Model", "Image and audio encoder", unset="found beside the model"),
        metavar="PATH",
        valid="the path of a GGUF, or none",
        default="the one beside the model",
        loads=True,
        applies="reload",
    ),
    "lora": Parameter(
        "LoRA adapter that changes the model: a GGUF, or a folder of PEFT (llama.cpp)",
        "--lora",
        Label("Model", "LoRA adapters"),
        metavar="PATH[:SCALE]",
        valid="paths of adapters, each with a scale if it is not 1, as style.gguf:0.5; 16 at most",
        default="none",
        loads=True,
        applies="reload",
    ),
    "context_length": Parameter(
        "Context length in tokens",
        "--ctx",
        Label("Memory", "Context", "tokens"),
        metavar="TOKENS",
        valid="a whole number from 1, or thousands as 4k",
        default="the largest that fits",
        loads=True,
        applies="reload",
    ),
    "kv_cache_type": Parameter(
        "Type of the KV cache",
        "--kv-type",
        Label("Memory", "KV cache type", unset="chosen for each model"),
        metavar="TYPE",
        valid="f16, q8_0 or q4_0; bf16 or fp8 on CUDA",
        default="f16, or what fits",
        loads=True,
        applies="reload",
    ),
    "cache_ram_mib": Parameter(
        "RAM for the KV cache of idle conversations",
        "--cache-ram",
        Label("Memory", "RAM for idle chats", "MiB", unset="chosen automatically"),
        metavar="MIB",
        valid="a whole number of MiB",
        default="half of the free memory, at most 2 GB",
        loads=True,
    ),
    "cache_disk_gb": Parameter(
        "Disk space for the KV cache of conversations",
        "--cache-disk",
        Label("Memory", "Disk for idle chats", "GB"),
        metavar="GB",
        valid="a number of gigabytes; 0 is off",
        default="10",
        loads=True,
    ),
    "kv_gb": Parameter(
        "Memory limit for the KV cache",
        "--kv-gb",
        Label("Memory", "KV cache limit", "GB"),
        metavar="GB",
        valid=_GIGABYTES,
        default="none",
        loads=True,
    ),
    "vram_gb": Parameter(
        "Memory limit for a model on each GPU",
        "--vram-gb",
        Label("Memory", "GPU memory limit", "GB"),
        metavar="GB",
        valid=_GIGABYTES,
        default="none",
        loads=True,
    ),
    "gpus": Parameter(
        "GPUs that compute every layer together (CUDA)",
        "--gpus",
        Label("Memory", "GPUs per model", unset="1"),
        metavar="N",
        valid="auto or a whole number of 1 or more",
        default="1",
        loads=True,
        applies="reload",
    ),
    "gpu_layers": Parameter(
        "Layers computed on the GPU",
        "--gpu-layers",
        Label("Memory", "Layers on the GPU", unset="as many as fit"),
        metavar="N",
        valid="auto, all or a whole number",
        default="auto, as many as fit",
        loads=True,
        applies="reload",
    ),
    "experts_on_cpu": Parameter(
        "Layers whose experts stay in RAM (mixture-of-experts models, llama.cpp)",
        "--experts-on-cpu",
        Label("Memory", "Experts kept in RAM", "layers", unset="as few as possible"),
        metavar="N",
        valid="auto or a whole number",
        default="auto, as few as possible",
        loads=True,
        applies="reload",
    ),
    "require_gpu": Parameter(
        "Fail rather than run on the CPU alone",
        "--require-gpu/--no-require-gpu",
        Label("Memory", "Refuse without a GPU"),
        loads=True,
    ),
    "threads": Parameter(
        "Compute threads",
        "--threads",
        Label("Memory", "Threads"),
        metavar="N",
        valid="a whole number; 0 is every physical core",
        default="0",
        loads=True,
        applies="reload",
    ),
    "quantize": Parameter(
        "Quantization of bf16 layers while loading (CUDA)",
        "--quantize",
        Label("Memory", "Round a bf16 model to"),
        metavar="TYPE",
        valid="fp8, int8 or int4",
        default="as stored",
        loads=True,
    ),
    "anyway": Parameter(
        "Load even if the model may not fit in memory",
        "--anyway/--not-anyway",
        Label("Memory", "Load if it may not fit"),
        loads=True,
        applies="reload",
    ),
    "window_only": Parameter(
        "Layers with a sliding window cache only their window: less memory, fewer prompts reused",
        "--window-only/--whole-window-cache",
        Label("Memory", "Cache only sliding windows"),
        loads=True,
        applies="reload",
    ),
    "dummy_weights": Parameter(
        "Random weights, for speed tests without a model's files",
        "--dummy-weights/--real-weights",
        loads=True,
    ),
    "think": Parameter(
        "Let the model reason before it answers",
        "--think/--no-think",
        Label("Answers", "Reasoning"),
        valid="auto, on or off",
        default="the model decides",
        applies="now",
    ),
    "think_budget": Parameter(
        "Longest reasoning, in tokens",
        "--think-budget",
        Label("Answers", "Longest reasoning", "tokens"),
        metavar="N",
        valid="a whole number from 0, or thousands as 2k",
        default="no limit",
        applies="now",
    ),
    "hide_reasoning": Parameter(
        "Hide the reasoning",
        "--hide-reasoning/--show-reasoning",
        Label("Answers", "Hide the reasoning"),
    ),
    "max_tokens": Parameter(
        "Longest answer, in tokens",
        "--max-tokens",
        Label("Answers", "Longest answer", "tokens"),
        metavar="N",
        valid="a whole number from 1, or thousands as 2k",
        default="a quarter of the context, at most 8,192",
        applies="now",
    ),
    "loop_guard": Parameter(
        "End answers that repeat themselves",
        "--loop-guard/--no-loop-guard",
        Label("Answers", "End repeating answers"),
        default="on",
    ),
    "stop": Parameter(
        "Text before which the answer ends",
        "--stop",
        Label("Answers", "Stop at"),
        valid="text that is not empty, 16 at most",
        default="nothing",
    ),
    "n": Parameter(
        "Number of answers",
        "--n",
        Label("Answers", "Answers at once"),
        metavar="N",
        valid="a whole number from 1 to 16",
        default="1",
    ),
    "temperature": Parameter(
        "Randomness, where 0 always takes the most likely token",
        "--temp --temperature",
        Label("Sampling", "Temperature", unset=MODEL_DEFAULT),
        metavar="X",
        valid="a number from 0 to 10",
        default="the model maker's value, or 0.7",
        applies="now",
        sampler=SamplingNumber((0.0, 100.0), off=0.0, client_range=(0.0, 10.0)),
    ),
    "top_k": Parameter(
        "Sample from this many of the most likely tokens",
        "--top-k",
        Label("Sampling", "Top-k", unset=MODEL_DEFAULT),
        metavar="K",
        valid="a whole number; 0 is off",
        default="the model maker's value, or off",
        applies="now",
        # Clients write -1 for off.
        sampler=SamplingNumber(
            (0, 1 << 31), off=0, client_range=(-1, 1 << 31), llamacpp_stage="top_k"
        ),
    ),
    "top_p": Parameter(
        "Sample from the most likely tokens whose probabilities add up to this (1 is off)",
        "--top-p",
        Label("Sampling", "Top-p", unset=MODEL_DEFAULT),
        metavar="P",
        valid=_SHARE,
        default="the model maker's value, or 0.95",
        applies="now",
        sampler=SamplingNumber((0.0, 1.0), off=1.0, llamacpp_stage="top_p"),
    ),
    "min_p": Parameter(
        "Drop tokens less likely than this share of the most likely one",
        "--min-p",
        Label("Sampling", "Min-p", unset=MODEL_DEFAULT),
        metavar="P",
        valid=_SHARE,
        default="the model maker's value, or 0.05",
        applies="now",
        sampler=SamplingNumber((0.0, 1.0), off=0.0, llamacpp_stage="min_p"),
    ),
    "typical_p": Parameter(
        "Keep tokens of typical information (1 is off)",
        "-o typical_p",
        Label("Sampling", "Typical-p", unset=MODEL_DEFAULT),
        valid=_SHARE,
        default="off",
        applies="now",
        sampler=SamplingNumber((0.0, 1.0), off=1.0, alias="typ_p", llamacpp_stage="typ_p"),
    ),
    "repetition_penalty": Parameter(
        "Penalty on tokens of the context (1 is off)",
        "-o repetition_penalty",
        Label("Sampling", "Repetition penalty", unset=MODEL_DEFAULT),
        valid="a number above 0, up to 10",
        default="off",
        applies="now",
        sampler=SamplingNumber(
            (1e-3, 100.0),
            off=1.0,
            client_range=(1e-3, 10.0),
            alias="repeat_penalty",
            llamacpp_stage="penalties",
            reads_text=True,
        ),
    ),
    "frequency_penalty": Parameter(
        "Penalty on a token for each earlier use (0 is off)",
        "-o frequency_penalty",
        Label("Sampling", "Frequency penalty", unset=MODEL_DEFAULT),
        valid=_PENALTY,
        default="off",
        applies="now",
        sampler=SamplingNumber((-100.0, 100.0), off=0.0, client_range=(-2.0, 2.0), reads_text=True),
    ),
    "presence_penalty": Parameter(
        "Penalty on a token for any earlier use (0 is off)",
        "-o presence_penalty",
        Label("Sampling", "Presence penalty", unset=MODEL_DEFAULT),
        valid=_PENALTY,
        default="off",
        applies="now",
        sampler=SamplingNumber((-100.0, 100.0), off=0.0, client_range=(-2.0, 2.0), reads_text=True),
    ),
    "dry_multiplier": Parameter(
        "DRY: penalty on tokens that would continue a repeated sequence (0 is off, 0.8 is usual)",
        "--dry-multiplier",
        Label("Sampling", "DRY multiplier", unset=MODEL_DEFAULT),
        metavar="X",
        valid="a number from 0 to 100",
        applies="now",
        sampler=SamplingNumber(
            (0.0, 100.0), off=0.0, llamacpp_stage="dry", reads_text=True, rare=True
        ),
    ),
    "dry_base": Parameter(
        "Growth of the DRY penalty with each repeated token",
        "-o dry_base",
        Label("Sampling", "DRY base"),
        valid="a number from 1 to 100",
        default="1.75",
        applies="now",
        sampler=SamplingNumber((1.0, 100.0), off=1.75),
    ),
    "dry_allowed_length": Parameter(
        "Longest repeated sequence that DRY does not penalize",
        "-o dry_allowed_length",
        Label("Sampling", "DRY allowed length", "tokens", unset="2 tokens"),
        valid="a whole number of tokens",
        default="2",
        applies="now",
        sampler=SamplingNumber((0, (1 << 31) - 1), off=2),
    ),
    "dry_penalty_last_n": Parameter(
        "Latest tokens that DRY searches for repetitions",
        "-o dry_penalty_last_n",
        Label("Sampling", "DRY searches the last", unset="everything"),
        valid="a whole number of tokens; 0 is none, -1 is all",
        default="-1",
        applies="now",
        sampler=SamplingNumber((-1, (1 << 31) - 1), off=-1),
    ),
    "dry_sequence_breakers": Parameter(
        "Texts across which DRY sees no repetition",
        "-o dry_sequence_breakers",
        Label("Sampling", "DRY breakers"),
        valid='up to 64 texts of 1 to 40 characters, as ["\\n", ":"], or none',
        default=r'["\n", ":", "\"", "*"]',
        applies="now",
    ),
    "xtc_probability": Parameter(
        "XTC: chance to drop the likeliest tokens except the last above the threshold (0 is off)",
        "--xtc-probability",
        Label("Sampling", "XTC probability", unset=MODEL_DEFAULT),
        metavar="P",
        valid=_SHARE,
        applies="now",
        sampler=SamplingNumber((0.0, 1.0), off=0.0, llamacpp_stage="xtc", rare=True),
    ),
    "xtc_threshold": Parameter(
        "Probability from which XTC drops tokens (above 0.5 is off)",
        "-o xtc_threshold",
        Label("Sampling", "XTC threshold"),
        valid=_SHARE,
        default="0.1",
        applies="now",
        sampler=SamplingNumber((0.0, 1.0), off=0.1),
    ),
    "top_n_sigma": Parameter(
        "Drop tokens whose logits are this many standard deviations below the highest (0 is off)",
        "--top-n-sigma",
        Label("Sampling", "Top-n-sigma", unset=MODEL_DEFAULT),
        metavar="N",
        valid="a number from 0 to 100",
        applies="now",
        # Clients write -1 for off.
        sampler=SamplingNumber(
            (0.0, 100.0),
            off=0.0,
            client_range=(-1.0, 100.0),
            alias="nsigma",
            llamacpp_stage="top_n_sigma",
            rare=True,
        ),
    ),
    "dynatemp_range": Parameter(
        "Dynamic temperature: how far it leaves the temperature, by how sure the model is (0 is off)",
        "--dynatemp-range",
        Label("Sampling", "Dynamic temperature", unset=MODEL_DEFAULT),
        metavar="X",
        valid="a number from 0 to 10",
        applies="now",
        sampler=SamplingNumber((0.0, 10.0), off=0.0, rare=True),
    ),
    "dynatemp_exponent": Parameter(
        "Exponent of the entropy in the dynamic temperature",
        "-o dynatemp_exponent",
        Label("Sampling", "Dynamic exponent"),
        valid="a number from 0 to 10",
        default="1",
        applies="now",
        sampler=SamplingNumber((0.0, 10.0), off=1.0),
    ),
    "logit_bias": Parameter(
        "Numbers to add to the logits of tokens",
        "-o logit_bias",
        Label("Sampling", "Logit bias"),
        valid='token ids with numbers from -100 to 100, as {"42": -5}',
        default="none",
    ),
    "seed": Parameter(
        "Random seed, for reproducible output",
        "--seed",
        Label("Sampling", "Seed", unset="random"),
        metavar="N",
        valid="a whole number from 0",
        default="another one for each answer",
        applies="now",
    ),
    "theme": Parameter(
        "Colors of the screen",
        "--theme",
        Label("Screen", "Theme"),
        metavar="NAME",
        valid="auto, dark, light, high-contrast, ansi or ansi-light",
        default="auto, as the terminal",
    ),
    "pictures": Parameter(
        "How the screen shows pictures",
        "--pictures",
        Label("Screen", "Pictures"),
        metavar="HOW",
        valid="auto, kitty, sixel, blocks, or off for a line of text",
        default="auto, as the terminal",
    ),
    "reduced_motion": Parameter(
        "No animations on the screen",
        "--reduced-motion/--no-reduced-motion",
        Label("Screen", "Reduced motion"),
    ),
    "screen_reader": Parameter(
        "Append lines and redraw nothing, for screen readers",
        "--screen-reader/--no-screen-reader",
        Label("Screen", "Screen reader"),
    ),
    "color": Parameter(
        "Use colors on a terminal",
        "--color/--no-color",
        Label("Screen", "Colours"),
        default="on",
    ),
    "stats": Parameter(
        "Print a line of metrics after the answer",
        "-v --verbose --stats/--no-stats",
        Label("Screen", "Metrics after an answer"),
    ),
    "quiet": Parameter(
        "Print nothing on stderr but errors and what was asked for",
        "-q --quiet/--no-quiet",
        Label("Screen", "Quiet command line"),
    ),
    "history": Parameter(
        "Store conversations on this machine's disk",
        "--history/--no-history",
        Label("Privacy", "Keep conversations"),
        default="on",
    ),
    "offline": Parameter(
        "Never use the network",
        "--offline/--no-offline",
        Label("Privacy", "Offline"),
    ),
    "attach": Parameter(
        "Use the models of a running `localchat serve`",
        "--attach/--no-attach",
        Label("Privacy", "Use a running server"),
        default="on",
    ),
    "keep_alive": Parameter(
        "Time that the server keeps an idle model",
        "--keep-alive",
        Label("Privacy", "Server keeps a model"),
        valid="seconds; 0 is at once, -1 forever",
        default="300",
    ),
    "tools": Parameter(
        "Tools that the model may call, with your consent",
        "--tools",
        Label("Tools", "Tools"),
        metavar="LIST",
        valid="read, edit, run, fetch, docs, and names of MCP servers, separated by commas; or off",
        applies="now",
    ),
    "root": Parameter(
        "Folder that the tools may use",
        "--root",
        Label("Tools", "Folder"),
        metavar="DIR",
        valid="a folder",
        default="the working folder",
        applies="now",
    ),
    "tool_rounds": Parameter(
        "Answers to one question whose tool calls run",
        "--tool-rounds",
        Label("Tools", "Rounds of calls"),
        metavar="N",
        valid="a number from 1 to 1000",
        default="25",
        applies="now",
    ),
}

SAMPLERS: Final[Mapping[str, SamplingNumber]] = {
    key: parameter.sampler for key, parameter in PARAMETERS.items() if parameter.sampler is not None
}
"""Numbers of the sampling by key."""
AT_START: Final = (
    *("n", "reduced_motion", "screen_reader", "color", "stats", "quiet", "hide_reasoning"),
    *("history", "attach", "keep_alive", "llamacpp_library"),
)
"""Keys that a conversation reads at its start only, or never."""
DRY_BREAKERS: Final = ("\n", ":", '"', "*")
"""Texts across which DRY sees no repetition, unless a request has others."""
NO_BREAKERS: Final = "none"
"""Stands for an empty list of breakers, as on llama.cpp's command line."""
