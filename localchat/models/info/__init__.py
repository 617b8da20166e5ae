"""Descriptions of model files, as `localchat show` prints them."""
