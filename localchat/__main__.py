"""`python -m localchat` is the command."""

from localchat.cli import main

if __name__ == "__main__":
    main()
