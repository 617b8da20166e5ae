"""Interface between the engine core and a backend, and the registry of installed backends."""
