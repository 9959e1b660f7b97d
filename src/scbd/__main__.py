"""Entry point of ``python -m scbd``, which runs the command line."""

import sys

from scbd.cli import main

if __name__ == "__main__":
    sys.exit(main())
