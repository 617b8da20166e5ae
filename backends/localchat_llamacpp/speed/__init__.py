"""Predicts tokens per second before a load: a short benchmark, corrected by past runs."""
