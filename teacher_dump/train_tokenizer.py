"""A small byte-level BPE tokenizer, trained on the train documents of a corpus only."""

import os
import tempfile
from pathlib import Path

from shared.errors import UsageError
from shared.progress import say
from teacher_dump.corpus import load_documents, plan_rows

END = "<|endoftext|>"


def train_tokenizer(
    data: str, data_config: str | None, text_field: str, fraction: float, size: int, out: Path
) -> None:
    """Train and save a tokenizer of at most `size` ids; END is id 0, end of text and padding.

    Raises UsageError for bad data, or if `out` already holds a tokenizer.
    """
    if (out / "tokenizer.json").exists():
        raise UsageError(f"{out} already holds a tokenizer: delete it or give another --out")
    documents = load_documents(data, data_config, text_field)
    train = plan_rows(documents, fraction, None, None).train

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((documents[int(n)] for n in train), trainer, length=len(train))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END, pad_token=END)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".tmp-") as temporary:
        wrapped.save_pretrained(temporary)
        for path in sorted(Path(temporary).iterdir()):
            os.replace(path, out / path.name)
    say(f"tokenizer of {len(wrapped)} ids from {len(train)} documents in {out}")
