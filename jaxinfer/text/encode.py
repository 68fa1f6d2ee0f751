"""Tokenizes texts of a trace with a model's own tokenizer."""

from functools import cache
from typing import TYPE_CHECKING

from jaxinfer.errors import JaxinferError
from jaxinfer.workload.trace import Encode

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer


def encoder(model: str | None) -> Encode:
    """Return a function that turns texts into token ids; it loads the tokenizer on first use.

    Args:
        model: a model as in a run file, or a folder that has only a tokenizer. Its weights are
            neither fetched nor opened.

    Raises:
        JaxinferError: (when the function is called) there is no tokenizer.
    """

    @cache
    def tokenizer() -> "Tokenizer":
        try:
            return _open(model)
        except JaxinferError as error:
            raise JaxinferError(
                f"has texts, which take the model's tokenizer: {error}; workload.tokenizer may "
                "name another model, or a folder with a tokenizer.json"
            ) from None

    return lambda text: tokenizer().encode(text)


def _open(model: str | None) -> "Tokenizer":
    if model is None:
        raise JaxinferError("no model is named")
    # Imported here, because it is slow and few traces need it.
    from jaxinfer.checkpoints.checkpoint import open_checkpoint
    from jaxinfer.text.tokenizer import folder_tokenizer, load_tokenizer

    return folder_tokenizer(model) or load_tokenizer(open_checkpoint(model, "dummy"))
