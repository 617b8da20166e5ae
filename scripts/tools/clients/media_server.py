"""Serves a tiny random model that sees pictures: prints its base address, ends when its stdin closes."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.tiny_media import write_media_model


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = write_media_model(Path(folder), "smolvlm", seed=5).model
        command = [sys.executable, "-m", "localchat", "serve", str(model), "--port", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            print(server.stdout.readline().strip(), flush=True)
            sys.stdin.read()
            server.terminate()


if __name__ == "__main__":
    main()
