"""What every method promises: bits as worked out by hand, and options and sides that do not fit are refused."""

from typing import Any

import pytest
import torch
from support.method_cases import bits_per_number, make_codec

PAPERS_RADII = {"radius_scale": "channel", "reconstruction": "edge", "center": "off"}
SIXTEEN = {"bits": (4, 2), "radius_bits": 16}
STORED: list[tuple[str, int, dict[str, Any], float]] = [
    ("turboquant", 64, {"bits": 4}, 4.25),
    ("turboquant", 128, {"bits": 3}, 3.125),
    ("turboquant", 80, {"bits": 2}, 2.2),
    ("turboquant", 128, {"bits": 2.5, "outlier_fraction": 0.25}, 2.25 + 32 / 128),
    ("turboquant", 64, {"bits": 3.5}, 3.5 + 32 / 64),
    ("turboquant", 128, {"bits": 3, "estimator": "prod"}, 3 + 32 / 128),
    ("turboquant", 128, {"bits": 1, "estimator": "prod"}, 1 + 16 / 128),
    ("turboquant", 64, {"bits": 2.5, "estimator": "prod"}, 2.5 + 64 / 64),
    # Scale and zero point of each group.
    *(
        ("kivi", 128, {"bits": bits, "group_size": size, "side": side}, bits + 32 / size)
        for bits, size in ((2, 32), (4, 32), (4, 64), (3, 16), (1, 128))
        for side in ("keys", "values")
    ),
    # One bit per row of a sketch, and a norm; outliers have their own.
    *(("qjl", dim, {"sketch_ratio": m / dim}, (m + 16) / dim) for dim, m in ((128, 256), (80, 160), (96, 40))),
    *(
        ("qjl", dim, {"sketch_ratio": m / dim, "outlier_channels": 8}, (m + 16 + dim + 16) / dim)
        for dim, m in ((128, 256), (80, 160), (96, 40))
    ),
    # The paper's 62 bits per 16 numbers; codes that fill no word of eight are padded.
    ("polarquant_recursive", 128, {"levels": 4, **SIXTEEN}, 62 / 16),
    ("polarquant_recursive", 128, SIXTEEN, (16 + 256 + 2 * 64) / 128),
    ("polarquant_recursive", 128, {"bits": (4, 3, 2)}, (8 + 256 + 96 + 2 * 32) / 128),
    ("polarquant_recursive", 64, {"levels": 4, **SIXTEEN}, 4.0),
    ("polarquant_recursive", 80, {"bits": (4, 2)}, (5 * 8 + 160 + 2 * 40) / 80),
    # An angle and a radius per pair, and a scale per pair and group.
    *(
        ("polarquant_rope", dim, {"angle_bits": m, "radius_bits": n, **more}, (m + n) / 2 + scales)
        for dim, m, n in ((64, 3, 3), (80, 6, 2), (128, 3, 6), (80, 5, 4))
        for more, scales in ((PAPERS_RADII, 0), ({"group_size": 64}, 16 / (2 * 64)))
    ),
]


@pytest.mark.parametrize(("method", "dim", "options", "bits"), STORED, ids=str)
def test_stored_bits(method: str, dim: int, options: dict[str, Any], bits: float) -> None:
    """The layout's count and the bytes really produced, per number."""
    codec = make_codec(method, dim, **options)
    assert bits_per_number(codec) == pytest.approx(bits, abs=1e-12)
    x = torch.randn(2, 1, 256, dim)
    codec.prepare(x)
    assert 8 * sum(field.nbytes for field in codec.encode(x)) / x.numel() == bits_per_number(codec)


@pytest.mark.parametrize(
    ("method", "dim", "options", "message"),
    [
        ("qjl", 64, {"sketch_ratio": 5}, r"sketch_ratio\n.*input_value=5"),
        ("qjl", 64, {"outlier_channels": 2}, "outlier_channels=2 "),
        ("qjl", 64, {"outlier_channels": 64}, "outlier_channels=64 "),
        ("qjl", 64, {"side": "values"}, "qjl for values"),
        ("polarquant_recursive", 64, {"bits": 7}, r"bits\.0\n.*input_value=7"),
        ("polarquant_recursive", 64, {"levels": 0}, r"levels\n.*input_value=0"),
        ("polarquant_recursive", 80, {"levels": 5}, "levels=5 "),
        ("polarquant_recursive", 64, {"levels": 2, "bits": (4, 3, 2)}, r"bits=\[4, 3, 2\] "),
        ("polarquant_recursive", 72, {}, "head_dim=72 "),
        ("polarquant_recursive", 16, {}, "head_dim=16 "),
        ("polarquant_recursive", 64, {"side": "values", "center": "on"}, "center='on' "),
        ("polarquant_rope", 64, {"angle_bits": 7}, r"angle_bits\n.*input_value=7"),
        ("polarquant_rope", 64, {"radius_bits": 1}, r"radius_bits\n.*input_value=1"),
        ("polarquant_rope", 64, {"group_size": 16}, r"group_size\n.*input_value=16"),
        ("polarquant_rope", 64, {"side": "values"}, "polarquant_rope for values"),
        ("polarquant_rope", 72, {}, "head_dim=72 "),
    ],
)
def test_refused(method: str, dim: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_codec(method, dim, **options)
