"""Growing buffers: little unused capacity, few copies, nothing rewritten."""

import pytest
import torch
from transformers import LlamaConfig

from kvcache_compress import TurboQuantCache
from kvcache_compress.codecs.layout import Field
from kvcache_compress.storage.packed_store import FIRST_TOKENS, SLACK, PackedStore, TailBuffer

FIELDS = (Field("codes", torch.int32, (4,)), Field("scale", torch.float16, (8,), tokens=32))


def new_store() -> PackedStore:
    return PackedStore(FIELDS, batch=2, heads=3, device=torch.device("cpu"))


def block(start: int, tokens: int = 32) -> tuple[torch.Tensor, ...]:
    """Fields of tokens `[start, start + tokens)`, filled with the tokens' numbers."""
    codes = torch.arange(start, start + tokens).view(1, 1, -1, 1).expand(2, 3, -1, 4).int()
    scale = torch.arange(start // 32, (start + tokens) // 32).view(1, 1, -1, 1).expand(2, 3, -1, 8).half()
    return codes, scale


def test_long_run() -> None:
    """Over 20,000 tokens, 32 at a time, at most 1/32 is unused, and a token is copied about 32 times."""
    store = new_store()
    moves = copied = 0
    for start in range(0, 20_000, 32):
        held = [buffer.data_ptr() for buffer in store.buffers]
        before, capacity = store.tokens, store.capacity
        store.append(block(start), 32, growing=True)
        used = sum(store.bytes_used().values())
        assert used <= store.bytes_allocated() <= (1 + SLACK) * used
        if store.capacity != capacity:
            assert store.capacity <= max((1 + SLACK) * (capacity + 32), before + 33), "never doubles"
            moves += 1
            copied += before
        else:
            assert [buffer.data_ptr() for buffer in store.buffers] == held
    assert moves < 150
    assert copied < 36 * store.tokens
    codes, scale = store.read(0, store.tokens)
    assert torch.equal(codes, block(0, store.tokens)[0])
    assert torch.equal(scale, block(0, store.tokens)[1])


def test_prompts_leave_no_slack_where_nothing_follows() -> None:
    store = new_store()
    store.append(block(0, 320), 320, growing=False)
    assert store.bytes_used() == {"codes": 6 * 320 * 16, "scale": 6 * 10 * 16}
    assert store.bytes_allocated() == sum(store.bytes_used().values())


def numbers(start: int, count: int) -> torch.Tensor:
    return torch.arange(start, start + count).float().view(1, 1, -1, 1).expand(1, 1, -1, 2)


def test_truncate_gives_room_back() -> None:
    store = new_store()
    store.append(block(0, 3200), 3200, growing=True)
    before = store.bytes_allocated()
    store.truncate(64)
    assert store.tokens == 64
    assert store.bytes_allocated() * 32 < before
    assert torch.equal(store.read(0, 64)[0], block(0, 64)[0])


def test_a_wide_window_takes_room_as_it_fills() -> None:
    """A wide window's buffer grows little by little, up to the window, also after tokens are replaced."""
    tail, moves, copied = TailBuffer(torch.zeros(1, 1, 0, 2), 5000), 0, 0
    for step in range(5000):
        pointer, before = tail.buffer.data_ptr(), tail.tokens
        tail.append(numbers(step, 1))
        if tail.buffer.data_ptr() != pointer:
            moves, copied = moves + 1, copied + before
        assert tail.buffer.shape[2] <= min(5000, max(FIRST_TOKENS, (1 + SLACK) * tail.tokens))
    assert torch.equal(tail.view(), numbers(0, 5000))
    assert moves < 110
    assert copied < 36 * 5000
    tail.replace(tail.view()[:, :, 32:])
    address = tail.buffer.data_ptr()
    for step in range(32):
        tail.append(numbers(step, 1))
    assert tail.buffer.data_ptr() == address, "a full window has the room that it needs until its next flush"


@pytest.mark.parametrize(("capacity", "frozen"), [(None, False), (60, False), (60, True)])
def test_windows_wider_than_the_text(capacity: int | None, frozen: bool, request: pytest.FixtureRequest) -> None:
    """Windows of 100,000 tokens take no more memory than the tokens held, or than a static capacity."""
    if frozen:
        request.getfixturevalue("static_shapes")
    config = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2)
    x = torch.randn(1, 2, 20, 32)
    for windows in ({"recent_tokens": 100_000}, {"sink_tokens": 100_000}):
        cache = TurboQuantCache(config, max_cache_len=capacity, **windows)
        for part in x.split([18, 1, 1], 2):
            cache.update(part, part, 0)
        assert cache.memory_report().allocated_bytes < 300_000
        assert torch.equal(cache.layers[0].keys, x)
