"""Load of a server by simulated clients: workloads, measurement, comparison and records."""
