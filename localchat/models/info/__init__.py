"""Facts about a model file, as `localchat show` prints them."""
