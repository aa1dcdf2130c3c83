"""`python -m mcore_batching` is the `mcore-batching` command."""

import sys

from mcore_batching.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
