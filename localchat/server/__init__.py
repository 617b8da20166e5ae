"""The door over HTTP: what clients of OpenAI's and of Anthropic's API expect, on this machine.

Each protocol translates what it gets into a chat and writes the answer in its own shape (`routes/`,
`anthropic/`, `responses/`); what lies between, from the checks to the client that leaves, is one.

`create_app` (app.py) makes the ASGI application from an `Engines` (engines.py) and a `ServerConfig`
(config.py). Nothing is imported here, so that the command line can name the package cheaply.
"""


# The routes, a file each; app.py lists them.
