"""Directories of teachers and tokenizers, local or from the Hugging Face hub.

Without a network the hub's client retries for half a minute, so we look first whether the hub
answers and otherwise work from what an earlier run has downloaded.
"""

import os
import re
import urllib.error
import urllib.request
from pathlib import Path

from shared.config import PRESETS
from shared.errors import UsageError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
TINY = PRESETS.parent / "tiny_teacher"
PROBE_SECONDS = 5.0


def offline_unless_reachable() -> None:
    """Set HF_HUB_OFFLINE=1 if the hub does not answer.

    The client reads it when first imported, so call this before transformers or datasets is.
    """
    if "HF_HUB_OFFLINE" in os.environ:
        return
    try:
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
        urllib.request.urlopen(endpoint, timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except (OSError, ValueError):
        os.environ["HF_HUB_OFFLINE"] = "1"


def is_hub_name(name: str) -> bool:
    """Whether `name` can only be a hub's organisation/name: no such path exists."""
    return HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def model_folder(name: str, revision: str | None, weights: bool) -> Path:
    """The directory of a teacher or tokenizer: `tiny`, a directory, or a hub name (downloaded).

    `weights` decides whether the safetensors are fetched. Raises UsageError.
    """
    if name == "tiny" and not Path(name).is_dir():
        if not TINY.is_dir():
            raise UsageError(f"the tiny teacher is not installed: expected the folder {TINY}")
        return TINY
    if Path(name).is_dir():
        return Path(name)
    if not is_hub_name(name) or name.startswith((".", "/", "~")):
        raise UsageError(f"no directory {name!r}, and not a hub name (organisation/name)")
    offline_unless_reachable()
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    patterns = ["*.json", "*.txt", "*.model", "*.jinja"] + ["*.safetensors"] * weights
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the client raises a dozen unrelated types for "not there"
        raise UsageError(
            f"could not load {name} from the hub (offline?): {_first_line(error)}\n"
            "give --teacher DIR with a downloaded teacher, or try --preset tiny"
        ) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].split(". ")[0]


def load_hub_dataset(name: str, config: str | None):  # noqa: ANN201 - datasets loads lazily
    """The train split of a hub dataset as a memory-mapped `datasets.Dataset`.

    Raises UsageError if the hub or the dataset cannot be reached.
    """
    offline_unless_reachable()
    import datasets

    try:
        return datasets.load_dataset(name, config, split="train")
    except Exception as error:  # network, missing dataset, bad config: all end the same way
        raise UsageError(
            f"could not load {name} from the hub (offline?): {_first_line(error)}\n"
            "give --data FILES, or try --preset tiny"
        ) from None
