"""Linear probes: what single tokens hold."""
