"""A temperature that draws the likeliest token without being 0."""

NEARLY_GREEDY = 2e-5
"""Requests at temperature 0 have no drafts and reuse exact KV alone, which most tests are not about."""
