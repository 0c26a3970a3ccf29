"""Breed and species of cats and dogs: one label follows from the other."""
