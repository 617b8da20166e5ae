"""ASGI middleware: access log and security."""
