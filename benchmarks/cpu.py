"""The table of targets for two CPU cores in fp32.

python benchmarks/cpu.py --seconds 60
"""

from __future__ import annotations

import sys

from common import BenchConfig, Target, main

SMALL = "timm:vit_small_patch16_224"

ROWS = {
    "vit-s-224": Target(
        "ViT-S/16 224, 8, r 13, 2 threads",
        BenchConfig(SMALL, r=13, batch=8, dtype="fp32", device="cpu", threads=2),
        efficiency=0.90,
    ),
}


if __name__ == "__main__":
    sys.exit(main(ROWS, __doc__, __file__, sys.argv[1:]))
