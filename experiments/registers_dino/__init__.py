"""The same as ``registers``, for models that learn without labels."""
