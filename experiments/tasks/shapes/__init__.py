"""Color and shape of rendered figures: independent labels."""
