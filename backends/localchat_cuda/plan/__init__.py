"""Plans the memory and predicts the speed of a load on a GPU. Imports no torch."""
