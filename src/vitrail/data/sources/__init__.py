"""Sources: where samples come from."""
