"""Measure TurboQuant's distortion on random unit vectors, to compare with the paper's bounds (Theorems 1 to 3).

python benchmarks/distortion.py --output benchmarks/results/distortion.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvcache_compress.eval.provenance.results import command_line, package_versions, write_atomically
from kvcache_compress.eval.studies.distortion_measures import ESTIMATORS, estimator_options, measure_random


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--vectors", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=4)
    arguments = parser.parse_args()
    rows = []
    for name in ESTIMATORS:
        for bits in (1, 2, 3, 4):
            options = estimator_options(name, bits)
            mse, product, bias = measure_random(options, arguments.dim, arguments.vectors, arguments.seeds)
            rows.append({"estimator": name, "bits": bits, "mse": mse, "product_error": product, "product_bias": bias})
    result = {"command": command_line(), "dim": arguments.dim, "versions": package_versions(), "rows": rows}
    write_atomically(arguments.output, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
