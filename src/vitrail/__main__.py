"""Run the command line as ``python -m vitrail``."""

from vitrail.cli import main

if __name__ == "__main__":
    main()
