"""Sampling on the device: candidates, penalties and the draw."""
