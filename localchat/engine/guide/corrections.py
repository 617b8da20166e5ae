"""Corrects what the guide was trained to say and what has changed in localchat since.

The topics of scripts/tools/guide have the corrected answers, so the next training makes this table empty.
"""

from typing import Final

CORRECTIONS: Final = {
    "In a preset it is `localchat preset edit NAME --unset KEY`.": (
        "In a preset, delete its line in the settings file."
    ),
    ", `localchat preset show NAME` prints one, `localchat preset edit NAME` changes what its flags name (such "
    "as `--temperature 0.2`), and `localchat preset rm NAME` removes it. They stand in the settings file under "
    "`[presets.NAME]`.": (
        ", and `localchat config preset rm NAME` removes one. They are in the settings file under "
        "`[presets.NAME]`, where you can change them."
    ),
    "every action by name, with its key, and your conversations and models.": (
        "every action by name, with its key, and every setting."
    ),
    "`F4` opens the parameters and what they cost.": (
        "`F4` opens the parameters of this conversation."
    ),
    "`/v1/chat/completions/input_tokens`, `/v1/responses/input_tokens` and `/v1/messages/count_tokens` count "
    "the tokens of a request without answering it; `/tokenize` counts those of a text.": (
        "`/v1/messages/count_tokens`, and `/tokenize` with `messages`, count the tokens of a conversation "
        "without answering it; `/tokenize` with `content` counts those of a text."
    ),
    ", from a benchmark of the model or an estimate.": (
        ", from a benchmark of the model: run `localchat bench MODEL` first."
    ),
    "`--price kwh=0.3` sets a price": "`--price machine_hour=2.50` sets a price",
    "safetensors on one NVIDIA GPU after": "safetensors on NVIDIA GPUs after",
    "`--max-num-seqs` is `--parallel`. For several GPUs keep vLLM and use it: `localchat --remote URL`.": (
        "`--max-num-seqs` is `--parallel`, `--tensor-parallel-size` is `--gpus`."
    ),
    "many users on one or several GPUs (tensor parallelism), which localchat does not do itself.": (
        "many users on the GPUs of one or several machines."
    ),
    "localchat cp ": "localchat config cp ",
    "localchat preset ": "localchat config preset ",
    "localchat completion ": "localchat config completion ",
    "licence": "license",
    "passages by their words, or with `--embed MODEL` by meaning, and": "passages by their words, and",
    "localchat converts nothing: llama.cpp's own tools (`convert_hf_to_gguf.py`, `llama-quantize`) make"
    " a GGUF and quantize it; then": (
        "`localchat quantize MODEL --type Q4_K_M` writes a GGUF in another quantization. `localchat "
        "quantize FOLDER OUT.gguf --type F16` makes a GGUF of a checkpoint of Llama, Qwen or Gemma 3; then"
    ),
    "it does not train, merge, prune or quantize. It runs finished ones; use other tools for that "
    "(llama.cpp's for GGUF), and": (
        "it does not train, merge or prune. It runs finished ones, and `localchat quantize` writes a GGUF "
        "in another quantization. Use other tools for the rest, and"
    ),
    "A route asks a small model first and a large one where a rule says so. Put `small` and `large` "
    "under `[routes.easy]` in the settings file, with rules such as `longer_than`, `regex`, `code` or "
    '`doubt`, then use it as a model: `localchat -m route:easy "question"`. `--stats` says who '
    "answered.": (
        "localchat does not choose between models by itself: a question goes to the model that you name. "
        "Use `-m MODEL` on the command line and `/model` in a chat."
    ),
    "localchat works with text only: it refuses images for now, and says so.": (
        'Models with an encoder read pictures, and some hear recordings: `localchat -f photo.jpg "What is '
        'this?"`. `localchat show MODEL` says what a model can do.'
    ),
    "localchat works with text only. It makes no pictures, sound or video, and it refuses images.": (
        "localchat writes text only. It makes no pictures, sound or video, but some models read pictures "
        "and hear recordings."
    ),
    "Tool calls are parsed and shown, or sent to the server's client; localchat itself runs none.": (
        "With `--tools read,edit` (or `/tools`) the model may read, edit and run, with your consent for "
        "each call. Without it, calls are shown, or sent to the server's client."
    ),
    "and localchat runs no tools. Still check commands before you run them: a model can be wrong.": (
        "and tools are off until you turn them on, and ask for each call. Still check commands before you "
        "run them: a model can be wrong."
    ),
    "localchat's server parses and forces such calls, and runs none itself.": (
        "localchat's server parses and forces such calls, and in a chat `--tools` lets localchat run tools "
        "of its own."
    ),
    "LoRA adapters are not loaded; localchat runs finished models. Merge the adapter into its model and"
    " convert the result to GGUF with llama.cpp's tools, then run the file. Ollama's adapters are left "
    "out too.": (
        "`localchat run MODEL --lora PATH` applies a LoRA adapter with llama.cpp: a GGUF file, or a folder "
        "saved by PEFT. `PATH:0.5` sets its scale. Ollama's adapters are left out."
    ),
    "Neither I nor any model in localchat can do that. Models here only write text: they run no "
    "commands, and open, change or delete no files. What you give them with `-f`, `@` or a pipe is all "
    "that they see.": (
        "I cannot do that, and a model can only with your consent: `--tools read,edit,run` (or `/tools`) "
        "lets it read and change files of one folder and run commands, and asks for each call. Otherwise "
        "models only write text, and see what you give them with `-f`, `@` or a pipe."
    ),
    "localchat has no MCP and no agents of its own: it runs no tools. Programs with MCP, such as Cline,"
    " Zed or Claude Code, can use its models through `localchat serve`, which parses tool calls.": (
        "`localchat config mcp add NAME COMMAND` adds an MCP server, and `--tools NAME` lets the model use "
        "it in a chat, with your consent. Programs with MCP, such as Cline, Zed or Claude Code, can also "
        "use models through `localchat serve`."
    ),
    "`--vote N` tries up to N times at once and prints the answer that most agree on; `--best-of "
    "N` takes the one the model was surest of, with `--judge` the one it picks itself. "
    "`--critique` lets it judge and mend its answer. In the terminal UI `/tries` does it. All "
    "cost time.": (
        "`--n 3` prints three answers to one prompt, and you choose. In the terminal UI `F5` "
        "answers again, and the old answer stays as a branch. localchat does not vote or judge "
        "its own answers."
    ),
    "`--head-int8` rounds the output head to 8 bits on the CUDA backend: faster, because in bf16 the "
    "head is a quarter of what a 4-bit 7B reads for each token. `--head-exact` keeps it as it is.": (
        "localchat does not round the output head: on the CUDA backend an 8-bit copy of it finds the likely "
        "tokens, and the exact head scores them, which is as fast as a rounded one. `--quantize int4` rounds "
        "the layers of a bf16 model."
    ),
    "`localchat tune MODEL` finds the fastest settings by measuring: threads, KV type, drafts, "
    "layers on the GPU. It shows what each brings and writes them for this model after asking; "
    "`localchat tune MODEL --undo` takes it back.": (
        "`localchat bench MODEL --vary threads=4,8` measures values of a setting side by side, "
        "and `--vary` also takes `kv-type`, `speculation` and `gpu-layers`. `localchat config "
        "set threads 8 --for MODEL` stores the faster one."
    ),
    "`localchat serve --print-unit` prints a service file with your flags, a systemd user unit "
    "or on a Mac a launchd agent, and on stderr how to install it:\n\n```\nlocalchat serve "
    "qwen2.5:7b --print-unit > ~/.config/systemd/user/localchat.service\nsystemctl --user "
    "daemon-reload && systemctl --user enable --now localchat\n```": (
        "localchat runs as a service of systemd or launchd: docs/serving.md has a file for each. "
        "On Linux save it as `localchat.service` in `~/.config/systemd/user`, then:\n\n```\n"
        "systemctl --user daemon-reload && systemctl --user enable --now localchat\n```"
    ),
    "`localchat bench MODEL` measures it, `localchat tune MODEL` finds faster settings.": (
        "`localchat bench MODEL --vary threads=4,8` compares settings."
    ),
    "To start it with the machine, `localchat serve --print-unit` prints a systemd user unit (on "
    "a Mac a launchd agent), and how to install it.": (
        "To start it with the machine, use the systemd unit or the launchd agent of "
        "docs/serving.md."
    ),
    "`/think`, `/tries`, `/regen`": ("`/think`, `/regen`"),
    "`localchat pull --check` says whether the hub has newer files of the models here, "
    "`localchat pull --check NAME` of one; `localchat pull NAME` then fetches them. Nothing else "
    "asks the hub.": (
        "`localchat pull NAME` again compares the files with the hub, and fetches those that "
        "have changed there."
    ),
    "`--vary kv-type=f16,q8_0` compares settings, `--compare A B` two kept results.": (
        "`--vary kv-type=f16,q8_0` compares settings."
    ),
    "`localchat serve --documents NAME` offers them to clients as `MODEL@NAME`.": (
        "Clients of `localchat serve` send their own context."
    ),
    "A large paste becomes an attachment in the input; open it (`Alt+O`) to see or change the "
    "text. It is sent whole.": (
        "A large paste becomes an attachment in the input, which is sent whole. `Ctrl+G` opens "
        "the message with its text in your editor."
    ),
    "The CUDA backend (AWQ, FP8, bf16) uses one GPU. For tensor parallelism run vLLM and use it with "
    "`localchat --remote URL`.": (
        "With the CUDA backend, `--gpus 2` or `--gpus auto` computes a safetensors model (bf16, AWQ, FP8) on "
        "several GPUs together."
    ),
    "It works with text; another program can turn speech into text and pipe it in: `cat speech.txt | "
    'localchat "Sum this up"`.': (
        'Some models hear recordings: `localchat -f talk.mp3 "Sum this up"`.'
    ),
    "`localchat quality A B` measures what a smaller one loses here.": (
        "`localchat fit MODEL` compares them for this machine, and `localchat quality A B` measures what a "
        "smaller one loses."
    ),
}
"""Replacements of phrases in every answer."""


def corrected(text: str) -> str:
    """Return a whole answer with all corrections."""
    for phrase, replacement in CORRECTIONS.items():
        text = text.replace(phrase, replacement)
    return text
