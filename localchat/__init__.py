"""localchat: a terminal chat and local-inference tool. Importing this package loads nothing heavy."""

__version__ = "0.2.0"

__all__ = ["__version__"]
