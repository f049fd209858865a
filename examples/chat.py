"""Chat on one cache that grows from turn to turn: `python examples/chat.py`.

Each turn feeds only its new tokens; everything said before stays packed.
"""

import argparse

import torch

from kvcache_compress import CompressedCache, enable_fused_attention
from kvcache_compress.modeling.decoder import cache_argument
from kvcache_compress.modeling.loading import load_model

SYSTEM = """You answer the guests of the Harbour Hotel in one short sentence, from these facts.
The hotel was built in 1841 and has 24 rooms. The owner is called Ruth, and the night porter is called Amos.
The breakfast is served in the garden room. The dinner is served in the old boat hall; the fish soup is the best dish.
The ferry to Gannet Island leaves from pier 4. The bus to the station leaves from the market square.
The lighthouse is made of granite. The museum is about whales. The beach is behind the church.
Bicycles cost 12 euros a day. Boats cost 50 euros a day. Dogs are welcome in the rooms, but not in the boat hall.
The sauna is on the third floor. The library is on the second floor. The keys of the cellar are kept at the desk.
The weather is best in September, when the storms have not begun. The nearest doctor is Doctor Hale in Mill Lane.
There is a market every Friday, where cheese, bread, apples and wool are sold, and a concert on the last Sunday."""
QUESTIONS = ("What is the night porter called?", "Where does the ferry leave from?", "Which floor is the sauna on?")

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m", help="a chat model: hub id, folder or .gguf file")
parser.add_argument("--preset", default="turboquant-4bit")
parser.add_argument("--question", action="append", help="repeatable")
parser.add_argument("--new-tokens", type=int, default=40, help="most tokens of an answer")
arguments = parser.parse_args()

model, tokenizer = load_model(arguments.model)
enable_fused_attention(model)
cache = CompressedCache(model.config, arguments.preset)
messages = [{"role": "system", "content": SYSTEM}]
ids, said = torch.empty(1, 0, dtype=torch.long), ""

for question in arguments.question or QUESTIONS:
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    new = tokenizer(prompt.removeprefix(said), add_special_tokens=False, return_tensors="pt").input_ids
    ids = torch.cat([ids, new], 1)
    before = cache.get_seq_length()
    how = {cache_argument(): cache, "max_new_tokens": arguments.new_tokens, "do_sample": False}
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
    print(f"> {question}\n{answer.strip()}")
    held = cache.get_seq_length()
    print(f"  {ids.shape[1] - before} tokens fed, {held} in the cache, {cache.packed_tokens} of them packed")
    # The next turn's text begins with the token that ends this answer, which the cache has not seen.
    ids, said = output[:, :held], prompt + answer

print(f"{cache.memory_report().packed_bits_per_number:.2f} bits per packed number")
