"""Small-scale studies of the claims behind Vitrail: one folder for each claim, shared code in ``common``."""
