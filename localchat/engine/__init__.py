"""Engines as front ends use them: the Engine interface, requests, events, and three implementations."""

from localchat.engine.interface import Engine, EngineInfo
from localchat.engine.request import GenerateRequest
from localchat.engine.stream import Stream

__all__ = ["Engine", "EngineInfo", "GenerateRequest", "Stream"]
