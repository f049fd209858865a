"""Building blocks of the fast path on NVIDIA GPUs: assembly over packed float16 numbers, and what it loads.

`prmt.b32` looks up four bytes at once in a table of eight, with packed nibbles as selectors. A level needs two lookups,
one per byte; another `prmt` interleaves four low and four high bytes into two pairs of levels, half2. A block gets any
two words A and B of a thread and returns pairs (A_j, B_j) of their fields j.
`tests/triton_kernels/test_compiled.py` runs the assembly without a GPU.
"""

import torch
import triton
import triton.language as tl

from kvcache_compress.codecs.layout import padded_words

from .codes import TRITON_39, load_words


def block(outputs: int, inputs: int, *lines: str) -> tl.constexpr:
    """Assembly with registers r0 to r15 of its own, and the constraints of its operands, as `assembled` takes them."""
    text = "{\n.reg .b32 r<16>;\n" + "\n".join(f"{line};" for line in lines) + "\n}"
    return tl.constexpr((text, ",".join(["=&r"] * outputs + ["r"] * inputs)))


def pairs(selectors: str, table: tuple[str, str, str, str], outputs: tuple[str, str], signs: str = "") -> list[str]:
    """Instructions that look up codes [A_i, A_j, B_i, B_j], the low 16 bits of `selectors`, as two pairs of levels.

    outputs: registers of the pairs (A_i, B_i) and (A_j, B_j).
    table: low bytes of the first four levels, low bytes of the others, then their high bytes likewise.
    signs: a register with the sign bits of the four levels, inverted, where the table holds magnitudes.
    """
    low, low_rest, high, high_rest = table
    return [
        f"prmt.b32 r14, {low}, {low_rest}, {selectors}",
        f"prmt.b32 r15, {high}, {high_rest}, {selectors}",
        *([f"lop3.b32 r15, r15, {signs}, 0x80808080, 0xd2"] if signs else []),
        f"prmt.b32 {outputs[0]}, r14, r15, 0x6240",
        f"prmt.b32 {outputs[1]}, r14, r15, 0x7351",
    ]


HALF = block(1, 4, "prmt.b32 r0, $3, $4, 0x0072", "prmt.b32 $0, $1, $2, r0")


@triton.jit
def assembled(BLOCK: tl.constexpr, b_inputs, COUNT: tl.constexpr = 8):
    """`COUNT` float16 tiles that a block makes of the numbers of `b_inputs`, two at a time."""
    return tl.inline_asm_elementwise(
        BLOCK[0], BLOCK[1], b_inputs, dtype=(tl.float16,) * COUNT, is_pure=True, pack=2
    )  # fmt: skip


@triton.jit
def load_bytes(p_words, tile, WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """Load the words of a one-bit plane, int32 `[T, PADDED]`: column c holds four neighbours, its own in byte `c % 4`.

    Loaded as bytes they would make the tensor cores' operands four tokens deep and move every other operand.
    """
    p_fours = p_words.to(tl.pointer_type(tl.int32), bitcast=True)
    b_fours = load_words(p_fours, tile, WORDS // 4, PADDED // 4, COUNT // 4)
    b_fours = tl.broadcast_to(b_fours[:, :, None], [tile.o_t.shape[0], PADDED // 4, 4])
    return tl.reshape(b_fours, [tile.o_t.shape[0], PADDED])


@triton.jit
def load_halves(p_words, b_places, tile, WORDS: tl.constexpr, PADDED: tl.constexpr, COUNT: tl.constexpr):
    """Load the words of a two-bit plane, int16 `[T, PADDED]`, as 32-bit words.

    With few words per token the compiler would load them one by one, and move every level instead of the words.
    """
    if PADDED >= 16:
        b_words = load_words(p_words, tile, WORDS, PADDED, COUNT)
    else:
        p_twos = p_words.to(tl.pointer_type(tl.int32), bitcast=True)
        b_twos = load_words(p_twos, tile, WORDS // 2, PADDED // 2, COUNT // 2)
        b_twos = tl.broadcast_to(b_twos[:, :, None], [tile.o_t.shape[0], PADDED // 2, 2])
        b_twos = tl.reshape(b_twos, [tile.o_t.shape[0], PADDED])
        b_words = tl.inline_asm_elementwise(HALF[0], HALF[1], (b_twos, b_places), dtype=tl.int16, is_pure=True, pack=2)
    return b_words


@triton.constexpr_function
def in_fours(columns):
    """True if `joined` can put tiles of so many columns in the order in which mapped queries lie in memory."""
    return columns == 8 and not TRITON_39


@triton.jit
def joined(b_tiles, FOURS: tl.constexpr = False):
    """Join pairs of tiles narrower than `tile_width`, without moving numbers between threads.

    Side by side, or with `FOURS`, if `in_fours`, two columns of either in turn.
    """
    T: tl.constexpr = b_tiles[0].shape[0]
    WIDTH: tl.constexpr = b_tiles[0].shape[1]
    b_pairs = ()
    for i in tl.static_range(len(b_tiles) // 2):
        b_pair = tl.join(b_tiles[2 * i], b_tiles[2 * i + 1])
        if FOURS and in_fours(WIDTH):
            b_pair = tl.permute(tl.reshape(b_pair, [T, WIDTH // 2, 2, 2]), [0, 1, 3, 2])
        else:
            b_pair = tl.permute(b_pair, [0, 2, 1])
        b_pairs = b_pairs + (tl.reshape(b_pair, [T, 2 * WIDTH]),)
    return b_pairs


@triton.jit
def scaled(b_levels, b_scale, b_zero):
    """`levels * scale + zero` in float16, two at a time; scale and zero broadcast to the levels' shape."""
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [b_levels, b_scale, b_zero],
        dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def product(b_x, b_y):
    """`x * y` in float16, two at a time; y broadcasts to the shape of x."""
    return tl.inline_asm_elementwise(
        "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", [b_x, b_y], dtype=tl.float16, is_pure=True, pack=2
    )  # fmt: skip


def warps(width: int) -> int:
    """Warps needed to hold the sums of `width` channels in registers."""
    return max(1, padded_words(width) // 16)


def places(words: int) -> torch.Tensor:
    """`prmt` selectors of narrow words within 32-bit words, int32 `[words]`.

    The low half selects bytes A B A B: nibbles 0 and 2 come from A's entry, 1 and 3 from B's. The high half
    selects halves A B: the low byte from A's entry, the high byte from B's.
    """
    byte = torch.arange(words, dtype=torch.int32, device="cpu") % 4
    half = 0x5410 + 0x2222 * (byte % 2)
    return byte | (4 + byte) << 4 | byte << 8 | (4 + byte) << 12 | half << 16


def byte_table(levels: torch.Tensor, bits: int) -> torch.Tensor:
    """`prmt` tables of levels by code, int32: low bytes, then high bytes; for four bits of the levels above zero."""
    halves = levels[len(levels) // 2 :].half() if bits == 4 else levels.half()
    return halves.view(torch.uint8).view(-1, 2).T.contiguous().view(torch.int32).flatten()
