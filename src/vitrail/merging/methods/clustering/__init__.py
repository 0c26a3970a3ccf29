"""Methods that cluster tokens: groups of any size in one step."""
