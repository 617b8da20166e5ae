"""Speculative decoding by n-grams."""
