"""Stands for pip in tests of rebuilds: prints, makes a library, fails or hangs, as its script says.

    python -m tests.support.fake_pip SCRIPT [pip's arguments]

SCRIPT is a JSON object: `lines` to print, `library` (text of the file to make; null: none), `status`, and
`hang` (a file that is touched before it sleeps with a child, which ignores SIGTERM).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

_DEAF = (
    "import os, pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(60)"
)


def main() -> None:
    script, *arguments = sys.argv[1:]
    how = json.loads(script)
    print(json.dumps({"arguments": arguments, "cmake": os.environ["CMAKE_ARGS"]}), flush=True)
    for line in how.get("lines", ()):
        print(line, flush=True)
    target = Path(arguments[arguments.index("--target") + 1])
    if how.get("library") is not None:
        folder = target / "llama_cpp/lib"
        folder.mkdir(parents=True)
        (folder / "libllama.so").write_text(how["library"])
        (folder / "libggml.so").write_text("ggml")
    if how.get("hang"):
        subprocess.Popen([sys.executable, "-c", _DEAF, how["hang"]])
        time.sleep(60)
    sys.exit(how.get("status", 0))


if __name__ == "__main__":
    main()
