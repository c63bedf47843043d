"""Tokens: the bytes themselves, or byte pairs that a tokenizer learned from the text."""

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from . import stores

END = "<|end|>"  # of a document; its number is 0 in every coding


class Tokens(Protocol):
    """Translates text to numbers below ``vocabulary`` and back; 0 ends a document."""

    vocabulary: int

    def encode(self, documents: list[str]) -> np.ndarray: ...
    def decode(self, tokens: np.ndarray) -> str: ...


class Bytes:
    """Every byte of UTF-8 is a token. Text itself holds no byte 0."""

    vocabulary = 256

    def encode(self, documents: list[str]) -> np.ndarray:
        return np.frombuffer(b"".join(text.encode() + b"\0" for text in documents), np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        return np.asarray(tokens, np.uint8).tobytes().decode(errors="replace").replace("\0", END)


class BytePairs:
    """A tokenizer of the library `tokenizers`, which must know the token ``<|end|>`` as 0."""

    def __init__(self, tokenizer: Tokenizer):
        if tokenizer.token_to_id(END) != 0:
            raise ValueError(
                f"the tokenizer has {tokenizer.token_to_id(END)} as number of {END!r}, which must "
                f"be 0: train it with {END!r} as its first special token, as this example does "
                "where --tokenizer names a file that does not exist yet."
            )
        self.tokenizer = tokenizer
        self.vocabulary = tokenizer.get_vocab_size()

    def encode(self, documents: list[str]) -> np.ndarray:
        encoded = self.tokenizer.encode_batch_fast([text + END for text in documents])
        numbers = [np.asarray(x.ids, np.min_scalar_type(self.vocabulary - 1)) for x in encoded]
        return np.concatenate(numbers) if numbers else np.zeros(0, np.uint8)

    def decode(self, tokens: np.ndarray) -> str:
        return self.tokenizer.decode(list(map(int, tokens)), skip_special_tokens=False)


def load(place: str) -> BytePairs:
    """Reads a tokenizer from a path or a URL.

    Raises:
      ValueError: there is no tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_buffer(stores.read(place))
    except Exception as error:  # each store's package has errors of its own
        raise ValueError(
            f"--tokenizer {place} is no file of the library tokenizers ({error}): give another, or "
            "the name of a file that does not exist, to learn one from the text."
        ) from error
    return BytePairs(tokenizer)


def train(documents: Iterable[str], vocabulary: int, place: str) -> None:
    """Learns byte pairs and writes them to a file at a path or a URL."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(documents, trainer)
    stores.write(place, tokenizer.to_str(pretty=True).encode())
