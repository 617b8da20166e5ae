"""Measures how many small tasks a model solves with tools, and whether undo restores every byte.

    python -m scripts.tools.check_tasks MODEL [--compare] [--only NAME,…] [--threads N] [--log FOLDER]

Each task has a fresh folder, and `localchat` answers in it on a terminal that consents to every call. The
result is judged by the files or the answer. Nothing outside of the folder may change. Then /undo takes the task
back, and the folder is compared with its first state byte by byte, except for files that Python compiles.

`--compare` also runs each task without the grammar of arguments. The last line is JSON. Ends with 1 if
something was written outside, or not restored.
"""

import argparse
import itertools
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

_ROOT: Final = Path(__file__).resolve().parents[2]
_MAX_TOKENS: Final = 300
_ROUNDS: Final = 8
_UNDO_S: Final = 60
_UNBOUND: Final = """
import sys
import msgspec
from localchat.tools.loop import ToolTurn
offer = ToolTurn.offer
def unbound(self, messages):
    return msgspec.structs.replace(offer(self, messages), bind_arguments=False)
ToolTurn.offer = unbound
from localchat.cli import main
sys.exit(main())
"""

Files = Mapping[str, str]
Check = Callable[[Path, str], bool]


class Task(NamedTuple):
    """A task of one question."""

    name: str
    tools: str
    prompt: str
    files: Files
    check: Check
    """Judges the folder and the answer."""


def says(*words: str) -> Check:
    """Return a check that the answer has all these words."""
    return lambda folder, answer: all(word.lower() in answer.lower() for word in words)


def has(name: str, *texts: str, without: str = "\0") -> Check:
    """Return a check that a file has these texts, and not another one."""

    def check(folder: Path, answer: str) -> bool:
        path = folder / name
        if not path.is_file():
            return False
        content = path.read_text(errors="replace")
        return all(text in content for text in texts) and without not in content

    return check


def prints(name: str, output: str) -> Check:
    """Return a check that a script succeeds and prints this."""

    def check(folder: Path, answer: str) -> bool:
        words = [sys.executable, "-B", name]
        try:
            done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=20)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0 and output in done.stdout

    return check


_CONFIG = '[server]\nhost = "localhost"\nport = 8714\n'
_TODO = "- [x] call Ann\n- [ ] water the plants\n- [ ] buy stamps\n- [x] pay rent\n"
_APP = "def fetch(url):\n    return url\n\n\ndef main():\n    print(fetch('x'))\n\n\nmain()\n"
_CLIENT = (
    "class Client:\n    def __init__(self, host, retries=7):\n        self.retries = retries\n"
)
_USERS = json.dumps(
    [{"name": "Mia", "email": "mia@example.org"}, {"name": "Tom", "email": "tom@example.org"}],
    indent=2,
)
_PAGE = (
    "<html><head><title>Ferns</title></head><body><h1>How to grow ferns</h1>"
    "<p>Ferns like shade and moist soil. Water them twice a week.</p></body></html>"
)
_LOG = "10:01 INFO start\n10:02 INFO ready\n10:05 ERROR disk full on /data\n10:06 INFO stop\n"
_CALC = "def add(a, b):\n    return a - b\n"
_TEST = "from calc import add\n\nassert add(2, 3) == 5, add(2, 3)\nprint('all tests passed')\n"
_SOURCES = {
    "src/dates.py": "def parse_date(text):\n    return text.split('-')\n",
    "src/names.py": "def parse_name(text):\n    return text.strip()\n",
    "src/main.py": "from dates import parse_date\n# TODO check input\nprint(parse_date('2024-01-02'))\n",
}

