"""Names of the forms of a model that are compared: the original, and compressed ones."""

from collections.abc import Sequence

ORIGINAL, LONGER = "original", "longer"


def forms_of(bits: Sequence[int], fewer_heads: Sequence[int]) -> list[str]:
    """Returns the names of the forms that are trained on: the original, and compressed forms."""
    return [LONGER, *(f"int{n}" for n in bits), *(f"heads-{n}" for n in fewer_heads)]


def label(form: str) -> str:
    """Returns the words for a form in tables."""
    if form.startswith("int"):
        return f"{form[3:]} bits a weight"
    if form.startswith("heads-"):
        count = int(form[6:])
        return f"{count} {'head' if count == 1 else 'heads'} fewer in each layer"
    return ORIGINAL if form == ORIGINAL else f"{ORIGINAL}, trained on"
