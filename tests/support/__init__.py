"""What several test modules share: backends, servers, files, machines."""