TASKS: Final = (
    Task(
        "port", "read", "Which port is set in config.toml?", {"config.toml": _CONFIG}, says("8714")
    ),
    Task(
        "todo",
        "read",
        "Which tasks in todo.md are not done yet?",
        {"todo.md": _TODO},
        says("plants", "stamps"),
    ),
    Task(
        "where", "read", "Which file defines the function parse_date?", _SOURCES, says("dates.py")
    ),
    Task(
        "path",
        "read",
        "Find the file report.md and tell me its path.",
        {"docs/2024/report.md": "# Report\n", "docs/index.md": "# Docs\n"},
        says("docs/2024/report.md"),
    ),
    Task(
        "list",
        "read",
        "What is in the folder 'fruits'?",
        {"fruits/apple.txt": "a\n", "fruits/pear.txt": "p\n", "other/x.txt": "x\n"},
        says("apple", "pear"),
    ),
    Task(
        "license",
        "read",
        "Who holds the copyright of this project?",
        {"LICENSE": "MIT License\n\nCopyright (c) 2024 Greta Olsen\n", "README.md": "# Tool\n"},
        says("Greta Olsen"),
    ),
    Task(
        "email",
        "read",
        "What is the email address of Mia in users.json?",
        {"users.json": _USERS},
        says("mia@example.org"),
    ),
    Task(
        "csv",
        "read",
        "How many apples were sold according to sales.csv?",
        {"sales.csv": "fruit,sold\npears,17\napples,42\nplums,9\n"},
        says("42"),
    ),
    Task(
        "log",
        "read",
        "What went wrong according to server.log?",
        {"server.log": _LOG},
        says("disk", "full"),
    ),
    Task(
        "which",
        "read",
        "Which of a.txt and b.txt mentions bananas?",
        {"a.txt": "Apples are red.\n", "b.txt": "Bananas are yellow.\n"},
        says("b.txt"),
    ),
    Task(
        "default",
        "read",
        "What is the default of retries in client.py?",
        {"client.py": _CLIENT},
        says("7"),
    ),
    Task(
        "page",
        "read",
        "Summarize page.html in one sentence.",
        {"page.html": _PAGE},
        says("fern", "shade"),
    ),
    Task(
        "yaml",
        "read",
        "Which database host does production use?",
        {
            "conf/dev.yaml": "database: db-dev.local\n",
            "conf/production.yaml": "database: db7.internal\n",
        },
        says("db7.internal"),
    ),
    Task("comment", "read", "In which file is there a TODO comment?", _SOURCES, says("main.py")),
    Task(
        "readme",
        "read",
        "Read README.md. How do I start the program?",
        {"README.md": "# Bird\n\nStart it with `bird --listen`.\n"},
        says("bird --listen"),
    ),
    Task(
        "set-port",
        "edit",
        "Change the port in config.toml to 9000.",
        {"config.toml": _CONFIG},
        has("config.toml", "port = 9000", "[server]", without="8714"),
    ),
    Task(
        "typo",
        "edit",
        "Fix the spelling mistake in letter.txt.",
        {"letter.txt": "Dear Tom,\nI will recieve the parcel on Monday.\n"},
        has("letter.txt", "receive the parcel", "Dear Tom", without="recieve"),
    ),
    Task(
        "create",
        "edit",
        "Create a file hello.py that prints Hello, world!",
        {"README.md": "# Demo\n"},
        prints("hello.py", "Hello, world!"),
    ),
    Task(
        "rename",
        "edit",
        "Rename the function fetch to download in app.py.",
        {"app.py": _APP},
        has("app.py", "def download(", "print(download(", without="fetch"),
    ),
    Task(
        "append",
        "edit",
        "Add the line '- buy milk' at the end of list.txt.",
        {"list.txt": "- eggs\n- bread\n"},
        has("list.txt", "- eggs\n- bread\n- buy milk"),
    ),
    Task(
        "debug",
        "edit",
        "Turn debug off in settings.ini.",
        {"settings.ini": "[main]\ndebug = true\nname = demo\n"},
        has("settings.ini", "debug = false", "name = demo"),
    ),
    Task(
        "version",
        "edit",
        "Change the version in package.json to 1.2.4.",
        {"package.json": '{\n  "name": "demo",\n  "version": "1.2.3"\n}\n'},
        has("package.json", '"version": "1.2.4"', '"name": "demo"'),
    ),
    Task(
        "remove",
        "edit",
        "Remove the line with the password from notes.txt.",
        {"notes.txt": "milk\npassword: 1234\nbread\n"},
        has("notes.txt", "milk\n", "bread", without="1234"),
    ),
    Task(
        "title",
        "edit",
        "Change the title of README.md to 'My Project'.",
        {"README.md": "# Untitled\n\nText.\n"},
        has("README.md", "# My Project", "Text.", without="Untitled"),
    ),
    Task(
        "new-note",
        "edit",
        "Create notes/idea.md with the text: build a boat",
        {"README.md": "# Demo\n"},
        has("notes/idea.md", "build a boat"),
    ),
    Task(
        "bug",
        "edit",
        "The function add in calc.py subtracts. Fix it.",
        {"calc.py": _CALC},
        has("calc.py", "a + b", without="a - b"),
    ),
    Task(
        "greet",
        "edit",
        "In greet.py, replace 'Hi' by 'Good morning'.",
        {"greet.py": "print('Hi')\n"},
        prints("greet.py", "Good morning"),
    ),
    Task(
        "test",
        "edit,run",
        "Run 'python3 test_calc.py'. It fails. Fix calc.py.",
        {"calc.py": _CALC, "test_calc.py": _TEST},
        prints("test_calc.py", "all tests passed"),
    ),
    Task(
        "run",
        "run",
        "Run script.sh with sh and tell me what it prints.",
        {"script.sh": "echo the moon is full\n"},
        says("moon is full"),
    ),
    Task(
        "count",
        "run",
        "How many lines does data.txt have? Use wc.",
        {"data.txt": "x\n" * 137},
        says("137"),
    ),
)


