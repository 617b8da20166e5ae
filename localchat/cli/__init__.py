"""The command line: a door that parses, asks an engine, and prints."""


def main() -> None:
    """Run the command and exit with its code."""
    import sys

    from localchat.cli.app import run

    sys.exit(run(sys.argv[1:]))
