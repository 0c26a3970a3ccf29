"""Colour and shape of what was drawn: labels that are independent of each other."""
