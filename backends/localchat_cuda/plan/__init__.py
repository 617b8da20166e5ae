"""Memory and speed of a load, from the header of a checkpoint and the state of the machine."""
