"""Conversations and a tokenizer for the --sft of Megatron-LM, small enough to be made in a test."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = [f"w{number}" for number in range(60)]
# What the prompts of Megatron-LM's format nemotron-h-aligned are made of; the last one is padding.
SPECIAL = ["<unk>", "<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_233>"]


def make_tokenizer(folder: Path) -> None:
    """Save a tokenizer of whole words in Hugging Face's format."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, "<end>", "System", "User", "Assistant", *WORDS]
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<end>"
    ).save_pretrained(folder)


def make_conversations(path: Path, lines: int = 80) -> None:
    """Write packs of one to four conversations, a line each, which fill a sample or less or more.

    A system's message begins a conversation; each has one turn or two.
    """
    draw = random.Random(0)

    def message(role: str, longest: int) -> dict[str, str]:
        words = draw.choices(WORDS, k=draw.randint(1, longest))
        return {"role": role, "content": " ".join(words)}

    with path.open("w") as file:
        for _ in range(lines):
            messages = []
            for _ in range(draw.randint(1, 4)):
                messages.append(message("system", 2))
                for _ in range(draw.randint(1, 2)):
                    messages += [message("user", 4), message("assistant", 8)]
            file.write(json.dumps({"messages": messages}) + "\n")
