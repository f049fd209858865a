"""The small model as a folder that `load_model` reads, with a tokenizer of one token per character."""

from functools import cache

from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from support.models.small_model import small_model
from support.paths import temporary_folder


@cache
def saved_model(layers: int = 2) -> str:
    """Folder of `small_model(layers, vocab_size=128)`, written at its first use."""
    folder = temporary_folder("small-model-")
    tokenizer = Tokenizer(WordLevel({chr(code): code for code in range(128)}, unk_token="\0"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    small_model(layers, vocab_size=128).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="\0", pad_token="\0").save_pretrained(folder)
    return str(folder)