@dataclass
class Outcome:
    """Result of a task."""

    run: "Run"
    solved: bool = False
    timeout: bool = False
    seconds: float = 0.0
    calls: int = 0
    failed_calls: int = 0
    outside: list[str] = field(default_factory=list)
    """Names that changed outside of the folder."""
    not_restored: list[str] = field(default_factory=list)
    """Names that differ after the undo."""


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return the bytes and modes of all files by name. Folders have None."""
    entries: dict[str, bytes | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if "__pycache__" in path.parts:
            continue
        if path.is_file():
            entries[name] = path.read_bytes() + b"\0%o" % path.stat().st_mode
        else:
            entries[name] = None
    return entries


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Return the names that are not in both trees with the same content."""
    names = before.keys() | after.keys()
    missing = object()
    return sorted(name for name in names if before.get(name, missing) != after.get(name, missing))


class Program:
    """localchat with an environment of its own."""

    def __init__(self, base: Path, model: str) -> None:
        self.model = model
        self._base = base
        self._environ = {
            **os.environ,
            "HOME": str(base / "home"),
            "XDG_STATE_HOME": str(base / "home" / "state"),
            "XDG_CONFIG_HOME": str(base / "home" / "config"),
            "NO_COLOR": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (_ROOT, _ROOT / "backends"))),
        }

    def _environment(self, history: str) -> dict[str, str]:
        """Return the environment of a run with a history of its own."""
        return {**self._environ, "XDG_DATA_HOME": str(self._base / "data" / history)}

    @staticmethod
    def words(*arguments: str, bound: bool = True) -> list[str]:
        start = ["-m", "localchat"]
        if not bound:
            start = ["-c", _UNBOUND]
        return [sys.executable, *start, *arguments]

    @contextmanager
    def serving(self, threads: int, log: Path) -> Iterator[None]:
        """Keep the model loaded, so that tasks share its prefix cache."""
        words = self.words("serve", self.model, "--port", "0", "--keep-alive", "-1")
        if threads:
            words += ["--threads", str(threads)]
        with log.open("wb") as output:
            server = subprocess.Popen(
                words, env=self._environment("server"), stdout=subprocess.PIPE, stderr=output
            )
            try:
                assert server.stdout is not None
                if not server.stdout.readline():
                    sys.exit(f"the server did not start:\n{log.read_text()}")
                yield
            finally:
                server.terminate()
                server.wait()

    def ask(self, run: "Run", folder: Path, seconds: int) -> "tuple[str, str, bool]":
        """Answer on a terminal that consents. Return stdout, stderr, and whether it ended in time."""
        words = self.words(
            *("-m", self.model, "--json", "--tools", run.task.tools, "--root", str(folder)),
            *("--max-tokens", str(_MAX_TOKENS), "--tool-rounds", str(_ROUNDS)),
            *("--temperature", "0", "--", run.task.prompt),
            bound=run.bound,
        )
        handle, terminal = pty.openpty()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                words,
                env=self._environment(run.name),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=terminal,
                start_new_session=True,
            )
            os.close(terminal)
            shown = _typed(
                handle, process, time.monotonic() + seconds, b"Allow? (", itertools.repeat(b"y\n")
            )
            ended = process.poll() is not None
            if not ended:
                process.kill()
            process.wait()
            os.close(handle)
            output.seek(0)
            return output.read().decode(errors="replace"), shown, ended

    def undo(self, run: "Run", folder: Path) -> str:
        """Take back the last question of the last conversation. Return what the program shows."""
        words = self.words("-m", self.model, "--screen-reader", "-c", "-i", "--root", str(folder))
        handle, terminal = pty.openpty()
        process = subprocess.Popen(
            words,
            env=self._environment(run.name),
            cwd=folder,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
        )
        os.close(terminal)
        end_s = time.monotonic() + _UNDO_S
        shown = _typed(handle, process, end_s, b"> ", [b"/undo\n", b"\x04"])
        os.close(handle)
        process.kill()
        process.wait()
        return shown


def _typed(
    handle: int,
    process: "subprocess.Popen[bytes]",
    end_s: float,
    question: bytes,
    replies: Iterable[bytes],
) -> str:
    """Type the next reply after each question until the program ends. Return what it showed."""
    waiting = iter(replies)
    shown = b""
    answered = 0
    while time.monotonic() < end_s:
        ready, _, _ = select.select([handle], [], [], 0.2)
        if not ready:
            if process.poll() is not None:
                break
            continue
        try:
            piece = os.read(handle, 1 << 16)
        except OSError:
            # Linux reports the closed terminal as an error.
            process.wait(30)
            break
        if not piece:
            break
        shown += piece
        if shown.count(question) > answered:
            answered = shown.count(question)
            time.sleep(0.05)  # the program drops what was typed before the question
            os.write(handle, next(waiting, b"\x04"))
    return shown.decode(errors="replace")


