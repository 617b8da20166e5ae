"""The door over HTTP: what clients of OpenAI's API expect, on this machine.

`create_app` (app.py) makes the ASGI application from an `Engines` (engines.py) and a `ServerConfig`
(config.py). Nothing is imported here, so that the command line can name the package cheaply.
"""
