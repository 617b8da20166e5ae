"""Plans the memory of a load and predicts its speed, before weights are read."""
