"""localchat as an agent of the Agent Client Protocol, over stdin and stdout.

The only package that imports `acp`, the library of the protocol, which is an optional dependency.
"""
