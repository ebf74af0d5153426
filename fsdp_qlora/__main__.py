"""`python -m fsdp_qlora train ...`, and `torchrun -m fsdp_qlora train ...` where no train.py is at hand."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
