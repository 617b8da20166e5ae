"""A build of llama.cpp for this machine: made, tried beside the library in use, taken only if it is better."""
