"""Breed and species of cats and dogs: the first label determines the second."""
