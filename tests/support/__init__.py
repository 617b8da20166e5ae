"""Code shared by test modules: backends, servers, files, machines."""
