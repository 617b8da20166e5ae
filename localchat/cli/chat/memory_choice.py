"""Steps that make room for a load or a prompt. On a terminal, the user picks one by its number."""

from collections.abc import Sequence

import click

from localchat.cli.chat.choose_model import can_ask, fetched_if_wanted
from localchat.cli.resolve import Inputs, Setup, chat_slots, resolve_inputs, subject_of
from localchat.cli.streams import Terminal
from localchat.config.settings import Given
from localchat.errors import ContextExceeded, DoesNotFit, LocalchatError, ModelMissing
from localchat.fit.steps import IN_ORDER, MemoryStep, numbered, step_lines
from localchat.models.resolve import planned_load

_ORIGIN = "picked to make room"


def steps_of(setup: Setup) -> tuple[MemoryStep, ...]:
    """Return the steps for the load of a setup. None for remote models and failed plans."""
    # These modules probe the hardware and read the catalog, so only a failed load imports them.
    from localchat.backend_api.registry import usable_machine
    from localchat.models.substitutes import memory_steps

    settings = setup.settings
    # A third-party backend class plans its own memory.
    if setup.model.remote is not None or ":" in (settings.backend or ""):
        return ()
    options = planned_load(settings, setup.paths, max_slots=chat_slots(settings))
    try:
        subject = subject_of(setup.model, settings)
        return memory_steps(subject, options, usable_machine(), setup.paths, setup.app.environ)
    except LocalchatError:
        return ()  # the load itself reports the error


def add_steps(problem: DoesNotFit, setup: Setup) -> tuple[MemoryStep, ...]:
    """Add the steps to the hint of an error with sizes, and return them."""
    if "needed_bytes" not in problem.details:
        return ()
    steps = steps_of(setup)
    if steps:
        problem.hint = "\n".join(filter(None, (problem.hint, IN_ORDER, *step_lines(steps))))
    return steps


def picked_step(
    terminal: Terminal, problem: LocalchatError, steps: Sequence[MemoryStep]
) -> MemoryStep | None:
    """Return the step that the user picks from a list. None off a terminal, or without a choice."""
    if not can_ask() or not any(step.can_be_taken for step in steps):
        return None
    terminal.progress("")
    terminal.print_line(f"localchat: {problem.message}")
    terminal.print_line(IN_ORDER)
    for line in step_lines(tuple(steps)):
        terminal.print_line(f"  {line}")
    choices = {str(number): step for number, step in numbered(steps) if step.can_be_taken}
    while True:
        question = f"Number of the step to take ({', '.join(choices)}), Enter for none"
        answer = click.prompt(question, default="", show_default=False, err=True).strip()
        if not answer:
            return None
        if answer in choices:
            return choices[answer]
        terminal.print_line(f"{answer} is not one of these numbers")


class RoomMaker:
    """Resolves the setup of a command again, with the steps that the user has picked."""

    def __init__(self, ctx: click.Context, model: str | None) -> None:
        """`model`: model argument of the command."""
        self._ctx = ctx
        self._model = model
        self._settings: dict[str, Given] = {}
        self.steps: tuple[MemoryStep, ...] = ()
        """Steps for the prompt that was rejected last."""

    def picked(self, problem: DoesNotFit | ContextExceeded, setup: Setup) -> MemoryStep | None:
        """Return the picked step. None if the hint of the error lists the steps instead."""
        if isinstance(problem, DoesNotFit):
            self.steps = add_steps(problem, setup)
        return picked_step(setup.terminal, problem, self.steps)

    def setup(self, step: MemoryStep) -> Setup:
        """Return the setup with one more step. Offer to download a missing model. Raises LocalchatError."""
        self._model = step.model or self._model
        self._settings |= {key: Given(value, _ORIGIN) for key, value in step.settings}
        inputs = Inputs.of(self._ctx, self._model)
        inputs.flags.update(self._settings)
        try:
            return resolve_inputs(inputs)
        except ModelMissing as problem:
            if not fetched_if_wanted(problem, inputs):
                raise
            return resolve_inputs(inputs)
