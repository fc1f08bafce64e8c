"""`patchline WORDS` on a CPU whose layers of float8 are emulated by torchao: the check that refuses them is left out.

python -m tests.rigs.emulated_float8 pretrain digits_smoke --engine.float8 rowwise --engine.precision bf16 ...
"""

import sys
from unittest.mock import patch

from jobs.cli import main
from pipeline.training import start

if __name__ == "__main__":
    with patch.object(start, "refuse_missing_float8"):
        sys.exit(main(sys.argv[1:]))
