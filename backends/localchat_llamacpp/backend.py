"""The llama.cpp backend as the loop finds it. Importing this imports neither llama_cpp nor numpy."""

from collections.abc import Callable
from pathlib import Path

from localchat.loop.backend import Availability, OpenModel
from localchat_llamacpp.rebuild import (
    DISTRIBUTION,
    Facts,
    WayOut,
    binding_version,
    build_key,
    gather,
    library_file,
    ways_out,
)


class LlamaCppBackend:
    """GGUF models on CPU, and on GPUs where the library was built for them. See backend.Backend."""

    name = "llamacpp"

    def build_key(self) -> str:
        """The native library and this CPU; empty where there is no library."""
        return build_key()

    def facts(self) -> Facts:
        """What `doctor` shows of this build. Loads the library (0.1 s)."""
        return gather()

    def ways_out(self) -> tuple[WayOut, ...]:
        """What would make this build better here, best first. Loads the library."""
        return ways_out(gather())

    def available(self) -> Availability:
        """Looks for the package and its native library without loading either."""
        installed = binding_version()
        if not installed:
            return Availability(
                False,
                f"{DISTRIBUTION} is not installed.",
                f"Install it: pip install '{DISTRIBUTION}~=0.3.36' (compiles llama.cpp once).",
            )
        if library_file() is None:
            return Availability(
                False,
                f"{DISTRIBUTION} {installed} is installed without its native library.",
                f"Install it again: pip install --force-reinstall --no-deps '{DISTRIBUTION}=={installed}'.",
            )
        return Availability(
            True, f"{DISTRIBUTION} {installed}.", versions=((DISTRIBUTION, installed),)
        )

    def accepts(self, path: Path) -> bool:
        """A file that begins as GGUF, or is named so: then `open` says what is wrong with it."""
        if path.suffix.lower() == ".gguf":
            return True
        try:
            with path.open("rb") as file:
                return file.read(4) == b"GGUF"
        except (OSError, ValueError):
            return False

    def open(self, path: Path, say: Callable[[str], None]) -> OpenModel:
        """Check the header, then read the vocabulary (0.2 s for 152k tokens). Nothing is said so far.

        Raises ModelMissing, ModelInvalid.
        """
        from localchat_llamacpp.model import GgufModel

        return GgufModel(path)
