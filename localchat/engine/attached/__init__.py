"""An engine in a running `localchat serve`."""
