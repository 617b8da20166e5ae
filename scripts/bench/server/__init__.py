"""Parts of bench_server.py: a client, the servers that it drives, and what is measured."""
