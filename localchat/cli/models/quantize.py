"""Command `localchat quantize`: write a model as GGUF in another quantization."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import click

from localchat.cli.context import AppContext
from localchat.cli.options import UserPath, complete_model
from localchat.cli.streams import Terminal, tell
from localchat.errors import LocalchatError, UsageError, os_errors_as
from localchat.sanitize import sanitize_line
from localchat.units import size, sizes

if TYPE_CHECKING:
    from localchat.backend_api.interface import Quantizer


@click.command("quantize")
@click.argument("model_name", metavar="MODEL", shell_complete=complete_model)
@click.argument("output", type=UserPath(path_type=Path), metavar="[FILE]", required=False)
@click.option(
    "-t",
    "--type",
    "quantization",
    metavar="TYPE",
    required=True,
    help="Quantization to write, such as Q4_K_M, Q8_0 or F16.",
)
@click.pass_obj
def command(app: AppContext, model_name: str, output: Path | None, quantization: str) -> None:
    """Write a model as a GGUF file in another quantization.

    MODEL is a name or the path of a GGUF file, best in F16, BF16 or Q8_0, or the folder of a safetensors
    checkpoint of Llama, Mistral, Qwen 2, Qwen 3 or Gemma 3. FILE is the new file, by default MODEL-TYPE.gguf in
    the models folder. The blocks are those of llama-quantize without an importance matrix. `localchat quality
    MODEL NEW` measures what was lost.
    """
    from localchat.backend_api.registry import find_backends
    from localchat.cli.resolve import follow_library_setting
    from localchat.cli.terminal_bar import ProgressDisplay
    from localchat.config.paths import expand_home, find_paths
    from localchat.fit.hardware import read_machine
    from localchat.model_files.checkpoint import is_checkpoint, read_summary
    from localchat.models.index import find_model, read_index

    follow_library_setting(app)
    paths = find_paths(app.environ)
    quantizers = [backend.quantizer() for backend in find_backends().values()]
    quantizer = next((quantizer for quantizer in quantizers if quantizer is not None), None)
    if quantizer is None:
        raise LocalchatError(
            "there is no llama.cpp here, whose quantizers are needed", hint="localchat doctor"
        )
    name = _written(quantization, quantizer)
    model = find_model(model_name, read_index(paths, app.environ), paths, app.environ)
    source = model.path
    if source is None or not (source.is_file() or is_checkpoint(source)):
        raise UsageError(
            f"{model.name} is neither a GGUF file nor a safetensors checkpoint",
            hint="pull a GGUF in F16 or Q8_0, or give the folder of a checkpoint",
        )
    shape = read_summary(source)
    stem = f"{_without_quantization(model.name, shape.quantization)}-{name.lower()}"
    target = expand_home(output) if output is not None else paths.models_dir / f"{stem}.gguf"
    if target.is_dir():
        target /= f"{stem}.gguf"
    _check_target(target, quantizer.size_bytes(source, name))
    terminal = Terminal(app.environ)
    if note := _loss_note(shape.quantization, name):
        terminal.notify(note)
    with (
        os_errors_as(LocalchatError, f"{target} cannot be written"),
        ProgressDisplay(terminal) as display,
    ):
        quantizer.write(
            source,
            target,
            name,
            read_machine().cores,
            lambda done, total: display.status(
                f"{name}: {sizes(done, total)} of {sanitize_line(model.name)}", done, total
            ),
        )
    file_bytes = target.stat().st_size
    shown = sanitize_line(str(target))
    runs = stem if output is None else shown
    source_bytes = sum(file.stat().st_size for file in model.files)
    tell(
        f"localchat: wrote {shown} ({size(file_bytes)}, from {size(source_bytes)}); "
        f"localchat run {runs} uses it"
    )


def _without_quantization(name: str, quantization: str) -> str:
    """Return the last part of a model's name without its quantization, for the name of a file."""
    stem = name.rpartition("/")[2].replace(":", "-")
    if quantization and stem.lower().endswith(quantization.lower()):
        stem = stem[: -len(quantization)].rstrip("-._")
    return stem or name


def _written(quantization: str, quantizer: "Quantizer") -> str:
    """Return the name of a quantization as the quantizer spells it. Raises UsageError."""
    from localchat.models.quantizations import same_quantization
    from localchat.suggestions import closest

    for name in quantizer.names:
        if same_quantization(name, quantization):
            return name
    near = ", ".join(closest(quantization.upper(), quantizer.names, count=2))
    hint = f"there are {', '.join(quantizer.names)}"
    if near:
        hint = f"did you mean {near}? {hint[0].upper()}{hint[1:]}"
    raise UsageError(f"there is no quantization {quantization!r} to write", hint=hint)


def _check_target(target: Path, needed_bytes: int) -> None:
    """Raise LocalchatError if the file exists, or if the disk has no room for it."""
    if target.exists():
        raise UsageError(f"{target} exists already", hint="give another FILE, or remove it")
    with os_errors_as(LocalchatError, f"{target.parent} cannot be used"):
        target.parent.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(target.parent).free
    if needed_bytes > free_bytes:
        raise LocalchatError(
            f"{target.name} needs {size(needed_bytes)} on the disk, and {size(free_bytes)} are free in "
            f"{target.parent}",
            hint="make room, or give a FILE on another disk",
        )


def _loss_note(source: str, target: str) -> str:
    """Return a warning for a source that has lost something already."""
    from localchat.fit.memory_plan import usual_bits

    if source in ("F32", "F16", "BF16", "Q8_0", ""):
        return ""
    bits = usual_bits(source)
    finer = usual_bits(target)
    if source == target:
        return f"the source is {source} already: the new file has the same weights"
    if bits is not None and finer is not None and finer > bits:
        return f"the source is {source}: {target} makes the file larger and cannot bring back what was lost"
    return f"the source is {source} already: quantizing it again loses more than from F16 or Q8_0"
