"""What a door holds: an Engine, the request that goes in and the events that come out."""

from localchat.engine.interface import Engine, EngineInfo
from localchat.engine.request import GenerateRequest
from localchat.engine.stream import Stream

__all__ = ["Engine", "EngineInfo", "GenerateRequest", "Stream"]
