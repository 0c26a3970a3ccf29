"""Labels: what they may hold, and the columns and masks they are read from."""
