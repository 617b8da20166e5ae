"""Many clients on one server: `python -m scripts.tools.soak`."""
