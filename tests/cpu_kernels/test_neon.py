"""NEON's twins of the operations in `common/simd.h`, run in an emulator."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import get_cxx_compiler, include_paths

from kvcache_compress.cpu_kernels import build

PROGRAM = r"""
#include <cstdio>

#include "common/simd.h"

using namespace kvcache_compress;

template <class Vector>
void show(const Vector& x) {
  for (int lane = 0; lane < LANES; ++lane) std::printf("%08x ", ((Ints)x)[lane]);
  std::puts("");
}

template <int COUNT>
void look_up(Ints random) {
  float levels[2 * COUNT];
  for (int i = 0; i < 2 * COUNT; ++i) levels[i] = i * i - 31.25f;
  show(Table<COUNT>(levels, 2)[random]);
}

int main() {
  WordsOf<uint32_t>::Vector random = {1, 22, 333, 4444, 55555, 666666, 7777777, 88888888};
  for (int step = 0; step < 300; ++step, random = random * 1664525u + 1013904223u) {
    const Ints x = (Ints)random, y = moved_up((Ints)(random * 22695477u));
    show(dot_halves(x, y));
    std::printf("%x\n", true_lanes(x < y));
    look_up<2>(x >> 5), look_up<8>(x >> 5), look_up<16>(x >> 5), look_up<32>(x >> 5), look_up<64>(x >> 5);
    const Floats f = __builtin_convertvector(x, Floats);
    show(exp2(-f * f * 1e-17f));
    float sums[LANES] = {};
    sum_each({f, f * 1e-9f, 1 / f, f + 0.5f}, sums);
    show(load(sums));
  }
  for (int number = 0; number < 0x7c00; number += LANES) {
    uint16_t bits[LANES];
    for (int lane = 0; lane < LANES; ++lane) bits[lane] = (number + lane) | (lane & 1) << 15;
    show(load(reinterpret_cast<const Half*>(bits)));
    show(load(reinterpret_cast<const BFloat16*>(bits)));
  }
}
"""
CROSS = "aarch64-linux-gnu-g++"


@pytest.mark.skipif(not (shutil.which(CROSS) and shutil.which("qemu-aarch64")), reason="no cross compiler or emulator")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in build._VECTOR_FLAGS, reason="no AVX2")
def test_gives_the_same_bits_as_avx(tmp_path: Path) -> None:
    source = tmp_path / "simd.cpp"
    source.write_text(PROGRAM)
    printed = []
    flags = build._VECTOR_FLAGS[torch.backends.cpu.get_cpu_capability()]
    for number, (compiler, runner) in enumerate(
        [([get_cxx_compiler(), *flags], []), ([CROSS, "-static"], ["qemu-aarch64"])]
    ):
        program = str(tmp_path / str(number))
        paths = (f"-I{path}" for path in (build._SOURCES, *include_paths()))
        subprocess.run([*compiler, "-O3", "-std=c++20", str(source), "-o", program, *paths], check=True)
        printed.append(subprocess.run([*runner, program], check=True, capture_output=True, text=True).stdout)
    assert len(printed[0].splitlines()) > 9000
    assert printed[1] == printed[0]
