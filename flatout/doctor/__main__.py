"""python -m flatout.doctor: the same as `flatout doctor`."""

import sys

from flatout.doctor.cli import main

sys.exit(main(sys.argv[1:]))
