"""Engine of the built-in guide, which checks its answers."""
