"""The engine pool, and the registry of running servers.

Imports nothing, because the command line uses only the light modules of this package.
"""
