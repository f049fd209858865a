"""Presets are the same with pydantic and with the stand-in that the kit uses where pydantic is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from gpu_kit import stand_in
from support.paths import ROOT

from kvcache_compress.bench.layers import VARIANTS, named_config
from kvcache_compress.config import BUDGETS, preset_names


def described() -> str:
    """All presets with the types of their values: fields, and plans with options, changed and with files too."""
    texts = []
    for name in [*preset_names(), *VARIANTS, "none", *BUDGETS]:
        config = named_config(name)
        changed = [config, config.with_files(codebooks="c", statistics="s")]
        if config.quantize_generated:
            changed.append(config.changed(max_cache_len=128))
        for one in changed:
            plans = one.plan(["full_attention"] * 32)
            texts.append(f"{name} {one.model_dump()} {[*map(_described, plans)]}")
    return "\n".join(texts)


def _described(plan: Any) -> Any:
    sides = [(side.method, side.options().model_dump(), side.idle()) for side in (plan.keys, plan.values)]
    return plan.sink_tokens, plan.recent_tokens, plan.compresses, sides


def test_presets_are_the_same_without_pydantic() -> None:
    program = """
import sys
sys.modules["pydantic"] = None
import test_stand_in
assert sys.modules["pydantic"].BaseModel is test_stand_in.stand_in.BaseModel
print(test_stand_in.described())
"""
    folders = [str(ROOT / folder) for folder in ("tests/benchmarks", "tests", "benchmarks")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == described()


def test_models_without_pydantic_refuse_unknown_and_missing_fields() -> None:
    module = stand_in.stand_in()

    class Options(module.BaseModel):  # type: ignore[name-defined, misc]
        model_config = module.ConfigDict(extra="forbid")
        bits: float
        name: str = "x"

    found = Options(bits=4)
    assert (found.bits, found.name, found == Options(bits=4.0), found == Options(bits=2)) == (4.0, "x", True, False)
    assert type(found.bits) is float
    assert len({found, Options(bits=4.0)}) == 1
    for wrong in ({"bits": 4, "bit": 3}, {}):
        with pytest.raises(ValueError, match=r"unknown keys bit: allowed bits, name|bits: field required"):
            Options(**wrong)
