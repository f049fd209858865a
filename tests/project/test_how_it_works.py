"""`docs/dev/how-it-works.md` follows a key through named functions: a real one takes that way, in that order."""

import re
import sys
import tomllib
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from support.cache_name import with_cache
from support.models.small_model import small_model
from support.paths import ROOT

import kvcache_compress
from kvcache_compress import TurboQuantCache, enable_fused_attention

PAGE = (ROOT / "docs" / "dev" / "how-it-works.md").read_text(encoding="utf-8")
PACKAGE = Path(kvcache_compress.__file__).parent
TOKEN = 20


def named_functions() -> list[tuple[str, str]]:
    """Files and functions of the page's table, in its order."""
    rows = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \| ([^|]+) \|", PAGE, flags=re.MULTILINE)
    return [(file, name) for file, names in rows for name in re.findall(r"`([\w.]+)`", names)]


def arguments(frame: FrameType) -> list[torch.Tensor]:
    return [value for value in frame.f_locals.values() if isinstance(value, torch.Tensor)]


@torch.no_grad()
def test_key_takes_the_way_of_the_page() -> None:
    named = named_functions()
    assert len(named) >= 12
    first_calls: dict[tuple[str, str], list[torch.Tensor]] = {}

    def watch(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            called = (path.relative_to(PACKAGE).as_posix(), frame.f_code.co_qualname)
            if called in named and called not in first_calls:
                first_calls[called] = [x.clone() for x in arguments(frame)]

    model = small_model()
    enable_fused_attention(model)
    cache = TurboQuantCache(model.config, bits=4, sink_tokens=4, recent_tokens=8, backend="torch")
    prompt = torch.randint(1, 64, (1, 80), generator=torch.Generator().manual_seed(0))
    sys.setprofile(watch)
    try:
        model.generate(prompt, **with_cache(cache), max_new_tokens=3, do_sample=False)
    finally:
        sys.setprofile(None)
    assert list(first_calls) == named

    key = first_calls["cache/layer.py", "CompressedLayer.update"][0][0, 0, TOKEN]
    (encoded,) = first_calls["methods/turboquant/codec.py", "TurboQuantCodec.encode"]
    assert (encoded == key).all(-1).sum() == 1, "the key of this token was not encoded"
    layer = cache.layers[0]
    assert layer.packed_tokens > TOKEN
    assert layer.keys is not None
    assert 0 < (layer.keys[0, 0, TOKEN] - key).norm() / key.norm() < 0.15


def test_rooms_of_the_page_are_those_of_the_import_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next(contract["layers"] for contract in contracts if contract["containers"] == ["kvcache_compress"])
    rooms = PAGE[PAGE.index("| room of") :]
    assert re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", rooms, flags=re.MULTILINE) == [
        ", ".join(f"`{name}`" for name in layer.split(" | ")) for layer in layers
    ]
