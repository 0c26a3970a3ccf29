"""Methods with parameters that must be trained."""
