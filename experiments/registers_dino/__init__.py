"""The study ``registers`` for models trained without labels."""
