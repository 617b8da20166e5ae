"""Which engines are loaded, for whom, until when; and how another process finds the server that has them.

Nothing is imported here: the command line takes parts of it that are light.
"""
