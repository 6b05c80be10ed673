"""`python -m neurond` is the same as `neurond`."""

import sys

from neurond.cli import main

sys.exit(main())
