"""`python -m pegainfer`: the same as the `pegainfer` command."""

import sys

from pegainfer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
