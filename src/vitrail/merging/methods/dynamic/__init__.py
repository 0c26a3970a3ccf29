"""Methods whose number of tokens depends on the image."""
