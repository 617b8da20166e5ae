"""Plans the memory and predicts the speed of a load with llama.cpp. Loads no library."""
