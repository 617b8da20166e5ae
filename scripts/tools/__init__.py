"""Checks, training and tests too long for every run; not part of the product."""