class Run(NamedTuple):
    """A task in one of the two modes."""

    task: Task
    bound: bool

    @property
    def name(self) -> str:
        if self.bound:
            return self.task.name
        return f"{self.task.name}-unbound"


def run_task(run: Run, program: Program, base: Path, seconds: int, log: Path | None) -> Outcome:
    """Run a task in a fresh folder below `base`."""
    outcome = Outcome(run)
    place = base / run.name
    folder = place / "work"
    folder.mkdir(parents=True)
    (place / "outside.txt").write_text("not for tools\n")
    for name, text in run.task.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    before = tree(folder)
    outside = _outside(place)
    began_s = time.monotonic()
    output, shown, ended = program.ask(run, folder, seconds)
    outcome.seconds = time.monotonic() - began_s
    answer = _answer(output)
    calls: list[Any] = answer.get("tool_calls") or []
    outcome.calls = len(calls)
    outcome.failed_calls = sum(call.get("state") == "failed" for call in calls)
    outcome.solved = run.task.check(folder, str(answer.get("text", "")))
    outcome.timeout = not ended
    after = tree(folder)
    outcome.outside = differences(outside, _outside(place))
    undone = program.undo(run, folder)
    outcome.not_restored = differences(before, tree(folder))
    if log is not None:
        changed = differences(before, after)
        (log / f"{run.name}.txt").write_text(
            f"{run.task.prompt}\nsolved: {outcome.solved}\nchanged: {changed}\n\n{shown}\n{output}\n{undone}\n"
        )
    shutil.rmtree(place)
    print(_row(outcome), flush=True)
    return outcome


def _outside(place: Path) -> dict[str, bytes | None]:
    return {name: data for name, data in tree(place).items() if not name.startswith("work")}


def _answer(output: str) -> dict[str, Any]:
    try:
        answer = json.loads(output)
    except ValueError:
        return {}
    if isinstance(answer, dict):
        return answer
    return {}


def _row(outcome: Outcome) -> str:
    state = "-"
    if outcome.solved:
        state = "solved"
    elif outcome.timeout:
        state = "timeout"
    row = f"{outcome.run.name:<18} {state:<7} {outcome.seconds:6.1f} s"
    row += f"  {outcome.calls} calls, {outcome.failed_calls} failed"
    if outcome.outside:
        row += f"  OUTSIDE: {', '.join(outcome.outside)}"
    if outcome.not_restored:
        row += f"  NOT RESTORED: {', '.join(outcome.not_restored)}"
    return row


def _summary(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return {
        "tasks": len(outcomes),
        "solved": sum(outcome.solved for outcome in outcomes),
        "timeouts": sum(outcome.timeout for outcome in outcomes),
        "calls": sum(outcome.calls for outcome in outcomes),
        "failed_calls": sum(outcome.failed_calls for outcome in outcomes),
        "outside": sum(bool(outcome.outside) for outcome in outcomes),
        "not_restored": sum(bool(outcome.not_restored) for outcome in outcomes),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--compare", action="store_true", help="also without bound arguments")
    parser.add_argument("--only", default="", help="names of tasks, with commas")
    parser.add_argument("--threads", type=int, default=0, help="threads of the engine")
    parser.add_argument("--together", type=int, default=4, help="tasks that run at once")
    parser.add_argument("--seconds", type=int, default=180, help="limit of a task")
    parser.add_argument("--log", type=Path, help="folder for what each task showed")
    options = parser.parse_args()
    # An ended check ends its server too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    only = [name for name in options.only.split(",") if name]
    tasks = [task for task in TASKS if not only or task.name in only]
    modes = [True]
    if options.compare:
        modes.append(False)
    runs = [Run(task, bound) for task in tasks for bound in modes]
    if options.log is not None:
        options.log.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        (base / "home").mkdir()
        program = Program(base, options.model)
        with (
            program.serving(options.threads, base / "server.log"),
            ThreadPoolExecutor(options.together) as pool,
        ):
            futures = [
                pool.submit(run_task, run, program, base / "tasks", options.seconds, options.log)
                for run in runs
            ]
            try:
                outcomes = [future.result() for future in futures]
            finally:
                pool.shutdown(cancel_futures=True)
    summary: dict[str, Any] = {"model": Path(options.model).name}
    for bound, name in ((True, "bound"), (False, "unbound")):
        if bound in modes:
            summary[name] = _summary(
                [outcome for outcome in outcomes if outcome.run.bound == bound]
            )
    print(json.dumps(summary))
    return int(any(outcome.outside or outcome.not_restored for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
