"""Downloads from the hub: listing, resumable transfer, verification."""
