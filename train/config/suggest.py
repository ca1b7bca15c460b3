"""Suggest a fix for a section, key or flag that a configuration does not have.

A wrong name is often not just a typing error: it may belong to another model family, to the other
entry script, or to Megatron-LM, whose flag has a different name here. The suggestions are tried in
this order, the most specific first.
"""

from collections.abc import Collection

from runtime.errors import did_you_mean
from train.config.fields import config_fields, fields_by_variant, hints_of, variants_of
from train.config.megatron_flags import entries as megatron_flags

ENTRIES: dict[str, type] = {}
"""Root class of each program, to recognise settings of another program; entries.py fills it."""


def belongs_to(program: str) -> str:
    """Return the end of an error message about a setting of another program.

    Callers that try both programs recognise the error by this text.
    """
    return f"it belongs to {program}"


def suggestion(
    root: type, name: str, candidates: Collection[str], variant: str | None, section: str = ""
) -> str:
    """Return a fix for a section, key or flag that `root` lacks, for the end of an error message.

    Args:
        candidates: sections, keys or flags that exist.
        section: section in which the key was given; empty for a section or a flag.
    """
    key = name.removeprefix("--").replace("-", "_")
    keys = {key, key.removeprefix("no_")} - config_fields(root, variant).keys()
    variants = variants_of(root)

    families = [family for family, table in fields_by_variant(root).items() if keys & table.keys()]
    if families:
        verb = "has" if len(families) == 1 else "have"
        names = families[-1]
        if len(families) > 1:
            names = f"{', '.join(families[:-1])} and {families[-1]}"
        return f"{variants.name} {variant or variants.default} does not have it; {names} {verb} it"

    for program, other in ENTRIES.items():
        if other is root:
            continue
        tables = fields_by_variant(other).values()
        if name in hints_of(other) or any(keys & table.keys() for table in tables):
            return belongs_to(program)

    if name.startswith("--"):
        return _similar_flag(root, name, candidates)
    similar = did_you_mean(name, candidates)
    if similar:
        return similar
    if section:
        table = config_fields(root, variant)
        candidates = [entry for entry in candidates if table[entry].section == section]
    return f"the known names are {', '.join(candidates)}"


def _similar_flag(root: type, name: str, candidates: Collection[str]) -> str:
    """Return a hint: the most similar flag, or a Megatron-LM flag and its name here."""
    answers = {flag: entry.answer for flag, entry in megatron_flags().items()}
    flags = dict.fromkeys(candidates)
    for table in fields_by_variant(root).values():
        flags |= dict.fromkeys(field.flag for field in table.values())
    return did_you_mean(name, flags, answers) or "--help lists them all"
