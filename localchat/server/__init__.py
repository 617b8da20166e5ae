"""The HTTP server: OpenAI's, Anthropic's, llama.cpp's and a part of Ollama's API over the engine pool.

Each protocol has a folder that translates its requests to a chat or a prompt and writes the answer in its own
format; everything in between is shared. `create_app` (app.py) makes the ASGI application from an
AsyncEnginePool and a ServerConfig. Imports nothing, so that the command line can name the package cheaply.
"""
