"""Lists the steps that make room for a load or a prompt, and lets a terminal user pick one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from localchat.cli.chat.choose_model import can_ask, fetched_if_wanted
from localchat.cli.resolve import CHAT_SLOTS, Inputs, Setup, resolve_inputs
from localchat.cli.streams import Terminal
from localchat.config.settings import Given
from localchat.errors import ContextExceeded, DoesNotFit, LocalchatError, ModelMissing
from localchat.fit.steps import IN_ORDER, MemoryStep, numbered, step_lines
from localchat.models.resolve import planned_load

if TYPE_CHECKING:
    from localchat.models.assess import Subject

_ORIGIN = "picked to make room"


def steps_of(setup: Setup) -> tuple[MemoryStep, ...]:
    """Return the nine steps for the load of a setup. Empty for a remote model or one that cannot be planned."""
    # Imported here, because these modules probe the hardware and read the catalogue.
    from localchat.backend_api.registry import usable_machine
    from localchat.models.substitutes import memory_steps

    subject = _subject(setup)
    if subject is None:
        return ()
    slots = max(CHAT_SLOTS, setup.settings.n)
    options = planned_load(setup.settings, setup.paths, max_slots=slots)
    try:
        return memory_steps(subject, options, usable_machine(), setup.paths, setup.app.environ)
    except LocalchatError:
        return ()  # the load itself reports the problem


def _subject(setup: Setup) -> "Subject | None":
    from localchat.model_files.checkpoint import read_summary
    from localchat.models.assess import Subject

    model = setup.model
    settings = setup.settings
    # A third-party backend class plans its own memory.
    if model.is_composed or ":" in (settings.backend or ""):
        return None
    try:
        summary = read_summary(model.path, dummy_weights=settings.dummy_weights)
    except LocalchatError:
        return None
    return Subject(model.name, summary, model.path, settings.backend)


def add_steps(problem: DoesNotFit, setup: Setup) -> tuple[MemoryStep, ...]:
    """Add the steps to the hint of an error with sizes, and return them."""
    steps = steps_of(setup) if "needed_bytes" in problem.details else ()
    if steps:
        problem.hint = "\n".join(filter(None, (problem.hint, IN_ORDER, *step_lines(steps))))
    return steps


def picked_step(
    terminal: Terminal, problem: LocalchatError, steps: Sequence[MemoryStep]
) -> MemoryStep | None:
    """Return the step that the user picks from a numbered list. None off a terminal or for Enter."""
    if not can_ask() or not any(step.can_be_taken for step in steps):
        return None
    terminal.progress("")
    terminal.print_line(f"localchat: {problem.message}")
    terminal.print_line(IN_ORDER)
    for line in step_lines(tuple(steps)):
        terminal.print_line(f"  {line}")
    choices = {str(number): step for number, step in numbered(steps) if step.can_be_taken}
    while True:
        question = f"Number to continue with ({', '.join(choices)}), Enter for none"
        answer = click.prompt(question, default="", show_default=False, err=True).strip()
        if not answer:
            return None
        if answer in choices:
            return choices[answer]
        terminal.print_line(f"{answer} is not one of the numbers")


class RoomMaker:
    """Resolves a command's setup again with the steps picked so far."""

    def __init__(self, ctx: click.Context, model: str | None) -> None:
        """model: name of the model in the command's arguments."""
        self._ctx = ctx
        self._model = model
        self._taken: dict[str, Given] = {}
        self.steps: tuple[MemoryStep, ...] = ()
        """Steps for the prompt that was refused last."""

    def picked(self, problem: DoesNotFit | ContextExceeded, setup: Setup) -> MemoryStep | None:
        """Return the step to continue with. None if the hint of the error lists them all."""
        if isinstance(problem, DoesNotFit):
            self.steps = add_steps(problem, setup)
        return picked_step(setup.terminal, problem, self.steps)

    def setup(self, step: MemoryStep) -> Setup:
        """Return the setup with one more step. Offers to download a missing model.

        Raises LocalchatError.
        """
        self._model = step.model or self._model
        self._taken |= {key: Given(value, _ORIGIN) for key, value in step.settings}
        inputs = Inputs.of(self._ctx, self._model)
        inputs.flags.update(self._taken)
        try:
            return resolve_inputs(inputs)
        except ModelMissing as problem:
            if not fetched_if_wanted(problem, inputs):
                raise
            return resolve_inputs(inputs)
