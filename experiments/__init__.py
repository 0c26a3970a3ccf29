"""What Vitrail rests on, measured at small scale: a folder for each claim, and what they share in ``common``."""
