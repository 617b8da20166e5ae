"""Measurement of models and servers: load, speed, answer quality, and plans that follow from them."""
