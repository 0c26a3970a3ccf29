"""``python -m vitrail`` is the same as ``vitrail``."""

from vitrail.cli import main

if __name__ == "__main__":
    main()
