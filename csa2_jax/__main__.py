"""`python -m csa2_jax` is `csa2`."""

import sys

from csa2_jax.cli import main

sys.exit(main())
