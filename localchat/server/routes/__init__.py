"""The routes, a file each; app.py lists them."""
